//! Sends whose receives have been started before.

use phalanx::{Comm, Request, Result};

pub fn run(comm: &Comm) -> Result<()> {
    if comm.rank() > 0 {
        comm.barrier()?;
        return comm.send_value(comm.rank() as u8, 0);
    }
    let receives: Vec<_> =
        (1..comm.world_size()).map(|peer| comm.start_recv(vec![0u8], peer)).collect::<Result<_>>()?;
    comm.barrier()?;
    let received = Request::wait_all(receives)?.concat();
    println!("got {received:?}");
    assert!(received.iter().zip(1..).all(|(value, rank)| *value == rank));
    Ok(())
}
