//! A factor has the type of the buffer.

use phalanx::PreMulSum;

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    comm.all_reduce_in_place(&mut [1.0f32; 4], PreMulSum(0.5f64))
}
