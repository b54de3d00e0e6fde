//! Wrong arguments: the call says which, nothing is started, and the communicator works on.

use super::Case;
use super::common::DEADLINE;
use crate::processes::Launch;
use crate::scenario::Outcome;
use crate::{Scenario, threads};
use phalanx::{Comm, Error, PreMulSum, ReduceOp, Result, UsageError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("usage/calls", |comm, _| wrong_calls(&comm)),
    Scenario::rank("usage/groups", |comm, _| groups(&comm)),
    Scenario::rank("usage/timeouts", |comm, _| timeouts(&comm)),
];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for scenario in SCENARIOS {
        cases.push(Case::new(format!("threads/{}", scenario.name), || {
            for ranks in [1, 2, 3] {
                let outcomes = threads::run_scenario(scenario, ranks, &[], DEADLINE)?;
                if outcomes.iter().any(|outcome| outcome.is_err()) {
                    return Err(format!("{ranks} thread ranks: {outcomes:#?}"));
                }
            }
            Ok(())
        }));
        if cfg!(target_os = "linux") {
            cases.push(Case::new(format!("processes/{}", scenario.name), || {
                Launch::new(scenario.name, 3).deadline(DEADLINE).reports()?;
                Ok(())
            }));
        }
    }
    cases.push(Case::new("threads/usage/numbers_of_ranks", numbers_of_ranks));
    cases
}

const SUM: ReduceOp = ReduceOp::Sum;

/// What kind of usage error a call must answer.
#[derive(Debug, PartialEq)]
enum Wrong {
    Length,
    Indivisible,
    Rank,
    Counts,
    TooLarge,
    SelfExchange,
}

fn kind(error: &Error) -> Option<Wrong> {
    let Error::Usage(usage) = error else { return None };
    match **usage {
        UsageError::Length { .. } => Some(Wrong::Length),
        UsageError::Indivisible { .. } => Some(Wrong::Indivisible),
        UsageError::Rank { .. } => Some(Wrong::Rank),
        UsageError::Counts { .. } => Some(Wrong::Counts),
        UsageError::Overflow { .. } => Some(Wrong::TooLarge),
        UsageError::SelfExchange { .. } => Some(Wrong::SelfExchange),
        _ => None,
    }
}

type Call = fn(&Comm, n: usize) -> Result<()>;

