//! One thread sends a buffer from each GPU to the next one.

use super::COUNT;
use phalanx::{Comm, Result, nccl};

pub fn run() -> Result<()> {
    let comms = nccl::init_all(nccl::gpus()?)?;
    let streams = comms.iter().map(Comm::cuda_stream).collect::<Result<Vec<_>>>()?;
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    for (rank, stream) in streams.iter().enumerate() {
        let values: Vec<f32> = (0..COUNT).map(|at| (rank * 1000 + at % 1000) as f32).collect();
        sent.push(stream.clone_htod(&values)?);
        received.push(stream.alloc_zeros::<f32>(COUNT)?);
    }

    phalanx::group(|group| {
        for ((comm, sent), received) in comms.iter().zip(&sent).zip(&mut received) {
            let (rank, ranks) = (comm.rank(), comm.world_size());
            group.on(comm).send(sent, (rank + 1) % ranks)?;
            group.on(comm).recv(received, (rank + ranks - 1) % ranks)?;
        }
        Ok(())
    })?;

    for (rank, (stream, received)) in streams.iter().zip(&received).enumerate() {
        let previous = (rank + comms.len() - 1) % comms.len();
        assert_eq!(stream.clone_dtoh(received)?[0], (previous * 1000) as f32);
        println!("GPU {rank} received the buffer of GPU {previous}");
    }
    Ok(())
}
