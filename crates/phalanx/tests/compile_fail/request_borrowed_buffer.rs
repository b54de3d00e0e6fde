//! A request takes memory that it can keep, not a borrow that ends.

use phalanx::ReduceOp;

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    let mut buffer = [1.0f32; 4];
    comm.start_all_reduce(&mut buffer[..], ReduceOp::Sum)?.wait().map(drop)
}
