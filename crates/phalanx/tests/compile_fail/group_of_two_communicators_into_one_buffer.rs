//! Operations of a group run at once: two of them, of different communicators, cannot write to one buffer.

use phalanx::nccl::Buffer;
use phalanx::{Comm, ReduceOp};

fn sums(rows: &Comm, columns: &Comm, buffer: &mut Buffer<f32>) -> phalanx::Result<()> {
    phalanx::group(|group| {
        group.on(rows).all_reduce_in_place(buffer, ReduceOp::Sum)?;
        group.on(columns).all_reduce_in_place(buffer, ReduceOp::Sum)
    })
}

fn main() {}
