//! A sum of views, with a thread for each GPU.

use phalanx::{BackendKind, Comm, ReduceOp, Result, nccl};

pub fn run() -> Result<()> {
    let gpus = nccl::gpus()?.len();
    let sums = Comm::builder().backend(BackendKind::Nccl).try_run(gpus, |comm| -> Result<Vec<f32>> {
        let stream = comm.cuda_stream()?;
        let sent = stream.clone_htod(&[(comm.rank() + 1) as f32; 2])?;
        let mut sum = stream.alloc_zeros::<f32>(2)?;
        comm.all_reduce(&sent.slice(..), &mut sum.slice_mut(..), ReduceOp::Sum)?;
        Ok(stream.clone_dtoh(&sum)?)
    })?;
    assert!(sums.iter().all(|sum| *sum == [(gpus * (gpus + 1) / 2) as f32; 2]));
    Ok(())
}
