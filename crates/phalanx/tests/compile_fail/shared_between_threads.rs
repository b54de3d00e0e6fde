//! One thread at a time uses a communicator: the order of its calls is what the other ranks match.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    std::thread::scope(|scope| {
        scope.spawn(|| comm.barrier());
        comm.barrier()
    })
}
