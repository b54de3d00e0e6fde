//! Requests that are dropped, and collectives that panic.

use super::*;
use crate::ReduceOp;
use crate::api::comm::Comm;
use crate::backend::solo::SoloComm;
use crate::contract::{Backend, BackendKind, Call, Departure, HostMemory, OperationId, Transfer, Window};
use crate::types::memory::Allocation;
use std::sync::mpsc::channel;

/// Its collectives panic until it is aborted.
struct Panicking(SoloComm);

impl Backend for Panicking {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn kind(&self) -> BackendKind {
        self.0.kind()
    }
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn world_size(&self) -> usize {
        self.0.world_size()
    }
    unsafe fn collective(&self, call: &Call<'_>) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.0.collective(call) }?;
        panic!("a collective was told to panic");
    }
    unsafe fn post(&self, transfer: Transfer) -> Result<OperationId> {
        // SAFETY: the caller's contract.
        unsafe { self.0.post(transfer) }
    }
    fn wait(&self, id: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        self.0.wait(id, meanwhile)
    }
    fn test(&self, id: OperationId) -> Result<bool> {
        self.0.test(id)
    }
    fn progress(&self) -> Result<bool> {
        self.0.progress()
    }
    unsafe fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn Backend>>> {
        // SAFETY: the caller's contract.
        unsafe { self.0.split(color, key) }
    }
    fn alloc(&self, bytes: usize) -> Result<Allocation> {
        self.0.alloc(bytes)
    }
    unsafe fn symmetric(&self, call: &Call<'_>) -> Result<Box<dyn Window + '_>> {
        // SAFETY: the caller's contract.
        unsafe { self.0.symmetric(call) }
    }
    unsafe fn shared_by_host(&self, call: &Call<'_>) -> Result<Box<dyn HostMemory>> {
        // SAFETY: the caller's contract.
        unsafe { self.0.shared_by_host(call) }
    }
    fn timeout(&self) -> Duration {
        self.0.timeout()
    }
    fn set_timeout(&self, timeout: Duration) {
        self.0.set_timeout(timeout);
    }
    fn abort(&self) {
        self.0.abort();
    }
    fn depart(&self, departure: Departure) {
        self.0.depart(departure);
    }
}

#[test]
fn a_request_that_was_dropped_ends() {
    let of_threads = Comm::builder().backend(BackendKind::Host).run(2, |comm| {
        if comm.rank() == 1 {
            comm.barrier()?;
            comm.send(&[7u8], 0)?;
            return comm.send_recv(&[7u8; 100_000], 0, &mut [0u8; 50_000], 0);
        }
        drop(comm.start_recv(vec![0u8], 1)?);
        drop(comm.start_send_recv(vec![7u8; 50_000], 1, vec![0u8; 100_000], 1)?);
        assert_eq!(lock(&comm.requests.moving.state).requests, 3);
        comm.barrier()?;
        let since = std::time::Instant::now();
        while lock(&comm.requests.moving.state).requests != 0 {
            assert!(since.elapsed() < Duration::from_secs(60), "it is moved along for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    });
    for outcome in of_threads.unwrap() {
        outcome.unwrap();
    }
}

#[test]
fn a_panic_in_a_started_collective_is_an_error_of_all_that_were_started() {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let backend = Panicking(SoloComm::new(Duration::from_secs(1)));
        let comm = Comm::new(Arc::new(backend), "panicking".to_owned());
        let requests: Vec<_> =
            (0..3).map(|_| comm.start_all_reduce(vec![1u8], ReduceOp::Sum).unwrap()).collect();
        let results: Vec<_> = requests.into_iter().map(Request::wait).collect();
        comm.sync().unwrap();
        sender.send(results).unwrap();
    });
    let results = receiver.recv_timeout(Duration::from_secs(10)).expect("nobody waits for ever");
    for result in results {
        assert!(matches!(result, Err(Error::Aborted { rank: 0 })), "{result:?}");
    }
}

/// The others are waited for even if the first one has failed, and the first error counts, in the order of the requests.
#[test]
fn wait_all_waits_for_all_and_answers_the_first_error() {
    let ran = Comm::builder().backend(BackendKind::Host).try_run(2, |comm| -> Result<()> {
        let (left, aborted) = (comm.duplicate()?, comm.duplicate()?);
        if comm.rank() == 1 {
            // Rank 0 has started its receives.
            comm.recv(&mut [0u8], 0)?;
            drop(left);
            aborted.abort();
            // By now a wait that ends at the first error is over.
            std::thread::sleep(Duration::from_millis(20));
            return comm.send(&[7u8], 0);
        }
        let start = |comm: &Comm| comm.start_recv(vec![0u8], 1);
        let receives = [start(&left)?, start(&aborted)?, start(&comm)?];
        comm.send(&[0u8], 1)?;
        let first = Request::wait_all(receives);
        assert!(matches!(first, Err(Error::Peer(_))), "{first:?}");
        assert_eq!(lock(&comm.requests.moving.state).requests, 0, "one was not waited for");
        Ok(())
    });
    ran.unwrap();
}
