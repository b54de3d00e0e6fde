//! Operations that start together: [`group`] and [`Comm::group`].
//!
//! Inside the closure operations are only collected, with their buffers borrowed until the group's end. So
//! nothing has happened yet if the closure fails or panics, and messages of a ring can be posted in any
//! order. At the end all messages are posted at once and moved along together, and then the collectives are
//! carried out in the order of their calls (`ncclGroupStart`, `ncclGroupEnd`).

use crate::backend::{Call, Transfer};
use crate::buffer::{Source, Target};
use crate::comm::Comm;
use crate::error::Result;
use crate::op::Reduction;
use crate::p2p::{receiving, sending, wait_all};
use std::marker::PhantomData;

/// Operations of several communicators that start together.
///
/// `'env` is how long the buffers are borrowed: beyond the closure, so that a buffer made inside it cannot
/// take part.
pub struct Group<'env> {
    transfers: Vec<(&'env Comm, Transfer)>,
    calls: Vec<(&'env Comm, Call<'env>)>,
    /// Invariant in `'env`, as scoped threads are; neither `Send` nor `Sync`.
    env: PhantomData<(&'env mut &'env (), *const ())>,
}

/// One communicator's part of a [`Group`].
pub struct CommGroup<'group, 'env> {
    comm: &'env Comm,
    group: &'group mut Group<'env>,
}

/// Collects operations of one or several communicators and starts them together; complete when it returns.
///
/// If the closure returns an error or panics, nothing is started.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// phalanx::run(3, |comm| -> phalanx::Result<()> {
///     let (right, left) = ((comm.rank() + 1) % 3, (comm.rank() + 2) % 3);
///     let (send, mut recv) = ([comm.rank() as u32], [0]);
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
pub fn group<'env, R>(f: impl FnOnce(&mut Group<'env>) -> Result<R>) -> Result<R> {
    let mut group = Group { transfers: Vec::new(), calls: Vec::new(), env: PhantomData };
    let result = f(&mut group)?;
    group.end()?;
    Ok(result)
}

impl<'env> Group<'env> {
    /// This communicator's part.
    pub fn on(&mut self, comm: &'env Comm) -> CommGroup<'_, 'env> {
        CommGroup { comm, group: self }
    }

    fn end(self) -> Result<()> {
        let mut messages = Vec::with_capacity(self.transfers.len());
        let mut outcome = Ok(());
        for (comm, transfer) in self.transfers {
            // SAFETY: the buffers are borrowed for 'env, which outlives this call, and all tickets are
            // settled below.
            match unsafe { comm.post(transfer) } {
                Ok(posted) => messages.push((comm, posted)),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        wait_all(&messages).and(outcome)?;
        self.calls.iter().try_for_each(|(comm, call)| comm.run_call(call))
    }
}

impl Comm {
    /// [`group`](crate::group) of this communicator's operations alone.
    pub fn group<'env, R>(&'env self, f: impl FnOnce(&mut CommGroup<'_, 'env>) -> Result<R>) -> Result<R> {
        group(|group| f(&mut group.on(self)))
    }
}

impl<'env> CommGroup<'_, 'env> {
    fn call(&mut self, call: Call<'env>) -> Result<()> {
        self.group.calls.push((self.comm, call));
        Ok(())
    }

    /// See [`Comm::send`]. In a group also to oneself.
    pub fn send<S: Source + ?Sized>(&mut self, buf: &'env S, peer: usize) -> Result<()> {
        self.send_tagged(buf, peer, 0)
    }

    /// See [`Comm::recv`].
    pub fn recv<R: Target + ?Sized>(&mut self, buf: &'env mut R, peer: usize) -> Result<()> {
        self.recv_tagged(buf, peer, 0)
    }

    /// See [`Comm::send_tagged`].
    pub fn send_tagged<S: Source + ?Sized>(&mut self, buf: &'env S, peer: usize, tag: u32) -> Result<()> {
        self.comm.shape().check_rank("send", "peer", peer)?;
        self.group.transfers.push((self.comm, sending(buf, peer, tag)));
        Ok(())
    }

    /// See [`Comm::recv_tagged`].
    pub fn recv_tagged<R: Target + ?Sized>(&mut self, buf: &'env mut R, peer: usize, tag: u32) -> Result<()> {
        self.comm.shape().check_rank("recv", "peer", peer)?;
        self.group.transfers.push((self.comm, receiving(buf, peer, tag)));
        Ok(())
    }

    /// See [`Comm::all_reduce`].
    pub fn all_reduce<S, R>(
        &mut self,
        send: &'env S,
        recv: &'env mut R,
        op: impl Into<Reduction<S::Elem>>,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.call(self.comm.shape().all_reduce(send, recv, op.into())?)
    }

    /// See [`Comm::all_reduce_in_place`].
    pub fn all_reduce_in_place<R>(
        &mut self,
        buf: &'env mut R,
        op: impl Into<Reduction<R::Elem>>,
    ) -> Result<()>
    where
        R: Target + ?Sized,
    {
        self.call(self.comm.shape().all_reduce_in_place(buf, op.into())?)
    }

    /// See [`Comm::broadcast_in_place`].
    pub fn broadcast_in_place<R: Target + ?Sized>(&mut self, buf: &'env mut R, root: usize) -> Result<()> {
        self.call(self.comm.shape().broadcast_in_place(buf, root)?)
    }

    /// See [`Comm::reduce`].
    pub fn reduce<S, R>(
        &mut self,
        send: &'env S,
        recv: &'env mut R,
        op: impl Into<Reduction<S::Elem>>,
        root: usize,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.call(self.comm.shape().reduce(send, recv, op.into(), root)?)
    }

    /// See [`Comm::all_gather`].
    pub fn all_gather<S, R>(&mut self, send: &'env S, recv: &'env mut R) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.call(self.comm.shape().all_gather(send, recv)?)
    }

    /// See [`Comm::reduce_scatter`].
    pub fn reduce_scatter<S, R>(
        &mut self,
        send: &'env S,
        recv: &'env mut R,
        op: impl Into<Reduction<S::Elem>>,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.call(self.comm.shape().reduce_scatter(send, recv, op.into())?)
    }

    /// See [`Comm::all_to_all`].
    pub fn all_to_all<S, R>(&mut self, send: &'env S, recv: &'env mut R) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
    {
        self.call(self.comm.shape().all_to_all(send, recv)?)
    }
}
