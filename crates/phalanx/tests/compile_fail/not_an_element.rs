//! Only plain data travels, and only numbers are combined. What else there is, the compiler says how to send.

struct Particle {
    _position: [f32; 3],
}

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    comm.broadcast_in_place(&mut [true; 4], 0)?;
    comm.broadcast_in_place(&mut vec![0usize; 4], 0)?;
    comm.send(&["text".to_owned()], 1)?;
    comm.all_reduce_in_place(&mut [1usize; 4], phalanx::ReduceOp::Sum)?;
    comm.send(&[Particle { _position: [0.0; 3] }], 1)
}
