//! Nothing can be called on a communicator that has ended.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    comm.finalize()?;
    comm.barrier()
}
