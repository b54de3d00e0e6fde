//! Operations that start together: [`group`] and [`Comm::group`].
//!
//! Inside the closure operations are only collected, with their buffers borrowed until the group's end. So
//! nothing has happened yet if the closure fails or panics, and messages of a ring can be posted in any
//! order. At the end all messages are posted at once and moved along together, and then the collectives are
//! carried out in the order of their calls (`ncclGroupStart`, `ncclGroupEnd`).

use super::coalesced::Together;
use super::comm::Comm;
use super::p2p::{receiving, sending, wait_all};
use crate::buffer::loan::Loan;
use crate::buffer::{Output, Source, Target};
#[cfg(feature = "_gpu")]
use crate::contract::Direction;
use crate::contract::{Backend, Call, Envelope, Shape, Transfer, Wanted};
use crate::os::RunInstant;
use crate::reduce::custom::Custom;
use crate::types::dtype::Plain;
use crate::types::error::Result;
use crate::types::op::CombineInOrder;
use crate::watch::Posted;
use crate::watch::deadline::Limited;
use std::cell::RefCell;
use std::marker::PhantomData;
#[cfg(feature = "_gpu")]
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

/// Operations of several communicators that start together.
///
/// `'env` is how long the buffers are borrowed: beyond the closure, so that a buffer made inside it cannot
/// take part.
pub struct Group<'env> {
    transfers: Vec<(&'env Comm, Transfer)>,
    /// Receives from any rank, until they have found theirs.
    any: RefCell<Vec<AnyReceive<'env>>>,
    calls: Vec<(&'env Comm, Call<'env>)>,
    /// The buffers of both, until the group has ended.
    loans: Vec<Loan<'env>>,
    /// The closures of calls. No `Box`, whose owner alone could use them.
    closures: Vec<Arc<dyn CombineInOrder + 'env>>,
    /// Buffers that travel together, and what they are packed into: they get their results at the end.
    packed: Vec<(Together<'env>, Vec<u8>)>,
    /// Invariant in `'env`, as scoped threads are; neither `Send` nor `Sync`.
    env: PhantomData<(&'env mut &'env (), *const ())>,
}

/// A receive whose sender is known when a message has come.
struct AnyReceive<'env> {
    comm: &'env Comm,
    wanted: Wanted,
    /// But for the peer and the tag.
    transfer: Transfer,
    from: &'env mut Option<Envelope>,
}

/// A group of backends that is being started. A panic that leaves it ends the loans of its buffers, as
/// [`Lending`](super::lending::Lending) does, and the thread's group.
struct OpenGroup<'a> {
    backends: &'a [&'a dyn Backend],
    is_open: bool,
}

impl<'a> OpenGroup<'a> {
    fn begin(backends: &'a [&'a dyn Backend]) -> OpenGroup<'a> {
        backends.iter().for_each(|backend| backend.start_group());
        OpenGroup { backends, is_open: true }
    }

    fn end(&mut self, queued: &Result<()>) -> Result<()> {
        self.is_open = false;
        self.backends.iter().map(|backend| backend.end_group(queued)).fold(Ok(()), Result::and)
    }

    /// The group is over: its messages are settled.
    fn forget(self) {
        std::mem::forget(self);
    }
}

impl Drop for OpenGroup<'_> {
    fn drop(&mut self) {
        self.backends.iter().for_each(|backend| backend.abandon());
        if self.is_open {
            // The communicators have failed.
            let _ = self.end(&Ok(()));
        }
    }
}

/// One communicator's part of a [`Group`].
pub struct CommGroup<'group, 'env> {
    comm: &'env Comm,
    group: &'group mut Group<'env>,
}

/// Collects operations of one or several communicators and starts them together. They are complete when it returns.
///
/// If the closure returns an error or panics, nothing is started.
///
/// On GPUs each operation is in its communicator's stream. Messages of one communicator on several streams start together: behind what these
/// streams have, and what follows on each of them is behind all of the messages.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     let (right, left) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
///     let (send, mut recv) = ([comm.rank() as u32], [0u32]);
///     phalanx::group(|g| {
///         let mut ring = g.on(&comm);
///         ring.send(&send, right)?;
///         ring.recv(&mut recv, left)
///     })?;
///     assert_eq!(recv[0] as usize, left);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[doc(alias("ncclGroupStart", "ncclGroupEnd", "batch_isend_irecv"))]
pub fn group<'env, R>(f: impl FnOnce(&mut Group<'env>) -> Result<R>) -> Result<R> {
    let mut group = Group::new();
    let result = f(&mut group)?;
    group.start_all()?;
    Ok(result)
}

