//! A buffer that is received into is borrowed mutably.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    let message = vec![0u8; 4];
    comm.recv(&message, 0)
}
