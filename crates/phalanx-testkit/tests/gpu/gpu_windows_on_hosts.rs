//! GPU memory of ranks on several hosts, over UCX: what the windows of one host do, and what only staging can get wrong.

use crate::gpu_window_faults::{found_by_the_first, refusal};
use crate::gpu_windows::{held, hold, launch, open_all, window};
use crate::world::{done, expect, must, new_stream, stream, upload};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, Error, GpuBlock, GpuDescriptor, PeerEvent, RemoteGpuWindow};
use phalanx_testkit::emulated::{Emulated, has_gpus_for, on_own_kernels};
use phalanx_testkit::fault::Fault;
use phalanx_testkit::hosts::Elsewhere;
use phalanx_testkit::processes::{Launch, phase};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::suite::Condition;
use phalanx_testkit::{Scenario, ucx};
use rustix::process::{Pid, Signal, kill_process};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("gpu_windows/pieces", pieces),
    Scenario::rank("gpu_windows/crossing", crossing),
    Scenario::rank("gpu_windows/behind_its_stream", behind_its_stream),
    Scenario::rank("gpu_windows/released_meanwhile", released_meanwhile),
    Scenario::rank("gpu_windows/lost_meanwhile", lost_meanwhile),
    Scenario::rank("gpu_windows/inside_a_host", inside_a_host),
    Scenario::rank("gpu_windows/without_ucx", without_ucx),
];

/// Scenarios of one host too, with their numbers of ranks; and those of this file.
const WORLDS: [(&str, &[usize]); 16] = [
    ("copies", &[2, 4]),
    ("lists", &[2]),
    ("many", &[2]),
    ("order", &[2]),
    ("streams", &[2]),
    ("future", &[2]),
    ("own", &[2]),
    ("leaks", &[2]),
    ("refused", &[2]),
    ("stale", &[2]),
    ("altered", &[2]),
    ("another_communicator", &[2]),
    ("absent", &[2]),
    ("left", &[2]),
    ("not_closed", &[2]),
    ("raced", &[2]),
];

pub fn trials() -> Vec<Trial> {
    let worlds = WORLDS.iter().flat_map(|(name, ranks)| ranks.iter().map(move |ranks| (*name, *ranks)));
    let own = ["pieces", "crossing", "behind_its_stream", "released_meanwhile"].map(|name| (name, 2));
    let mut trials: Vec<Trial> = worlds
        .chain(own)
        .chain([("inside_a_host", 4)])
        .map(|(name, ranks)| {
            let run = move || Ok(on_own_kernels("nccl", ranks, launch(name, ranks).on_hosts(2)).map(drop)?);
            Trial::test(format!("gpu_windows/hosts/{name}/{ranks}"), run)
        })
        .collect();
    trials.push(Trial::test("gpu_windows/hosts/killed_meanwhile", || lost(Fault::Kill)));
    trials.push(Trial::test("gpu_windows/hosts/cut_off_meanwhile", || lost(Fault::Stop)));
    let nowhere = || launch("without_ucx", 2).on_hosts(2).env("PHALANX_UCX_LIB", "/nowhere/libucp.so.0");
    let without_ucx = move || Ok(on_own_kernels("nccl", 2, nowhere()).map(drop)?);
    trials.push(Trial::test("gpu_windows/hosts/without_ucx", without_ucx));
    let obstacle = Elsewhere::enter().err().or_else(ucx::missing);
    let can_run = |trial: Trial| match &obstacle {
        Some(why) => trial.only_if(false, &format!("cannot run: {why}")),
        None => trial,
    };
    trials.into_iter().map(can_run).collect()
}

/// Elements of several pieces, and some more.
const LONG: usize = (3 << 20) + 12_345;

fn value(rank: usize, index: usize) -> u8 {
    ((rank * 91 + index * 7 + (index >> 12)) % 251) as u8
}

/// Ranges of many pieces at odd places, both ways; what lies beside them stays.
fn pieces(comm: Comm, _: &[String]) -> Outcome {
    let rank = comm.rank();
    let values: Vec<u8> = (0..LONG).map(|index| value(rank, index)).collect();
    let window = window(&comm, &values)?;
    let open = open_all::<u8>(&comm, window.descriptor())?;
    let peer = &open[1 - rank];
    let mut got = upload(&comm, &vec![0u8; LONG])?;
    // The last first, of which some are longer than a piece, and some short.
    let lens = [1, (1 << 20) + 3, 77, (1 << 20) - 1, 4096, 1 << 20, 13];
    let (mut local, mut blocks) = (5, Vec::new());
    for (at, len) in lens.into_iter().enumerate() {
        blocks.push(GpuBlock { local, remote: LONG - local - len - at, len });
        local += len + 1;
    }
    let of_local =
        |index: usize| blocks.iter().find(|block| (block.local..block.local + block.len).contains(&index));
    // After a copy of one piece the next one's first goes to the other place of the staging.
    let mut short = upload(&comm, &[0u8; 7])?;
    must("get", peer.get(&mut short, 3))?;
    must("get_list", peer.get_list(&mut got, &blocks))?;
    must("sync", peer.sync())?;
    let short = stream(&comm).clone_dtoh(&short).context(|| "download".into())?;
    expect("got", &short, |index| value(1 - rank, index + 3))?;
    let held_now = stream(&comm).clone_dtoh(&got).context(|| "download".into())?;
    expect("got", &held_now, |index| match of_local(index) {
        Some(block) => value(1 - rank, block.remote + index - block.local),
        None => 0,
    })?;
    must("barrier", comm.barrier())?;
    let mine: Vec<u8> = (0..LONG).map(|index| value(rank + 5, index)).collect();
    must("put_list", peer.put_list(&upload(&comm, &mine)?, &blocks))?;
    must("signal", peer.signal())?;
    must("wait_signals", window.wait_signals(1 - rank, 1))?;
    let of_window =
        |index: usize| blocks.iter().find(|block| (block.remote..block.remote + block.len).contains(&index));
    expect("put", &held(&comm, &window)?, |index| match of_window(index) {
        Some(block) => value(1 - rank + 5, block.local + index - block.remote),
        None => value(rank, index),
    })?;
    must("sync", comm.sync())?;
    drop(open);
    must("release", window.release())?;
    done()
}

