//! Buffers are slices and what has a slice. What else there is, the compiler says how to send.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    comm.send(&String::from("text"), 1)?;
    comm.send("text", 1)?;
    comm.broadcast_in_place(&mut 1.0f32, 0)?;
    comm.start_all_reduce([1.0f32; 4], phalanx::ReduceOp::Sum)?.wait().map(drop)
}
