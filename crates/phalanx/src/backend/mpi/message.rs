//! Sends and receives: MPI's non-blocking calls, asked again and again.
//!
//! A wait ends when MPI has let go of the buffer, or with the job: also after another operation has failed, since the
//! caller frees the buffer afterwards.

use super::{Failure, MpiComm, check};
use crate::backend::host::Record;
use crate::backend::{Blocks, Call, Direction, Operation, Ticket, Transfer};
use crate::error::{Error, MismatchError, Result};
use crate::sync::lock;
use phalanx_sys::mpi::{Handle, Status};
use std::ffi::c_int;
use std::time::Instant;

/// How often a waiting rank asks before it lets other threads have the core.
pub(super) const SPINS: u32 = 200;

/// The messages of a communicator that are under way, or done and not asked for.
#[derive(Default)]
pub(super) struct Messages {
    /// By ticket.
    posted: Vec<Option<Posted>>,
    free: Vec<usize>,
    /// For each peer, how many were sent to it and received from it so far.
    counts: Vec<[u64; 2]>,
}

struct Posted {
    transfer: Transfer,
    /// Its number among the messages to or from that peer.
    sequence: u64,
    /// A long message has more than one piece.
    first: Piece,
    rest: Vec<Piece>,
    outcome: Result<()>,
}

struct Piece {
    request: Handle,
    /// Bytes.
    count: c_int,
    done: bool,
}

impl Posted {
    fn pieces(&mut self) -> impl Iterator<Item = &mut Piece> {
        std::iter::once(&mut self.first).chain(&mut self.rest)
    }

    fn is_done(&self) -> bool {
        self.first.done && self.rest.iter().all(|piece| piece.done)
    }

    fn record(&self) -> Record {
        let operation = operation(&self.transfer);
        let Transfer { peer: root, dtype, count, .. } = self.transfer;
        Record::of(&Call { root, dtype, blocks: Blocks::Equal(count), ..Call::empty(operation) })
    }
}

fn operation(transfer: &Transfer) -> Operation {
    match transfer.direction {
        Direction::Send(_) => Operation::Send,
        Direction::Recv(_) => Operation::Recv,
    }
}

impl Messages {
    fn add(&mut self, posted: Posted) -> Ticket {
        match self.free.pop() {
            Some(index) => {
                self.posted[index] = Some(posted);
                Ticket(index)
            }
            None => {
                self.posted.push(Some(posted));
                Ticket(self.posted.len() - 1)
            }
        }
    }

    fn take(&mut self, ticket: Ticket) -> Posted {
        self.free.push(ticket.0);
        self.posted[ticket.0].take().expect("a ticket is asked for until it is done, and not again")
    }

    fn next_sequence(&mut self, transfer: &Transfer, ranks: usize) -> u64 {
        self.counts.resize(ranks, [0; 2]);
        let count = &mut self.counts[transfer.peer][usize::from(operation(transfer) == Operation::Recv)];
        *count += 1;
        *count
    }
}

impl MpiComm {
    /// # Safety
    /// As for [`Backend::post`](crate::backend::Backend::post).
    pub(super) unsafe fn post_message(&self, transfer: Transfer) -> Result<Ticket> {
        if transfer.tag > self.process.max_tag {
            return Err(Error::Unsupported {
                what: format!("the tag {}", transfer.tag),
                why: format!("the largest tag of this MPI is {} (MPI_TAG_UB)", self.process.max_tag),
                remedy: "use smaller tags: every MPI has those up to 32766".into(),
            });
        }
        let (bytes, most) = (transfer.count * transfer.dtype.size(), self.process.max_bytes);
        let mut messages = lock(&self.messages);
        let sequence = messages.next_sequence(&transfer, self.ranks);
        // SAFETY: the caller's contract; a message without elements has one piece, which is empty.
        let first = unsafe { self.post_piece(&transfer, 0, bytes.min(most)) };
        let failed = |failure| {
            let record = Record::of(&Call { root: transfer.peer, ..Call::empty(operation(&transfer)) });
            self.failure(failure, &record, sequence)
        };
        let first = first.map_err(failed)?;
        let mut posted = Posted { transfer, sequence, first, rest: Vec::new(), outcome: Ok(()) };
        let mut start = most;
        while start < bytes {
            // SAFETY: the caller's contract.
            match unsafe { self.post_piece(&transfer, start, most.min(bytes - start)) } {
                Ok(piece) => posted.rest.push(piece),
                Err(failure) => {
                    // What was posted is still in MPI's hands: the wait for the ticket answers the error.
                    posted.outcome = Err(self.failure(failure, &posted.record(), sequence));
                    break;
                }
            }
            start += most;
        }
        Ok(messages.add(posted))
    }

