//! A request owns its buffer until it is waited for.

use phalanx::ReduceOp;

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    let buffer = vec![1.0f32; 4];
    let request = comm.start_all_reduce(buffer, ReduceOp::Sum)?;
    println!("{}", buffer[0]);
    request.wait().map(drop)
}
