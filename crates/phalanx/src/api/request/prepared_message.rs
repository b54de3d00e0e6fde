//! [`PreparedMessage`]: messages that are checked once and sent or received many times.

use super::plan::look_at;
use crate::api::checks::same_type;
use crate::api::comm::Comm;
use crate::buffer::stream::Stream;
use crate::buffer::{Owned, Target};
use crate::contract::{Direction, Transfer};
use crate::types::error::{Result, UsageError};
use crate::watch::RecordId;

/// A message that was checked once, with its buffer, or one there and one back with their two, for [`run`](PreparedMessage::run) as often
/// as wanted. `MPI_Send_init`, `MPI_Recv_init`.
///
/// Preparing communicates nothing, and each run matches the plain call on the other rank. Runs of one message in a row have one flight
/// record, as those of a [`Prepared`](crate::Prepared) collective.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
///     let peer = 1 - comm.rank();
///     let mut exchange = comm.prepare_send_recv(vec![0u32; 3], peer, vec![0u32; 3], peer)?;
///     for step in 0..3 {
///         exchange.buffers.0.fill(10 * step + comm.rank() as u32);
///         exchange.run()?;
///         assert_eq!(exchange.buffers.1, [10 * step + peer as u32; 3]);
///     }
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct PreparedMessage<'c, B> {
    /// The buffer of the message, or those of both: `(send, recv)`. Their lengths stay as they are.
    pub buffers: B,
    comm: &'c Comm,
    look: fn(&mut B, &Stream) -> [(*const u8, usize); 2],
    messages: Messages,
    /// The record of the last run of one message.
    record: Option<RecordId>,
}

#[derive(Clone, Copy)]
enum Messages {
    One(Transfer),
    /// A receive, and a send.
    Both([Transfer; 2]),
}

impl<B> PreparedMessage<'_, B> {
    /// Sends or receives, as the plain call would.
    ///
    /// # Errors
    /// Those of the plain call; [`UsageError::Length`] if a buffer's length has changed.
    pub fn run(&mut self) -> Result<()> {
        let [first, second] = (self.look)(&mut self.buffers, &self.comm.stream);
        match &mut self.messages {
            Messages::One(transfer) => {
                place(transfer, first)?;
                let transfer = *transfer;
                // SAFETY: the buffer is this value's, which is borrowed until this returns.
                unsafe { self.comm.transfer_again(transfer, &mut self.record) }
            }
            Messages::Both([receive, send]) => {
                place(send, first)?;
                place(receive, second)?;
                // SAFETY: as above.
                unsafe { self.comm.transfer_both([*receive, *send]) }
            }
        }
    }
}

/// Sets where a message's buffer is.
#[inline(always)]
fn place(transfer: &mut Transfer, (start, len): (*const u8, usize)) -> Result<()> {
    if len != transfer.count {
        let (operation, expected) = (transfer.operation().name(), transfer.count);
        let rule = "as long as when it was prepared";
        return Err(UsageError::Length { operation, buffer: "message", actual: len, expected, rule }.into());
    }
    transfer.direction = match transfer.direction {
        Direction::Send(_) => Direction::Send(start),
        Direction::Recv(_) => Direction::Recv(start.cast_mut()),
    };
    Ok(())
}

