//! Small all_reduces of more ranks than hear each other: each block is compared with the plain reference, in
//! rank order and bit for bit, on all ranks.
//!
//! Ranks that share cores go another way. `PHALANX_CORES` says here that they do not, to processes of their
//! own: also where the ranks are threads.

use crate::world::{DEADLINE, all_equal, all_ok};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, DType, ReduceOp};
use phalanx_testkit::processes::Launch;
use phalanx_testkit::random::Random;
use phalanx_testkit::reference::{self, Combine};
use phalanx_testkit::ring::{Ring, STRIDE, bytes, same_values};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario, threads, with_number};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("rounds/cells", |comm, _| all_types(&comm)),
    Scenario::rank("rounds/uneven", |comm, _| uneven(&comm)),
    Scenario::process("rounds/threads", on_threads),
];

/// Without a rank to spare, with longer and shorter rows, and at the numbers where ranks begin to go in
/// rounds.
const THREADS: [usize; 6] = [9, 23, 24, 25, 33, 64];
const PROCESSES: [usize; 4] = [24, 25, 33, 64];

/// Bytes of a block: around what fits in an opening and in lines, around 32 for each rank, and to the largest
/// that goes in rounds.
const BYTES: [usize; 9] = [40, 41, 57, 64, 257, 505, 768, 1056, 2048];

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    if cfg!(target_os = "linux") {
        for scenario in ["cells", "uneven"] {
            trials.extend(THREADS.map(|ranks| {
                Trial::test(format!("threads/rounds/{scenario}/{ranks}"), move || {
                    let launch = Launch::alone("rounds/threads").arg(scenario).arg(ranks);
                    reports(launch, ranks).map(drop)
                })
            }));
            trials.extend(PROCESSES.map(|ranks| {
                Trial::test(format!("processes/rounds/{scenario}/{ranks}"), move || {
                    let launch = Launch::new(&format!("rounds/{scenario}"), ranks);
                    all_equal(&reports(launch, ranks)?)
                })
            }));
        }
    }
    trials
}

fn reports(launch: Launch, ranks: usize) -> Result<Vec<String>, Failed> {
    let launch = launch.env("PHALANX_CORES", &ranks.to_string()).deadline(DEADLINE);
    launch.reports().map_err(|problems| format!("{ranks} ranks:{problems}").into())
}

/// Thread ranks of this process, which has variables of its own.
fn on_threads(args: &[String]) -> Outcome {
    let scenario = SCENARIOS.iter().find(|scenario| scenario.name == format!("rounds/{}", args[0]));
    let ranks = args[1].parse().map_err(|_| "not a number of ranks")?;
    let outcomes = threads::run_scenario(scenario.ok_or("no such scenario")?, ranks, &[], DEADLINE)?;
    all_equal(&all_ok(outcomes.into_iter())?).map_err(|failed| format!("{failed:?}"))?;
    Ok(String::new())
}

fn all_types(comm: &Comm) -> Outcome {
    let mut report = String::new();
    for dtype in DType::ALL {
        report += &with_number!(dtype, T => all_cells::<T>(comm))?;
    }
    Ok(report)
}

/// The report is a digest of all results: every bit of them is the same on all ranks.
fn all_cells<T: Number>(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<T>::new(77);
    let mut digest = 0u64;
    for (i, bytes_of_block) in BYTES.into_iter().enumerate() {
        let count = bytes_of_block.div_ceil(size_of::<T>());
        let inputs: Vec<Vec<T>> =
            (0..ranks).map(|rank| ring.window(i * 911 + rank * STRIDE, count)).collect();
        for combine in Combine::all(ranks) {
            let what = |place: &str| {
                format!("{} of {count} {} {place}, rank {rank} of {ranks}", combine.name(), T::DTYPE)
            };
            let expected = reference::combined(&inputs, &combine);
            // At odd addresses: one element behind where the memory starts.
            let mut result = vec![T::from_small(1); count + 1];
            let reduction = || combine.reduction(rank);
            comm.all_reduce(&inputs[rank], &mut result[1..], reduction()).context(|| what("out of place"))?;
            same_values(&result[1..], &expected).context(|| what("out of place"))?;
            let mut in_place = inputs[rank].clone();
            comm.all_reduce_in_place(&mut in_place, reduction()).context(|| what("in place"))?;
            if bytes(&in_place) != bytes(&result[1..]) {
                return Err(what("in place is not what it was out of place, bit for bit,"));
            }
            digest = bytes(&in_place).iter().fold(digest, |digest, byte| {
                (digest.rotate_left(5) ^ u64::from(*byte)).wrapping_mul(0x517c_c1b7_2722_0a95)
            });
        }
    }
    Ok(format!("{}={digest:x} ", T::DTYPE))
}

