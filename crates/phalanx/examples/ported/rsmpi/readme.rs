//! A message around the ring, started and received from any rank, and a broadcast.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);

    let send = comm.start_send(vec![rank, 2 * rank, 4 * rank], next)?;
    let (message, envelope) = comm.recv_vec::<usize>(None, None)?;
    println!("rank {rank} got {message:?}, {envelope:?}");
    let source = envelope.source;
    assert_eq!(source, previous);
    assert_eq!(message, [source, 2 * source, 4 * source]);

    let mut powers = if rank == 0 { [2, 4, 8, 16] } else { [0; 4] };
    comm.broadcast_in_place(&mut powers, 0)?;
    println!("rank {rank} has {powers:?}");
    assert_eq!(powers, [2, 4, 8, 16]);
    send.wait()?;
    Ok(())
}
