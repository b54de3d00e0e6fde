//! GPU memory that other ranks access: what is refused, and ranks that are lost.

use crate::gpu_windows::{both, held, launch, open_all, window};
use crate::world::{done, expect, must, stream, upload};
use libtest_mimic::{Failed, Trial};
use phalanx::{BackendKind, Comm, Error, GpuBlock, GpuDescriptor, PeerEvent, RemoteGpuWindow};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::{Emulated, has_gpus_for, on_own_kernels};
use phalanx_testkit::fault::Fault;
use phalanx_testkit::processes::{Launch, phase};
use phalanx_testkit::scenario::{ErrorContext, Outcome, recorded};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("gpu_windows/refused", refused),
    Scenario::rank("gpu_windows/stale", stale),
    Scenario::rank("gpu_windows/raced", raced),
    Scenario::rank("gpu_windows/altered", altered),
    Scenario::rank("gpu_windows/another_communicator", another_communicator),
    Scenario::rank("gpu_windows/describe", describe),
    Scenario::rank("gpu_windows/another_job", another_job),
    Scenario::rank("gpu_windows/absent", absent),
    Scenario::rank("gpu_windows/left", left),
    Scenario::rank("gpu_windows/not_closed", not_closed),
    Scenario::rank("gpu_windows/lost", lost),
    Scenario::process("gpu_windows/on_the_host", on_the_host),
];

pub fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> =
        ["refused", "stale", "raced", "altered", "another_communicator", "absent", "left", "not_closed"]
            .into_iter()
            .flat_map(|name| both(name, &[2]))
            .collect();
    trials.push(Trial::test("gpu_windows/another_job/processes/2", jobs));
    trials.push(Trial::test("gpu_windows/killed/processes/2", || fault(Fault::Kill)));
    trials.push(Trial::test("gpu_windows/stopped/processes/2", || fault(Fault::Stop)));
    let on_the_host = || Ok(Launch::alone("gpu_windows/on_the_host").reports().map(drop)?);
    trials.push(Trial::test("gpu_windows/on_the_host", on_the_host));
    trials
}

/// The text of an error, which is a usage error or of something that there is not: the communicator works on.
pub fn refusal<T: std::fmt::Debug>(what: &str, result: phalanx::Result<T>) -> Result<String, String> {
    match result {
        Err(error @ (Error::Usage(_) | Error::Unsupported(_))) => Ok(error.to_string()),
        other => Err(format!("{what} is not refused: {other:?}")),
    }
}

/// What does not fit is an error that says what and how much, and moves nothing, of a list too.
fn refused(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let window = window(&comm, &[7i32; 100])?;
    let open = open_all::<i32>(&comm, window.descriptor())?;
    let peer = &open[1 - rank];
    let (mine, mut got) = (upload(&comm, &[1i32; 100])?, upload(&comm, &[2i32; 100])?);
    let block = |local, remote, len| GpuBlock { local, remote, len };
    let good = block(0, 0, 10);
    let outside: [(GpuBlock, &[&str]); 7] = [
        (block(0, 91, 10), &["10 elements from index 91", "100 elements"]),
        (block(0, 100, 1), &["1 elements from index 100"]),
        (block(0, usize::MAX, 2), &["from index 18446744073709551615"]),
        (block(0, 2, usize::MAX), &["18446744073709551615 elements from index 2"]),
        (block(91, 0, 10), &["buffer has 100 elements, it needs 101"]),
        (block(usize::MAX, 0, 2), &["buffer has 100 elements"]),
        (block(101, 0, 0), &["buffer has 100 elements, it needs 101"]),
    ];
    for (bad, parts) in outside {
        let texts = [
            refusal("put_list", peer.put_list(&mine, &[good, bad]))?,
            refusal("get_list", peer.get_list(&mut got, &[good, bad]))?,
        ];
        for (text, (operation, buffer)) in texts.iter().zip([("put", "source"), ("get", "target")]) {
            for part in parts.iter().chain([&operation]) {
                assert!(text.contains(part), "{part:?} is not in {text:?} of {bad:?}");
            }
            assert!(text.contains("index") || text.contains(buffer), "{text}");
        }
    }
    refusal("put", peer.put(&mine, 1))?;
    let host = refusal("host memory", peer.put(&[1i32; 10], 0))?;
    assert!(host.contains("host memory") && host.contains("CudaSlice"), "{host}");
    let text = refusal("another type", comm.open_gpu::<f32>(window.descriptor()))?;
    assert!(text.contains("i32") && text.contains("f32"), "{text}");
    let text = refusal("a pool's memory", comm.register_gpu(upload(&comm, &[1i32; 10])?))?;
    assert!(text.contains("pool") && text.contains("alloc_gpu"), "{text}");
    refusal("nothing", must("alloc_gpu", comm.alloc_gpu::<i32>(0)).map(|none| comm.register_gpu(none))?)?;
    refusal("too much", comm.alloc_gpu::<u64>(usize::MAX / 4))?;
    let text = refusal("rank", window.wait_signals(ranks, 1))?;
    assert!(text.contains(&format!("rank {ranks} does not exist")), "{text}");
    must("sync", comm.sync())?;
    must("barrier", comm.barrier())?;
    expect("the window", &held(&comm, &window)?, |_| 7)?;
    let got = stream(&comm).clone_dtoh(&got).context(|| "download".into())?;
    expect("the target", &got, |_| 2)?;
    must("barrier", comm.barrier())?;
    drop(open);
    must("release", window.release())?;
    done()
}

