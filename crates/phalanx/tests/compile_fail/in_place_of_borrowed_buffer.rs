//! One buffer cannot be sent and received into at once: that is what the in-place forms are for.

use phalanx::ReduceOp;

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    let mut buffer = vec![1.0f32; 4];
    comm.all_reduce(&buffer, &mut buffer, ReduceOp::Sum)
}