/// Both ranks put to each other and get at the same time, on several streams, and each signal comes behind its put.
fn crossing(comm: Comm, _: &[String]) -> Outcome {
    let (rank, rounds, len) = (comm.rank(), 20, 300_000);
    let window = window(&comm, &vec![0u32; len])?;
    let all = must("all_gather_object", comm.all_gather_object(window.descriptor()))?;
    let other = new_stream(&comm)?;
    let puts = must("open_gpu", comm.open_gpu::<u32>(&all[1 - rank]))?;
    let gets = must("open_gpu", must("on", comm.on(&other))?.open_gpu::<u32>(&all[1 - rank]))?;
    must("barrier", comm.barrier())?;
    let mut got = upload(&comm, &vec![0u32; len])?;
    for round in 1..=rounds {
        let mine = upload(&comm, &vec![round; len])?;
        must("put", puts.put(&mine, 0))?;
        must("signal", puts.signal())?;
        must("get", gets.get(&mut got, 0))?;
        // The buffer is freed behind the put.
        drop(mine);
        must("wait_signals", window.wait_signals(1 - rank, 1))?;
        expect("put", &held(&comm, &window)?, |_| round)?;
        must("sync", comm.sync())?;
        must("barrier", comm.barrier())?;
    }
    let got = stream(&comm).clone_dtoh(&got).context(|| "download".into())?;
    assert!(got.iter().all(|value| (rounds - 1..=rounds).contains(value)), "another round's value");
    drop((puts, gets));
    must("release", window.release())?;
    done()
}

/// A get reads when its stream has come to it, and not before.
fn behind_its_stream(comm: Comm, _: &[String]) -> Outcome {
    let mut window = window(&comm, &[1i32; 1000])?;
    let all = must("all_gather_object", comm.all_gather_object(window.descriptor()))?;
    let (peer, other) = (1 - comm.rank(), new_stream(&comm)?);
    let signals = must("open_gpu", comm.open_gpu::<i32>(&all[peer]))?;
    let gets = must("open_gpu", must("on", comm.on(&other))?.open_gpu::<i32>(&all[peer]))?;
    if comm.rank() == 0 {
        let mut got = upload(&comm, &[0i32; 1000])?;
        let held = hold(&other)?;
        must("get", gets.get(&mut got, 0))?;
        must("signal", signals.signal())?;
        must("wait_signals", window.wait_signals(1, 1))?;
        drop(held);
        must("sync", gets.sync())?;
        let got = stream(&comm).clone_dtoh(&got).context(|| "download".into())?;
        expect("got", &got, |_| 2)?;
    } else {
        must("wait_signals", window.wait_signals(0, 1))?;
        stream(&comm).memcpy_htod(&[2i32; 1000], &mut window.view_mut()).context(|| "upload".into())?;
        stream(&comm).synchronize().context(|| "synchronize".into())?;
        must("signal", signals.signal())?;
    }
    must("barrier", comm.barrier())?;
    drop((signals, gets));
    must("release", window.release())?;
    done()
}

/// A window is released while long copies are under way: those are made, the release waits, and later ones are refused.
fn released_meanwhile(comm: Comm, _: &[String]) -> Outcome {
    let len = 4 * LONG;
    if comm.rank() == 0 {
        let values: Vec<u8> = (0..len).map(|index| value(0, index)).collect();
        let window = window(&comm, &values)?;
        must("send", comm.send_object(window.descriptor(), 1))?;
        must("wait", window.wait_signals(1, 1))?;
        // The memory is garbage as soon as it is free.
        drop(must("release", window.release())?);
        must("barrier", comm.barrier())?;
        return done();
    }
    let descriptor: GpuDescriptor = must("recv", comm.recv_object(0))?;
    let remote = must("open", comm.open_gpu::<u8>(&descriptor))?;
    let mut got = upload(&comm, &vec![0u8; len])?;
    let mut last = upload(&comm, &[0u8; 100])?;
    must("signal", remote.signal())?;
    must("get", remote.get(&mut got, 0))?;
    let text = loop {
        match remote.get(&mut last, 0) {
            Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            refused => break refusal("get", refused)?,
        }
    };
    assert!(text.contains("released"), "{text}");
    must("sync", remote.sync())?;
    let got = stream(&comm).clone_dtoh(&got).context(|| "download".into())?;
    expect("got", &got, |index| value(0, index))?;
    drop(remote);
    must("barrier", comm.barrier())?;
    done()
}

