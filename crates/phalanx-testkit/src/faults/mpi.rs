//! Ranks of MPI whose error stream takes nothing, and jobs that are stopped as a whole.
//!
//! The thread that ends a hanging job says why first. It must come to the end whatever becomes of what it says.

use super::Case;
use super::common::has;
use crate::error_stream::{self, STREAMS};
use crate::mpi::{Ended, Installation};
use crate::scenario::{Outcome, Scenario};
use crate::verdict;
use phalanx::{Comm, ReduceOp};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("mpi/error_stream", error_stream),
    Scenario::rank("mpi/grow", |comm, _| {
        let fields = verdict::expected(comm.grow(1), "growing on MPI")?;
        has(&fields, "kind", "unsupported")?;
        comm.barrier().map(|()| String::new()).map_err(|error| error.to_string())
    }),
    Scenario::rank("mpi/stopped_as_a_whole", |comm, _| stopped_as_a_whole(&comm)),
];

/// The deadline of a rank that waits for one that does not come.
const LIMIT: Duration = Duration::from_millis(500);
/// How long a job may take, with the start and the end of its launcher.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a whole job is stopped: for longer than its deadline.
const STOPPED: Duration = Duration::from_secs(3);

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    if !cfg!(target_os = "linux") {
        return cases;
    }
    for (name, found) in Installation::all() {
        let mut add = |what: String, run: fn(&Installation, &str) -> Result<(), String>| {
            let (installation, argument) = (found.clone().ok(), what.clone());
            let case = Case::new(format!("{name}/{what}"), move || {
                let stream = argument.rsplit('/').next().unwrap_or_default();
                run(installation.as_ref().ok_or("it is not installed")?, stream)
            });
            cases.push(case.ignored(found.clone().err()));
        };
        for stream in STREAMS {
            add(format!("error_stream/deadline/{stream}"), deadline_passes);
            add(format!("error_stream/exit/{stream}"), rank_exits);
        }
        add("grow".into(), |installation, _| {
            installation.job(2).scenario("mpi/grow", &[]).succeed().map(drop)
        });
        add("stopped_as_a_whole".into(), |installation, _| {
            installation.job(3).scenario("mpi/stopped_as_a_whole", &[]).succeed().map(drop)
        });
    }
    cases
}

fn job(installation: &Installation, stream: &str, how: &str) -> Result<(Ended, Duration), String> {
    let since = Instant::now();
    let job = installation.job(2).scenario("mpi/error_stream", &[stream, how]);
    Ok((job.deadline(PATIENCE).run()?, since.elapsed()))
}

fn deadline_passes(installation: &Installation, stream: &str) -> Result<(), String> {
    let (ended, took) = job(installation, stream, "late")?;
    // MPICH's MPI_Abort waits for the thread that is inside MPI, so the process aborts itself, which is 6. MPICH 5.0.2's launcher
    // answers 9, a rank that it killed itself, after 1 of 200 calls of MPI_Abort: also of a C program.
    let allowed: &[i32] = if installation.name != "open_mpi" && took < PATIENCE / 2 { &[6, 9] } else { &[] };
    let code = ended.status.and_then(|status| status.code()).filter(|code| allowed.contains(code));
    expect(&ended, took, code.unwrap_or(124))
}

fn rank_exits(installation: &Installation, stream: &str) -> Result<(), String> {
    let (ended, took) = job(installation, stream, "exit")?;
    // MPICH's launcher answers the status of whichever rank it hears of first: also that of the other one, which it ends by SIGHUP or SIGKILL.
    // A rank that aborted would be 6.
    let of_the_other = ended.status.and_then(|status| status.code()).filter(|code| [1, 9].contains(code));
    expect(&ended, took, of_the_other.filter(|_| installation.name != "open_mpi").unwrap_or(3))
}

/// The job has this status: MPI_Abort's, or that of a rank. A rank that ends by a signal has another one.
fn expect(ended: &Ended, took: Duration, status: i32) -> Result<(), String> {
    if ended.status.and_then(|ended| ended.code()) == Some(status) && ended.left.is_empty() {
        return Ok(());
    }
    Err(format!("not status {status}, after {took:?}: {ended:#?}"))
}

/// Rank 1 exits with status 3, or does not come. Arguments: what becomes of standard error, and which of the two.
fn error_stream(args: &[String]) -> Outcome {
    let comm = phalanx::init().map_err(|error| error.to_string())?;
    comm.barrier().map_err(|error| error.to_string())?;
    let _open = error_stream::replace(&args[0])?;
    match (comm.rank(), args[1].as_str()) {
        (1, "exit") => std::process::exit(3),
        (1, _) => {
            // For longer than the job may take: who holds it is looked up at its deadline.
            std::thread::sleep(2 * PATIENCE);
            Err("the job has not ended".into())
        }
        (_, "exit") => comm.barrier().map(|()| String::new()).map_err(|error| error.to_string()),
        _ => Err(format!("the barrier came back: {:?}", comm.within(LIMIT).barrier())),
    }
}

/// All ranks are stopped, for longer than their deadline, while the others wait for rank 0.
fn stopped_as_a_whole(comm: &Comm) -> Outcome {
    let text = |error: phalanx::Error| error.to_string();
    let mut processes = vec![0u32; comm.world_size()];
    comm.all_gather(&[std::process::id()], &mut processes).map_err(text)?;
    comm.set_timeout(STOPPED - Duration::from_secs(1));
    if comm.rank() == 0 {
        let list = processes.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
        let script = format!("sleep 0.5; kill -STOP {list}; sleep {}; kill -CONT {list}", STOPPED.as_secs());
        let shell = std::process::Command::new("sh").args(["-c", &script]).spawn();
        shell.map_err(|error| error.to_string())?;
    }
    let began = Instant::now();
    loop {
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(300));
        }
        let mut going = [u8::from(began.elapsed() < STOPPED + Duration::from_secs(1))];
        comm.all_reduce_in_place(&mut going, ReduceOp::Min).map_err(text)?;
        if going == [0] {
            return Ok(String::new());
        }
    }
}
