//! Messages of a rank to itself: started, tested and probed. The original also cancels requests, which phalanx cannot.

use phalanx::{Comm, Result};
use std::f32::consts::PI;

pub fn run(comm: &Comm) -> Result<()> {
    let own = comm.rank();

    let mut send = comm.start_send(vec![PI], own)?;
    assert_eq!(comm.start_recv(vec![0.0], own)?.wait()?, [PI]);
    while !send.is_done() {}
    send.wait()?;

    // A ready send: the receive is started before.
    let receive = comm.start_recv(vec![0.0], own)?;
    let send = comm.start_send(vec![PI], own)?;
    assert_eq!(receive.wait()?, [PI]);
    send.wait()?;

    assert!(comm.try_probe(None, None)?.is_none());

    let send = comm.start_send(vec![PI], own)?;
    let envelope = loop {
        if let Some(envelope) = comm.try_probe(None, None)? {
            break envelope;
        }
    };
    assert_eq!(comm.recv_value::<f32>(envelope.source)?, PI);
    send.wait()?;

    let mut receive = comm.start_recv(vec![0.0], own)?;
    assert!(!receive.is_done());
    comm.start_send(vec![PI], own)?.wait()?;
    while !receive.is_done() {}
    assert_eq!(receive.wait()?, [PI]);
    Ok(())
}
