//! What goes wrong is an error, on all PEs, within the deadline; where the library can only end the process,
//! the others are told.

use crate::world::{are_emulated, barrier, context, done, launch, must, refused, upload};
use crate::{lifecycle, memory};
use libtest_mimic::{Failed, Trial};
use phalanx::jit::Image;
use phalanx::nvshmem::{Compare, Context, Symmetric};
use phalanx::{Comm, Error};
use phalanx_testkit::Scenario;
use phalanx_testkit::fault::Fault;
use phalanx_testkit::processes::{Ended, Launch, describe, phase};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("failures/different_sizes", different_sizes),
    Scenario::rank("failures/different_contents", different_contents),
    Scenario::rank("failures/different_calls", different_calls),
    Scenario::rank("failures/waits_for_a_signal", waits_for_a_signal),
    Scenario::rank("failures/waits_to_free", waits_to_free),
    Scenario::rank("failures/puts_on_and_on", puts_on),
    Scenario::rank("failures/waits_for_nothing", waits_for_nothing),
    Scenario::rank("failures/quiet_of_a_stuck_stream", stuck),
    Scenario::rank("failures/loading_beside_a_stuck_stream", loading),
    Scenario::rank("failures/init", init),
    Scenario::rank("failures/out_of_memory", out_of_memory),
    Scenario::rank("failures/no_room_to_grow", no_room_to_grow),
    Scenario::rank("failures/more_than_a_step", more_than_a_step),
    Scenario::rank("failures/unreachable", unreachable),
    Scenario::rank("failures/teams_of_multicast", teams_of_multicast),
    Scenario::rank("failures/missing_function", missing_function),
    Scenario::rank("memory/mapped", memory::mapped),
    Scenario::rank("lifecycle/environment", lifecycle::environment),
    Scenario::rank("lifecycle/no_plugin", lifecycle::no_plugin),
    Scenario::rank("lifecycle/no_plugin_of_one", lifecycle::no_plugin_of_one),
    Scenario::process("lifecycle/global_exit", lifecycle::global_exit),
    Scenario::rank("lifecycle/sharing", lifecycle::sharing),
];

/// The PEs' deadline here.
const TIMEOUT: Duration = Duration::from_secs(4);
/// What comes on top, at most.
const SLACK: Duration = Duration::from_secs(6);

