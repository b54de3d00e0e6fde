//! The methods of [`Comm`] that start a message.

use super::{Kept, MaybeDangling, MessagePair, Request, Work};
use crate::api::checks::same_type;
use crate::api::comm::Comm;
use crate::buffer::{Owned, Source, Target};
use crate::contract::{Direction, Transfer};
use crate::types::error::Result;
use crate::watch::Posted;
use std::mem::ManuallyDrop;

impl Comm {
    fn message<B: Source>(
        &self,
        operation: &'static str,
        mut buffer: MaybeDangling<B>,
        direction: Direction,
        peer: usize,
        tag: u32,
    ) -> Result<Request<B>> {
        self.shape().check_rank(operation, "peer", peer)?;
        self.requests.start_mover()?;
        let (dtype, count) = (buffer.get_mut().dtype(), buffer.get_mut().len());
        // SAFETY: the request owns the buffer and keeps it until the transfer is settled.
        let posted = unsafe { self.post(Transfer::host(direction, peer, tag, dtype, count)) };
        self.request_for(buffer, [Some(posted), None])
    }

    /// The request of messages that were posted, or failed to be. If one is under way, `wait` reports the other's error.
    fn request_for<B>(
        &self,
        buffers: MaybeDangling<B>,
        posted: [Option<Result<Posted>>; 2],
    ) -> Result<Request<B>> {
        let mut outcome = Ok(());
        let under_way = posted.map(|posted| {
            let posted = posted?.inspect(|_| self.requests.moving.request_started());
            posted.map_err(|error| outcome = Err(error)).ok()
        });
        if under_way.iter().all(Option::is_none) {
            outcome.clone()?;
        }
        Ok(Request {
            buffers: ManuallyDrop::new(buffers),
            kept: ManuallyDrop::new(MaybeDangling::new(Kept::default())),
            unpack: None,
            work: Work::Messages(MessagePair { under_way, outcome }),
            deadline: self.deadline,
            requests: self.requests.clone(),
        })
    }

    /// Starts a [`send`](Comm::send).
    #[doc(alias("MPI_Isend", "MPI_Bsend", "MPI_Rsend", "MPI_Ssend", "isend"))]
    pub fn start_send<B: Owned>(&self, buf: B, peer: usize) -> Result<Request<B>> {
        self.start_send_tagged(buf, peer, 0)
    }

    /// Starts a [`recv`](Comm::recv).
    #[doc(alias("MPI_Irecv", "irecv"))]
    pub fn start_recv<B: Owned>(&self, buf: B, peer: usize) -> Result<Request<B>> {
        self.start_recv_tagged(buf, peer, 0)
    }

    /// Starts a [`send_tagged`](Comm::send_tagged).
    pub fn start_send_tagged<B: Owned>(&self, buf: B, peer: usize, tag: u32) -> Result<Request<B>> {
        let mut buf = MaybeDangling::new(buf);
        let direction = Direction::Send(buf.get_mut().lend(&self.stream)?.span().start);
        self.message("start_send", buf, direction, peer, tag)
    }

    /// Starts a [`recv_tagged`](Comm::recv_tagged).
    pub fn start_recv_tagged<B: Owned>(&self, buf: B, peer: usize, tag: u32) -> Result<Request<B>> {
        let mut buf = MaybeDangling::new(buf);
        let direction = Direction::Recv(buf.get_mut().lend_mut(&self.stream)?.span().start);
        self.message("start_recv", buf, direction, peer, tag)
    }

    /// Starts a [`send_recv`](Comm::send_recv): both messages at once, each as long as its own buffer.
    #[doc(alias = "MPI_Isendrecv")]
    pub fn start_send_recv<S, R>(
        &self,
        send: S,
        dest: usize,
        recv: R,
        source: usize,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        self.start_send_recv_tagged(send, dest, recv, source, 0)
    }

    /// Starts a [`send_recv_tagged`](Comm::send_recv_tagged).
    pub fn start_send_recv_tagged<S, R>(
        &self,
        send: S,
        dest: usize,
        recv: R,
        source: usize,
        tag: u32,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        self.shape().check_rank("start_send_recv", "destination", dest)?;
        self.shape().check_rank("start_send_recv", "source", source)?;
        self.requests.start_mover()?;
        let mut buffers = MaybeDangling::new((send, recv));
        let (send, recv) = buffers.get_mut();
        let (dtype, sent, expected) = (send.dtype(), send.len(), recv.len());
        same_type("start_send_recv", dtype, recv.dtype())?;
        let from = Direction::Send(send.lend(&self.stream)?.span().start);
        let to = Direction::Recv(recv.lend_mut(&self.stream)?.span().start);
        let receive = Transfer::host(to, source, tag, dtype, expected);
        let send_it = Transfer::host(from, dest, tag, dtype, sent);
        // SAFETY: the request owns the buffers and keeps them until both transfers are settled.
        let posted = unsafe { self.post_both([receive, send_it]) };
        self.request_for(buffers, posted.map(Some))
    }
}
