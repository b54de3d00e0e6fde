//! What is sent before a barrier is received before what is sent after it.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    if comm.rank() > 0 {
        comm.send_value(1u64, 0)?;
        comm.barrier()?;
        return comm.send_value(2u64, 0);
    }
    let receive = || (1..comm.world_size()).map(|_| comm.recv_any_value()).collect::<Result<Vec<_>>>();
    let before: Vec<(u64, usize)> = receive()?;
    comm.barrier()?;
    let after = receive()?;
    println!("{before:?} {after:?}");
    assert!(before.iter().all(|(value, _)| *value == 1));
    assert!(after.iter().all(|(value, _)| *value == 2));
    Ok(())
}