/// Calls that are wrong with any number of ranks; `n` is that number.
const WRONG: &[(&str, Wrong, Call)] = &[
    ("all_reduce", Wrong::Length, |c, _| c.all_reduce(&[1; 3], &mut [0; 4], SUM)),
    ("all_reduce", Wrong::Length, |c, _| c.all_reduce(&[1; 3], &mut [0; 2], PreMulSum(2))),
    ("broadcast", Wrong::Rank, |c, n| c.broadcast(&[1; 3], &mut [0; 3], n)),
    ("broadcast", Wrong::Rank, |c, _| c.broadcast_in_place(&mut [0; 3], usize::MAX)),
    ("reduce", Wrong::Rank, |c, n| c.reduce(&[1; 3], &mut [0; 3], SUM, n)),
    ("reduce", Wrong::Rank, |c, n| c.reduce_in_place(&mut [0; 3], SUM, n)),
    // Lengths that only the root has to get right: each rank calls itself the root.
    ("broadcast", Wrong::Length, |c, _| c.broadcast(&[1; 3], &mut [0; 2], c.rank())),
    ("broadcast", Wrong::Length, |c, _| c.broadcast(&[1u8; 100_000], &mut [0; 100_001], c.rank())),
    ("reduce", Wrong::Length, |c, _| c.reduce(&[1; 3], &mut [0; 2], SUM, c.rank())),
    ("gather", Wrong::Length, |c, n| c.gather(&[1; 3], &mut vec![0; 3 * n + 1], c.rank())),
    ("scatter", Wrong::Length, |c, n| c.scatter(&vec![1; 3 * n + 1], &mut [0; 3], c.rank())),
    ("gather_v", Wrong::Length, |c, n| c.gather_v(&[1; 3], &mut vec![0; 3 * n - 1], &vec![3; n], c.rank())),
    ("scatter_v", Wrong::Length, |c, n| c.scatter_v(&vec![1; 3 * n + 1], &vec![3; n], &mut [0; 3], c.rank())),
    ("all_gather", Wrong::Length, |c, n| c.all_gather(&[1; 3], &mut vec![0; 3 * n + 1])),
    ("all_gather", Wrong::Length, |c, _| c.all_gather(&[1; 3], &mut [0; 0])),
    ("reduce_scatter", Wrong::Length, |c, n| c.reduce_scatter(&vec![1; 3 * n + 1], &mut [0; 3], SUM)),
    ("all_to_all", Wrong::Length, |c, n| c.all_to_all(&vec![1; 2 * n], &mut vec![0; 3 * n])),
    ("gather", Wrong::Rank, |c, n| c.gather(&[1; 3], &mut vec![0; 3 * n], n)),
    ("gather", Wrong::Rank, |c, n| c.gather_in_place(&mut vec![0; 3 * n], n)),
    ("scatter", Wrong::Rank, |c, n| c.scatter(&vec![1; 3 * n], &mut [0; 3], n)),
    ("scatter", Wrong::Rank, |c, n| c.scatter_in_place(&mut vec![0; 3 * n], n)),
    ("all_gather_v", Wrong::Counts, |c, n| c.all_gather_v(&[1; 3], &mut vec![0; 3 * n], &vec![3; n + 1])),
    ("all_gather_v", Wrong::Counts, |c, n| c.all_gather_v(&[1; 3], &mut vec![0; 3 * n], &[])),
    ("all_gather_v", Wrong::Length, |c, n| c.all_gather_v(&[1; 4], &mut vec![0; 3 * n], &vec![3; n])),
    ("all_gather_v", Wrong::Length, |c, n| c.all_gather_v(&[1; 3], &mut vec![0; 3 * n + 2], &vec![3; n])),
    ("reduce_scatter_v", Wrong::Counts, |c, n| {
        c.reduce_scatter_v(&vec![1; 3 * n], &mut [0; 3], &vec![3; n + 2], SUM)
    }),
    ("reduce_scatter_v", Wrong::Length, |c, n| {
        c.reduce_scatter_v(&vec![1; 3 * n], &mut [0; 2], &vec![3; n], SUM)
    }),
    ("gather_v", Wrong::Counts, |c, n| c.gather_v(&[1; 3], &mut vec![0; 3 * n], &vec![3; n + 1], 0)),
    ("gather_v", Wrong::Length, |c, n| c.gather_v(&[1; 2], &mut vec![0; 3 * n], &vec![3; n], 0)),
    ("gather_v", Wrong::Rank, |c, n| c.gather_v(&[1; 3], &mut vec![0; 3 * n], &vec![3; n], n)),
    ("scatter_v", Wrong::Counts, |c, n| c.scatter_v(&vec![1; 3 * n], &vec![3; n + 1], &mut [0; 3], 0)),
    ("scatter_v", Wrong::Length, |c, n| c.scatter_v(&vec![1; 3 * n], &vec![3; n], &mut [0; 2], 0)),
    ("scatter_v", Wrong::Rank, |c, n| c.scatter_v(&vec![1; 3 * n], &vec![3; n], &mut [0; 3], n)),
    ("all_to_all_v", Wrong::Counts, |c, n| {
        c.all_to_all_v(&vec![1; n], &vec![1; n + 1], &mut vec![0; n], &vec![1; n])
    }),
    ("all_to_all_v", Wrong::Counts, |c, n| {
        c.all_to_all_v(&vec![1; n], &vec![1; n], &mut vec![0; n], &vec![1; n + 1])
    }),
    ("all_to_all_v", Wrong::Length, |c, n| {
        c.all_to_all_v(&vec![1; n + 1], &vec![1; n], &mut vec![0; n], &vec![1; n])
    }),
    ("all_to_all_v", Wrong::Length, |c, n| {
        c.all_to_all_v(&vec![1; n], &vec![1; n], &mut vec![0; n + 1], &vec![1; n])
    }),
    ("all_gather_v_in_place", Wrong::Counts, |c, n| {
        c.all_gather_v_in_place(&mut vec![0; 3 * n], &vec![3; n + 1])
    }),
    ("all_gather_v_in_place", Wrong::Length, |c, n| {
        c.all_gather_v_in_place(&mut vec![0; 3 * n + 1], &vec![3; n])
    }),
    ("reduce_scatter_v_in_place", Wrong::Counts, |c, _| c.reduce_scatter_v_in_place(&mut [0; 0], &[], SUM)),
    ("reduce_scatter_v_in_place", Wrong::Length, |c, n| {
        c.reduce_scatter_v_in_place(&mut vec![0; 3 * n - 1], &vec![3; n], SUM)
    }),
    ("all_to_all_v_in_place", Wrong::Counts, |c, n| {
        c.all_to_all_v_in_place(&mut vec![0; n], &vec![1; n + 1])
    }),
    ("all_to_all_v_in_place", Wrong::Length, |c, n| {
        c.all_to_all_v_in_place(&mut vec![0; n + 1], &vec![1; n])
    }),
    // Of this length on every rank, not at the root only.
    ("gather_v_in_place", Wrong::Length, |c, n| {
        c.gather_v_in_place(&mut vec![0; 3 * n + 1], &vec![3; n], n - 1)
    }),
    ("gather_v_in_place", Wrong::Counts, |c, n| c.gather_v_in_place(&mut vec![0; 3 * n], &vec![3; n + 1], 0)),
    ("gather_v_in_place", Wrong::Rank, |c, n| c.gather_v_in_place(&mut vec![0; 3 * n], &vec![3; n], n)),
    ("scatter_v_in_place", Wrong::Length, |c, n| {
        c.scatter_v_in_place(&mut vec![0; 3 * n - 2], &vec![3; n], n - 1)
    }),
    ("scatter_v_in_place", Wrong::Counts, |c, n| {
        c.scatter_v_in_place(&mut vec![0; 3 * n], &vec![3; n + 2], 0)
    }),
    ("scatter_v_in_place", Wrong::Rank, |c, _| {
        c.scatter_v_in_place(&mut vec![0; 3 * c.world_size()], &vec![3; c.world_size()], usize::MAX)
    }),
    ("group all_to_all_v_in_place", Wrong::Length, |c, n| {
        let (mut buffer, counts) = (vec![0; n + 1], vec![1; n]);
        c.group(|g| g.all_to_all_v_in_place(&mut buffer, &counts))
    }),
    ("prepare_all_gather", Wrong::Length, |c, n| {
        c.prepare_all_gather(vec![1; 3], vec![0; 3 * n + 1]).map(drop)
    }),
    ("prepare_gather_v", Wrong::Rank, |c, n| {
        c.prepare_gather_v(vec![1; 3], vec![0; 3 * n], vec![3; n], n).map(drop)
    }),
    ("start_all_gather_v", Wrong::Counts, |c, n| {
        c.start_all_gather_v(vec![1; 3], vec![0; 3 * n], vec![3; n + 1]).map(drop)
    }),
    ("start_all_gather_v", Wrong::Length, |c, n| {
        c.start_all_gather_v(vec![1; 3], vec![0; 3 * n + 1], vec![3; n]).map(drop)
    }),
    ("start_reduce_scatter_v", Wrong::Length, |c, n| {
        c.start_reduce_scatter_v(vec![1; 3 * n], vec![0; 2], vec![3; n], SUM).map(drop)
    }),
    ("start_gather_v", Wrong::Rank, |c, n| {
        c.start_gather_v(vec![1; 3], vec![0; 3 * n], vec![3; n], n).map(drop)
    }),
    ("start_scatter_v", Wrong::Length, |c, n| {
        c.start_scatter_v(vec![1; 3 * n + 1], vec![3; n], vec![0; 3], c.rank()).map(drop)
    }),
    ("start_all_to_all_v", Wrong::Counts, |c, n| {
        c.start_all_to_all_v(vec![1; n], vec![1; n], vec![0; n], vec![1; n + 1]).map(drop)
    }),
    ("start_all_to_all_v", Wrong::Length, |c, n| {
        c.start_all_to_all_v(vec![1; n], vec![1; n], vec![0; n + 1], vec![1; n]).map(drop)
    }),
    ("send", Wrong::Rank, |c, n| c.send(&[1; 3], n)),
    ("recv", Wrong::Rank, |c, n| c.recv(&mut [0; 3], n)),
    ("send_tagged", Wrong::Rank, |c, _| c.send_tagged(&[1; 3], usize::MAX, 1)),
    ("send_recv", Wrong::Rank, |c, n| c.send_recv(&[1; 3], n, &mut [0; 3], 0)),
    ("send_recv", Wrong::Rank, |c, n| c.send_recv(&[1; 3], 0, &mut [0; 3], n)),
    ("send_recv_in_place", Wrong::Rank, |c, n| c.send_recv_in_place(&mut [1; 3], n, 0)),
    ("send_recv_in_place", Wrong::Rank, |c, n| c.send_recv_in_place(&mut [1; 3], 0, n)),
    ("send_recv_tagged", Wrong::Rank, |c, n| c.send_recv_tagged(&[1; 3], n, &mut [0; 3], 0, 1)),
    ("start_send_recv", Wrong::Rank, |c, n| c.start_send_recv(vec![1; 3], n, vec![0; 3], 0).map(drop)),
    ("start_send_recv", Wrong::Rank, |c, n| c.start_send_recv(vec![1; 3], 0, vec![0; 3], n).map(drop)),
    ("send to oneself", Wrong::SelfExchange, |c, _| c.send(&[1; 3], c.rank())),
    ("start_broadcast", Wrong::Rank, |c, n| c.start_broadcast(vec![1; 3], n).map(drop)),
    ("start_all_gather", Wrong::Length, |c, n| c.start_all_gather(vec![1; 3], vec![0; 3 * n + 1]).map(drop)),
    ("start_send", Wrong::Rank, |c, n| c.start_send(vec![1; 3], n).map(drop)),
    ("alloc", Wrong::TooLarge, |c, _| c.alloc::<f64>(usize::MAX).map(drop)),
    ("alloc", Wrong::TooLarge, |c, _| c.alloc::<u64>(usize::MAX / 8 + 2).map(drop)),
];

