//! One number from each rank to each rank.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let own = vec![comm.rank(); comm.world_size()];
    let mut received = vec![0; comm.world_size()];
    comm.all_to_all(&own, &mut received)?;
    println!("{own:?} became {received:?}");
    assert!(received.into_iter().eq(0..comm.world_size()));
    Ok(())
}
