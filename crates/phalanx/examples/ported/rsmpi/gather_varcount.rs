//! Lists of different lengths from all ranks to the root.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let own: Vec<usize> = (0..comm.rank()).collect();
    if let Some(all) = comm.gather_vec(&own, 0)? {
        println!("{all:?}");
        assert!(all.elements.into_iter().eq((0..comm.world_size()).flat_map(|rank| 0..rank)));
    }
    Ok(())
}
