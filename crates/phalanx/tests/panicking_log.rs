//! The program's log panics at every event, as `tracing_subscriber::fmt().init()` does when its output cannot be written.
//! Operations end as they would without a log.

use phalanx::{BackendKind, Comm, Error, ReduceOp, Result};
use std::sync::Once;
use std::time::Duration;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

struct Panics;

impl Subscriber for Panics {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        panic!("the log cannot be written");
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Two ranks with such a log and a short deadline.
fn ranks<R: Send>(rank: impl Fn(Comm) -> R + Sync) -> Vec<R> {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // What the log's panics print would bury the results.
        std::panic::set_hook(Box::new(|_| ()));
        tracing::subscriber::set_global_default(Panics).unwrap();
    });
    let builder = Comm::builder().backend(BackendKind::Host).timeout(Duration::from_millis(100));
    builder.run(2, rank).expect("making ranks logs, too")
}

/// Rank 0 waits for what never comes; both ranks get an error, and the rank's communicator is dropped.
fn times_out(operation: impl Fn(&Comm) -> Result<()> + Sync) {
    for outcome in ranks(|comm| if comm.rank() == 0 { operation(&comm) } else { comm.recv(&mut [0u8], 0) }) {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Timeout(_) | Error::Peer(_) | Error::Mismatch(_)), "{error}");
    }
}

#[test]
fn an_operation_that_succeeds() {
    for sum in ranks(|comm| {
        let mut sum = [1u32];
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map(|()| sum)
    }) {
        assert_eq!(sum.unwrap(), [2]);
    }
}

#[test]
fn a_collective_that_times_out() {
    times_out(|comm| comm.all_reduce_in_place(&mut [1f32; 9], ReduceOp::Sum));
}

#[test]
fn a_receive_that_times_out() {
    times_out(|comm| comm.recv(&mut [0u8; 9], 1));
}

#[test]
fn a_send_and_receive_that_time_out() {
    times_out(|comm| comm.send_recv(&[0u8; 1 << 20], 1, &mut vec![0u8; 1 << 20], 1));
}

#[test]
fn a_group_that_times_out() {
    times_out(|comm| {
        let (mut one, mut other) = ([0u8; 9], [0u8; 9]);
        comm.group(|g| {
            g.recv(&mut one, 1)?;
            g.recv_tagged(&mut other, 1, 7)
        })
    });
}

#[test]
fn a_request_that_times_out() {
    times_out(|comm| comm.start_all_reduce(vec![1f32; 9], ReduceOp::Sum)?.wait().map(drop));
    times_out(|comm| comm.start_recv(vec![0u8; 9], 1)?.wait().map(drop));
}

#[test]
fn a_request_that_is_dropped() {
    times_out(|comm| {
        drop(comm.start_all_reduce(vec![1f32; 9], ReduceOp::Sum)?);
        comm.barrier()
    });
}

#[test]
fn a_rank_that_panics_itself() {
    let ran = std::panic::catch_unwind(|| {
        ranks(|comm| match comm.rank() {
            0 => panic!("the rank's own"),
            _ => comm.barrier(),
        })
    });
    assert_eq!(*ran.unwrap_err().downcast::<&str>().unwrap(), "the rank's own");
}
