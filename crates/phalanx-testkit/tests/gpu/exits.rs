//! Processes that exit with communicators that nobody has dropped: they end as the program wanted them to,
//! with their part in the others' work done if that was well, and not by a crash of the library's threads.

use crate::world::{are_emulated, done, download, elements, expect, launch, must, upload};
use libtest_mimic::{Failed, Trial};
use phalanx::ReduceOp;
use phalanx_testkit::Scenario;
use phalanx_testkit::processes::{Launch, describe};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("exits", exits),
    Scenario::process("exits/while_held", exits_while_held),
    Scenario::process("exits/dropped", exits_when_dropped),
    Scenario::process("exits/first", exits_first),
];

/// What a program ends with that has failed.
const FAILED: i32 = 3;

pub fn trials(gpus: usize) -> Vec<Trial> {
    let trials = [
        Trial::test("exits/well", move || well(gpus, |launch| launch)),
        Trial::test("exits/failed", move || failed(gpus, |launch| launch)),
        Trial::test("exits/dropped", move || dropped(gpus)),
        Trial::test("exits/first", move || Ok(launch(SCENARIOS[3], gpus, "").reports().map(drop)?)),
    ];
    trials.into_iter().map(|trial| trial.only_if(gpus >= 2, "it takes two GPUs")).collect()
}

/// All ranks but 0 exit well, with work that may still be going on; rank 0 sees that it was done.
pub fn well(ranks: usize, dress: impl FnOnce(Launch) -> Launch) -> Result<(), Failed> {
    Ok(dress(launch(SCENARIOS[0], ranks, "0")).reports().map(drop)?)
}

/// All ranks exit with a status that says they have failed, with work that may still be going on.
pub fn failed(ranks: usize, dress: impl FnOnce(Launch) -> Launch) -> Result<(), Failed> {
    let ended = dress(launch(SCENARIOS[0], ranks, &FAILED.to_string())).run()?;
    let is_told = ended.iter().all(|one| one.status.and_then(|status| status.code()) == Some(FAILED));
    if is_told { Ok(()) } else { Err(describe(&ended).into()) }
}

/// All ranks exit well while the library holds a thread of theirs.
pub fn while_held(ranks: usize, dress: impl FnOnce(Launch) -> Launch) -> Result<(), Failed> {
    Ok(dress(launch(SCENARIOS[1], ranks, "")).reports().map(drop)?)
}

/// All ranks drop their communicators, of which a thread may then end some, and exit at once.
fn dropped(ranks: usize) -> Result<(), Failed> {
    let launch =
        launch(SCENARIOS[2], ranks, "").env("EMULATED_EXIT", "crash").env("EMULATED_DESTROY", "slow");
    Ok(launch.reports().map(drop)?)
}

fn exits_when_dropped(_: &[String]) -> Outcome {
    let comm = must("init", phalanx::init())?;
    let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    let mut buffer = upload(&comm, &[1.0f32; 1000])?;
    must("all_reduce", part.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    done()
}

/// Rank 1 exits while the others have work among themselves. Where the library ends a communicator with all
/// ranks together, its process waits ten seconds for them, and then ends its part alone; they see that when
/// they leave.
fn exits_first(_: &[String]) -> Outcome {
    let comm = must("init", phalanx::init())?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let part = must("split", comm.split((rank != 1).then_some(0), 0))?;
    let mut buffer = upload(&comm, &[1.0f32; 1000])?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    let mut processes = vec![0; ranks];
    must("all_gather", comm.all_gather(&[std::process::id()], &mut processes))?;
    let Some(part) = part else {
        std::mem::forget((buffer, comm));
        return done();
    };
    let since = Instant::now();
    while is_running(processes[1]) {
        let mut together = [1u32];
        must("all_reduce", part.all_reduce_in_place(&mut together, ReduceOp::Sum))?;
        assert_eq!(together, [ranks as u32 - 1]);
        assert!(since.elapsed() < Duration::from_secs(20), "it has not ended after {:?}", since.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
    if are_emulated() {
        assert!(since.elapsed() > Duration::from_secs(9), "it has ended after {:?}", since.elapsed());
    }
    expect("the sum", &download(&comm, &buffer)?, |_| ranks as f32)?;
    drop((buffer, comm));
    must("barrier", part.barrier())?;
    must("finalize", part.finalize())?;
    done()
}

/// Whether a process is there that has not ended.
fn is_running(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}

fn exits_while_held(_: &[String]) -> Outcome {
    let comm = must("init", phalanx::init())?;
    let (sender, begun) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let work = || {
            let mut buffer = upload(&comm, &[1.0f32; 1000])?;
            must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Max))?;
            let _ = sender.send(());
            (0..100)
                .try_for_each(|_| must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Max)))
        };
        let _: Result<(), String> = work();
        std::mem::forget(comm);
    });
    begun.recv().map_err(|_| "the thread ended before it was held")?;
    std::thread::sleep(Duration::from_millis(300));
    done()
}

fn exits(args: &[String]) -> Outcome {
    let comm = must("init", phalanx::init())?;
    let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    let mut buffer = upload(&comm, &vec![comm.rank() as f32 + 1.0; elements(1 << 22)])?;
    must("barrier", part.barrier())?;
    for _ in 0..10 {
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Max))?;
    }
    let status = args[0].parse();
    if comm.rank() == 0 && status == Ok(0) {
        std::thread::sleep(Duration::from_millis(300));
        must("sync", comm.sync())?;
        let largest = comm.world_size() as f32;
        expect("the largest", &download(&comm, &buffer)?, |_| largest)?;
    }
    std::mem::forget((buffer, part, comm));
    match status {
        Ok(0) => done(),
        Ok(status) => std::process::exit(status),
        Err(error) => Err(format!("{args:?}: {error}")),
    }
}
