//! cudarc's view of memory from NCCL, which is freed.

use phalanx::cudarc::driver::CudaStream;
use std::sync::Arc;

fn zeroes(nccl: phalanx::nccl::Nccl<'_>, stream: &Arc<CudaStream>) -> phalanx::Result<Vec<f32>> {
    let buffer = nccl.alloc::<f32>(1000)?;
    let view = buffer.view();
    drop(buffer);
    Ok(stream.clone_dtoh(&view)?)
}

fn main() {}
