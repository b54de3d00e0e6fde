//! What one-sided accesses cost: rank 0 puts to rank 1's memory, gets from it, and adds to it; and what all ranks read of a table that their
//! host shares.
//!
//! ```text
//! phalanx launch -n 2 -- target/release/examples/one_sided_overhead
//! ```
//!
//! A put is timed until it is complete there (`flush`). Times are medians of 41 rounds, in nanoseconds. `docs/benchmarks/one_sided.c` is
//! the same program on an MPI's windows.

use phalanx::{Comm, ReduceOp, Result};
use std::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;

const ROUNDS: usize = 41;
/// Bytes of an access.
const SIZES: [usize; 6] = [8, 64, 1 << 10, 16 << 10, 256 << 10, 4 << 20];
/// Elements of the shared table: 1 MiB. Where the pages of a larger one are makes more difference than whose they are.
const TABLE: usize = 1 << 17;

fn main() -> ExitCode {
    match phalanx::init().and_then(|comm| measure(&comm).and_then(|()| comm.finalize())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(comm: &Comm) -> Result<()> {
    let mut memory = comm.symmetric::<u64>(SIZES[5] / 8)?;
    let epoch = memory.epoch()?;
    if comm.rank() == 0 {
        let mut buffer = vec![1u64; SIZES[5] / 8];
        let other = 1 % comm.world_size();
        for bytes in SIZES {
            let buffer = &mut buffer[..bytes / 8];
            let times = if bytes < 1 << 20 { 1000 } else { 20 };
            let put = median(times, || {
                epoch.put(buffer, other, 0)?;
                epoch.flush(other)
            })?;
            let get = median(times, || epoch.get(black_box(buffer), other, 0))?;
            println!("{bytes:>8} bytes: put {put:9.1} get {get:9.1}");
        }
        let add = median(1000, || epoch.fetch_and_op(1, other, 0, ReduceOp::Sum).map(drop))?;
        println!("fetch and add {add:.1}");
    }
    epoch.end()?;
    memory.free()?;

    let shared = comm.shared_by_host(TABLE, |table: &mut [u64]| {
        table.iter_mut().enumerate().for_each(|(place, value)| *value = place as u64);
        Result::Ok(())
    })?;
    if comm.rank() == 0 {
        let plain: Vec<u64> = shared.to_vec();
        let mut times = [[0.0; ROUNDS]; 2];
        for round in 0..ROUNDS {
            for (times, table) in times.iter_mut().zip([&plain[..], &shared[..]]) {
                let began = Instant::now();
                black_box(black_box(table).iter().fold(0u64, |sum, value| sum.wrapping_add(*value)));
                times[round] = began.elapsed().as_secs_f64();
            }
        }
        let [plain, shared] = times.map(middle);
        println!("sum of a shared table, over that of a plain slice: {:.3}", shared / plain);
    }
    comm.barrier()?;
    shared.free()
}

/// The median of rounds of so many calls each: nanoseconds of one.
fn median(times: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut rounds = [0.0; ROUNDS];
    for round in &mut rounds {
        let began = Instant::now();
        for _ in 0..times {
            call()?;
        }
        *round = began.elapsed().as_secs_f64() * 1e9 / times as f64;
    }
    Ok(middle(rounds))
}

fn middle(mut rounds: [f64; ROUNDS]) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}
