//! Sorts keys that are spread over the ranks. The ranks agree on the borders between their ranges by samples, exchange keys once, and sort what
//! they got.
//!
//! ```text
//! cargo run --release -p phalanx --example sample_sort -- 4 1000000     4 ranks as threads, a million keys each
//! phalanx launch -n 4 -- target/release/examples/sample_sort 4 1000000
//! ```

#[path = "shared/ranks.rs"]
mod ranks;

use phalanx::{Comm, ReduceOp};
use ranks::{Result, number};
use std::process::ExitCode;
use std::time::Instant;

/// Samples of each rank for each border. With more of them the ranks' shares are more equal.
const SAMPLES: usize = 32;

fn main() -> ExitCode {
    ranks::on_ranks("sample_sort", |comm, arguments| {
        let keys = arguments.first().map_or(Ok(100_000), |text| number("keys", text))?;
        one_rank(comm, keys)
    })
}

fn one_rank(comm: Comm, keys: usize) -> Result<()> {
    let keys = random_keys(comm.rank() as u64, keys);
    let sum_before = checksum(&comm, &keys)?;
    comm.barrier()?;
    let start = Instant::now();
    let sorted = sort(&comm, keys)?;
    comm.barrier()?;
    let seconds = start.elapsed().as_secs_f64();

    let [count, sum] = checksum(&comm, &sorted)?;
    if [count, sum] != sum_before || !is_sorted(&comm, &sorted)? {
        return Err(format!("rank {}: the keys are not sorted, or not the same", comm.rank()).into());
    }
    let largest = comm.all_reduce_value(sorted.len() as u64, ReduceOp::Max)?;
    if comm.rank() == 0 {
        let share = largest as f64 * comm.world_size() as f64 / count.max(1) as f64;
        println!("{count} keys in {seconds:.3} s: {:.1} million/s", count as f64 / seconds / 1e6);
        println!("sorted; the largest share is {share:.2} of the average");
    }
    comm.finalize()?;
    Ok(())
}

/// All ranks' keys, sorted: rank 0 gets the smallest.
fn sort(comm: &Comm, mut keys: Vec<u64>) -> phalanx::Result<Vec<u64>> {
    let ranks = comm.world_size();
    keys.sort_unstable();
    let samples: Vec<u64> = evenly(&keys, SAMPLES * ranks).collect();
    let mut samples = comm.all_gather_vec(&samples)?.elements;
    samples.sort_unstable();
    let borders: Vec<u64> = evenly(&samples, ranks).skip(1).collect();

    // Ranks without a border, if there are fewer keys than ranks, get nothing.
    let mut ends: Vec<usize> =
        borders.iter().map(|border| keys.partition_point(|key| key < border)).collect();
    ends.resize(ranks, keys.len());
    let starts = [0].into_iter().chain(ends.iter().copied());
    let counts: Vec<usize> = starts.zip(&ends).map(|(start, end)| end - start).collect();
    let mut received = comm.all_to_all_vec(&keys, &counts)?.elements;
    // Blocks that are sorted already: the standard library's stable sort merges them.
    received.sort();
    Ok(received)
}

/// Up to `count` of the values, at equal distances.
fn evenly(values: &[u64], count: usize) -> impl Iterator<Item = u64> {
    let count = count.min(values.len());
    (0..count).map(move |index| values[index * values.len() / count])
}

/// The number of all ranks' keys, and their sum.
fn checksum(comm: &Comm, keys: &[u64]) -> phalanx::Result<[u64; 2]> {
    let sum = keys.iter().fold(0, |sum: u64, key| sum.wrapping_add(*key));
    let mut both = [keys.len() as u64, sum];
    comm.all_reduce_in_place(&mut both, ReduceOp::Sum)?;
    Ok(both)
}

/// Whether each rank's keys are in order, and none is smaller than one of a lower rank.
fn is_sorted(comm: &Comm, keys: &[u64]) -> phalanx::Result<bool> {
    let ends: Vec<u64> = keys.first().into_iter().chain(keys.last()).copied().collect();
    let all_ends = comm.all_gather_vec(&ends)?.elements;
    Ok(keys.is_sorted() && all_ends.is_sorted())
}

/// SplitMix64 of this seed.
fn random_keys(seed: u64, count: usize) -> Vec<u64> {
    let mut state = seed << 32;
    let next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    std::iter::repeat_with(next).take(count).collect()
}
