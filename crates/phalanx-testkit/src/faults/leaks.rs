//! After a failure nothing is left behind: no file descriptor, no mapping. (Shared memory has no name.)

use super::Case;
use super::common::DEADLINE;
use super::holdings::Holdings;
use crate::Scenario;
use crate::processes::Launch;
use crate::scenario::Outcome;
use phalanx::{Comm, ReduceOp};
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("leaks/process_ranks", |args| process_ranks(&args[0])),
    Scenario::process("leaks/thread_ranks", |args| thread_ranks(&args[0])),
];

const WAYS: [&str; 4] = ["finish", "mismatch", "timeout", "leave"];

pub fn cases() -> Vec<Case> {
    if !cfg!(target_os = "linux") {
        return Vec::new();
    }
    let mut cases = Vec::new();
    for way in WAYS {
        cases.push(Case::new(format!("processes/leaks/{way}"), move || {
            Launch::new("leaks/process_ranks", 3).arg(way).deadline(DEADLINE).reports().map(drop)
        }));
        cases.push(Case::new(format!("threads/leaks/{way}"), move || {
            Launch::alone("leaks/thread_ranks").arg(way).deadline(DEADLINE).reports().map(drop)
        }));
    }
    cases
}

/// Works a little and then ends in some way; what the last call answers is other trials' matter.
fn end_somehow(comm: Comm, way: &str) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut buffer = comm.alloc::<f32>(200_000).map_err(|error| error.to_string())?;
    comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).map_err(|error| error.to_string())?;
    let child = comm.split(Some(0), 0).map_err(|error| error.to_string())?.ok_or("no child")?;
    child.all_reduce_in_place(&mut buffer[..10], ReduceOp::Sum).map_err(|error| error.to_string())?;
    comm.send_recv(
        &buffer[..100_000],
        (rank + 1) % ranks,
        &mut vec![0f32; 100_000],
        (rank + ranks - 1) % ranks,
    )
    .map_err(|error| error.to_string())?;
    let failure = match way {
        "finish" => return comm.finalize().map_err(|error| error.to_string()),
        "mismatch" => comm.all_reduce_in_place(&mut buffer[..100_000 + rank], ReduceOp::Sum),
        "timeout" if rank == 0 => {
            // Here until the others have given up, and then no longer needed.
            std::thread::sleep(Duration::from_millis(900));
            comm.barrier()
        }
        "timeout" => {
            comm.set_timeout(Duration::from_millis(300));
            comm.barrier()
        }
        "leave" if rank == 0 => return Ok(()),
        "leave" => comm.barrier(),
        other => return Err(format!("no way is called {other}")),
    };
    match failure {
        Err(error) if error.is_fatal() => Ok(()),
        other => Err(format!("rank {rank} should have failed: {other:?}")),
    }
}

fn process_ranks(way: &str) -> Outcome {
    let before = Holdings::now()?;
    let comm = phalanx::init().map_err(|error| error.to_string())?;
    end_somehow(comm, way)?;
    before.compare()?;
    Ok(String::new())
}

fn thread_ranks(way: &str) -> Outcome {
    let world = || -> Result<(), String> {
        let outcomes = phalanx::run(3, |comm| end_somehow(comm, way)).map_err(|error| error.to_string())?;
        outcomes.into_iter().collect()
    };
    // Whatever is opened once for the whole process is open after the first world.
    world()?;
    let before = Holdings::now()?;
    (0..if way == "timeout" { 3 } else { 30 }).try_for_each(|_| world())?;
    before.compare()?;
    Ok(String::new())
}
