//! Collectives of single values, and of lists whose lengths the other ranks do not know.

use crate::world::{Done, both, outcome, same};
use libtest_mimic::Trial;
use phalanx::{Comm, Error, PreMulSum, ReduceOp, UsageError};
use phalanx_testkit::Scenario;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("values/single", |comm, _| outcome(single(&comm))),
    Scenario::rank("values/lists", |comm, _| outcome(lists(&comm))),
    Scenario::rank("values/refused", |comm, _| outcome(refused(&comm))),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 5, 8])).collect()
}

fn single(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    same("largest", comm.all_reduce_value(rank as i32 - 3, ReduceOp::Max)?, ranks as i32 - 4)?;
    same(
        "sum of halves",
        comm.all_reduce_value(2.0 * rank as f64, PreMulSum(0.5))?,
        (ranks * (ranks - 1) / 2) as f64,
    )?;
    for root in 0..ranks {
        same("broadcast", comm.broadcast_value(rank as u8 + 100, root)?, root as u8 + 100)?;
    }
    same("all", comm.all_gather_value(rank as u64)?, (0..ranks as u64).collect::<Vec<_>>())?;
    same("shared", comm.all_gather_value(1.5f32)?, vec![1.5; ranks])?;
    Ok(())
}

/// Elements from one rank to another: none, some, and more than one piece.
const LENGTHS: [fn(usize, usize) -> usize; 3] =
    [|_, _| 0, |from, to| (from * 7 + to * 3) % 5, |from, to| if from % 2 == 0 { 70_001 + to } else { from }];

fn lists(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for length in LENGTHS {
        let list = |from: usize, to: usize| vec![(from * ranks + to) as u32; length(from, to)];
        let gathered: Vec<u32> = (0..ranks).flat_map(|from| list(from, 0)).collect();
        let counts: Vec<usize> = (0..ranks).map(|from| length(from, 0)).collect();

        let all = comm.all_gather_vec(&list(rank, 0))?;
        same("all_gather_vec, counts", &all.counts, &counts)?;
        same("all_gather_vec", all.elements == gathered, true)?;
        let blocks: Vec<&[u32]> = all.iter().collect();
        for (from, block) in blocks.iter().enumerate() {
            same("a block", *block == list(from, 0) && *block == all.block(from), true)?;
        }
        same("blocks", blocks.len(), ranks)?;

        let root = ranks / 2;
        let at_root = comm.gather_vec(&list(rank, 0), root)?;
        same("gather_vec", at_root, (rank == root).then_some(all))?;

        let send: Vec<u32> = (0..ranks).flat_map(|to| list(rank, to)).collect();
        let counts: Vec<usize> = (0..ranks).map(|to| length(rank, to)).collect();
        let received = comm.all_to_all_vec(&send, &counts)?;
        let expected: Vec<u32> = (0..ranks).flat_map(|from| list(from, rank)).collect();
        same(
            "all_to_all_vec, counts",
            received.counts,
            (0..ranks).map(|from| length(from, rank)).collect::<Vec<_>>(),
        )?;
        same("all_to_all_vec", received.elements == expected, true)?;
    }
    Ok(())
}

/// Wrong arguments are an error before anything is sent.
fn refused(comm: &Comm) -> Done {
    let ranks = comm.world_size();
    let counts = comm.all_to_all_vec(&[1u8], &vec![0; ranks + 1]);
    let right = matches!(&counts, Err(Error::Usage(error)) if matches!(**error, UsageError::Counts { .. }));
    same("a count too many", right, true)?;
    let length = comm.all_to_all_vec(&[1u8], &vec![1; ranks + 1][..ranks]);
    let right = matches!(&length, Err(Error::Usage(error)) if matches!(**error, UsageError::Length { .. }));
    same("an element too few", right, ranks > 1)?;
    same("a root that is not there", comm.gather_vec(&[1u8], ranks).is_err(), true)?;
    same("afterwards", comm.all_gather_value(1u8)?, vec![1; ranks])?;
    Ok(())
}
