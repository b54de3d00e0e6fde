//! Random sequences of all collectives in one world, with ranks that come early and late: what one operation
//! leaves behind meets every other.

use crate::world::each;
use libtest_mimic::Trial;
use phalanx::Comm;
use phalanx_testkit::Scenario;
use phalanx_testkit::program::Step;
use phalanx_testkit::random::Random;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("programs/short_blocks", |comm, args| program(&comm, args, 400, 2000)),
    Scenario::rank("programs/long_blocks", |comm, args| program(&comm, args, 150, 60_000)),
];

pub fn trials() -> Vec<Trial> {
    let seeds: &[&str] = &["1", "2", "3"];
    SCENARIOS.iter().flat_map(|scenario| each(*scenario, [&[2, 3, 4, 7]; 2], seeds)).collect()
}

fn program(comm: &Comm, args: &[String], steps: usize, longest: usize) -> Outcome {
    let seed: u64 = args.first().and_then(|arg| arg.parse().ok()).ok_or("no seed was given")?;
    let mut random = Random::new(seed);
    let mut delays = Random::new(seed * 1000 + comm.rank() as u64);
    for number in 0..steps {
        // The sequence is the same on all ranks, the delays are each rank's own.
        let step = Step::random(&mut random, longest);
        // On MPI, a communicator on which one is started has another form of all.
        let step = if seed % 2 == 1 { step.at_once() } else { step };
        if delays.below(8) == 0 {
            std::thread::sleep(Duration::from_micros(delays.below(300) as u64));
        }
        step.perform(comm).context(|| {
            let Step { operation, dtype, form, lengths, shared, .. } = &step;
            format!(
                "seed {seed}, step {number}: {operation:?} of {dtype}, {form:?}, first length {}, \
                 shared {shared:#x}, rank {}",
                lengths[0],
                comm.rank()
            )
        })?;
    }
    Ok(String::new())
}