pub fn trials(gpus: usize) -> Vec<Trial> {
    let pairs = [
        Trial::test("failures/different_sizes", || together("failures/different_sizes")),
        Trial::test("failures/different_contents", || together("failures/different_contents")),
        Trial::test("failures/different_calls", || together("failures/different_calls")),
        Trial::test("failures/killed_before_a_signal", || killed("failures/waits_for_a_signal")),
        Trial::test("failures/killed_before_a_free", || killed("failures/waits_to_free")),
        Trial::test("failures/killed_in_a_put", || killed("failures/puts_on_and_on")),
        Trial::test("failures/killed_beside_an_idle_stream", || killed("failures/waits_for_nothing")),
        Trial::test("failures/quiet_of_a_stuck_stream", quiet_of_stuck),
        Trial::test("failures/module_beside_a_stuck_stream", || loading_waits("module")),
        Trial::test("failures/threads", || lifecycle::threads().map_err(Failed::from)),
        Trial::test("memory/mapped", || {
            let launch = || launch("memory/mapped", 2);
            launch().env("NVSHMEM_CUMEM_GRANULARITY", "2097152").arg("whole").reports()?;
            launch().arg("half").reports().map(drop).map_err(Failed::from)
        }),
        Trial::test("lifecycle/sharing", || together("lifecycle/sharing")),
    ];
    let no_room = Trial::test("failures/init_of_one_has_no_room", no_room);
    let no_room = no_room.only_if(gpus >= 2 && !are_emulated(), "it takes two GPUs that are not emulated");
    // What the emulator is told to do wrong.
    let told = [
        Trial::test("failures/init_is_half", || init_fails(&[("half", "status 1"), ("half", "status 1")])),
        Trial::test("failures/init_answers", || {
            init_fails(&[("error", "answered 7"), ("error", "answered 7")])
        }),
        Trial::test("failures/init_hangs", || init_fails(&[("hang", "timeout"), ("hang", "timeout")])),
        Trial::test("failures/init_of_one_fails", || init_fails(&[("", "rank 1"), ("half", "status 1")])),
        Trial::test("failures/init_of_one_hangs", || init_fails(&[("", ""), ("hang", "timeout")])),
        Trial::test("failures/init_of_one_exits", || init_fails(&[("", "rank 1"), ("exit", "")])),
        Trial::test("failures/out_of_memory", || {
            // The context has 8 MiB of it.
            told("failures/out_of_memory", &[("SYMMETRIC_SIZE", "9388608")])
        }),
        Trial::test("failures/no_room_to_grow", no_growth),
        Trial::test("failures/more_than_a_step", || {
            let launch = launch("failures/more_than_a_step", 2).env("NVSHMEM_CUMEM_GRANULARITY", "16777216");
            launch.reports().map(drop).map_err(Failed::from)
        }),
        Trial::test("failures/unreachable", || told("failures/unreachable", &[("PEER_ACCESS", "0")])),
        Trial::test("failures/teams_of_multicast", || {
            told("failures/teams_of_multicast", &[("MULTICAST", "1")])?;
            told("memory/peers", &[("MULTICAST", "1")])
        }),
        Trial::test("failures/loading_beside_a_stuck_stream", || loading_waits("atomic")),
        Trial::test("failures/missing_function", missing),
        Trial::test("failures/too_old", too_old),
        Trial::test("lifecycle/environment", || told("lifecycle/environment", &[])),
        Trial::test("lifecycle/no_plugin", || {
            let launch = launch("lifecycle/no_plugin", 2).env("NVSHMEM_BOOTSTRAP_PMI", "pmix");
            launch.reports().map(drop).map_err(Failed::from)
        }),
        Trial::test("lifecycle/no_plugin_of_one", || {
            let nowhere = Some("/nowhere/nvshmem_bootstrap_uid.so.3");
            let launch = launch("lifecycle/no_plugin_of_one", 2);
            let launch = launch.env_of(1, "NVSHMEM_BOOTSTRAP_UID_PLUGIN", nowhere);
            launch.reports().map(drop).map_err(Failed::from)
        }),
        Trial::test("lifecycle/global_exit", ends_globally),
        Trial::test("failures/left_behind", || told("lifecycle/one_at_a_time", &[("EXIT", "crash")])),
    ];
    let pairs = pairs.into_iter().map(|trial| trial.only_if(gpus >= 2, "it takes two GPUs"));
    let told =
        told.into_iter().map(|trial| trial.only_if(are_emulated(), "only emulated libraries can be told so"));
    pairs.chain(told).chain([no_room]).collect()
}

fn together(scenario: &str) -> Result<(), Failed> {
    let reports = launch(scenario, 2).deadline(TIMEOUT * 2).reports();
    reports.map(drop).map_err(Failed::from)
}

fn told(scenario: &str, settings: &[(&str, &str)]) -> Result<(), Failed> {
    let told = settings
        .iter()
        .fold(launch(scenario, 2), |launch, (name, value)| launch.env(&format!("EMULATED_{name}"), value));
    told.reports().map(drop).map_err(Failed::from)
}

/// The heap would not be the same on all PEs any more.
fn different_sizes(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let len = 100 + context.my_pe();
    let error = refused("alloc", context.alloc::<f32>(len), &["nvshmem_malloc(400", "nvshmem_malloc(404"])?;
    assert!(matches!(error, Error::Mismatch(_)) && error.is_fatal(), "{error}");
    // Final: the same answer from everything, and no end that would wait for the other.
    refused("quiet", context.quiet(), &["nvshmem_malloc(400"])?;
    refused("finalize", context.finalize(), &["nvshmem_malloc(400"])?;
    done()
}

