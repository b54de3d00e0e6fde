//! What is sent and what is received have the same type.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    comm.all_gather(&[1.0f32; 4], &mut [0i32; 4])
}
