//! A second communicator of the same ranks.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let second = comm.duplicate()?;
    comm.barrier()?;
    second.barrier()?;
    assert_eq!(comm.rank_group(), second.rank_group());
    assert_ne!(comm.name(), second.name());
    Ok(())
}