/// Calls that are wrong with two ranks and more.
const WRONG_FROM_TWO: &[(&str, Wrong, Call)] = &[
    ("all_gather_in_place", Wrong::Indivisible, |c, n| c.all_gather_in_place(&mut vec![0; 2 * n + 1])),
    ("reduce_scatter_in_place", Wrong::Indivisible, |c, n| {
        c.reduce_scatter_in_place(&mut vec![0; 2 * n + 1], SUM)
    }),
    ("all_to_all", Wrong::Indivisible, |c, n| c.all_to_all(&vec![0; n + 1], &mut vec![0; n + 1])),
    ("all_to_all_in_place", Wrong::Indivisible, |c, n| c.all_to_all_in_place(&mut vec![0; n + 1])),
    ("gather_in_place", Wrong::Indivisible, |c, n| c.gather_in_place(&mut vec![0; n + 1], 0)),
    ("scatter_in_place", Wrong::Indivisible, |c, n| c.scatter_in_place(&mut vec![0; n + 1], 0)),
    ("all_gather_v", Wrong::TooLarge, |c, n| {
        let mut counts = vec![0; n];
        counts[c.rank()] = 2;
        counts[(c.rank() + 1) % n] = usize::MAX;
        c.all_gather_v(&[1; 2], &mut [0; 1], &counts)
    }),
    ("all_to_all_v_in_place", Wrong::TooLarge, |c, n| {
        let mut counts = vec![0; n];
        counts[c.rank()] = 2;
        counts[(c.rank() + 1) % n] = usize::MAX;
        c.all_to_all_v_in_place(&mut [0; 1], &counts)
    }),
    ("start_all_to_all_v", Wrong::TooLarge, |c, _| {
        let counts = other_has(c, 2, usize::MAX - 1);
        c.start_all_to_all_v(vec![1; 2], counts.clone(), vec![0; 2], counts).map(drop)
    }),
    // A number of elements that is one, of bytes that is none, and is not this rank's to hold.
    ("gather_v_in_place", Wrong::TooLarge, |c, n| {
        c.gather_v_in_place(&mut [1f32; 1000], &other_has(c, 1000, 1 << 62), (c.rank() + 1) % n)
    }),
    ("scatter_v_in_place", Wrong::TooLarge, |c, n| {
        c.scatter_v_in_place(&mut [0f64; 1000], &other_has(c, 1000, 1 << 61), (c.rank() + 1) % n)
    }),
    ("all_gather_v_in_place", Wrong::TooLarge, |c, _| {
        c.all_gather_v_in_place(&mut [1f32; 1000], &other_has(c, 1000, 1 << 62))
    }),
    ("reduce_scatter_v_in_place", Wrong::TooLarge, |c, _| {
        c.reduce_scatter_v_in_place(&mut [1f32; 1000], &other_has(c, 1000, 1 << 62), SUM)
    }),
    ("start_gather_v", Wrong::TooLarge, |c, n| {
        let (counts, root) = (other_has(c, 1000, 1 << 62), (c.rank() + 1) % n);
        c.start_gather_v(vec![1f32; 1000], vec![0f32; 0], counts, root).map(drop)
    }),
    ("gather_v", Wrong::TooLarge, |c, n| {
        c.gather_v(
            &[1f32; 100_000],
            &mut [0f32; 0],
            &other_has(c, 100_000, (1 << 62) + 64),
            (c.rank() + 1) % n,
        )
    }),
    ("gather_v", Wrong::TooLarge, |c, n| {
        c.gather_v(&[1f32; 1000], &mut [0f32; 0], &other_has(c, 1000, 1 << 62), (c.rank() + 1) % n)
    }),
    ("scatter_v", Wrong::TooLarge, |c, n| {
        c.scatter_v(&[0f64; 0], &other_has(c, 1000, 1 << 61), &mut [0f64; 1000], (c.rank() + 1) % n)
    }),
    ("group gather_v", Wrong::TooLarge, |c, n| {
        let (send, mut recv, counts) = ([1f32; 1000], [0f32; 0], other_has(c, 1000, 1 << 62));
        c.group(|g| g.gather_v(&send, &mut recv, &counts, (c.rank() + 1) % n))
    }),
];

