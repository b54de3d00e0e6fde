//! A group's buffers are used at its end, and stay until then.

use phalanx::nccl::Buffer;
use phalanx::{Comm, ReduceOp};

fn sum(comm: &Comm, own: Buffer<f32>, sum: &mut Buffer<f32>) -> phalanx::Result<()> {
    comm.group(|group| {
        group.all_reduce(&own, sum, ReduceOp::Sum)?;
        drop(own);
        Ok(())
    })
}

fn main() {}