/// Ranks of one host of several copy themselves: also while the window's process is stopped. The rank of the other host gets the rest later.
fn inside_a_host(comm: Comm, _: &[String]) -> Outcome {
    let (rank, len) = (comm.rank(), 300_000);
    let values: Vec<u8> = (0..len).map(|index| value(rank, index)).collect();
    let window = window(&comm, &values)?;
    let open = open_all::<u8>(&comm, window.descriptor())?;
    let processes = must("all_gather_value", comm.all_gather_value(std::process::id()))?;
    let (here, there) = (rank ^ 1, (rank + 2) % 4);
    assert!(comm.host_topology().same_host(rank, here) && !comm.host_topology().same_host(rank, there));
    let mut got = upload(&comm, &vec![0u8; len])?;
    if rank % 2 == 1 {
        let process = Pid::from_raw(processes[here] as i32).ok_or("a process")?;
        kill_process(process, Signal::STOP).context(|| "stop".into())?;
        let copied = open[here].get(&mut got, 0).and_then(|()| open[here].sync());
        kill_process(process, Signal::CONT).context(|| "go on".into())?;
        must("get", copied)?;
        expect("got", &stream(&comm).clone_dtoh(&got).context(|| "download".into())?, |index| {
            value(here, index)
        })?;
        must("put", open[here].put(&upload(&comm, &values)?, 0))?;
        must("signal", open[here].signal())?;
    } else {
        must("wait_signals", window.wait_signals(here, 1))?;
        expect("put", &held(&comm, &window)?, |index| value(here, index))?;
    }
    must("barrier", comm.barrier())?;
    must("get", open[there].get(&mut got, 0).and_then(|()| open[there].sync()))?;
    // Even ranks' windows have what the odd one beside put there.
    let got = stream(&comm).clone_dtoh(&got).context(|| "download".into())?;
    expect("got", &got, |index| value(there | 1, index))?;
    must("barrier", comm.barrier())?;
    drop(open);
    must("release", window.release())?;
    done()
}

/// The last rank is killed, or its host is cut off, while the first copies to and from its memory.
fn lost(fault: Fault) -> Result<(), Failed> {
    let launch = launch("lost_meanwhile", 2).on_hosts(2);
    let emulated = if has_gpus_for(2) { None } else { Some(Emulated::new()?.set("DEVICES", 2)) };
    let launch: Launch = match &emulated {
        Some(emulated) => emulated.launch(launch),
        None => launch.on_gpus(),
    };
    found_by_the_first(launch, "copying", fault)
}

fn lost_meanwhile(comm: Comm, _: &[String]) -> Outcome {
    let window = window(&comm, &vec![7u8; LONG])?;
    let open = open_all::<u8>(&comm, window.descriptor())?;
    if comm.rank() == 1 {
        phase("open");
        std::thread::sleep(Duration::from_secs(60));
        return done();
    }
    let peer: &RemoteGpuWindow<u8> = &open[1];
    let mut got = upload(&comm, &vec![0u8; LONG])?;
    must("get", peer.get(&mut got, 0).and_then(|()| peer.sync()))?;
    phase("copying");
    let since = Instant::now();
    // Copies are always under way; none waits for the host.
    let error = loop {
        let copied = peer.get(&mut got, 0).and_then(|()| peer.put(&got, 0));
        // The stream goes on, whatever becomes of the copies.
        stream(&comm).synchronize().context(|| "synchronize".into())?;
        if let Err(error) = copied.and_then(|()| peer.sync()) {
            break error;
        }
        assert!(since.elapsed() < Duration::from_secs(20), "the loss is not found");
    };
    match &error {
        Error::Peer(lost) => {
            assert_eq!(lost.rank, 1);
            assert!(matches!(lost.event, PeerEvent::Died | PeerEvent::Unreachable), "{error}");
        }
        other => return Err(format!("{other}")),
    }
    phase("found");
    for again in [peer.put(&got, 0), peer.signal(), peer.sync(), comm.sync()] {
        assert_eq!(again.expect_err("it has failed").to_string(), error.to_string());
    }
    // What the lost rank had open is this rank's again: it is this rank's service that makes the copies.
    drop(open);
    must("release", window.release())?;
    done()
}

/// UCX is found at run time; where it is missing, the error says how to get it, and the communicator works on.
fn without_ucx(comm: Comm, _: &[String]) -> Outcome {
    let slice = must("alloc_gpu", comm.alloc_gpu::<i32>(10))?;
    let text = refusal("register_gpu", comm.register_gpu(slice))?;
    assert!(text.contains("apt install libucx0") && text.contains("/nowhere/libucp.so.0"), "{text}");
    must("barrier", comm.barrier())?;
    done()
}
