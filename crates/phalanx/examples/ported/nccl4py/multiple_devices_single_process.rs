//! A communicator for each GPU of this machine, all made by one thread.

use phalanx::{Result, nccl};

pub fn run() -> Result<()> {
    let comms = nccl::init_all(nccl::gpus()?)?;
    for (gpu, comm) in comms.iter().enumerate() {
        let context = comm.cuda_stream()?.context();
        let (major, minor) = context.compute_capability()?;
        let memory = context.total_mem()? as f64 / f64::from(1 << 30);
        println!("GPU {gpu}: {}, compute capability {major}.{minor}, {memory:.1} GiB", context.name()?);
        assert_eq!((comm.rank(), comm.world_size(), comm.gpu()), (gpu, comms.len(), Some(gpu)));
    }
    println!("{} communicators", comms.len());
    Ok(())
}
