//! Counts primes. Rank 0 hands out ranges of numbers, each to the worker that is free first: pieces of unequal length cost no waiting.
//!
//! ```text
//! cargo run --release -p phalanx --example master_worker -- 4 1000000     4 ranks as threads, numbers below a million
//! phalanx launch -n 4 -- target/release/examples/master_worker 4 1000000
//! ```

#[path = "shared/ranks.rs"]
mod ranks;

use bytemuck::{Pod, Zeroable};
use phalanx::Comm;
use ranks::{Result, number};
use std::collections::BTreeMap;
use std::process::ExitCode;

/// Numbers of a piece.
const PIECE: u64 = 10_000;

/// The numbers from `start` up to `end`; none of them are the end of the work.
#[derive(Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Task {
    start: u64,
    end: u64,
}

/// What a worker has found, when it asks for more.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Found {
    task: Task,
    primes: u64,
}

const NOTHING: Task = Task { start: 0, end: 0 };

fn main() -> ExitCode {
    ranks::on_ranks("master_worker", |comm, arguments| {
        let limit = arguments.first().map_or(Ok(100_000), |text| number("the limit", text))? as u64;
        let mut tasks =
            (0..limit).step_by(PIECE as usize).map(|start| Task { start, end: limit.min(start + PIECE) });
        match (comm.rank(), comm.world_size()) {
            (0, 1) => report(limit, tasks.map(primes).sum(), &BTreeMap::new()),
            (0, _) => master(&comm, limit, &mut tasks),
            _ => worker(&comm),
        }?;
        Ok(comm.finalize()?)
    })
}

/// Hands out the tasks in the order in which the workers ask for them.
fn master(comm: &Comm, limit: u64, tasks: &mut impl Iterator<Item = Task>) -> Result<()> {
    let (mut total, mut seen, mut pieces) = (0, 0, BTreeMap::new());
    let mut busy = comm.world_size() - 1;
    while busy > 0 {
        let mut found = [Found::zeroed()];
        let worker = comm.recv_any(&mut found)?;
        let [Found { task, primes }] = found;
        if task != NOTHING {
            total += primes;
            seen += task.end - task.start;
            *pieces.entry(worker).or_insert(0) += 1;
        }
        let next = tasks.next().unwrap_or(NOTHING);
        comm.send(&[next], worker)?;
        busy -= usize::from(next == NOTHING);
    }
    if seen != limit {
        return Err(format!("{seen} of {limit} numbers were looked at").into());
    }
    report(limit, total, &pieces)
}

/// Asks for tasks until there is none.
fn worker(comm: &Comm) -> Result<()> {
    let mut found = Found { task: NOTHING, primes: 0 };
    loop {
        comm.send(&[found], 0)?;
        let mut task = [NOTHING];
        comm.recv(&mut task, 0)?;
        let [task] = task;
        if task == NOTHING {
            return Ok(());
        }
        found = Found { task, primes: primes(task) };
    }
}

fn report(limit: u64, primes: u64, pieces: &BTreeMap<usize, usize>) -> Result<()> {
    println!("{primes} primes below {limit}");
    for (worker, pieces) in pieces {
        println!("rank {worker} had {pieces} pieces");
    }
    Ok(())
}

fn primes(task: Task) -> u64 {
    (task.start..task.end).filter(|number| is_prime(*number)).count() as u64
}

fn is_prime(number: u64) -> bool {
    let divisors = (2..).take_while(|divisor| divisor * divisor <= number);
    number >= 2 && divisors.into_iter().all(|divisor| !number.is_multiple_of(divisor))
}