/// Memory that one PE clears, and nobody else waits for.
fn different_contents(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let allocated = match context.my_pe() {
        0 => context.alloc::<f32>(10),
        _ => context.alloc_uninit::<f32>(10),
    };
    let error = refused("alloc", allocated, &["nvshmem_malloc(40, 1", "nvshmem_malloc(40, 0"])?;
    assert!(matches!(error, Error::Mismatch(_)), "{error}");
    done()
}

fn different_calls(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let first = must("alloc", context.alloc::<f32>(10))?;
    let second = must("alloc", context.alloc::<f32>(10))?;
    let freed = if context.my_pe() == 0 { first.free() } else { second.free() };
    refused("free", freed, &["nvshmem_free(1", "nvshmem_free(2"])?;
    done()
}

/// PE 0 waits on its GPU for a signal of PE 1's, which is killed.
fn waits_for_a_signal(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let words = must("alloc", context.alloc::<u64>(1))?;
    barrier(&context)?;
    phase("waiting");
    if context.my_pe() == 1 {
        std::thread::sleep(Duration::from_secs(600));
    }
    let signal = must("signal", words.signal(0))?;
    must("wait", context.signal_wait_until_on_stream(&signal, Compare::Ge, 1, context.stream()))?;
    let since = Instant::now();
    let error = refused("sync", context.sync(context.stream()), &["rank 1 is gone"])?;
    assert!(matches!(error, Error::Peer(_)) && error.is_fatal(), "{error}");
    assert!(since.elapsed() < TIMEOUT + SLACK, "{:?}", since.elapsed());
    refused("free", words.free(), &["rank 1 is gone"])?;
    phase("told");
    // The exit handlers of CUDA would wait for the GPU.
    std::process::abort()
}

/// PE 0 waits for PE 1 in a collective call.
fn waits_to_free(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let memory = upload(&context, &[1.0f32; 10])?;
    barrier(&context)?;
    phase("waiting");
    if context.my_pe() == 1 {
        std::thread::sleep(Duration::from_secs(600));
    }
    refused("free", memory.free(), &["rank 1 is gone"])?;
    phase("told");
    done()
}

/// PE 0 puts to PE 1 and waits for that, again and again: the memory of a dead PE takes it.
fn puts_on(comm: Comm, _: &[String]) -> Outcome {
    again_and_again(comm, |context, inbox, source| {
        context.put(inbox, source, 1).and_then(|()| context.quiet())
    })
}

/// PE 0 waits for a stream that has nothing to do.
fn waits_for_nothing(comm: Comm, _: &[String]) -> Outcome {
    again_and_again(comm, |context, _, _| context.sync(context.stream()))
}

fn again_and_again(
    comm: Comm,
    does: impl Fn(&Context, &Symmetric<'_, f32>, &Symmetric<'_, f32>) -> phalanx::Result<()>,
) -> Outcome {
    let context = context(&comm)?;
    let (source, inbox) = (upload(&context, &[1.0f32; 10])?, must("alloc", context.alloc::<f32>(10))?);
    barrier(&context)?;
    phase("waiting");
    if context.my_pe() == 1 {
        std::thread::sleep(Duration::from_secs(600));
    }
    let since = Instant::now();
    let error = loop {
        match does(&context, &inbox, &source) {
            Ok(()) if since.elapsed() > TIMEOUT + SLACK => return Err("nobody is missed".into()),
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Peer(_)) && error.to_string().contains("rank 1 is gone"), "{error}");
    phase("told");
    std::process::abort()
}