/// A list of counts in which this rank has some and the next one others.
fn other_has(comm: &Comm, own: usize, others: usize) -> Vec<usize> {
    let mut counts = vec![0; comm.world_size()];
    counts[(comm.rank() + 1) % comm.world_size()] = others;
    counts[comm.rank()] = own;
    counts
}

fn wrong_calls(comm: &Comm) -> Outcome {
    let ranks = comm.world_size();
    let more = if ranks > 1 { WRONG_FROM_TWO } else { &[] };
    for (i, (name, wrong, call)) in WRONG.iter().chain(more).enumerate() {
        let result = catch_unwind(AssertUnwindSafe(|| call(comm, ranks)));
        match result.map_err(|_| format!("{name} (call {i}) panicked"))? {
            Err(error) if kind(&error).as_ref() == Some(wrong) && !error.is_fatal() => {}
            other => {
                return Err(format!("{name} (call {i}) answers {other:?}, {wrong:?} is right"));
            }
        }
        works(comm).map_err(|error| format!("after {name} (call {i}): {error}"))?;
    }
    Ok(String::new())
}

fn works(comm: &Comm) -> std::result::Result<(), String> {
    let mut sum = [1u64; 2];
    comm.all_reduce_in_place(&mut sum, SUM).map_err(|error| error.to_string())?;
    if sum == [comm.world_size() as u64; 2] { Ok(()) } else { Err(format!("the sum is {sum:?}")) }
}

