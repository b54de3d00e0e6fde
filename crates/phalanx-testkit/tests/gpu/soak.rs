//! Very many calls in a row: random operations, lengths and places, graphs between them, against a model on the host.
//!
//! A sample makes a few hundred; `TESTKIT_SOAK_CALLS=1000000` says how many.

use crate::world::{done, download, must, stream, upload};
use libtest_mimic::{Failed, Trial};
use phalanx::cudarc::driver::CudaSlice;
use phalanx::nccl::Graph;
use phalanx::{Comm, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::on_own_kernels;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::random::Random;
use phalanx_testkit::scenario::Outcome;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[Scenario::rank("own_kernels/soak", soak)];

const CALLS: &str = "TESTKIT_SOAK_CALLS";
/// Calls between two comparisons with the model.
const BATCH: usize = 200;
/// Elements of a buffer.
const ROOM: usize = 1 << 16;

pub fn trials() -> Vec<Trial> {
    let worlds =
        [("auto", "threads", 2), ("auto", "processes", 2), ("ll128", "threads", 4), ("auto", "processes", 4)];
    let trial = |(algorithm, kind, ranks): (&'static str, &str, usize)| {
        let is_threads = kind == "threads";
        Trial::test(format!("own_kernels/soak/{algorithm}/{kind}/{ranks}"), move || -> Result<(), Failed> {
            let launch = Launch::new("own_kernels/soak", ranks).deadline(Duration::from_secs(400));
            let launch = launch.env("PHALANX_BACKEND", "nccl");
            let launch = if is_threads { launch.on_threads() } else { launch };
            Ok(on_own_kernels(algorithm, ranks, launch).map(drop)?)
        })
    };
    worlds.map(trial).into()
}

/// An operation from a part of one buffer to a part of the other.
struct Call {
    operation: usize,
    /// Of a block.
    len: usize,
    from: usize,
    to: usize,
    root: usize,
    op: ReduceOp,
    /// Whether the second buffer is the source.
    is_back: bool,
}

const OPERATIONS: usize = 8;

impl Call {
    fn random(random: &mut Random, ranks: usize) -> Call {
        // As many lengths of each order of magnitude.
        let most = 1 << random.below(17 - ranks.ilog2() as usize);
        let len = 1 + random.below(most);
        let place = ROOM - len * ranks + 1;
        Call {
            operation: random.below(OPERATIONS),
            len,
            from: random.below(place),
            to: random.below(place),
            root: random.below(ranks),
            op: [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Sum][random.below(4)],
            is_back: random.below(2) == 1,
        }
    }

    fn enqueue(&self, comm: &Comm, a: &mut CudaSlice<u32>, b: &mut CudaSlice<u32>) -> phalanx::Result<()> {
        let (source, target) = if self.is_back { (b, a) } else { (a, b) };
        let ranks = comm.world_size();
        let one = |at: usize| at..at + self.len;
        let all = |at: usize| at..at + self.len * ranks;
        let (send, send_all) = (source.slice(one(self.from)), source.slice(all(self.from)));
        match self.operation {
            0 => comm.all_reduce(&send, &mut target.slice_mut(one(self.to)), self.op),
            1 => comm.reduce_scatter(&send_all, &mut target.slice_mut(one(self.to)), self.op),
            2 => comm.all_gather(&send, &mut target.slice_mut(all(self.to))),
            3 => comm.all_to_all(&send_all, &mut target.slice_mut(all(self.to))),
            4 => comm.broadcast(&send, &mut target.slice_mut(one(self.to)), self.root),
            5 => comm.reduce(&send, &mut target.slice_mut(one(self.to)), self.op, self.root),
            6 => comm.gather(&send, &mut target.slice_mut(all(self.to)), self.root),
            _ => comm.scatter(&send_all, &mut target.slice_mut(one(self.to)), self.root),
        }
    }

    /// The same on the model.
    fn model(&self, buffers: &mut [[Vec<u32>; 2]]) {
        let (len, ranks) = (self.len, buffers.len());
        let (source, target) = (usize::from(self.is_back), usize::from(!self.is_back));
        let combined = |buffers: &[[Vec<u32>; 2]], at: usize| -> Vec<u32> {
            let mut sum = buffers[0][source][at..at + len].to_vec();
            for buffer in &buffers[1..] {
                for (sum, value) in sum.iter_mut().zip(&buffer[source][at..at + len]) {
                    *sum = match self.op {
                        ReduceOp::Max => (*sum).max(*value),
                        ReduceOp::Min => (*sum).min(*value),
                        _ => sum.wrapping_add(*value),
                    };
                }
            }
            sum
        };
        let block = |buffers: &[[Vec<u32>; 2]], rank: usize, number: usize| {
            buffers[rank][source][self.from + number * len..][..len].to_vec()
        };
        let results: Vec<Option<Vec<u32>>> = (0..ranks)
            .map(|rank| match self.operation {
                0 => Some(combined(buffers, self.from)),
                1 => Some(combined(buffers, self.from + rank * len)),
                2 => Some((0..ranks).flat_map(|peer| block(buffers, peer, 0)).collect()),
                3 => Some((0..ranks).flat_map(|peer| block(buffers, peer, rank)).collect()),
                4 => Some(block(buffers, self.root, 0)),
                5 => (rank == self.root).then(|| combined(buffers, self.from)),
                6 => {
                    (rank == self.root).then(|| (0..ranks).flat_map(|peer| block(buffers, peer, 0)).collect())
                }
                _ => Some(block(buffers, self.root, rank)),
            })
            .collect();
        for (buffer, result) in buffers.iter_mut().zip(results) {
            if let Some(result) = result {
                buffer[target][self.to..self.to + result.len()].copy_from_slice(&result);
            }
        }
    }
}

fn fresh(seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..ROOM).map(|_| random.next_u64() as u32).collect()
}