/// A put that began on a stream which never gets there: what waits for it does so with the timeout.
fn stuck(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (source, inbox) = (upload(&context, &[1.0f32; 10])?, must("alloc", context.alloc::<f32>(10))?);
    let words = must("alloc", context.alloc::<u64>(1))?;
    barrier(&context)?;
    let (signal, stream) = (must("signal", words.signal(0))?, context.stream());
    must("wait", context.signal_wait_until_on_stream(&signal, Compare::Ge, 1, stream))?;
    let peer = 1 - context.my_pe();
    must("put_nbi_on_stream", context.put_nbi_on_stream(&inbox, &source, peer, stream))?;
    context.set_timeout(Duration::from_millis(500));
    let error = refused("quiet", context.quiet(), &["timeout"])?;
    assert!(matches!(error, Error::Timeout(_)) && error.is_fatal(), "{error}");
    phase("told");
    std::thread::sleep(Duration::from_secs(1));
    std::process::abort()
}

/// A kernel that is not loaded yet, for which the GPU has to come to rest: that is waited for with the
/// timeout, too.
fn loading(comm: Comm, args: &[String]) -> Outcome {
    let context = context(&comm)?;
    let words = must("alloc", context.alloc::<u64>(2))?;
    barrier(&context)?;
    let (signal, stream) = (must("signal", words.signal(0))?, context.stream());
    must("wait", context.signal_wait_until_on_stream(&signal, Compare::Ge, 1, stream))?;
    // What needs no kernel waits for nothing.
    assert_eq!(must("signal_fetch", context.signal_fetch(&signal))?, 0);
    context.set_timeout(Duration::from_millis(500));
    let error = match args[0].as_str() {
        "atomic" => {
            let fetched = context.atomic_fetch(&words, 1, 1 - context.my_pe());
            refused("atomic_fetch", fetched, &["timeout", "cuModuleLoadData"])?
        }
        _ => {
            let half =
                refused("load", context.load(&Image::from_bytes(&b"\x7fELF"[..])), &["4 bytes", "whole"])?;
            assert!(!half.is_fatal(), "{half}");
            refused("load", context.load(&without_kernels()), &["timeout"])?
        }
    };
    assert!(matches!(error, Error::Timeout(_)) && error.is_fatal(), "{error}");
    phase("told");
    std::thread::sleep(Duration::from_secs(1));
    std::process::abort()
}

/// A header, and a table of one section, which is none.
fn without_kernels() -> Image {
    let mut file = [0; 128];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    (file[40], file[58], file[60]) = (64, 64, 1);
    Image::from_bytes(file)
}

fn quiet_of_stuck() -> Result<(), Failed> {
    both_told(launch("failures/quiet_of_a_stuck_stream", 2))
}

fn loading_waits(what: &str) -> Result<(), Failed> {
    let launch = launch("failures/loading_beside_a_stuck_stream", 2).arg(what);
    both_told(launch.env("EMULATED_SYNC", "implicit"))
}

fn both_told(launch: Launch) -> Result<(), Failed> {
    let mut world = launch.deadline(TIMEOUT * 2 + SLACK).start()?;
    world.await_phase(0, "told")?;
    world.await_phase(1, "told")?;
    world.finish();
    Ok(())
}

fn killed(scenario: &str) -> Result<(), Failed> {
    let mut world = launch(scenario, 2).deadline(TIMEOUT * 2 + SLACK).start()?;
    world.await_phase(1, "waiting")?;
    world.await_phase(0, "waiting")?;
    std::thread::sleep(Duration::from_millis(200));
    world.inject(1, Fault::Kill)?;
    world.await_phase(0, "told")?;
    let ended = world.finish();
    match ended[0].status {
        Some(_) => Ok(()),
        None => Err(format!("PE 0 did not end: {}", ended[0].output).into()),
    }
}

/// Reports the error of initialisation.
fn init(comm: Comm, _: &[String]) -> Outcome {
    let since = Instant::now();
    let error = match Context::init(&comm) {
        Ok(_) => return Err("it was initialised".into()),
        Err(error) => error,
    };
    assert!(since.elapsed() < TIMEOUT + SLACK, "{:?}", since.elapsed());
    // There is no second attempt, and no waiting for it.
    let again = Context::builder().gpu(0).init_from_environment();
    let again = again.err().ok_or("a second attempt was allowed")?;
    assert_eq!(again.to_string(), error.to_string());
    Ok(error.to_string())
}

