//! Nothing can be called on a communicator that was aborted.

fn main() -> phalanx::Result<()> {
    let comm = phalanx::init()?;
    comm.abort();
    comm.barrier()
}
