//! In a rank: a life, and the end of one of them.

use super::act::Act;
use super::{Plan, Way};
use crate::fault::{self, Fault};
use crate::faults::holdings::Holdings;
use crate::faults::{Backend, common};
use crate::fields::Fields;
use crate::processes::phase;
use crate::program::Problem;
use crate::scenario::Outcome;
use crate::verdict;
use phalanx::{Builder, Comm, Error, ReduceOp};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What a whole process may do to itself.
fn strike(way: Way) {
    let outcome = match way {
        Way::Kill => fault::inject_here(Fault::Kill),
        Way::Stop => fault::inject_here(Fault::Stop),
        Way::Exit => std::process::exit(17),
        _ => Ok(()),
    };
    outcome.expect("a process can send itself a signal");
}

/// Something happens now, or in a while by a thread; `None` if it has happened.
pub fn light(plan: &Plan) -> Option<JoinHandle<()>> {
    plan.mark();
    let way = plan.way;
    match plan.delay {
        None => {
            strike(way);
            None
        }
        Some(delay) => Some(std::thread::spawn(move || {
            let since = Instant::now();
            // Sleeping is too coarse for the shortest.
            while since.elapsed() < delay {
                std::hint::spin_loop();
            }
            strike(way);
        })),
    }
}

/// A rank that is a process: it meets the others, and lives.
pub fn process(plan: &Plan, rank: Option<usize>) -> Result<Fields, String> {
    let mut bomb = None;
    if rank == Some(plan.victim) && plan.at.is_none() {
        bomb = light(plan);
        if plan.way == Way::Late {
            std::thread::sleep(plan.meeting() * 5 / 2);
        }
    }
    let since = Instant::now();
    let joined = phalanx::init();
    // Somebody who is struck while the ranks meet does nothing more before that.
    let _ = bomb.map(JoinHandle::join);
    match joined {
        Ok(comm) => {
            phase("met");
            live(comm, plan)
        }
        Err(error) => {
            let took = since.elapsed().as_millis();
            Ok(verdict::fields(&error).with("outcome", "alone").with("took_ms", took))
        }
    }
}

/// The same, which leaves nothing behind.
pub fn clean_process(plan: &Plan) -> Outcome {
    plan.surroundings.enter()?;
    let rank = std::env::var("PHALANX_RANK").ok().and_then(|rank| rank.parse().ok());
    let mut before = Holdings::now()?;
    if plan.backend == Backend::Nccl {
        warm_up(Comm::builder().gpu(rank.ok_or("no rank")?), 1)?;
        before = Holdings::now()?.without_connections();
    }
    let fields = process(plan, rank)?;
    phase("through");
    before.compare()?;
    Ok(fields.to_string())
}

/// What libraries open once for a process, they keep.
fn warm_up(builder: Builder, ranks: usize) -> Result<(), String> {
    let works = |comm: Comm| comm.all_reduce_in_place(&mut [1u8; 9], ReduceOp::Sum);
    let worked = builder.run(ranks, works).map_err(|error| error.to_string())?;
    worked.into_iter().collect::<phalanx::Result<Vec<()>>>().map(drop).map_err(|error| error.to_string())
}

pub fn threads(plan: &Plan) -> Outcome {
    plan.surroundings.enter()?;
    if plan.backend == Backend::Nccl {
        warm_up(Comm::builder(), plan.ranks)?;
    }
    let before = Holdings::now()?;
    let reports = Mutex::new(vec![None; plan.ranks]);
    let world = catch_unwind(AssertUnwindSafe(|| {
        Comm::builder().timeout(plan.meeting()).run(plan.ranks, |comm| {
            let rank = comm.rank();
            let outcome = live(comm, plan);
            reports.lock().expect("nobody panics with it")[rank] = Some(outcome);
        })
    }));
    match world {
        Err(_) if plan.way == Way::Panic => {}
        Err(_) => return Err("a panic".into()),
        Ok(world) => drop(world.map_err(|error| error.to_string())?),
    }
    before.compare()?;
    let reports = reports.into_inner().map_err(|_| "a panic with the reports in hand")?;
    let lines = reports.into_iter().map(|report| match report {
        Some(outcome) => outcome.map(|fields| fields.to_string()),
        None => Ok(String::new()),
    });
    Ok(lines.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// A rank's life until its end or its failure.
fn live(comm: Comm, plan: &Plan) -> Result<Fields, String> {
    let is_victim = comm.rank() == plan.victim;
    comm.set_timeout(plan.timeout());
    for (i, act) in plan.acts.iter().enumerate() {
        let mut bomb = None;
        if is_victim && plan.at == Some(i) {
            plan.mark();
            match plan.way {
                Way::Panic => panic!("this rank was told to panic"),
                Way::Leave => return Ok(Fields::new().with("outcome", "gone")),
                Way::Abort => {
                    comm.abort();
                    return Ok(Fields::new().with("outcome", "gone"));
                }
                Way::Late => std::thread::sleep(plan.timeout() * 5 / 2),
                Way::Kill | Way::Stop | Way::Exit => bomb = light(plan),
            }
        }
        let since = Instant::now();
        if let Act::Finalize = act {
            let outcome = comm.finalize();
            let took = since.elapsed();
            let _ = bomb.map(JoinHandle::join);
            return Ok(match outcome {
                Ok(()) => Fields::new().with("outcome", "done"),
                Err(error) => failed(&error, took, i),
            });
        }
        let outcome = act.perform(&comm, plan);
        let took = since.elapsed();
        let _ = bomb.map(JoinHandle::join);
        match outcome {
            Ok(()) => {}
            Err(Problem::Wrong(wrong)) => return Err(format!("step {i}: {wrong}")),
            Err(Problem::Error(error)) => {
                let fields = failed(&error, took, i);
                if plan.backend == Backend::Mpi {
                    // Nobody goes on with MPI after a failure.
                    return Ok(fields);
                }
                let shrunk = comm.shrink();
                common::report(comm, &error, took)?;
                return Ok(fields.with("shrunk", go_on(shrunk)?));
            }
        }
    }
    unreachable!("the last act is the end")
}

fn failed(error: &Error, took: Duration, step: usize) -> Fields {
    verdict::fields(error).with("outcome", "failed").with("took_ms", took.as_millis()).with("step", step)
}

/// How many ranks go on together; they try it.
fn go_on(shrunk: phalanx::Result<Comm>) -> Result<String, String> {
    let comm = match shrunk {
        Err(Error::LeftBehind { .. }) => return Ok("left behind".into()),
        Err(error) => return Err(format!("shrink: {error}")),
        Ok(comm) => comm,
    };
    let text = |error: Error| format!("after shrink: {error}");
    let ranks = comm.world_size();
    common::have_one_name(&comm).map_err(text)?;
    for len in [1, 5000, 100_000] {
        let mut ones = vec![1u32; len];
        comm.all_reduce_in_place(&mut ones, ReduceOp::Sum).map_err(text)?;
        if ones.iter().any(|one| *one != ranks as u32) {
            return Err("after shrink: a wrong sum".into());
        }
    }
    comm.finalize().map_err(text)?;
    Ok(ranks.to_string())
}
