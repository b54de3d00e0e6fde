//! While other ranks may write to this rank's part, it has no reference to it.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    let mut memory = comm.symmetric::<u64>(4)?;
    let epoch = memory.epoch()?;
    println!("{:?}", memory.local());
    epoch.end()
}
