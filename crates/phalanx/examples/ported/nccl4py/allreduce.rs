//! One thread sums a buffer of each GPU, for all GPUs.

use super::COUNT;
use phalanx::{Comm, ReduceOp, Result, nccl};

pub fn run() -> Result<()> {
    let comms = nccl::init_all(nccl::gpus()?)?;
    let streams = comms.iter().map(Comm::cuda_stream).collect::<Result<Vec<_>>>()?;
    let (mut sent, mut sums) = (Vec::new(), Vec::new());
    for (rank, stream) in streams.iter().enumerate() {
        sent.push(stream.clone_htod(&vec![rank as f32; COUNT])?);
        sums.push(stream.alloc_zeros::<f32>(COUNT)?);
    }

    phalanx::group(|group| {
        for ((comm, sent), sum) in comms.iter().zip(&sent).zip(&mut sums) {
            group.on(comm).all_reduce(sent, sum, ReduceOp::Sum)?;
        }
        Ok(())
    })?;

    // Only one result is read, and a buffer must not be dropped while its GPU works on it.
    for comm in &comms {
        comm.sync()?;
    }
    let expected = (comms.len() * (comms.len() - 1) / 2) as f32;
    assert!(streams[0].clone_dtoh(&sums[0])?.iter().all(|sum| *sum == expected));
    println!("the sum of {} GPUs is {expected}", comms.len());
    Ok(())
}
