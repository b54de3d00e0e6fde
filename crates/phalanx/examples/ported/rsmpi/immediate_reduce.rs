//! Started reductions: to one rank, to all, in blocks, and by an operation of the program's own.

use phalanx::{Comm, ReduceOp, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank() as i32, comm.world_size() as i32);

    let sum = comm.start_reduce(vec![rank], ReduceOp::Sum, 0)?.wait()?;
    if rank == 0 {
        assert_eq!(sum, [ranks * (ranks - 1) / 2]);
    }
    let largest = comm.start_all_reduce(vec![rank], ReduceOp::Max)?.wait()?;
    assert_eq!(largest, [ranks - 1]);

    let factors: Vec<i32> = (0..ranks).collect();
    let (_, product) = comm.start_reduce_scatter(factors, vec![0], ReduceOp::Prod)?.wait()?;
    assert_eq!(product, [rank.wrapping_pow(ranks as u32)]);

    let sum = comm.start_all_reduce_with(vec![rank], |x, y| x + y)?.wait()?;
    assert_eq!(sum, [ranks * (ranks - 1) / 2]);
    Ok(())
}