impl<'env> Group<'env> {
    pub(crate) fn new() -> Group<'env> {
        Group {
            transfers: Vec::new(),
            any: RefCell::default(),
            calls: Vec::new(),
            loans: Vec::new(),
            closures: Vec::new(),
            packed: Vec::new(),
            env: PhantomData,
        }
    }

    /// Opens a communicator's part of the group.
    pub fn on(&mut self, comm: &'env Comm) -> CommGroup<'_, 'env> {
        CommGroup { comm, group: self }
    }

    /// Starts the collected operations, and waits for those of host memory.
    pub(crate) fn start_all(&self) -> Result<()> {
        let mut backends: Vec<&dyn Backend> = Vec::new();
        let any = self.any.borrow().iter().map(|any| any.comm).collect::<Vec<_>>();
        let comms =
            self.transfers.iter().map(|(comm, _)| comm).chain(self.calls.iter().map(|(comm, _)| comm));
        for comm in comms.chain(&any) {
            comm.requests.make_way_for_message();
            if !backends.iter().any(|known| std::ptr::addr_eq(*known, &*comm.backend)) {
                backends.push(&*comm.backend);
            }
        }
        let mut open = OpenGroup::begin(&backends);
        let mut messages = Vec::with_capacity(self.transfers.len());
        let started = self.start(&mut messages).and_then(|()| self.receive_any(&mut messages));
        // Ended even if starting failed, so that the thread does not stay in a group.
        let ended = {
            let limits = self.transfers.iter().map(|(comm, _)| comm.deadline);
            let limits = limits.chain(self.calls.iter().map(|(comm, _)| comm.deadline)).flatten();
            let _limited = Limited::to(limits.min());
            open.end(&started)
        };
        let outcome = wait_all(&messages).and(started).and(ended);
        open.forget();
        outcome?;
        let on_host = |(comm, _): &&(&Comm, Call<'_>)| !comm.backend.is_stream_ordered();
        self.calls.iter().filter(on_host).try_for_each(|(comm, call)| comm.run_call(call))?;
        self.packed.iter().for_each(|(together, packed)| together.unpack(packed));
        Ok(())
    }

    #[cfg(feature = "_gpu")]
    pub(crate) fn calls(&self) -> impl Iterator<Item = &Call<'env>> {
        self.calls.iter().map(|(_, call)| call)
    }

    #[cfg(feature = "_gpu")]
    pub(crate) fn transfers(&self) -> impl Iterator<Item = &Transfer> {
        self.transfers.iter().map(|(_, transfer)| transfer)
    }

    /// The registrations of the operations' buffers, in the order of the calls.
    #[cfg(feature = "_gpu")]
    pub(crate) fn registrations(&self) -> impl Iterator<Item = Option<NonZeroU64>> {
        self.loans.iter().map(Loan::registration)
    }

    /// The same operations on other memory: `place` gives memory of so many bytes, `footprint` the lengths of a call's `send`
    /// and `recv` in bytes. What a norm reads stays where it is.
    #[cfg(feature = "_gpu")]
    pub(crate) fn elsewhere(
        &self,
        footprint: impl Fn(&Call<'env>) -> [usize; 2],
        mut place: impl FnMut(usize) -> *mut u8,
    ) -> Group<'env> {
        let mut moved = Group::new();
        moved.calls.extend(self.calls.iter().map(|(comm, call)| {
            let [send, recv] = footprint(call);
            #[cfg_attr(not(feature = "nccl"), expect(unused_mut))]
            let mut moved = Call { send: place(send), recv: place(recv), ..*call };
            #[cfg(feature = "nccl")]
            if let Some(norm) = &mut moved.norm {
                let [residual, scales] = norm.lens(call.dtype, call.blocks.longest());
                (norm.residual, norm.scales) = (place(residual) as u64, place(scales) as u64);
            }
            (*comm, moved)
        }));
        moved.transfers.extend(self.transfers.iter().map(|(comm, transfer)| {
            let start = place(transfer.count * transfer.dtype.size());
            let direction = match transfer.direction {
                Direction::Send(_) => Direction::Send(start),
                Direction::Recv(_) => Direction::Recv(start),
            };
            (*comm, Transfer { direction, ..*transfer })
        }));
        moved
    }

    /// Finds the messages from any rank, in order, and posts their receives.
    fn receive_any(&self, messages: &mut Vec<(&'env Comm, Posted)>) -> Result<()> {
        for any in self.any.borrow_mut().iter_mut() {
            let found = any.comm.recorder.noted(any.find(messages))?;
            let transfer = Transfer { peer: found.source, tag: found.tag, ..any.transfer };
            // SAFETY: as in `start`.
            messages.push((any.comm, unsafe { any.comm.post(transfer) }?));
            *any.from = Some(found);
        }
        Ok(())
    }

    /// Posts the messages, and enqueues the stream-ordered collectives.
    fn start(&self, messages: &mut Vec<(&'env Comm, Posted)>) -> Result<()> {
        for (comm, transfer) in &self.transfers {
            // SAFETY: the buffers are borrowed for 'env, which outlives this call, and all messages are settled
            // by `start_all`.
            messages.push((comm, unsafe { comm.post(*transfer) }?));
        }
        let queued = |(comm, _): &&(&Comm, Call<'_>)| comm.backend.is_stream_ordered();
        self.calls.iter().filter(queued).try_for_each(|(comm, call)| comm.run_call(call))
    }
}

impl AnyReceive<'_> {
    /// Waits for its message, and advances the other communicators' meanwhile: that rank may need them first.
    fn find(&self, messages: &[(&Comm, Posted)]) -> Result<Envelope> {
        let backend = &*self.comm.backend;
        let is_other = |comm: &&Comm| !std::ptr::addr_eq(&*comm.backend, backend);
        let others: Vec<&Comm> = messages.iter().map(|(comm, _)| *comm).filter(is_other).collect();
        let since = RunInstant::now();
        while !others.is_empty() && since.elapsed() < self.comm.timeout() {
            if let Some(found) = backend.try_probe(self.wanted)? {
                return Ok(found);
            }
            for other in &others {
                // The other communicator's own wait reports its error.
                let _ = other.backend.progress();
            }
            std::thread::yield_now();
        }
        // At the deadline, this finds the message or the error.
        let _limited =
            if others.is_empty() { self.comm.limited() } else { Limited::to(Some(Duration::ZERO)) };
        backend.probe(self.wanted)
    }
}

impl Comm {
    /// Starts several operations of this communicator together: [`group`](crate::group()) of one communicator.
    pub fn group<'env, R>(&'env self, f: impl FnOnce(&mut CommGroup<'_, 'env>) -> Result<R>) -> Result<R> {
        group(|group| f(&mut group.on(self)))
    }
}