    /// As bytes: MPICH ends the job when a message does not have whole elements of the receive's type.
    ///
    /// # Safety
    /// As for [`Backend::post`](crate::backend::Backend::post), for these bytes.
    unsafe fn post_piece(
        &self,
        transfer: &Transfer,
        start: usize,
        bytes: usize,
    ) -> std::result::Result<Piece, Failure> {
        let f = &self.process.mpi.functions;
        let byte = self.process.mpi.constants.byte;
        let (peer, tag, count) = (transfer.peer as c_int, transfer.tag as c_int, bytes as c_int);
        let mut request = Handle::ZERO;
        // SAFETY: the memory is valid and stays so until MPI has let go of it, by the caller's contract.
        unsafe {
            match transfer.direction {
                Direction::Send(buffer) => {
                    let buffer = buffer.add(start).cast();
                    let posted = (f.isend)(buffer, count, byte, peer, tag, self.comm, &raw mut request);
                    check("MPI_Isend", posted)?;
                }
                Direction::Recv(buffer) => {
                    let buffer = buffer.add(start).cast();
                    let posted = (f.irecv)(buffer, count, byte, peer, tag, self.comm, &raw mut request);
                    check("MPI_Irecv", posted)?;
                }
            }
        }
        Ok(Piece { request, count, done: false })
    }

    pub(super) fn wait_for_message(&self, ticket: Ticket, meanwhile: &dyn Fn()) -> Result<()> {
        let mut polls = 0u32;
        let mut since = None;
        loop {
            if let Err(error) = self.process.check_thread() {
                self.guard.end_job(&format!("{error}; a message is under way, and its buffer is in use"));
            }
            if let Some(outcome) = self.take_if_done(ticket) {
                return outcome;
            }
            meanwhile();
            polls = polls.wrapping_add(1);
            if polls < SPINS {
                std::hint::spin_loop();
                continue;
            }
            std::thread::yield_now();
            let since = *since.get_or_insert_with(Instant::now);
            if polls.is_multiple_of(64) && since.elapsed() >= self.guard.timeout() {
                let posted = lock(&self.messages).take(ticket);
                self.guard.give_up(posted.record().to_string(), posted.sequence, since.elapsed());
            }
        }
    }

    pub(super) fn test_message(&self, ticket: Ticket) -> Result<bool> {
        if self.process.check_thread().is_err() {
            return Ok(false);
        }
        self.take_if_done(ticket).map_or(Ok(false), |outcome| outcome.map(|()| true))
    }

    pub(super) fn progress_messages(&self) -> Result<bool> {
        if self.process.check_thread().is_err() {
            return Ok(false);
        }
        let mut under_way = false;
        for posted in lock(&self.messages).posted.iter_mut().flatten() {
            self.advance(posted);
            under_way |= !posted.is_done();
        }
        Ok(under_way)
    }

    /// A message's outcome, if MPI has let go of its buffer.
    fn take_if_done(&self, ticket: Ticket) -> Option<Result<()>> {
        let mut messages = lock(&self.messages);
        let posted = messages.posted[ticket.0].as_mut()?;
        self.advance(posted);
        posted.is_done().then(|| messages.take(ticket).outcome)
    }

    /// Asks MPI for the pieces that are not done.
    fn advance(&self, posted: &mut Posted) {
        let f = &self.process.mpi.functions;
        let receives = matches!(posted.transfer.direction, Direction::Recv(_));
        let byte = self.process.mpi.constants.byte;
        let mut wrong = None;
        for piece in posted.pieces().filter(|piece| !piece.done) {
            let (mut done, mut status, mut count) = (0, Status::new(), piece.count);
            // SAFETY: a request that is not complete; no other thread asks for it, since the messages are locked. The
            // status of one that is complete tells how much came.
            let result = unsafe {
                let tested = (f.test)(&raw mut piece.request, &raw mut done, &raw mut status);
                if tested == 0 && done != 0 && receives {
                    (f.get_count)(&raw const status, byte, &raw mut count);
                }
                check("MPI_Test", tested)
            };
            piece.done = done != 0 || result.is_err();
            if let Err(failure) = result {
                wrong = Some(Err(failure));
            } else if count != piece.count {
                wrong = Some(Ok(count));
            }
            if !piece.done {
                break;
            }
        }
        if let Some(wrong) = wrong {
            posted.outcome = Err(self.wrong_message(posted, wrong));
        }
    }

    /// The error for a message that MPI refused, or that has another length than its receive expects.
    #[cold]
    fn wrong_message(&self, posted: &Posted, wrong: std::result::Result<c_int, Failure>) -> Error {
        let Transfer { dtype, count, peer, .. } = posted.transfer;
        let came = match wrong {
            Ok(came) if came as usize % dtype.size() == 0 => {
                format!("{dtype} × {}", came as usize / dtype.size())
            }
            Ok(came) => format!("{came} bytes"),
            Err(failure) if self.is_truncation(failure) => format!("more than {dtype} × {count}"),
            Err(failure) => return self.failure(failure, &posted.record(), posted.sequence),
        };
        let own = (self.rank, posted.record().to_string());
        let theirs = (peer, format!("send({came}, to rank {})", self.rank));
        let (lower, higher) = if self.rank < peer { (own, theirs) } else { (theirs, own) };
        self.fail(
            MismatchError {
                rank: higher.0,
                theirs: higher.1,
                other_rank: lower.0,
                ours: lower.1,
                sequence: posted.sequence,
            }
            .into(),
        )
    }

    fn is_truncation(&self, failure: Failure) -> bool {
        let mut class = 0;
        // SAFETY: may be called at any time, with a variable for the answer.
        unsafe { (self.process.mpi.functions.error_class)(failure.code, &raw mut class) };
        class == self.process.mpi.constants.err_truncate
    }
}
