//! Communicators that their members alone make, their names, and what survivors agree on.

use crate::world::{Done, both, outcome, same};
use libtest_mimic::Trial;
use phalanx::{BackendKind, Comm, Error, RankGroup, ReduceOp};
use phalanx_sys::mpi::{Handle, Mpi};
use phalanx_testkit::Scenario;
use phalanx_testkit::random::Random;
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("members/split", |comm, _| outcome(split(&comm))),
    Scenario::rank("members/names", |comm, _| outcome(names(&comm))),
    Scenario::rank("members/adopted", |comm, _| outcome(adopted(&comm))),
    Scenario::rank("members/agree_among_all", |comm, _| outcome(agree_among_all(&comm))),
];

/// What MPI does not promise: it ends the job where a rank is missing.
pub const SURVIVED: &[Scenario] = &[
    Scenario::rank("members/agree", |comm, _| outcome(agree(&comm))),
    Scenario::rank("members/agree_without_some", |comm, _| outcome(agree_without_some(comm))),
    Scenario::rank("members/named_in_errors", |comm, _| outcome(named_in_errors(&comm))),
];

pub fn trials() -> Vec<Trial> {
    let all = SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 5]));
    all.chain(SURVIVED.iter().flat_map(|scenario| both(*scenario, &[2, 5, 8]))).collect()
}

/// Groups of every other rank, backwards, and of neighbors; the ranks outside are somewhere else.
fn split(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let outside = RankGroup::from(ranks..ranks + 1);
    same("a rank that there is not", comm.split_members(&outside).is_err(), true)?;
    let others = RankGroup::new((0..ranks).filter(|other| *other != rank))?;
    same("a group of the others", matches!(comm.split_members(&others), Err(Error::Usage(_))), true)?;
    if !matches!(comm.backend(), BackendKind::Host | BackendKind::Ucx | BackendKind::Mpi | BackendKind::Solo)
    {
        let refused = comm.split_members(&comm.rank_group());
        same("a backend without", matches!(refused, Err(Error::Unsupported(_))), true)?;
        return Ok(());
    }
    let halves = RankGroup::new((0..ranks).rev().filter(|other| other % 2 == rank % 2))?;
    let half = comm.split_members(&halves)?;
    let members: Vec<u64> = halves.ranks().iter().map(|rank| *rank as u64).collect();
    same("a half", half.all_gather_value(rank as u64)?, members)?;

    // Pairs of neighbors, one after the other: a rank is in two of them.
    for first in 0..ranks - 1 {
        if rank == first || rank == first + 1 {
            let pair = comm.split_members(&RankGroup::from(first..first + 2))?;
            same("a pair", pair.all_reduce_value(rank as u64, ReduceOp::Sum)?, 2 * first as u64 + 1)?;
        }
    }
    // One of a part, with a message of the parent under way.
    let next = (rank + 1) % ranks;
    let recv = comm.start_recv(vec![0u64], (rank + ranks - 1) % ranks)?;
    let alone = comm.split_members(&RankGroup::new([rank])?)?;
    same("alone", (alone.rank(), alone.world_size()), (0, 1))?;
    comm.start_send(vec![rank as u64], next)?.wait()?;
    same("a message", recv.wait()?[0], ((rank + ranks - 1) % ranks) as u64)?;
    same("names differ", half.name() != alone.name(), true)?;
    comm.barrier()?;
    Ok(())
}

fn names(comm: &Comm) -> Done {
    let part = comm.split(Some(0), 0)?.ok_or("no part")?;
    let before = part.name();
    part.set_name("pipeline")?;
    same("the name", part.name(), format!("{before}:pipeline"))?;
    same("another name", part.set_name("mesh").is_err(), true)?;
    let all = comm.all_gather_object(&part.name())?;
    same("every rank's name", all, vec![part.name(); comm.world_size()])?;
    Ok(())
}