/// From the first moment of a release, nothing is opened or copied; it returns when the other rank has closed the window.
fn stale(comm: Comm, _: &[String]) -> Outcome {
    if comm.rank() == 0 {
        let window = window(&comm, &[7i32; 100])?;
        must("send", comm.send_object(window.descriptor(), 1))?;
        must("wait", window.wait_signals(1, 1))?;
        let since = Instant::now();
        must("release", window.release())?;
        assert!(since.elapsed() > Duration::from_millis(90), "rank 1 has it open");
        must("barrier", comm.barrier())?;
    } else {
        let descriptor: GpuDescriptor = must("recv", comm.recv_object(0))?;
        let remote = must("open", comm.open_gpu::<i32>(&descriptor))?;
        let mut got = upload(&comm, &[0i32; 100])?;
        must("signal", remote.signal())?;
        let text = loop {
            match remote.get(&mut got, 0) {
                Ok(()) => std::thread::sleep(Duration::from_millis(1)),
                refused => break refusal("get", refused)?,
            }
        };
        assert!(
            text.contains("rank 0 has released it") || text.contains("that rank has released it"),
            "{text}"
        );
        refusal("put", remote.put(&got, 0))?;
        refusal("signal", remote.signal())?;
        let text = refusal("open", comm.open_gpu::<i32>(&descriptor))?;
        assert!(text.contains("released"), "{text}");
        must("sync", remote.sync())?;
        std::thread::sleep(Duration::from_millis(100));
        drop(remote);
        must("barrier", comm.barrier())?;
        // The memory is somebody else's now.
        let text = refusal("open", comm.open_gpu::<i32>(&descriptor))?;
        assert!(text.contains("released"), "{text}");
    }
    done()
}

/// A rank opens a window while its rank releases it: it is refused, or the release waits for it.
fn raced(comm: Comm, _: &[String]) -> Outcome {
    let rounds = 200;
    let mut opened = 0;
    for round in 0..rounds {
        // Both come at about the same time, in all orders.
        let late = |rank: usize| (0..(round * 37 + rank * 11) % 50 * 20).for_each(|_| std::hint::spin_loop());
        if comm.rank() == 0 {
            let window = window(&comm, &[round as i32; 10])?;
            must("send", comm.send_object(window.descriptor(), 1))?;
            must("sync", comm.sync())?;
            late(0);
            must("release", window.release())?;
            continue;
        }
        let descriptor: GpuDescriptor = must("recv", comm.recv_object(0))?;
        let mut got = upload(&comm, &[-1i32; 10])?;
        late(1);
        let remote = match comm.open_gpu::<i32>(&descriptor) {
            Ok(remote) => remote,
            Err(error) if error.to_string().contains("released") => continue,
            Err(error) => return Err(error.to_string()),
        };
        opened += 1;
        if remote.get(&mut got, 0).is_ok() {
            must("sync", remote.sync())?;
            let got = stream(&comm).clone_dtoh(&got).context(|| "download".into())?;
            expect("got", &got, |_| round as i32)?;
        }
    }
    must("barrier", comm.barrier())?;
    Ok(format!("{opened} of {rounds} windows were opened"))
}

