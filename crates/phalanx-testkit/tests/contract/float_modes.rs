//! Ranks whose threads are in different floating-point modes, as fast-math libraries set them.

use crate::world::{all_equal, on_processes, on_threads};
use libtest_mimic::Trial;
use phalanx::{Comm, Element, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::float_mode::{FAST, mode, set_mode};
use phalanx_testkit::scenario::{ErrorContext, Outcome};

pub const SCENARIOS: &[Scenario] =
    &[Scenario::rank("float_modes/reductions", |comm, _| with_rank_1_in_fast_mode(&comm))];

pub fn trials() -> Vec<Trial> {
    let name = |kind: &str| format!("{kind}/{}", SCENARIOS[0].name);
    let threads = || [2, 3].iter().try_for_each(|ranks| all_equal(&on_threads(SCENARIOS[0], *ranks, &[])?));
    let processes =
        || [2, 3].iter().try_for_each(|ranks| all_equal(&on_processes(SCENARIOS[0], *ranks, &[])?));
    vec![Trial::test(name("threads"), threads), Trial::test(name("processes"), processes)]
}

/// Lengths in elements: in an opening, in a slot, in steps, and pushed.
const LENGTHS: [usize; 4] = [3, 200, 20_000, 600_000];

/// Every rank's results in one word, which must be the same on all. Rank 1 is in a mode that flushes small numbers to zero.
fn with_rank_1_in_fast_mode(comm: &Comm) -> Outcome {
    let before = mode();
    if comm.rank() == 1 {
        set_mode(FAST);
    }
    let during = mode();
    let results = [
        of::<f32>(comm, |i| f32::from_bits(i as u32 * 37 + 1)),
        of::<f64>(comm, |i| f64::from_bits(i as u64 * 37 + 1)),
        of::<phalanx::f16>(comm, |i| phalanx::f16::from_bits(i as u16 % 1000 + 1)),
        of::<phalanx::bf16>(comm, |i| phalanx::bf16::from_bits(i as u16 % 120 + 1)),
        of::<phalanx::F8E4M3>(comm, |i| phalanx::F8E4M3::from_bits(i as u8 % 7 + 1)),
        of::<phalanx::F8E5M2>(comm, |i| phalanx::F8E5M2::from_bits(i as u8 % 3 + 1)),
    ];
    let after = mode();
    set_mode(before);
    if during != after {
        return Err(format!("the thread was in mode {during:x}, and afterwards in {after:x}"));
    }
    let mut all = 0;
    for result in results {
        let (hash, lost) = result?;
        if lost {
            return Err("a sum of small numbers is zero".into());
        }
        all ^= hash;
    }
    Ok(format!("{all:x}"))
}

/// A hash of the results for one type, and whether a sum was flushed to zero.
fn of<T: Element>(comm: &Comm, tiny: fn(usize) -> T) -> Result<(u64, bool), String> {
    let (mut hash, mut lost) = (0u64, false);
    for len in LENGTHS {
        let own: Vec<T> = (0..len).map(|i| tiny(i + comm.rank())).collect();
        let mut shared = comm.alloc::<T>(len).context(|| "alloc".into())?;
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg] {
            let mut private = own.clone();
            comm.all_reduce_in_place(&mut private, op).context(|| "all_reduce".into())?;
            shared.copy_from_slice(&own);
            comm.all_reduce_in_place(&mut shared, op).context(|| "all_reduce of shared memory".into())?;
            let started = comm.start_all_reduce(own.clone(), op).and_then(|request| request.wait());
            let started = started.context(|| "start_all_reduce".into())?;
            for results in [&private[..], &shared[..], &started[..]] {
                // SAFETY: elements are plain numbers.
                let bytes = unsafe {
                    std::slice::from_raw_parts(results.as_ptr().cast::<u8>(), size_of_val(results))
                };
                // By their bits: in its mode, rank 1 takes them for zero.
                lost |= op == ReduceOp::Sum
                    && bytes
                        .chunks_exact(size_of::<T>())
                        .any(|element| element.iter().all(|byte| *byte == 0));
                hash = bytes.iter().fold(hash, |hash, byte| hash.rotate_left(5) ^ u64::from(*byte));
            }
        }
    }
    Ok((hash, lost))
}