/// Now and then a rank is late.
fn dawdle(random: &mut Random) {
    if random.below(64) == 0 {
        let until = Instant::now() + Duration::from_micros(random.below(150) as u64);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    }
}

fn soak(comm: Comm, _: &[String]) -> Outcome {
    let calls = std::env::var(CALLS).map_or(2 * BATCH, |calls| calls.parse().expect("a number"));
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut random = Random::new(7);
    let mut delays = Random::new(100 + rank as u64);
    let graphed = 1 + random.below(20_000);
    let mut graph = must(
        "capture",
        Graph::capture(&comm, upload(&comm, &vec![0u32; graphed])?, |group, buffer| {
            group.all_reduce_in_place(buffer, ReduceOp::Sum)
        }),
    )?;
    for batch in 0..calls.div_ceil(BATCH) as u64 {
        let seed = |rank: usize, buffer: u64| batch * 64 + rank as u64 * 2 + buffer;
        let mut model: Vec<[Vec<u32>; 2]> =
            (0..ranks).map(|rank| [fresh(seed(rank, 0)), fresh(seed(rank, 1))]).collect();
        let (mut a, mut b) = (upload(&comm, &model[rank][0])?, upload(&comm, &model[rank][1])?);
        let mut sums: Vec<u32> = model.iter().map(|[_, second]| second[0]).collect();
        let own = vec![sums[rank]; graphed];
        stream(&comm).memcpy_htod(&own, graph.buffers_mut()).map_err(|error| error.to_string())?;
        for number in 0..BATCH {
            dawdle(&mut delays);
            if random.below(8) == 0 {
                must("launch", graph.launch())?;
                let sum = sums.iter().fold(0, |sum: u32, value| sum.wrapping_add(*value));
                sums.fill(sum);
                continue;
            }
            let call = Call::random(&mut random, ranks);
            call.enqueue(&comm, &mut a, &mut b).map_err(|error| {
                format!("call {number} of batch {batch}, operation {}: {error}", call.operation)
            })?;
            call.model(&mut model);
        }
        for (name, buffer, expected) in [("first", &a, &model[rank][0]), ("second", &b, &model[rank][1])] {
            let got = download(&comm, buffer)?;
            if let Some(index) = (0..ROOM).find(|index| got[*index] != expected[*index]) {
                return Err(format!(
                    "batch {batch}: {name} buffer, element {index}: {}, expected {}",
                    got[index], expected[index]
                ));
            }
        }
        if download(&comm, graph.buffers())? != vec![sums[rank]; graphed] {
            return Err(format!("batch {batch}: the graph's buffer is not {}", sums[rank]));
        }
    }
    done()
}