/// A rank does not come: the error says to which communicator.
fn named_in_errors(comm: &Comm) -> Done {
    let part = comm.split(Some(0), 0)?.ok_or("no part")?;
    part.set_name("pipeline")?;
    if comm.rank() == 0 {
        match part.within(Duration::from_millis(100)).recv(&mut [0u8], 1) {
            Err(error @ Error::Timeout(_)) => {
                same(
                    "named",
                    error.to_string().contains(&format!(" of communicator {}", part.name())),
                    true,
                )?;
            }
            other => Err(format!("a message that nobody sends: {other:?}"))?,
        }
    }
    comm.barrier()?;
    Ok(())
}

/// Nobody is lost: on every backend, between other operations, and with one under way.
fn agree_among_all(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let sum = comm.start_all_reduce(vec![1u32; 100], ReduceOp::Sum)?;
    same("all", comm.agree(true)?, true)?;
    same("a sum", sum.wait()?, vec![ranks as u32; 100])?;
    for dissenter in 0..ranks {
        same("but one", comm.agree(rank != dissenter)?, false)?;
        same("in between", comm.all_reduce_value(1u64, ReduceOp::Sum)?, ranks as u64)?;
    }
    Ok(())
}

fn agree(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    same("all", comm.agree(true)?, true)?;
    for dissenter in 0..ranks {
        same("but one", comm.agree(rank != dissenter)?, false)?;
    }
    // In the middle of other operations, and of another agreement of the same rounds.
    same("the communicator works", comm.all_reduce_value(1u64, ReduceOp::Sum)?, ranks as u64)?;
    let part = comm.shrink()?;
    same("the new one", (part.world_size(), part.agree(true)?), (ranks, true))?;
    same("the old one", comm.agree(false)?, false)?;
    same("it works still", comm.all_reduce_value(1u64, ReduceOp::Sum)?, ranks as u64)?;
    Ok(())
}

/// Ranks leave in the middle of many agreements. The others agree on every one, and go on.
fn agree_without_some(comm: Comm) -> Done {
    const ROUNDS: usize = 40;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let last_round = |rank: usize| match rank % 3 {
        1 => Random::new(rank as u64).below(ROUNDS),
        _ => ROUNDS,
    };
    let mut answers = Vec::new();
    for round in 0..ROUNDS {
        if round == last_round(rank) {
            return Ok(());
        }
        // A survivor decides in two of three rounds, and one that leaves in the third.
        let flag = if rank % 3 == 1 { round % 3 != 0 } else { round % 3 != 1 };
        answers.push(comm.agree(flag)?);
        if round % 3 == 1 {
            same("a survivor's flag", answers[round], false)?;
        }
    }
    let part = comm.shrink()?;
    let left = (0..ranks).filter(|rank| last_round(*rank) == ROUNDS).count();
    same("survivors", part.world_size(), left)?;
    let all = part.all_gather_object(&answers)?;
    same("their answers", all.iter().all(|other| *other == answers), true)?;
    Ok(())
}

/// A communicator that the program made by MPI itself, with the ranks in another order; and that it frees.
fn adopted(comm: &Comm) -> Done {
    if comm.backend() != BackendKind::Mpi {
        // SAFETY: the handle is not looked at.
        let refused = unsafe { comm.adopt_mpi_comm(0) };
        same("another backend", matches!(refused, Err(Error::Unsupported(_))), true)?;
        return Ok(());
    }
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mpi = Mpi::load()?;
    let mut theirs = Handle::ZERO;
    // SAFETY: MPI is initialised; the variable takes the new handle.
    let made =
        unsafe { (mpi.functions.comm_split)(mpi.constants.comm_world, 0, -(rank as i32), &raw mut theirs) };
    same("MPI_Comm_split", made, 0)?;
    // SAFETY: it was just made.
    let own = unsafe { comm.adopt_mpi_comm(theirs.value()) }?;
    // SAFETY: nobody uses the handle any more.
    let freed = unsafe { (mpi.functions.comm_free)(&raw mut theirs) };
    same("MPI_Comm_free", freed, 0)?;
    same("the order", own.rank(), ranks - 1 - rank)?;
    same("a sum", own.all_reduce_value(1u64, ReduceOp::Sum)?, ranks as u64)?;
    // SAFETY: no communicator, which is refused.
    let null = unsafe { comm.adopt_mpi_comm(mpi.constants.comm_null.value()) };
    same("no communicator", matches!(null, Err(Error::Usage(_))), true)?;
    Ok(())
}
