//! The sum of the ranks up to each rank, and the product of those before it.

use phalanx::{Comm, ReduceOp, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let rank = comm.rank() as u64;
    assert_eq!(comm.scan_value(rank, ReduceOp::Sum)?, rank * (rank + 1) / 2);
    let factorial = comm.exclusive_scan_value(rank + 1, ReduceOp::Prod)?;
    assert_eq!(factorial, (rank > 0).then(|| (1..=rank).product()));
    Ok(())
}
