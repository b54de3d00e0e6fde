//! Messages from one rank to another.

use super::checks::same_type;
use super::comm::Comm;
use crate::buffer::loan::Loan;
use crate::buffer::stream::Stream;
use crate::buffer::{Output, Source, Target};
use crate::contract::{Direction, Transfer};
use crate::types::dtype::DType;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::memory::{Space, Span};
use crate::watch::Posted;

/// The transfer that sends a borrowed buffer.
pub(crate) fn sending(
    dtype: DType,
    count: usize,
    loan: &Loan<'_>,
    stream: &Stream,
    peer: usize,
    tag: u32,
) -> Transfer {
    let span = loan.span();
    let direction = Direction::Send(span.start);
    Transfer { direction, peer, tag, dtype, count, space: span.space, stream: stream.raw() }
}

/// The transfer that receives into a borrowed buffer.
pub(crate) fn receiving(
    dtype: DType,
    count: usize,
    loan: &Loan<'_>,
    stream: &Stream,
    peer: usize,
    tag: u32,
) -> Transfer {
    let span = loan.span();
    let direction = Direction::Recv(span.start);
    Transfer { direction, peer, tag, dtype, count, space: span.space, stream: stream.raw() }
}

/// Waits for all messages, even if some fail; answers the first error. The other communicators' messages advance during each
/// wait: their peers may need them first.
pub(crate) fn wait_all(messages: &[(&Comm, Posted)]) -> Result<()> {
    let mut outcome = Ok(());
    for (index, (comm, posted)) in messages.iter().enumerate() {
        let others = &messages[index + 1..];
        let meanwhile = || {
            for (other, _) in others {
                // A view shares its communicator's backend, which is locked and advances its own messages.
                if !std::ptr::addr_eq(&*other.backend, &*comm.backend) {
                    // The other communicator's own wait reports its error.
                    let _ = other.backend.progress();
                }
            }
        };
        outcome = outcome.and(comm.wait(*posted, &meanwhile));
    }
    outcome
}

/// # Messages
///
/// A message matches the peer's receive with the same tag, in the order of posting. It must have the length and the type that
/// the receive expects: a difference is an error on both ranks.
///
/// - **NCCL** has no tags: programs for every backend post receives in the order of the sends. A difference is noticed in
///   [checked mode](crate::Builder::check) only; otherwise NCCL waits for missing data, or leaves a part of the buffer as it was.
/// - **Host**: short messages (up to 4 KiB) are sent before the peer receives them, at least two in each direction. `send` of a
///   longer one may wait for the receive. A message that arrives while the peer receives one with another tag is kept in heap
///   memory of its length until its receive; if there is no memory for it, the communicator fails.
impl Comm {
    /// Sends a buffer to a peer. Returns when the buffer can be used again; the peer may not have received
    /// it yet. `ncclSend`, `MPI_Send`.
    ///
    /// Two ranks that `send` to each other before they `recv` can wait for each other for ever: use
    /// [`send_recv`](Comm::send_recv) or [`group`](Comm::group).
    #[doc(alias("MPI_Send", "ncclSend"))]
    pub fn send<S: Source + ?Sized>(&self, buf: &S, peer: usize) -> Result<()> {
        self.send_tagged(buf, peer, 0)
    }

    /// Receives a buffer from a peer. `ncclRecv`, `MPI_Recv`.
    #[doc(alias("MPI_Recv", "ncclRecv"))]
    pub fn recv<R: Output + ?Sized>(&self, buf: &mut R, peer: usize) -> Result<()> {
        self.recv_tagged(buf, peer, 0)
    }

    /// [`send`](Comm::send) with a tag.
    pub fn send_tagged<S: Source + ?Sized>(&self, buf: &S, peer: usize, tag: u32) -> Result<()> {
        self.check_other("send", peer)?;
        let loan = buf.lend(&self.stream)?;
        // SAFETY: the buffer is borrowed until this returns.
        unsafe { self.transfer(sending(buf.dtype(), buf.len(), &loan, &self.stream, peer, tag)) }
    }