impl<'env> CommGroup<'_, 'env> {
    pub(super) fn shape(&self) -> Shape {
        self.comm.shape()
    }

    pub(crate) fn comm(&self) -> &'env Comm {
        self.comm
    }

    /// Collects a checked call, and its memory until the group's end.
    pub(crate) fn push(&mut self, call: Call<'env>, loans: impl IntoIterator<Item = Loan<'env>>) {
        self.group.calls.push((self.comm, call));
        self.group.loans.extend(loans);
    }

    /// Keeps a closure until the group's end.
    pub(super) fn keep<T: Plain>(
        &mut self,
        combine: impl Fn(&T, &T) -> T + 'env,
    ) -> &'env dyn CombineInOrder {
        let kept: Arc<dyn CombineInOrder + 'env> = Arc::new(Custom::new(combine));
        let closure = Arc::as_ptr(&kept);
        self.group.closures.push(kept);
        // SAFETY: the closure is on the heap until the group is dropped, and nobody changes it. Only the group's calls, which are over
        // then, have the reference.
        unsafe { &*closure }
    }

    /// Collects a call on buffers that travel together.
    pub(super) fn push_packed(&mut self, call: Call<'env>, together: Together<'env>, packed: Vec<u8>) {
        self.group.calls.push((self.comm, call));
        self.group.packed.push((together, packed));
    }

    pub(super) fn out_of_place<S, R>(
        &mut self,
        call: Call<'env>,
        send: &'env S,
        recv: &'env mut R,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Output<Elem = S::Elem> + ?Sized,
    {
        let stream = &self.comm.stream;
        let call = call.of_types(send.dtype(), recv.output_dtype())?;
        let (send, recv) = (send.lend(stream)?, recv.lend_output(stream)?);
        let call = call.between(&send, &recv, stream).configured(stream);
        self.push(call, [send, recv]);
        Ok(())
    }

    pub(super) fn in_place<R: Target + ?Sized>(&mut self, call: Call<'env>, buf: &'env mut R) -> Result<()> {
        let stream = &self.comm.stream;
        let call = call.of_type(buf.dtype())?;
        let loan = buf.lend_mut(stream)?;
        let call = call.inside(&loan, stream, self.comm.rank()).configured(stream);
        self.push(call, [loan]);
        Ok(())
    }

    /// See [`Comm::send`]. In a group also to oneself.
    pub fn send<S: Source + ?Sized>(&mut self, buf: &'env S, peer: usize) -> Result<()> {
        self.send_tagged(buf, peer, 0)
    }

    /// See [`Comm::recv`].
    pub fn recv<R: Output + ?Sized>(&mut self, buf: &'env mut R, peer: usize) -> Result<()> {
        self.recv_tagged(buf, peer, 0)
    }

    /// See [`Comm::send_tagged`].
    pub fn send_tagged<S: Source + ?Sized>(&mut self, buf: &'env S, peer: usize, tag: u32) -> Result<()> {
        self.comm.shape().check_rank("send", "peer", peer)?;
        let stream = &self.comm.stream;
        let loan = buf.lend(stream)?;
        self.group.transfers.push((self.comm, sending(buf.dtype(), buf.len(), &loan, stream, peer, tag)));
        self.group.loans.push(loan);
        Ok(())
    }

    /// See [`Comm::recv_tagged`].
    pub fn recv_tagged<R: Output + ?Sized>(&mut self, buf: &'env mut R, peer: usize, tag: u32) -> Result<()> {
        self.comm.shape().check_rank("recv", "peer", peer)?;
        let (stream, dtype, count) = (&self.comm.stream, buf.output_dtype(), buf.output_len());
        let loan = buf.lend_output(stream)?;
        self.group.transfers.push((self.comm, receiving(dtype, count, &loan, stream, peer, tag)));
        self.group.loans.push(loan);
        Ok(())
    }

    /// See [`Comm::recv_any_tagged`]. `from` gets what is known of the message. It is found when the group's other messages are posted, and
    /// matches what none of their receives does.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
    ///     let (send, mut recv, mut from) = ([comm.rank() as u32], [0u32], None);
    ///     comm.group(|g| {
    ///         g.send(&send, (comm.rank() + 1) % 3)?;
    ///         g.recv_any_tagged(&mut recv, None, &mut from)
    ///     })?;
    ///     assert_eq!(recv[0] as usize, from.unwrap().source);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn recv_any_tagged<R: Output + ?Sized>(
        &mut self,
        buf: &'env mut R,
        tag: impl Into<Option<u32>>,
        from: &'env mut Option<Envelope>,
    ) -> Result<()> {
        let wanted = Wanted { source: None, tag: tag.into() };
        // A backend that cannot look for messages says so before anything is started.
        self.comm.backend.try_probe(wanted)?;
        let (stream, dtype, count) = (&self.comm.stream, buf.output_dtype(), buf.output_len());
        let loan = buf.lend_output(stream)?;
        let transfer = receiving(dtype, count, &loan, stream, 0, 0);
        self.group.any.get_mut().push(AnyReceive { comm: self.comm, wanted, transfer, from });
        self.group.loans.push(loan);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BackendKind;
    use std::time::Duration;

    #[test]
    fn a_views_deadline_is_for_its_own_operations() {
        let (short, late) = (Duration::from_millis(1), Duration::from_millis(200));
        let of_threads = Comm::builder().backend(BackendKind::Host).run(2, |comm| {
            let view = comm.within(short);
            let mut received = [0u8];
            if comm.rank() == 1 {
                comm.recv_tagged(&mut received, 0, 1)?;
                std::thread::sleep(late);
                return comm.send(&[7u8], 0);
            }
            group(|g| {
                g.on(&view).send_tagged(&[1u8], 1, 1)?;
                g.on(&comm).recv(&mut received, 1)
            })
        });
        for outcome in of_threads.unwrap() {
            outcome.unwrap();
        }
    }
}