/// A group with a wrong call starts nothing; a group that fails or panics still ends.
fn groups(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let peer = (rank + 1) % ranks;
    let (send, mut recv) = (vec![rank as u64; 50_000], vec![u64::MAX; 50_000]);

    let result = comm.group(|g| {
        g.send(&send, peer)?;
        g.recv(&mut recv, ranks)
    });
    match &result {
        Err(error) if kind(error) == Some(Wrong::Rank) => {}
        other => return Err(format!("a group with a wrong call answers {other:?}")),
    }
    works(comm).map_err(|error| format!("after a group with a wrong call: {error}"))?;

    let mut recv = vec![u64::MAX; 50_000];
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        comm.group(|g| -> Result<()> {
            g.recv(&mut recv, peer)?;
            panic!("inside the group, on purpose")
        })
    }));
    if panicked.is_ok() {
        return Err("the panic was swallowed".into());
    }
    works(comm).map_err(|error| format!("after a group that panicked: {error}"))?;

    // Nothing of those groups is left that a later message could be mistaken for.
    let (next, previous) = (peer, (rank + ranks - 1) % ranks);
    let mut recv = vec![u64::MAX; 7];
    comm.send_recv(&[rank as u64; 7], next, &mut recv, previous).map_err(|error| error.to_string())?;
    if recv != [previous as u64; 7] {
        return Err(format!("a message of an earlier group arrived: {recv:?}"));
    }
    comm.group(|_| Ok(())).map_err(|error| format!("an empty group: {error}"))?;
    Ok(String::new())
}