    /// [`recv`](Comm::recv) with a tag.
    pub fn recv_tagged<R: Output + ?Sized>(&self, buf: &mut R, peer: usize, tag: u32) -> Result<()> {
        self.shape().check_rank("recv", "peer", peer)?;
        let (dtype, count) = (buf.output_dtype(), buf.output_len());
        let loan = buf.lend_output(&self.stream)?;
        // SAFETY: the buffer is borrowed until this returns.
        unsafe { self.transfer(receiving(dtype, count, &loan, &self.stream, peer, tag)) }
    }

    /// Sends one buffer to `dest` and receives another from `source` at the same time. Lengths may differ.
    /// `MPI_Sendrecv`.
    #[doc(alias = "MPI_Sendrecv")]
    pub fn send_recv<S, R>(&self, send: &S, dest: usize, recv: &mut R, source: usize) -> Result<()>
    where
        S: Source + ?Sized,
        R: Output<Elem = S::Elem> + ?Sized,
    {
        self.send_recv_tagged(send, dest, recv, source, 0)
    }

    /// [`send_recv`](Comm::send_recv) with a tag, which both messages have.
    pub fn send_recv_tagged<S, R>(
        &self,
        send: &S,
        dest: usize,
        recv: &mut R,
        source: usize,
        tag: u32,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Output<Elem = S::Elem> + ?Sized,
    {
        self.shape().check_rank("send_recv", "destination", dest)?;
        self.shape().check_rank("send_recv", "source", source)?;
        let (dtype, count, expected) = (send.dtype(), send.len(), recv.output_len());
        same_type("send_recv", dtype, recv.output_dtype())?;
        let (send, recv) = (send.lend(&self.stream)?, recv.lend_output(&self.stream)?);
        let receive = receiving(dtype, expected, &recv, &self.stream, source, tag);
        let send = sending(dtype, count, &send, &self.stream, dest, tag);
        // SAFETY: both buffers are borrowed until this returns.
        unsafe { self.transfer_both([receive, send]) }
    }

    /// Sends a buffer to `dest`, and replaces it by a message of the same length from `source`. `MPI_Sendrecv_replace`.
    ///
    /// Host memory only. What is sent is copied first, so [`send_recv`](Comm::send_recv) of two buffers is faster.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// let shifted = phalanx::try_run(3, |comm| -> phalanx::Result<[usize; 1]> {
    ///     let (rank, ranks) = (comm.rank(), comm.world_size());
    ///     let mut token = [rank];
    ///     comm.send_recv_in_place(&mut token, (rank + 1) % ranks, (rank + ranks - 1) % ranks)?;
    ///     Ok(token)
    /// })?;
    /// assert_eq!(shifted, [[2], [0], [1]]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`] for GPU memory.
    #[doc(alias = "MPI_Sendrecv_replace")]
    pub fn send_recv_in_place<B>(&self, buf: &mut B, dest: usize, source: usize) -> Result<()>
    where
        B: Target + ?Sized,
    {
        let operation = "send_recv_in_place";
        self.shape().check_rank(operation, "destination", dest)?;
        self.shape().check_rank(operation, "source", source)?;
        let (dtype, count) = (buf.dtype(), buf.len());
        let loan = buf.lend_mut(&self.stream)?;
        let Span { start, space } = loan.span();
        if space != Space::Host {
            return Err(Error::from(UnsupportedError {
                what: format!("{operation} of GPU memory"),
                why: "what is sent is copied on the host".into(),
                remedy: "use send_recv with a second buffer".into(),
            }));
        }
        // SAFETY: a loan of host memory is the address of the buffer's elements, which are initialised and have no padding.
        let mut sent = unsafe { std::slice::from_raw_parts(start, count * dtype.size()) }.to_vec();
        let copy = Loan::host(sent.as_mut_ptr());
        let receive = receiving(dtype, count, &loan, &self.stream, source, 0);
        let send = sending(dtype, count, &copy, &self.stream, dest, 0);
        // SAFETY: the buffer is borrowed, and the copy lives, until this returns.
        unsafe { self.transfer_both([receive, send]) }
    }

    /// Refuses a plain send to oneself, which would wait for a receive that cannot come.
    pub(super) fn check_other(&self, operation: &'static str, peer: usize) -> Result<()> {
        self.shape().check_rank(operation, "peer", peer)?;
        let rank = self.rank();
        if peer == rank {
            return Err(UsageError::SelfExchange { operation, rank }.into());
        }
        Ok(())
    }
}