/// All_reduces one behind the other, and among others that use the same memory, of ranks that come now sooner
/// and now later.
fn uneven(comm: &Comm) -> Outcome {
    const ROUNDS: usize = 400;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (mut common, mut own) = (Random::new(5), Random::new(1000 + rank as u64));
    for round in 0..ROUNDS {
        match own.below(40) {
            0 => std::thread::sleep(std::time::Duration::from_micros(own.below(300) as u64)),
            1..10 => (0..own.below(2000)).for_each(|_| std::hint::spin_loop()),
            10..20 => std::thread::yield_now(),
            _ => {}
        }
        let what = || format!("round {round}, rank {rank} of {ranks}");
        let count = 6 + common.below(80);
        let number = |rank: usize, i: usize| (round * 100_003 + rank * 101 + i) as u32;
        let root = common.below(ranks);
        match common.below(12) {
            0 => comm.barrier().context(what)?,
            8 => {
                let mut blocks: Vec<u32> = (0..ranks).map(|to| number(rank, to)).collect();
                comm.all_to_all_in_place(&mut blocks).context(what)?;
                if blocks.iter().enumerate().any(|(from, word)| *word != number(from, rank)) {
                    return Err(format!("{}: exchanged {blocks:?}", what()));
                }
            }
            9 => {
                let mut sum = [number(rank, 2)];
                comm.reduce_in_place(&mut sum, ReduceOp::Sum, root).context(what)?;
                let right = (0..ranks).fold(0u32, |sum, rank| sum.wrapping_add(number(rank, 2)));
                if rank == root && sum != [right] {
                    return Err(format!("{}: {sum:?} at the root, not {right}", what()));
                }
            }
            10 => {
                let mut sums = vec![number(rank, 3); 5000];
                comm.all_reduce_in_place(&mut sums, ReduceOp::Sum).context(what)?;
                let right = (0..ranks).fold(0u32, |sum, rank| sum.wrapping_add(number(rank, 3)));
                if sums.iter().any(|sum| *sum != right) {
                    return Err(format!("{}: {} of a long sum, not {right}", what(), sums[4999]));
                }
            }
            1 => {
                let mut word = [number(rank, 0)];
                comm.broadcast_in_place(&mut word, root).context(what)?;
                if word != [number(root, 0)] {
                    return Err(format!("{}: {word:?} of rank {root}", what()));
                }
            }
            2 => {
                let mut words = vec![0; ranks];
                comm.all_gather(&[number(rank, 1)], &mut words).context(what)?;
                if words.iter().enumerate().any(|(rank, word)| *word != number(rank, 1)) {
                    return Err(format!("{}: gathered {words:?}", what()));
                }
            }
            _ => {
                let mut sums: Vec<u32> = (0..count).map(|i| number(rank, i)).collect();
                comm.all_reduce_in_place(&mut sums, ReduceOp::Sum).context(what)?;
                let right = |i: usize| (0..ranks).fold(0u32, |sum, rank| sum.wrapping_add(number(rank, i)));
                if let Some(i) = (0..count).find(|i| sums[*i] != right(*i)) {
                    return Err(format!("{}: sum {i} of {count} is {}, not {}", what(), sums[i], right(i)));
                }
            }
        }
    }
    Ok(String::new())
}
