//! What only NCCL has is the communicator's, which has ended.

fn registered(comm: phalanx::Comm) -> phalanx::Result<()> {
    let nccl = comm.nccl().expect("a communicator of NCCL");
    comm.finalize()?;
    nccl.alloc::<f32>(1000).map(drop)
}

fn main() {}
