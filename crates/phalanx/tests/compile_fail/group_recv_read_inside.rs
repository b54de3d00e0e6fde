//! What a group receives is there only after its end.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    let mut message = vec![0u8; 4];
    let first = comm.group(|g| {
        g.recv(&mut message, 0)?;
        Ok(message[0])
    })?;
    println!("{first}");
    Ok(())
}
