//! The steps of a life: random calls, and what they must deliver.

use super::Plan;
use crate::faults::Backend;
use crate::program::{self, Problem};
use crate::random::Random;
use phalanx::{Comm, DType, ReduceOp};

/// One step of a program.
#[derive(Debug, Clone)]
pub enum Act {
    Collective(program::Step),
    /// Messages around the ring, to the next and from the one before; so many elements.
    Ring(usize),
    /// The same in a group, with an all_reduce.
    Group(usize),
    /// A collective of the ranks with even and of those with odd numbers, and a barrier of all.
    Split(program::Step),
    /// An all_reduce that goes on meanwhile.
    Request(usize),
    /// An all_reduce on memory in which the ranks write each other's results.
    Push(usize),
    Barrier,
    Finalize,
}

impl Act {
    pub fn random(random: &mut Random, backend: Backend) -> Act {
        let longest = [3, 100, 3000, 40_000][random.below(4)];
        match random.below(9) {
            0..=2 => Act::Collective(step(random, longest, backend)),
            3 => Act::Ring(1 + random.below(10 * longest)),
            4 => Act::Group(1 + random.below(10 * longest)),
            5 => Act::Split(step(random, longest, backend)),
            6 => Act::Request(1 + random.below(10 * longest)),
            7 => Act::Push(70_000 + random.below(400_000)),
            _ => Act::Barrier,
        }
    }

    /// What verdicts may call it.
    pub fn names(&self) -> Vec<String> {
        let of = |step: &program::Step| snake_case(&format!("{:?}", step.operation));
        match self {
            Act::Collective(step) => vec![of(step)],
            Act::Ring(_) => vec!["send".into(), "recv".into()],
            Act::Group(_) => vec!["send".into(), "recv".into(), "all_reduce".into()],
            Act::Split(_) => vec!["split".into(), "barrier".into()],
            Act::Request(_) | Act::Push(_) => vec!["all_reduce".into()],
            Act::Barrier => vec!["barrier".into()],
            Act::Finalize => vec!["finalize".into()],
        }
    }

    pub fn perform(&self, comm: &Comm, plan: &Plan) -> Result<(), Problem> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let sum = (ranks * (ranks + 1) / 2) as u64;
        let all = |values: &[u64], right: u64| match values.iter().position(|value| *value != right) {
            None => Ok(()),
            Some(i) => Err(Problem::Wrong(format!("element {i} is {} and not {right}: {self:?}", values[i]))),
        };
        match self {
            Act::Collective(step) => step.perform(comm),
            Act::Ring(len) => {
                let mut received = vec![0; *len];
                comm.send_recv(&vec![rank as u64; *len], next, &mut received, previous)?;
                all(&received, previous as u64)
            }
            Act::Group(len) => {
                let (sent, mut received) = (vec![rank as u64; *len], vec![0; *len]);
                let mut total = [rank as u64 + 1; 3];
                comm.group(|group| {
                    group.recv(&mut received, previous)?;
                    group.send(&sent, next)?;
                    group.all_reduce_in_place(&mut total, ReduceOp::Sum)
                })?;
                all(&received, previous as u64)?;
                all(&total, sum)
            }
            Act::Split(step) => {
                let part = comm.split(Some(rank as u32 % 2), 0)?;
                let part = part.ok_or_else(|| Problem::Wrong("no part".into()))?;
                let outcome = step.perform(&part);
                drop(part);
                match outcome {
                    Ok(()) => Ok(comm.barrier()?),
                    Err(Problem::Error(error)) => {
                        plan.expect_in_part(&error, rank)?;
                        comm.barrier()?;
                        Err(Problem::Wrong(format!("a part failed ({error}) and the whole did not")))
                    }
                    Err(wrong) => Err(wrong),
                }
            }
            Act::Request(len) => {
                let total = comm.start_all_reduce(vec![rank as u64 + 1; *len], ReduceOp::Sum)?.wait()?;
                all(&total, sum)
            }
            Act::Push(len) => {
                let mut total = comm.alloc::<u64>(*len)?;
                total.fill(rank as u64 + 1);
                comm.all_reduce_in_place(&mut total, ReduceOp::Sum)?;
                all(&total, sum)
            }
            Act::Barrier => Ok(comm.barrier()?),
            Act::Finalize => unreachable!("the end of a life is not one of its steps"),
        }
    }
}

/// A collective with a result that the backend promises. NCCL's order of summation is its own, and so is how
/// integers are averaged.
fn step(random: &mut Random, longest: usize, backend: Backend) -> program::Step {
    use DType::{I8, I32, I64, U8, U32, U64};
    const EXACT: [DType; 6] = [I8, U8, I32, U32, I64, U64];
    let step = program::Step::random(random, longest).at_once();
    if backend == Backend::Nccl {
        let (dtype, combine) = (EXACT[usize::from(step.dtype.code()) % EXACT.len()], step.combine % 4);
        return program::Step { dtype, combine, ..step };
    }
    step
}

fn snake_case(name: &str) -> String {
    let mut text = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.push(c.to_ascii_lowercase());
    }
    text
}
