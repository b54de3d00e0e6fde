//! Lists of different lengths from the root to all ranks.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let counts: Vec<usize> = (0..ranks).collect();
    let all: Vec<usize> = if rank == 0 { (0..ranks).flat_map(|to| 0..to).collect() } else { Vec::new() };
    let mut own = vec![0; rank];
    comm.scatter_v(&all, &counts, &mut own, 0)?;
    println!("rank {rank} got {own:?}");
    assert!(own.into_iter().eq(0..rank));
    Ok(())
}
