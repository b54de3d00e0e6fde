//! The root's value and the root's list, for every rank.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, root) = (comm.rank(), 0);

    let x = comm.broadcast_value(if rank == root { 1u64 << 10 } else { 0 }, root)?;
    println!("rank {rank} has {x}");
    assert_eq!(x, 1024);

    let mut list = [0u64; 4];
    if rank == root {
        list = [2, 4, 8, 16];
    }
    comm.broadcast_in_place(&mut list, root)?;
    println!("rank {rank} has {list:?}");
    assert_eq!(list, [2, 4, 8, 16]);
    Ok(())
}
