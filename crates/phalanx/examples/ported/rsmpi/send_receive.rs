//! Messages in both directions of the ring, messages of unknown length to rank 0, and a value that is replaced by the previous rank's.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);

    let received = comm.send_recv_value(rank, previous, next)?;
    println!("rank {rank} got {received}");
    comm.barrier()?;
    assert_eq!(received, next);

    if rank > 0 {
        comm.send(&[rank, rank + 1, rank - 1], 0)?;
    } else {
        for _ in 1..ranks {
            let (message, envelope) = comm.recv_vec::<usize>(None, None)?;
            println!("rank 0 got {message:?}, {envelope:?}");
            let source = envelope.source;
            assert_eq!(message, [source, source + 1, source - 1]);
        }
    }
    comm.barrier()?;

    let mut x = rank;
    x = comm.send_recv_value(x, next, previous)?;
    assert_eq!(x, previous);
    Ok(())
}