/// # Prepared messages
///
/// Messages of the same buffers that are sent or received many times: see [`PreparedMessage`].
impl Comm {
    /// Prepares a [`send`](Comm::send).
    #[doc(alias = "MPI_Send_init")]
    pub fn prepare_send<B: Owned>(&self, buf: B, peer: usize) -> Result<PreparedMessage<'_, B>> {
        self.prepare_send_tagged(buf, peer, 0)
    }

    /// Prepares a [`recv`](Comm::recv).
    #[doc(alias = "MPI_Recv_init")]
    pub fn prepare_recv<B: Owned>(&self, buf: B, peer: usize) -> Result<PreparedMessage<'_, B>> {
        self.prepare_recv_tagged(buf, peer, 0)
    }

    /// Prepares a [`send_tagged`](Comm::send_tagged).
    pub fn prepare_send_tagged<B: Owned>(
        &self,
        buf: B,
        peer: usize,
        tag: u32,
    ) -> Result<PreparedMessage<'_, B>> {
        self.check_other("prepare_send", peer)?;
        self.prepare_message(buf, Direction::Send(std::ptr::null()), peer, tag)
    }

    /// Prepares a [`recv_tagged`](Comm::recv_tagged).
    pub fn prepare_recv_tagged<B: Owned>(
        &self,
        buf: B,
        peer: usize,
        tag: u32,
    ) -> Result<PreparedMessage<'_, B>> {
        self.shape().check_rank("prepare_recv", "peer", peer)?;
        self.prepare_message(buf, Direction::Recv(std::ptr::null_mut()), peer, tag)
    }

    fn prepare_message<B: Owned>(
        &self,
        mut buf: B,
        direction: Direction,
        peer: usize,
        tag: u32,
    ) -> Result<PreparedMessage<'_, B>> {
        // What cannot be lent is refused here.
        buf.lend_mut(&self.stream)?;
        let messages = Messages::One(Transfer::host(direction, peer, tag, buf.dtype(), buf.len()));
        let look = |buf: &mut B, stream: &Stream| [look_at(buf, stream), (std::ptr::null(), 0)];
        Ok(PreparedMessage { buffers: buf, comm: self, look, messages, record: None })
    }

    /// Prepares a [`send_recv`](Comm::send_recv).
    pub fn prepare_send_recv<S, R>(
        &self,
        send: S,
        dest: usize,
        recv: R,
        source: usize,
    ) -> Result<PreparedMessage<'_, (S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        self.prepare_send_recv_tagged(send, dest, recv, source, 0)
    }

    /// Prepares a [`send_recv_tagged`](Comm::send_recv_tagged).
    pub fn prepare_send_recv_tagged<S, R>(
        &self,
        send: S,
        dest: usize,
        mut recv: R,
        source: usize,
        tag: u32,
    ) -> Result<PreparedMessage<'_, (S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        self.shape().check_rank("prepare_send_recv", "destination", dest)?;
        self.shape().check_rank("prepare_send_recv", "source", source)?;
        let dtype = send.dtype();
        same_type("prepare_send_recv", dtype, recv.dtype())?;
        send.lend(&self.stream)?;
        recv.lend_mut(&self.stream)?;
        let (nowhere, to) = (Direction::Recv(std::ptr::null_mut()), Direction::Send(std::ptr::null()));
        let receive = Transfer::host(nowhere, source, tag, dtype, recv.len());
        let messages = Messages::Both([receive, Transfer::host(to, dest, tag, dtype, send.len())]);
        let look =
            |(send, recv): &mut (S, R), stream: &Stream| [look_at(send, stream), look_at(recv, stream)];
        Ok(PreparedMessage { buffers: (send, recv), comm: self, look, messages, record: None })
    }

    /// [`transfer`](Self::transfer) again: in the record that it had if there is none since, without reading the clock.
    ///
    /// # Safety
    /// As for `transfer`.
    #[inline]
    unsafe fn transfer_again(&self, transfer: Transfer, record: &mut Option<RecordId>) -> Result<()> {
        self.requests.make_way_for_message();
        let Some(again) = record.filter(|record| self.recorder.repeat_message(*record, &transfer)) else {
            // SAFETY: the caller's contract.
            let result = unsafe { self.transfer(transfer) };
            *record = self.recorder.last();
            return result;
        };
        // SAFETY: the caller's contract.
        self.again(again, || unsafe { self.backend.recorded_transfer(transfer, &|| ()) })
    }
}

impl<B> std::fmt::Debug for PreparedMessage<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PreparedMessage").finish_non_exhaustive()
    }
}
