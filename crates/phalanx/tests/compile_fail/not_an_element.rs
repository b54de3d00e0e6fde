//! Only numbers of the fourteen types travel.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    comm.broadcast_in_place(&mut [true; 4], 0)
}
