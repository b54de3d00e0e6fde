//! Two ranks exchange a number, in a group, so that the order of the two calls does not matter.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let rank = comm.rank();
    assert_eq!(comm.world_size(), 2, "two ranks are needed");
    let other = 1 - rank;
    let stream = comm.cuda_stream()?;
    let sent = stream.clone_htod(&[100.0 + rank as f32])?;
    let mut received = stream.alloc_zeros::<f32>(1)?;
    comm.group(|group| {
        group.send(&sent, other)?;
        group.recv(&mut received, other)
    })?;
    let actual = stream.clone_dtoh(&received)?;
    println!("rank {rank} sent {} and received {actual:?}", 100 + rank);
    assert_eq!(actual, [100.0 + other as f32]);
    Ok(())
}
