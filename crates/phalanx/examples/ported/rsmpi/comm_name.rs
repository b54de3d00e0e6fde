//! A communicator's name.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    assert_eq!(comm.name(), "world");
    comm.set_name("test")?;
    assert_eq!(comm.name(), "world:test");
    Ok(())
}
