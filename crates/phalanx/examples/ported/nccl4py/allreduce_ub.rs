//! A sum of buffers that are registered with NCCL, which then needs no copy of them.

use phalanx::{Comm, Logical, ReduceOp, Result};

const COUNT: usize = 1 << 20;

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let nccl = comm.nccl().expect("a communicator of NCCL");
    let stream = comm.cuda_stream()?;
    let (mut sent, mut sum) = (nccl.alloc::<f32>(COUNT)?, nccl.alloc::<f32>(COUNT)?);
    println!("rank {rank} has {:?} memory", sent.registration());
    stream.memcpy_htod(&vec![rank as f32; COUNT], &mut sent.slice_mut(..))?;
    comm.all_reduce(&sent, &mut sum, ReduceOp::Sum)?;

    let got = stream.clone_dtoh(&sum.slice(..))?[0];
    let is_right = got == (ranks * (ranks - 1) / 2) as f32;
    assert_eq!(comm.all_reduce_value(u8::from(is_right), Logical::And)?, 1, "rank {rank} got {got}");
    Ok(())
}
