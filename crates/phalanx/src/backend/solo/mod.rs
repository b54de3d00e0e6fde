//! The backend of a world of one rank: no data moves between ranks, and every operation keeps its meaning.
//!
//! A collective is a copy (an average over one rank, a pre-multiplied sum of one). A message to oneself is
//! kept until it is received.

mod window;

use crate::contract::{
    Backend, BackendKind, Call, Departure, Direction, Envelope, HostMemory, OperationId, Transfer, Wanted,
    Window,
};
use crate::os::Mapping;
use crate::os::sync::lock;
use crate::reduce::{Reducer, Targets};
use crate::types::error::{Error, MismatchError, MissingRank, Result, TimeoutError, UsageError};
use crate::types::memory::Allocation;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// The only rank of a communicator.
pub(crate) struct SoloComm {
    messages: Mutex<SoloMessages>,
    timeout: AtomicU64,
    failed: OnceLock<Error>,
}

#[derive(Default)]
struct SoloMessages {
    /// Sent and not received, in order.
    sent: VecDeque<(Transfer, Vec<u8>)>,
    /// Posted receives that nothing matched yet.
    receives: Vec<(OperationId, Transfer)>,
    done: Vec<OperationId>,
    next: usize,
}

impl SoloComm {
    pub fn new(timeout: Duration) -> SoloComm {
        let comm = SoloComm { messages: Mutex::default(), timeout: 0.into(), failed: OnceLock::new() };
        comm.set_timeout(timeout);
        comm
    }

    fn lock(&self) -> MutexGuard<'_, SoloMessages> {
        lock(&self.messages)
    }

    fn fail(&self, error: Error) -> Error {
        self.failed.get_or_init(|| error).clone()
    }

    /// The error for a receive without a send.
    fn never_comes(&self, receive: Option<Transfer>) -> Error {
        let operation =
            receive.map_or("recv".into(), |r| format!("recv({} × {}, from rank 0)", r.dtype, r.count));
        self.fail(
            TimeoutError {
                operation,
                sequence: 1,
                reporter: 0,
                waited: Duration::ZERO,
                missing: vec![MissingRank { rank: 0, last_seen: "it waits for itself".into() }],
            }
            .into(),
        )
    }

    /// Copies a message to its receive.
    fn deliver(&self, send: &Transfer, bytes: &[u8], recv: &Transfer) -> Result<()> {
        if (send.dtype, send.count) != (recv.dtype, recv.count) {
            return Err(self.fail(
                MismatchError {
                    rank: 0,
                    theirs: format!("send({} × {}, to rank 0)", send.dtype, send.count),
                    other_rank: 0,
                    ours: format!("recv({} × {}, from rank 0)", recv.dtype, recv.count),
                    sequence: 1,
                }
                .into(),
            ));
        }
        let Direction::Recv(target) = recv.direction else { unreachable!("a receive") };
        // SAFETY: the posted buffer has as many bytes as were sent, just checked.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
        Ok(())
    }
}

impl Backend for SoloComm {
    fn kind(&self) -> BackendKind {
        BackendKind::Solo
    }

    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    unsafe fn collective(&self, call: &Call<'_>) -> Result<()> {
        self.check()?;
        if call.operation.is_empty_handed() {
            return Ok(());
        }
        let count = call.blocks.len(0);
        // SAFETY: with one rank, `send` and `recv` are one block each, the same place or apart.
        unsafe {
            if call.flow().combined(0, 1).is_empty() {
                // An exclusive scan leaves `recv` as it is.
            } else if call.operation.reduces() {
                let reducer = Reducer::of(call);
                reducer.run(Targets::new(&[call.recv], false), &[call.send], &[call.reduction.factor], count);
            } else if call.send != call.recv.cast_const() {
                std::ptr::copy_nonoverlapping(call.send, call.recv, count * call.dtype.size());
            }
        }
        Ok(())
    }

    fn try_probe(&self, wanted: Wanted) -> Result<Option<Envelope>> {
        self.check()?;
        let messages = self.lock();
        let found = messages.sent.iter().find(|(send, _)| wanted.includes(0, send.tag));
        Ok(found.map(|(send, bytes)| Envelope { source: 0, tag: send.tag, bytes: bytes.len() }))
    }

    fn probe(&self, wanted: Wanted) -> Result<Envelope> {
        self.try_probe(wanted)?.ok_or_else(|| self.never_comes(None))
    }

