//! A view of a communicator is that communicator, which has ended.

use phalanx::cudarc::driver::CudaStream;
use std::sync::Arc;

fn barrier(comm: phalanx::Comm, stream: &Arc<CudaStream>) -> phalanx::Result<()> {
    let on = comm.on(stream)?;
    comm.abort();
    on.barrier()
}

fn main() {}
