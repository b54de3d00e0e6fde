//! A group's buffers are used at its end, so they must be there then.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    comm.group(|g| {
        let message = vec![1u8; 4];
        g.send(&message, 0)
    })
}