/// What is set for each PE, and what its error says; nothing if the process need not report.
fn init_fails(pes: &[(&str, &str)]) -> Result<(), Failed> {
    let mut launch = launch("failures/init", pes.len()).deadline(TIMEOUT * 2 + SLACK);
    launch = launch.env("PHALANX_TIMEOUT", &TIMEOUT.as_secs().to_string());
    for (pe, (setting, _)) in pes.iter().enumerate() {
        launch = launch.env_of(pe, "EMULATED_NVSHMEM_INIT", Some(setting));
    }
    let ended = launch.run()?;
    for (Ended { outcome, status, output, .. }, (_, names)) in ended.iter().zip(pes) {
        match outcome {
            // It ended because the library ended it.
            Err(_) if names.is_empty() => {}
            Ok(error) if error.contains(names) => {}
            _ => return Err(format!("expected {names:?}: {outcome:?}, {status:?}, {output}").into()),
        }
    }
    Ok(())
}

/// A PE whose GPU is too small for its heap: the library answers that, or ends the process. The other is told
/// of it.
fn no_room() -> Result<(), Failed> {
    let launch = launch("failures/init", 2)
        .deadline(TIMEOUT * 2 + SLACK)
        .env("PHALANX_TIMEOUT", &TIMEOUT.as_secs().to_string())
        // The whole heap at once.
        .env("NVSHMEM_DISABLE_CUDA_VMM", "1");
    let initialised = |ended: &Ended| ended.outcome == Err("it was initialised".into());
    let ended = launch.clone().run()?;
    if !ended.iter().all(initialised) {
        return Err(format!("with room for both: {}", describe(&ended)).into());
    }
    let ended = launch.env_of(1, "NVSHMEM_SYMMETRIC_SIZE", Some("2T")).run()?;
    // By the library, which loses its connection to the other, or by the other's end.
    let says = ["status 1", "rank 1"];
    let is_told = ended[0].outcome.as_ref().is_ok_and(|error| says.iter().any(|part| error.contains(part)));
    let has_failed = ended[1].status.is_some() && !initialised(&ended[1]);
    if is_told && has_failed { Ok(()) } else { Err(describe(&ended).into()) }
}

/// The heap is full: all PEs are told, and go on.
fn out_of_memory(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    refused("alloc", context.alloc::<u8>(2_000_000), &["nvshmem_malloc", "NVSHMEM_SYMMETRIC_SIZE"])?;
    let memory = must("alloc", context.alloc::<u8>(900_000))?;
    refused("alloc", context.alloc_uninit::<u8>(200_000), &["200000 bytes"])?;
    must("free", memory.free())?;
    let memory = must("alloc", context.alloc::<u8>(900_000))?;
    must("free", memory.free())?;
    must("finalize", context.finalize())?;
    done()
}

/// PE 1's GPU has no room for the heap to grow: all PEs are told before the library tries, which would lose
/// its heap; what fits into the heap as it is, is still to be had.
fn no_room_to_grow(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let names = if context.my_pe() == 1 { "more of the GPU" } else { "PE 1 could not" };
    let kept = must("alloc", context.alloc::<u8>(4 << 20))?;
    for _ in 0..2 {
        refused("alloc", context.alloc::<u8>(100 << 20), &[names])?;
    }
    let memory = must("alloc in what is left", context.alloc_uninit::<u8>(1 << 20))?;
    must("free", memory.free())?;
    must("free", kept.free())?;
    must("finalize", context.finalize())?;
    done()
}

/// A single allocation of more than a step by which the heap grows.
fn more_than_a_step(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let memory = must("alloc", context.alloc::<u8>(70 << 20))?;
    let last = must("g", context.g(&memory, (70 << 20) - 1, 0))?;
    assert_eq!(last, 0);
    must("free", memory.free())?;
    must("finalize", context.finalize())?;
    done()
}

