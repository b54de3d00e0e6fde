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
    let mut requests =
        (1..comm.world_size()).map(|peer| comm.start_send(vec![PI], peer)).collect::<Result<Vec<_>>>()?;
    while let Some((_, sent)) = Request::wait_any(&mut requests) {
        sent?;
        println!("a request is complete, {} are left", requests.len());
    }
    Ok(())
}
