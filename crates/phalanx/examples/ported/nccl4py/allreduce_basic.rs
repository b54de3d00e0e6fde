//! The sum of the ranks, in place.

use phalanx::{Comm, ReduceOp, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let stream = comm.cuda_stream()?;
    let mut data = stream.clone_htod(&[rank as f32])?;
    comm.all_reduce_in_place(&mut data, ReduceOp::Sum)?;
    let actual = stream.clone_dtoh(&data)?;
    println!("rank {rank} has {actual:?}");
    assert_eq!(actual, [(ranks * (ranks - 1) / 2) as f32]);
    Ok(())
}
