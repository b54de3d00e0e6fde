//! An epoch cannot begin while a reference to this rank's part is used.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    let mut memory = comm.symmetric::<u64>(4)?;
    let part = memory.local();
    memory.epoch()?.end()?;
    println!("{part:?}");
    Ok(())
}