/// No descriptor that was changed opens anything, whatever was changed.
fn altered(comm: Comm, _: &[String]) -> Outcome {
    let window = window(&comm, &[7i32; 100])?;
    let all = must("all_gather_object", comm.all_gather_object(window.descriptor()))?;
    let theirs = &all[1 - comm.rank()];
    let bytes = postcard::to_allocvec(theirs).context(|| "to bytes".into())?;
    let mut changed = 0;
    for bit in 0..bytes.len() * 8 {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let Ok(other) = postcard::from_bytes::<GpuDescriptor>(&bytes) else { continue };
        if other == *theirs {
            continue;
        }
        changed += 1;
        refusal(&format!("bit {bit}: {other:?}"), comm.open_gpu::<i32>(&other).map(|remote| remote.len()))?;
        // As what it says that it is.
        refusal("of no such type", comm.open_gpu::<u32>(&other).map(|remote| remote.len()))?;
    }
    assert!(changed > 100, "{changed} of {} bits", bytes.len() * 8);
    // Ends, other lengths, and what another rank has.
    let own = postcard::to_allocvec(window.descriptor()).context(|| "to bytes".into())?;
    for cut in 1..bytes.len() {
        let mixed = [&bytes[..cut], &own[cut.min(own.len())..]].concat();
        let Ok(other) = postcard::from_bytes::<GpuDescriptor>(&mixed) else { continue };
        if other != *theirs && other != *window.descriptor() {
            refusal(&format!("mixed at {cut}"), comm.open_gpu::<i32>(&other).map(|remote| remote.len()))?;
        }
    }
    drop(must("the true one", comm.open_gpu::<i32>(theirs))?);
    must("barrier", comm.barrier())?;
    must("release", window.release())?;
    done()
}

/// A descriptor counts in its own communicator, though the ranks are the same.
fn another_communicator(comm: Comm, _: &[String]) -> Outcome {
    let twin = must("split", comm.split(Some(0), 0))?.ok_or("a colour")?;
    let window = window(&comm, &[7i32; 100])?;
    let all = must("all_gather_object", comm.all_gather_object(window.descriptor()))?;
    let text = refusal("another communicator's", twin.open_gpu::<i32>(&all[1 - comm.rank()]))?;
    assert!(text.contains("another communicator"), "{text}");
    drop(must("open", comm.open_gpu::<i32>(&all[1 - comm.rank()]))?);
    must("barrier", comm.barrier())?;
    must("release", window.release())?;
    done()
}

/// Two jobs, one after the other.
fn jobs() -> Result<(), Failed> {
    let described = on_own_kernels("nccl", 2, launch("describe", 2))?;
    on_own_kernels("nccl", 2, launch("another_job", 2).arg(&described[0]))?;
    Ok(())
}

