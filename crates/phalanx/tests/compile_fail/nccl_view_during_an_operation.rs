//! An operation writes to memory from NCCL while cudarc has a view of it.

use phalanx::cudarc::driver::CudaStream;
use phalanx::nccl::Buffer;
use phalanx::{Comm, ReduceOp};
use std::sync::Arc;

fn sum(comm: &Comm, stream: &Arc<CudaStream>, mut buffer: Buffer<f32>) -> phalanx::Result<Vec<f32>> {
    let before = buffer.view();
    comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
    Ok(stream.clone_dtoh(&before)?)
}

fn main() {}
