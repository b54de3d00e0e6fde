//! A panic that leaves an operation fails the communicator: the peers are told, and no buffer is used any more.

use crate::types::error::{Error, PeerEvent, Result};
use crate::watch::PANIC_WHEN_BEGUN;
use crate::{Comm, ReduceOp};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Enough for an operation to wait, and to say that it has begun.
const LEN: usize = 1 << 20;

/// Rank 0 panics inside `operation`, which rank 1 takes part in by `other`.
fn panics(operation: impl Fn(&Comm) -> Result<()> + Sync, other: impl Fn(&Comm) -> Result<()> + Sync) {
    let began = Instant::now();
    let timeout = Duration::from_secs(100);
    let ran = Comm::builder().backend(crate::BackendKind::Host).timeout(timeout).run(2, |comm| {
        if comm.rank() == 1 {
            return other(&comm).and_then(|()| comm.barrier()).unwrap_err();
        }
        PANIC_WHEN_BEGUN.set(true);
        assert!(catch_unwind(AssertUnwindSafe(|| operation(&comm))).is_err());
        PANIC_WHEN_BEGUN.set(false);
        // The communicator is still there: nothing but the panic tells the peer.
        comm.barrier().unwrap_err()
    });
    for error in ran.unwrap() {
        let Error::Peer(peer) = &error else { panic!("{error}") };
        assert_eq!((peer.rank, peer.event), (0, PeerEvent::Panicked), "{error}");
    }
    assert!(began.elapsed() < timeout / 2, "the peer has waited for its deadline");
}

#[test]
fn in_a_collective() {
    let all_reduce = |comm: &Comm| comm.all_reduce_in_place(&mut vec![1f32; LEN], ReduceOp::Sum);
    panics(all_reduce, all_reduce);
}

#[test]
fn in_a_receive() {
    panics(|comm| comm.recv(&mut vec![0u8; LEN], 1), |comm| comm.recv(&mut [0u8], 0));
}

#[test]
fn in_a_send() {
    panics(|comm| comm.send(&vec![0u8; LEN], 1), |comm| comm.recv(&mut [0u8], 0));
}

#[test]
fn in_a_group() {
    panics(
        |comm| {
            let mut ones = vec![1f32; LEN];
            comm.group(|g| g.all_reduce_in_place(&mut ones, ReduceOp::Sum))
        },
        |comm| comm.recv(&mut [0u8], 0),
    );
}