/// Extreme deadlines are deadlines.
fn timeouts(comm: &Comm) -> Outcome {
    for timeout in [Duration::MAX, Duration::from_secs(u64::MAX / 4), Duration::from_secs(3600)] {
        comm.set_timeout(timeout);
        works(comm).map_err(|error| format!("with a deadline of {timeout:?}: {error}"))?;
        // Somebody has to wait long enough to sleep.
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(30));
        }
        comm.barrier().map_err(|error| format!("with a deadline of {timeout:?}: {error}"))?;
    }
    if comm.timeout() != Duration::from_secs(3600) {
        return Err(format!("the deadline is {:?}", comm.timeout()));
    }
    Ok(String::new())
}

fn numbers_of_ranks() -> std::result::Result<(), String> {
    for ranks in [0, 100_000, usize::MAX] {
        let ran = phalanx::run(ranks, |_| ());
        let Err(Error::Usage(wrong)) = &ran else { return Err(format!("{ranks} ranks: {ran:?}")) };
        let UsageError::WorldSize { world_size, limit } = **wrong else {
            return Err(format!("{ranks} ranks: {wrong}"));
        };
        if world_size != ranks || limit == 0 || limit >= 100_000 {
            return Err(format!("{ranks} ranks: world_size {world_size}, limit {limit}"));
        }
        match Comm::builder().run(ranks, |_| ()) {
            Err(Error::Usage(wrong)) if matches!(*wrong, UsageError::WorldSize { .. }) => {}
            other => return Err(format!("{ranks} ranks from a builder: {other:?}")),
        }
    }
    // The limit itself is not beyond the limit.
    let many = phalanx::run(64, |comm| {
        let mut sum = [1u32];
        comm.all_reduce_in_place(&mut sum, SUM).map(|()| sum[0])
    });
    let many = many.map_err(|error| error.to_string())?;
    let sums = many.into_iter().collect::<Result<Vec<_>>>().map_err(|error| error.to_string())?;
    if sums != [64; 64] { Err("64 ranks do not add up".into()) } else { Ok(()) }
}
