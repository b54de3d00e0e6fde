//! Takes numbers apart into primes by a table of their smallest factors, of which each host has one copy. Each rank fills a part of it.
//!
//! ```text
//! cargo run --release -p phalanx --example shared_table -- 4 1000000     4 ranks as threads, numbers below a million
//! phalanx launch -n 4 -- target/release/examples/shared_table 4 1000000
//! ```

#[path = "shared/ranks.rs"]
mod ranks;

use phalanx::{Comm, ReduceOp, SharedByHost};
use ranks::{Result, number};
use std::ops::Range;
use std::process::ExitCode;

fn main() -> ExitCode {
    ranks::on_ranks("shared_table", |comm, arguments| {
        let limit = arguments.first().map_or(Ok(100_000), |text| number("limit", text))?;
        one_rank(comm, limit)
    })
}

fn one_rank(comm: Comm, limit: usize) -> Result<()> {
    // The smallest prime factor of each number; 0 of 0 and 1.
    let factors = comm.shared_by_host_in_parts(limit, |numbers, part: &mut [u32]| {
        sieve(numbers, part);
        phalanx::Result::Ok(())
    })?;
    // Each rank takes every n-th number.
    let own = (2..limit).skip(comm.rank()).step_by(comm.world_size());
    let mut found = [0u64; 2];
    for number in own {
        let count = prime_factors(&factors, number);
        found[0] += u64::from(count == 1);
        found[1] = found[1].max(count);
    }
    let primes = comm.all_reduce_value(found[0], ReduceOp::Sum)?;
    let most = comm.all_reduce_value(found[1], ReduceOp::Max)?;
    if comm.rank() == 0 {
        println!("{primes} primes below {limit}; the most factors of a number are {most}");
        let ranks = comm.host_topology().ranks_of(0).len();
        println!("one table of {} KiB for {ranks} ranks of a host", factors.len() * 4 / 1024);
    }
    factors.free()?;
    comm.finalize()?;
    Ok(())
}

/// Writes the smallest factor of each of these numbers.
fn sieve(numbers: Range<usize>, factors: &mut [u32]) {
    for prime in (2..).take_while(|prime| prime * prime < numbers.end) {
        let first = numbers.start.next_multiple_of(prime).max(2 * prime);
        for multiple in (first..numbers.end).step_by(prime) {
            let factor = &mut factors[multiple - numbers.start];
            if *factor == 0 {
                *factor = prime as u32;
            }
        }
    }
    // What is left is prime.
    for (number, factor) in numbers.zip(factors) {
        if *factor == 0 && number > 1 {
            *factor = number as u32;
        }
    }
}

/// How many prime factors a number has.
fn prime_factors(factors: &SharedByHost<u32>, mut number: usize) -> u64 {
    let mut count = 0;
    while number > 1 {
        number /= factors[number] as usize;
        count += 1;
    }
    count
}
