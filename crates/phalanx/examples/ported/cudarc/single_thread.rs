//! A sum, with one thread for all GPUs.

use phalanx::{Comm, ReduceOp, Result, nccl};

pub fn run() -> Result<()> {
    let comms = nccl::init_all(nccl::gpus()?)?;
    let streams = comms.iter().map(Comm::cuda_stream).collect::<Result<Vec<_>>>()?;
    let (mut sent, mut sums) = (Vec::new(), Vec::new());
    for (rank, stream) in streams.iter().enumerate() {
        sent.push(stream.clone_htod(&[(rank + 1) as f32; 2])?);
        sums.push(stream.alloc_zeros::<f32>(2)?);
    }
    phalanx::group(|group| {
        for ((comm, sent), sum) in comms.iter().zip(&sent).zip(&mut sums) {
            group.on(comm).all_reduce(sent, sum, ReduceOp::Sum)?;
        }
        Ok(())
    })?;
    for (stream, sum) in streams.iter().zip(&sums) {
        assert_eq!(stream.clone_dtoh(sum)?, [(comms.len() * (comms.len() + 1) / 2) as f32; 2]);
    }
    Ok(())
}
