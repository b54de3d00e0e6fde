//! Rank 0 sends to all others, which receive one after the other, and sees the sends complete.

use phalanx::{Comm, Request, Result};
use std::f32::consts::PI;
use std::time::Duration;

pub fn run(comm: &Comm) -> Result<()> {
    if comm.rank() > 0 {
        std::thread::sleep(Duration::from_millis(100 * comm.rank() as u64));
        assert_eq!(comm.recv_any_value()?, (PI, 0));
        return Ok(());
    }
    let send = |peer| comm.start_send(vec![PI], peer).map(Some);
    let mut requests = (1..comm.world_size()).map(send).collect::<Result<Vec<_>>>()?;
    while let Some((place, sent)) = Request::wait_any(&mut requests) {
        sent?;
        println!("the request of place {place} is complete");
    }
    Ok(())
}