/// With multicast there are few teams, and the library would end the process instead of saying so.
fn teams_of_multicast(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (world, pes) = (context.world(), context.n_pes());
    let split = || world.split_strided(0, 1, pes);
    let mut teams = Vec::new();
    let error = loop {
        match split() {
            Ok(team) => teams.push(team.ok_or("a member")?),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(error, Error::Unsupported(_)) && teams.len() == 3,
        "{} teams, then {error}",
        teams.len()
    );
    refused("two more", world.split_2d(1), &["NVSHMEM_MAX_TEAMS"])?;
    must("destroy", teams.pop().ok_or("none")?.destroy())?;
    teams.push(must("another", split())?.ok_or("a member")?);
    teams.into_iter().try_for_each(|team| must("destroy", team.destroy()))?;
    must("finalize", context.finalize())?;
    done()
}

/// Peers whose memory is not mapped: what the library would end the process for is refused, the rest works.
fn unreachable(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, peer) = (context.my_pe(), 1 - context.my_pe());
    let mut memory = upload(&context, &[me as i32; 100])?;
    let inbox = must("alloc", context.alloc::<i32>(100))?;
    barrier(&context)?;
    assert!(must("peer", memory.peer(peer))?.is_none());
    refused("iput", context.iput(&inbox, 2, &memory, 1, 10, peer), &["iput with PE", "loads and stores"])?;
    refused("iget", context.iget(&mut memory, 2, &inbox, 1, 10, peer), &["iget with PE"])?;
    refused("g", context.g(&inbox, 0, peer), &["g with PE"])?;
    must("iput to oneself", context.iput(&inbox, 2, &memory, 1, 10, me))?;
    // The peer's put is for the same elements.
    barrier(&context)?;
    must("put", context.put(&inbox, &memory, peer))?;
    must("p", context.p(&inbox, 3, 77, peer))?;
    barrier(&context)?;
    let got = crate::world::read(&inbox)?;
    assert_eq!((got[2], got[3]), (peer as i32, 77));
    barrier(&context)?;
    must("free", memory.free())?;
    must("free", inbox.free())?;
    must("finalize", context.finalize())?;
    done()
}

/// A library without a function says so when it is needed, with its name, version and path.
fn missing_function(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let memory = must("alloc", context.alloc::<f32>(10))?;
    let put = context.put(&memory, &memory, 0);
    let error = refused("put", put, &["nvshmemx_putmem_on_stream", "NVSHMEM 3.8.0", "libnvshmem_host.so.3"])?;
    assert!(matches!(error, Error::MissingFunction(_)), "{error}");
    must("free", memory.free())?;
    must("finalize", context.finalize())?;
    done()
}

fn missing() -> Result<(), Failed> {
    use phalanx_testkit::emulated::Emulated;
    let emulated = Emulated::without(&["nvshmemx_putmem_on_stream"])?;
    emulated.launch(launch("failures/missing_function", 2)).reports().map(drop).map_err(Failed::from)
}

/// The second PE's GPU has room for the first step and little more.
fn no_growth() -> Result<(), Failed> {
    let launch = launch("failures/no_room_to_grow", 2).env("NVSHMEM_CUMEM_GRANULARITY", "16777216");
    launch.env_of(1, "EMULATED_DEVICE_MEMORY", Some("20000000")).reports().map(drop).map_err(Failed::from)
}

/// The status is what the process ends with.
fn ends_globally() -> Result<(), Failed> {
    let ended = launch("lifecycle/global_exit", 1).run()?;
    match &ended[0] {
        Ended { outcome: Err(_), status: Some(status), .. } if status.code() == Some(7) => Ok(()),
        _ => Err(describe(&ended).into()),
    }
}

fn too_old() -> Result<(), Failed> {
    let ended = launch("failures/init", 1).env("EMULATED_NVSHMEM_VERSION", "3.3.9").run()?;
    // Nothing was entered, so the second attempt has an error of its own.
    match &ended[0].outcome {
        Ok(error) if error.contains("3.4.0 is the oldest") => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}
