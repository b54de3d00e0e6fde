//! A group ends before what it received can be used, wherever the borrow went meanwhile.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    let mut message = vec![0u8; 4];
    let mut seen = 0;
    phalanx::group(|g| {
        let mut part = g.on(&comm);
        let buffer = &mut message;
        part.recv(buffer, 0)?;
        seen = buffer[0];
        Ok(())
    })?;
    println!("{seen}");
    Ok(())
}
