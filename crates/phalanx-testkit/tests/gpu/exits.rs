//! Processes that exit with communicators that nobody has dropped: they end as the program wanted them to, with their
//! work done if that was well, and not by a crash of the library's threads.

use crate::world::{done, elements, launch, must, upload};
use libtest_mimic::{Failed, Trial};
use phalanx::ReduceOp;
use phalanx_testkit::Scenario;
use phalanx_testkit::processes::{Launch, describe};
use phalanx_testkit::scenario::Outcome;

pub const SCENARIOS: &[Scenario] = &[Scenario::process("exits", exits)];

/// What a program ends with that has failed.
const FAILED: i32 = 3;

pub fn trials(gpus: usize) -> Vec<Trial> {
    let trials = [
        Trial::test("exits/well", move || well(gpus, |launch| launch)),
        Trial::test("exits/failed", move || failed(gpus, |launch| launch)),
    ];
    trials.into_iter().map(|trial| trial.with_ignored_flag(gpus < 2)).collect()
}

/// All ranks exit well, with work that may still be going on.
pub fn well(ranks: usize, dress: impl FnOnce(Launch) -> Launch) -> Result<(), Failed> {
    Ok(dress(launch(SCENARIOS[0], ranks, "0")).reports().map(drop)?)
}

/// All ranks exit with a status that says they have failed, with work that may still be going on.
pub fn failed(ranks: usize, dress: impl FnOnce(Launch) -> Launch) -> Result<(), Failed> {
    let ended = dress(launch(SCENARIOS[0], ranks, &FAILED.to_string())).run()?;
    let is_told = ended.iter().all(|one| one.status.and_then(|status| status.code()) == Some(FAILED));
    if is_told { Ok(()) } else { Err(describe(&ended).into()) }
}

fn exits(args: &[String]) -> Outcome {
    let comm = must("init", phalanx::init())?;
    let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    let mut buffer = upload(&comm, &vec![1.0f32; elements(1 << 22)])?;
    must("barrier", part.barrier())?;
    for _ in 0..10 {
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Max))?;
    }
    std::mem::forget((buffer, part, comm));
    match args[0].parse() {
        Ok(0) => done(),
        Ok(status) => std::process::exit(status),
        Err(error) => Err(format!("{args:?}: {error}")),
    }
}
