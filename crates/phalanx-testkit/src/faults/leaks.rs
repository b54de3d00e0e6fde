//! After a failure nothing is left behind: no file descriptor, no mapping, no file.

use crate::common::DEADLINE;
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::Outcome;
use std::collections::BTreeSet;
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("leaks/process_ranks", |args| process_ranks(&args[0])),
    Scenario::process("leaks/thread_ranks", |args| thread_ranks(&args[0])),
];

const WAYS: [&str; 4] = ["finish", "mismatch", "timeout", "leave"];

pub fn trials() -> Vec<Trial> {
    if !cfg!(target_os = "linux") {
        return Vec::new();
    }
    let mut trials = Vec::new();
    for way in WAYS {
        trials.push(Trial::test(format!("processes/leaks/{way}"), move || {
            in_clean_shm(|| Launch::new("leaks/process_ranks", 3).arg(way).deadline(DEADLINE).reports())
        }));
        trials.push(Trial::test(format!("threads/leaks/{way}"), move || {
            in_clean_shm(|| Launch::alone("leaks/thread_ranks").arg(way).deadline(DEADLINE).reports())
        }));
    }
    trials
}

/// Nothing of this library's name may be new in /dev/shm; the files of other programs are their own matter.
fn in_clean_shm(run: impl FnOnce() -> Result<Vec<String>, String>) -> Result<(), Failed> {
    let list = || -> Result<BTreeSet<String>, String> {
        let entries = std::fs::read_dir("/dev/shm").map_err(|error| format!("/dev/shm: {error}"))?;
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
        Ok(names.filter(|name| name.to_lowercase().contains("phalanx")).collect())
    };
    let before = list()?;
    run()?;
    let new: Vec<_> = list()?.difference(&before).cloned().collect();
    if new.is_empty() { Ok(()) } else { Err(format!("left in /dev/shm: {new:?}").into()) }
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

/// Open files, and mappings that are of this library or lie in /dev/shm.
fn holdings() -> Result<(Vec<String>, Vec<String>), String> {
    let text = |error: std::io::Error| error.to_string();
    let open = std::fs::read_dir("/proc/self/fd").map_err(text)?;
    let targets = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    // The listing itself is open while it is read.
    let mut files: Vec<String> = targets
        .map(|target| target.to_string_lossy().into_owned())
        .filter(|target| !target.starts_with("/proc/"))
        .collect();
    files.sort();
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(text)?;
    let shared = maps.lines().filter(|line| line.contains("memfd:") || line.contains("/dev/shm/"));
    Ok((files, shared.map(str::to_owned).collect()))
}

fn compare(before: &(Vec<String>, Vec<String>)) -> Result<(), String> {
    let after = holdings()?;
    if after.0 != before.0 {
        return Err(format!("open files before: {:?}, after: {:?}", before.0, after.0));
    }
    if after.1 != before.1 {
        return Err(format!("shared mappings are left: {:?}", after.1));
    }
    Ok(())
}

fn process_ranks(way: &str) -> Outcome {
    let before = holdings()?;
    let comm = phalanx::init().map_err(|error| error.to_string())?;
    end_somehow(comm, way)?;
    compare(&before)?;
    Ok(String::new())
}

fn thread_ranks(way: &str) -> Outcome {
    let world = || -> Result<(), String> {
        let outcomes = phalanx::run(3, |comm| end_somehow(comm, way)).map_err(|error| error.to_string())?;
        outcomes.into_iter().collect()
    };
    // Whatever is opened once for the whole process is open after the first world.
    world()?;
    let before = holdings()?;
    (0..if way == "timeout" { 3 } else { 30 }).try_for_each(|_| world())?;
    compare(&before)?;
    Ok(String::new())
}
