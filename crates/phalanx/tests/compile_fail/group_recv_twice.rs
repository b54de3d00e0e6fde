//! Two messages cannot be received into one buffer.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    let mut message = vec![0u8; 4];
    comm.group(|g| {
        g.recv(&mut message, 0)?;
        g.recv(&mut message, 0)
    })
}
