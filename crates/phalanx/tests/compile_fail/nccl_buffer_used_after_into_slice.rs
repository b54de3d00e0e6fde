//! A registered slice that was taken back is no longer a communicator's.

use phalanx::nccl::Buffer;
use phalanx::{Comm, ReduceOp};

fn sum(comm: &Comm, mut registered: Buffer<f32>) -> phalanx::Result<()> {
    registered.into_slice()?;
    comm.all_reduce_in_place(&mut registered, ReduceOp::Sum)
}

fn main() {}