    unsafe fn post(&self, transfer: Transfer) -> Result<OperationId> {
        self.check()?;
        let mut messages = self.lock();
        let id = OperationId(messages.next);
        messages.next += 1;
        match transfer.direction {
            Direction::Send(source) => {
                let len = transfer.count * transfer.dtype.size();
                let mut bytes = vec![0; len];
                // SAFETY: the posted buffer is readable for its length.
                unsafe { std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), len) };
                let waiting = messages.receives.iter().position(|(_, recv)| recv.tag == transfer.tag);
                match waiting {
                    Some(index) => {
                        let (waiting, recv) = messages.receives.remove(index);
                        self.deliver(&transfer, &bytes, &recv)?;
                        messages.done.push(waiting);
                    }
                    None => messages.sent.push_back((transfer, bytes)),
                }
                messages.done.push(id);
            }
            Direction::Recv(_) => {
                let found = messages.sent.iter().position(|(send, _)| send.tag == transfer.tag);
                match found.and_then(|index| messages.sent.remove(index)) {
                    Some((send, bytes)) => {
                        self.deliver(&send, &bytes, &transfer)?;
                        messages.done.push(id);
                    }
                    None => messages.receives.push((id, transfer)),
                }
            }
        }
        Ok(id)
    }

    unsafe fn recorded_transfer(&self, transfer: Transfer, begun: &dyn Fn()) -> Result<()> {
        begun();
        // SAFETY: the caller's contract.
        let id = unsafe { self.post(transfer) }?;
        if self.test(id)? {
            return Ok(());
        }
        // Only this thread could send it, and it is here.
        self.lock().receives.retain(|(waiting, _)| *waiting != id);
        let operation = transfer.operation().name();
        Err(UsageError::SelfExchange { operation, rank: 0 }.into())
    }

    fn wait(&self, id: OperationId, _meanwhile: &dyn Fn()) -> Result<()> {
        if self.test(id)? {
            return Ok(());
        }
        // Only this thread could still send, and it waits here.
        let receive = {
            let mut messages = self.lock();
            let index = messages.receives.iter().position(|(waiting, _)| *waiting == id);
            index.map(|index| messages.receives.remove(index).1)
        };
        Err(self.never_comes(receive))
    }

    fn test(&self, id: OperationId) -> Result<bool> {
        let mut messages = self.lock();
        match messages.done.iter().position(|done| *done == id) {
            Some(index) => {
                messages.done.swap_remove(index);
                Ok(true)
            }
            None => {
                let failed = self.check();
                if failed.is_err() {
                    messages.receives.retain(|(waiting, _)| *waiting != id);
                }
                failed.map(|()| false)
            }
        }
    }

    fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn sync(&self) -> Result<()> {
        self.check()?;
        let waiting = self.lock().receives.first().map(|(_, receive)| *receive);
        waiting.map_or(Ok(()), |receive| Err(self.never_comes(Some(receive))))
    }

    fn progress(&self) -> Result<bool> {
        // A message moves when its second half is posted.
        Ok(false)
    }

    fn shrink(&self) -> Result<(Box<dyn Backend>, Vec<u64>)> {
        Ok((Box::new(SoloComm::new(self.timeout())), vec![1]))
    }

    fn split_members(&self, _members: &[usize]) -> Result<(Box<dyn Backend>, u64)> {
        self.check()?;
        // For a name of its own.
        static MADE: AtomicU64 = AtomicU64::new(0);
        Ok((Box::new(SoloComm::new(self.timeout())), MADE.fetch_add(1, Ordering::Relaxed)))
    }

    fn agree(&self, flag: bool) -> Result<bool> {
        Ok(flag)
    }

    unsafe fn split(&self, color: Option<u32>, _key: i64) -> Result<Option<Box<dyn Backend>>> {
        self.check()?;
        Ok(color.map(|_| Box::new(SoloComm::new(self.timeout())) as Box<dyn Backend>))
    }

    fn alloc(&self, bytes: usize) -> Result<Allocation> {
        let memory = Mapping::anonymous(bytes.max(1))?;
        Ok(Allocation { start: memory.as_ptr(), keep: Box::new(memory) })
    }

    unsafe fn symmetric(&self, call: &Call<'_>) -> Result<Box<dyn Window + '_>> {
        self.window(call)
    }

    unsafe fn shared_by_host(&self, call: &Call<'_>) -> Result<Box<dyn HostMemory>> {
        self.host_memory(call)
    }

    fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    fn set_timeout(&self, timeout: Duration) {
        let nanos = timeout.as_nanos().try_into().unwrap_or(u64::MAX);
        self.timeout.store(nanos, Ordering::Relaxed);
    }

    fn abort(&self) {
        self.fail(Error::Aborted { rank: 0 });
    }

    fn depart(&self, _departure: Departure) {}
}

#[cfg(test)]
mod tests {
    use crate::{BackendKind, Comm, Error};

    #[test]
    fn a_receive_to_which_nothing_was_sent_is_told_by_sync() {
        let ran = Comm::builder().backend(BackendKind::Solo).run(1, |comm| {
            let sent = comm.start_send(vec![7u8; 3], 0).unwrap();
            comm.sync().unwrap();
            let received = comm.start_recv(vec![0u8; 3], 0).unwrap();
            comm.sync().unwrap();
            assert_eq!((sent.wait().unwrap(), received.wait().unwrap()), (vec![7; 3], vec![7; 3]));

            let never = comm.start_recv(vec![0u8; 3], 0).unwrap();
            for outcome in [comm.sync(), comm.sync(), never.wait().map(drop)] {
                assert!(matches!(outcome, Err(Error::Timeout(_))), "{outcome:?}");
            }
        });
        ran.unwrap();
    }
}
