//! One operation's send buffer cannot be its receive buffer: in place, it is one buffer.

use phalanx::cudarc::driver::CudaSlice;
use phalanx::{Comm, ReduceOp};

fn sum(comm: &Comm, mut buffer: CudaSlice<f32>) -> phalanx::Result<()> {
    comm.group(|group| group.all_reduce(&buffer, &mut buffer, ReduceOp::Sum))
}

fn main() {}
