//! Deadlines of single operations: what is called within a shorter time than the communicator's gives up
//! then, what is called after it has the communicator's again.

use super::common::{DEADLINE, Ground};
use super::{Backend, Case};
use crate::mpi::Installation;
use crate::processes::Launch;
use crate::scenario::{Outcome, Scenario};
use crate::threads;
use phalanx::{Comm, Error, ReduceOp};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("deadline/within", |comm, args| within(&comm, &args[0])),
    Scenario::process("deadline/within_of_threads", |args| {
        let outcomes = phalanx::run(2, |comm| within(&comm, &args[0])).map_err(text)?;
        outcomes.into_iter().collect::<Result<Vec<_>, _>>().map(|reports| reports.concat())
    }),
];

/// What is called.
const CALLS: [&str; 7] =
    ["barrier", "all_reduce", "recv", "started_all_reduce", "started_recv", "split", "group"];

/// The operation's own deadline.
const LIMIT: Duration = Duration::from_millis(200);
/// When the other rank comes.
const LATE: Duration = Duration::from_millis(1000);

pub fn cases(backend: Backend) -> Vec<Case> {
    let ways = [
        ("processes", Launch::new("deadline/within", 2)),
        ("threads", Launch::alone("deadline/within_of_threads")),
    ];
    let of_way = |(ranks, launch): (&'static str, Launch)| {
        CALLS.map(|call| {
            let launch = launch.clone().arg(call).deadline(DEADLINE);
            Case::new(format!("{ranks}/deadline/{call}"), move || {
                Ground::new(backend)?.launch(launch.clone()).reports().map(drop)
            })
        })
    };
    if cfg!(target_os = "linux") {
        return ways.into_iter().flat_map(of_way).collect();
    }

    let on_threads = |call: &'static str| {
        let run = move || threads::run_scenario(&SCENARIOS[0], 2, &[call.to_owned()], DEADLINE).map(drop);
        Case::new(format!("threads/deadline/{call}"), run)
    };
    CALLS.map(on_threads).into()
}

/// On MPI a receive is given up, and an operation that MPI has begun ends the job.
pub fn mpi_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, found) in Installation::all() {
        for call in ["recv", "started_recv", "barrier", "all_reduce", "started_all_reduce"] {
            let installation = found.clone().ok();
            let case = Case::new(format!("{name}/deadline/{call}"), move || {
                job(installation.as_ref().ok_or("it is not installed")?, call)
            });
            cases.push(case.ignored(found.clone().err()));
        }
    }
    cases
}

fn job(installation: &Installation, call: &'static str) -> Result<(), String> {
    let job = installation.job(2).scenario("deadline/within", &[call]);
    if call.ends_with("recv") {
        return job.succeed().map(drop);
    }
    let since = Instant::now();
    let ended = job.run()?;
    let (took, problem) = (since.elapsed(), format!("{ended:?}"));
    let call = call.trim_start_matches("started_");
    // It is the first operation of its communicator, and the other rank says nothing.
    let says = |line: &str| {
        let after = line.split_once("phalanx: timeout after ").map(|(_, after)| after);
        after.map(|after| {
            after.contains(&format!("ms in {call}")) && after.contains("(operation number 1) on rank 0: ")
        })
    };
    let mut lines = ended.output.lines().filter_map(says).peekable();
    let said = lines.peek().is_some() && lines.all(|is_right| is_right);
    let failed = ended.status.is_some_and(|status| !status.success());
    if said && failed && took < Duration::from_secs(10) {
        Ok(())
    } else {
        Err(format!("{took:?}: {problem}"))
    }
}

fn text(error: Error) -> String {
    error.to_string()
}

fn call(comm: &Comm, call: &str) -> phalanx::Result<()> {
    let mut data = vec![1u32; 5000];
    match call {
        "barrier" => comm.within(LIMIT).barrier(),
        "all_reduce" => {
            let view = comm.within(LIMIT);
            // With GPU memory, the wait is `sync`'s.
            view.all_reduce_in_place(&mut data, ReduceOp::Sum).and_then(|()| view.sync())
        }
        "recv" => comm.within(LIMIT).recv(&mut data, 1),
        "started_all_reduce" => {
            let request = comm.within(LIMIT).start_all_reduce(data, ReduceOp::Sum)?;
            request.wait().map(drop)
        }
        "started_recv" => {
            let request = comm.within(LIMIT).start_recv(data, 1)?;
            request.wait().map(drop)
        }
        "split" => comm.within(LIMIT).split(Some(0), 0).map(drop),
        "group" => comm.within(LIMIT).group(|group| group.recv(&mut data, 1)),
        other => panic!("no call is called {other}"),
    }
}

/// Rank 1 comes late, twice: the communicator's deadline lets it, the operation's own does not.
fn within(comm: &Comm, name: &str) -> Outcome {
    comm.set_timeout(DEADLINE / 2);
    let limited = comm.split(Some(0), 0).map_err(text)?.ok_or("no part")?;
    if comm.rank() == 1 {
        std::thread::sleep(LATE);
        comm.barrier().map_err(text)?;
        std::thread::sleep(LATE - LIMIT);
        comm.barrier().map_err(text)?;
        return Ok(String::new());
    }
    let since = Instant::now();
    let error = call(&limited, name).err().ok_or("it came back without the other rank")?;
    let took = since.elapsed();
    let Error::Timeout(timeout) = &error else { return Err(format!("another error: {error}")) };
    let named: Vec<usize> = timeout.missing.iter().map(|missing| missing.rank).collect();
    if named != [1] || took < LIMIT || took > LIMIT + Duration::from_secs(1) {
        return Err(format!("after {took:?}: {error}"));
    }
    if (limited.timeout(), limited.within(LIMIT).timeout()) != (DEADLINE / 2, LIMIT) {
        return Err("the communicator has not got its own deadline".into());
    }
    comm.barrier().map_err(text)?;
    comm.barrier().map_err(text)?;
    Ok(String::new())
}