fn describe(comm: Comm, _: &[String]) -> Outcome {
    let window = window(&comm, &[7i32; 100])?;
    let bytes = postcard::to_allocvec(window.descriptor()).context(|| "to bytes".into())?;
    must("barrier", comm.barrier())?;
    must("release", window.release())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Both have windows in the same places.
fn another_job(comm: Comm, args: &[String]) -> Outcome {
    let byte = |at: usize| u8::from_str_radix(&args[0][at..at + 2], 16);
    let bytes: Result<Vec<u8>, _> = (0..args[0].len()).step_by(2).map(byte).collect();
    let theirs: GpuDescriptor =
        postcard::from_bytes(&bytes.map_err(|e| e.to_string())?).map_err(|e| e.to_string())?;
    let window = window(&comm, &[7i32; 100])?;
    must("barrier", comm.barrier())?;
    let text = refusal("another job's", comm.open_gpu::<i32>(&theirs))?;
    assert!(text.contains("another communicator or job"), "{text}");
    must("barrier", comm.barrier())?;
    must("release", window.release())?;
    done()
}

/// A signal that does not come: the deadline's error names the rank.
fn absent(comm: Comm, _: &[String]) -> Outcome {
    let window = window(&comm, &[7i32; 100])?;
    let open = open_all::<i32>(&comm, window.descriptor())?;
    if comm.rank() == 0 {
        comm.set_timeout(Duration::from_secs(2));
        let since = Instant::now();
        let error = window.wait_signals(1, 1).expect_err("there is none");
        assert!(since.elapsed() < Duration::from_secs(4), "{:?}", since.elapsed());
        let Error::Timeout(timeout) = &error else { return Err(format!("{error}")) };
        assert_eq!(timeout.missing.iter().map(|missing| missing.rank).collect::<Vec<_>>(), [1], "{error}");
        assert!(error.to_string().contains("wait_signals(rank 1)"), "{error}");
        let again = open[1].put(&upload(&comm, &[1i32])?, 0).expect_err("it has failed");
        assert_eq!(again.to_string(), error.to_string());
    } else {
        await_failure(&open[0]);
    }
    drop(open);
    // Both have closed the other's; what is lost is the communicator alone.
    must("release", window.release())?;
    done()
}

/// Waits until the other rank has given up.
fn await_failure(open: &RemoteGpuWindow<i32>) {
    let since = Instant::now();
    while open.is_complete().is_ok() {
        assert!(since.elapsed() < Duration::from_secs(20), "the failure is everybody's");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A rank that has left gives no signal.
fn left(comm: Comm, _: &[String]) -> Outcome {
    let window = window(&comm, &[7i32; 100])?;
    let open = open_all::<i32>(&comm, window.descriptor())?;
    if comm.rank() == 1 {
        must("signal", open[0].signal())?;
        must("sync", open[0].sync())?;
        drop(open);
        must("release", window.release())?;
        drop(comm);
        return done();
    }
    let (first, second) = (1, 1 << 40);
    drop(open);
    must("the signal of a rank that leaves", window.wait_signals(1, first))?;
    match window.wait_signals(1, second) {
        Err(Error::Peer(peer)) => assert_eq!((peer.rank, peer.event), (1, PeerEvent::Left)),
        other => return Err(format!("{other:?}")),
    }
    must("release", window.release())?;
    done()
}

/// A rank that keeps a window open: the release ends at the deadline with its name, and the memory is not given back.
fn not_closed(comm: Comm, _: &[String]) -> Outcome {
    let window = window(&comm, &[7i32; 100])?;
    let open = open_all::<i32>(&comm, window.descriptor())?;
    if comm.rank() == 0 {
        drop(open);
        comm.set_timeout(Duration::from_secs(2));
        let since = Instant::now();
        let error = window.release().expect_err("rank 1 has it open");
        assert!(since.elapsed() < Duration::from_secs(4), "{:?}", since.elapsed());
        let Error::Timeout(timeout) = &error else { return Err(format!("{error}")) };
        assert_eq!(timeout.missing.iter().map(|missing| missing.rank).collect::<Vec<_>>(), [1], "{error}");
    } else {
        await_failure(&open[0]);
        drop(open);
        must("release", window.release())?;
    }
    done()
}

/// A rank is killed or stopped; the other waits for its signal, and later gives its own memory back.
fn fault(fault: Fault) -> Result<(), Failed> {
    let folder = std::env::temp_dir().join(format!("phalanx-window-{}-{fault:?}", std::process::id()));
    let launch = launch("lost", 2).arg(if fault == Fault::Kill { "killed" } else { "stopped" });
    let launch = launch.env("PHALANX_TRACE_DIR", &folder.to_string_lossy());
    let emulated = if has_gpus_for(2) { None } else { Some(Emulated::new()?.set("DEVICES", 2)) };
    let launch = match &emulated {
        Some(emulated) => emulated.launch(launch),
        None => launch.on_gpus(),
    };
    let found = found_by_the_first(launch, "waiting", fault);
    let _ = std::fs::remove_dir_all(folder);
    found
}

/// Rank 1 has a fault when rank 0 has come to a phase; rank 0 finds it, and ends well.
pub fn found_by_the_first(launch: Launch, phase: &str, fault: Fault) -> Result<(), Failed> {
    let mut world = launch.start()?;
    world.await_phase(0, phase)?;
    world.await_phase(1, "open")?;
    world.inject(1, fault)?;
    world.await_phase(0, "found")?;
    if fault == Fault::Stop {
        world.inject(1, Fault::Kill)?;
    }
    let ended = world.finish();
    Ok(ended[0].outcome.clone().map(drop)?)
}

fn lost(comm: Comm, args: &[String]) -> Outcome {
    let window = window(&comm, &[7i32; 100])?;
    let open = open_all::<i32>(&comm, window.descriptor())?;
    if comm.rank() == 1 {
        phase("open");
        std::thread::sleep(Duration::from_secs(60));
        return done();
    }
    phase("waiting");
    let since = Instant::now();
    let expected = if args[0] == "killed" { PeerEvent::Died } else { PeerEvent::Stopped };
    match window.wait_signals(1, 1) {
        Err(Error::Peer(peer)) => {
            assert_eq!((peer.rank, peer.event), (1, expected));
            recorded(&Error::Peer(peer))?;
        }
        other => return Err(format!("{other:?}")),
    }
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
    phase("found");
    let mut got = upload(&comm, &[0i32; 100])?;
    let error = open[1].get(&mut got, 0).expect_err("the communicator has failed").to_string();
    assert!(error.contains("rank 1"), "{error}");
    drop(open);
    match (args[0].as_str(), window.release()) {
        // A process that has ended copies nothing.
        ("killed", released) => drop(must("release", released)?),
        // A stopped one may go on; or the test has ended it meanwhile.
        ("stopped", Err(error)) => assert!(error.to_string().contains("rank 1"), "{error}"),
        ("stopped", Ok(_)) => {}
        (other, _) => return Err(format!("no fault is called {other}")),
    }
    done()
}

/// A communicator of host memory says what it is that it does not have.
fn on_the_host(_: &[String]) -> Outcome {
    let builder = Comm::builder().backend(BackendKind::Host);
    let refused = |comm: Comm| refusal("alloc_gpu", comm.alloc_gpu::<f32>(1).map(|slice| slice.len()));
    for text in must("run", builder.run(2, refused))? {
        let text = text?;
        assert!(text.contains("backend host") && text.contains("nccl"), "{text}");
    }
    done()
}
