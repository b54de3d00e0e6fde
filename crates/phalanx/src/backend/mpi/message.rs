//! Sends and receives: MPI's non-blocking calls, polled until they are complete.
//!
//! A receive is not posted to MPI. Its message is probed for and then received, since Open MPI writes past
//! the end of the buffer when a message is longer than its receive. So a length mismatch is only an error,
//! and a receive without a message can be given up. A buffer that MPI uses cannot: a wait ends when MPI has
//! released it, or with the job.

#[cfg(feature = "cuda")]
use super::cuda;
use super::message_table::{MpiMessages, MpiTransfer, PartialReceive, TransferProgress};
use super::{MpiComm, MpiFailure, check};
use crate::contract::{Call, Direction, Envelope, Operation, OperationId, Transfer, Wanted};
use crate::control::record::CallRecord;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, MismatchError, MissingRank, Result, TimeoutError, UnsupportedError};
#[cfg(feature = "cuda")]
use crate::types::memory::Space;
use phalanx_sys::mpi::{Handle, Status};
use std::cell::Cell;
use std::ffi::c_int;
use std::time::Duration;

/// Polls of a waiting rank before it yields the core.
pub(crate) const SPINS: u32 = 200;

impl MpiComm {
    /// # Safety
    /// As for [`Backend::post`](crate::contract::Backend::post).
    pub(crate) unsafe fn post_message(&self, transfer: Transfer) -> Result<OperationId> {
        if transfer.tag > self.process.max_tag {
            return Err(Error::from(UnsupportedError {
                what: format!("the tag {}", transfer.tag),
                why: format!("the largest tag of this MPI is {} (MPI_TAG_UB)", self.process.max_tag),
                remedy: "use smaller tags: every MPI has those up to 32766".into(),
            }));
        }
        // SAFETY: the caller's contract.
        Ok(unsafe { self.post_transfer(transfer) })
    }

    /// Posts a message with any tag. Errors of MPI are reported by the wait.
    ///
    /// # Safety
    /// As for [`Backend::post`](crate::contract::Backend::post).
    pub(crate) unsafe fn post_transfer(&self, transfer: Transfer) -> OperationId {
        let mut messages = lock(&self.messages);
        let sequence = messages.next_sequence(&transfer, self.ranks);
        let mut posted = MpiTransfer {
            transfer,
            sequence,
            progress: TransferProgress::Recv(PartialReceive::default()),
            outcome: Ok(()),
        };
        if let Direction::Send(buffer) = transfer.direction {
            let (mut first, mut rest) = (None, Vec::new());
            for (start, len) in self.pieces(transfer.count * transfer.dtype.size()) {
                // SAFETY: the piece is a part of the buffer, which is valid until MPI has let go of it.
                match unsafe { self.send_piece(buffer.wrapping_add(start), len, &transfer) } {
                    Ok(request) if first.is_none() => first = Some(request),
                    Ok(request) => rest.push(request),
                    Err(failure) => {
                        posted.outcome = Err(self.failure(failure, &posted.record(), sequence));
                        break;
                    }
                }
            }
            posted.progress = TransferProgress::Send { first, rest };
        }
        messages.add(posted)
    }

    /// Cuts `bytes` into pieces that one MPI call takes: offset and length. No bytes are one piece, too.
    fn pieces(&self, bytes: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let most = self.process.max_bytes;
        (0..bytes.max(1)).step_by(most).map(move |offset| (offset, most.min(bytes - offset)))
    }

    /// # Safety
    /// So many bytes can be read until the request is complete.
    unsafe fn send_piece(
        &self,
        buffer: *const u8,
        len: usize,
        transfer: &Transfer,
    ) -> std::result::Result<Handle, MpiFailure> {
        let mpi = &self.process.mpi;
        let (peer, tag, byte) = (transfer.peer as c_int, transfer.tag as c_int, mpi.constants.byte);
        let mut request = Handle::ZERO;
        // SAFETY: the caller's contract.
        check("MPI_Isend", unsafe {
            let buffer = buffer.cast();
            (mpi.functions.isend)(buffer, len as c_int, byte, peer, tag, self.comm, &raw mut request)
        })?;
        Ok(request)
    }

    pub(crate) fn wait_for_message(&self, id: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        let others = || {
            // The peer may wait for another operation of this rank first.
            self.progress_all();
            meanwhile();
        };
        let overdue = |waited| {
            let posted = lock(&self.messages).take(id);
            Err(self.overdue(&posted, waited))
        };
        self.poll(|| self.take_if_done(id), others, overdue)
    }

    /// Whether posted messages are incomplete, as of the last poll.
    pub(crate) fn has_messages(&self) -> bool {
        lock(&self.messages).posted.iter().flatten().any(|posted| !posted.is_done())
    }

    /// Waits until all messages are complete. Their outcomes stay for their own waits.
    pub(crate) fn finish_messages(&self) -> Result<()> {
        let outcome = || {
            let under_way = self.progress_messages();
            let failed = self.failed.get().filter(|_| under_way);
            failed.map(|error| Err(error.clone())).or((!under_way).then_some(Ok(())))
        };
        let overdue = |waited| {
            let messages = lock(&self.messages);
            let posted = messages.posted.iter().flatten().find(|posted| !posted.is_done());
            posted.map_or(Ok(()), |posted| Err(self.overdue(posted, waited)))
        };
        let others = || {
            self.progress_all();
        };
        self.poll(outcome, others, overdue)
    }

    /// A message that has come and that no posted receive is for.
    pub(crate) fn probe_now(&self, wanted: Wanted) -> Result<Option<Envelope>> {
        self.progress_all();
        if let Some(error) = self.failed.get() {
            return Err(error.clone());
        }
        let messages = lock(&self.messages);
        match self.look(wanted) {
            Ok(Some(found)) if found.bytes == self.process.max_bytes => Err(Error::from(UnsupportedError {
                what: "probing for a message longer than one MPI message".into(),
                why: format!(
                    "it comes in pieces of {} bytes, and its length is not known before",
                    found.bytes
                ),
                remedy: "send its length in a message before".into(),
            })),
            // A block of a collective.
            Ok(Some(found)) if found.tag > self.process.max_tag => Ok(None),
            // It belongs to a receive that has not taken it yet.
            Ok(Some(found)) if messages.expects(found.source, found.tag) => Ok(None),
            Ok(found) => Ok(found),
            Err(failure) => {
                let record = CallRecord::of(&Call::empty(Operation::Recv));
                Err(self.failure(failure, &record, 0))
            }
        }
    }

    /// Waits for such a message.
    pub(crate) fn wait_for_probe(&self, wanted: Wanted) -> Result<Envelope> {
        let found = Cell::new(None);
        let outcome = || {
            self.probe_now(wanted).map(|now| {
                found.set(now);
                now.is_some()
            })
        };
        let overdue = |waited| {
            let ranks = wanted.source.map_or(0..self.ranks, |source| source..source + 1);
            let last_seen = "its message has not come";
            let missing = ranks
                .filter(|rank| *rank != self.rank)
                .map(|rank| MissingRank { rank, last_seen: last_seen.into() });
            let from = wanted.source.map_or("from any rank".into(), |source| format!("from rank {source}"));
            let (operation, reporter) = (self.watch.named(format_args!("recv({from})")), self.rank);
            let missing = missing.collect();
            Err(self.fail(TimeoutError { operation, sequence: 0, reporter, waited, missing }.into()))
        };
        let poll = || match outcome() {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(error) => Some(Err(error)),
        };
        self.poll(poll, || (), overdue)?;
        Ok(found.get().expect("waited for"))
    }

    /// Asks MPI for a message; its length is that of its first piece.
    fn look(&self, wanted: Wanted) -> std::result::Result<Option<Envelope>, MpiFailure> {
        let (f, constants) = (&self.process.mpi.functions, &self.process.mpi.constants);
        let source = wanted.source.map_or(constants.any_source, |source| source as c_int);
        let tag = wanted.tag.map_or(constants.any_tag, |tag| tag as c_int);
        let (mut there, mut len, mut status) = (0, 0, Status::new());
        // SAFETY: the communicator is alive; the variables take the answers.
        unsafe {
            check("MPI_Iprobe", (f.iprobe)(source, tag, self.comm, &raw mut there, &raw mut status))?;
            if there == 0 {
                return Ok(None);
            }
            check("MPI_Get_count", (f.get_count)(&raw const status, constants.byte, &raw mut len))?;
        }
        let (source, tag) = (status.source(constants.status_source), status.tag(constants.status_source));
        Ok(Some(Envelope { source: source as usize, tag: tag as u32, bytes: len.max(0) as usize }))
    }

    /// Polls for an outcome and advances `others`. Gives up when nothing has progressed for the deadline.
    pub(crate) fn poll(
        &self,
        outcome: impl Fn() -> Option<Result<()>>,
        others: impl Fn(),
        overdue: impl Fn(Duration) -> Result<()>,
    ) -> Result<()> {
        let mut polls = 0u32;
        let mut progress_count = self.watch.progress_count();
        let mut since = None;
        loop {
            if let Err(error) = self.process.check_thread() {
                self.watch.end_job(&format!("{error}; an operation is under way, and its buffer is in use"));
            }
            if let Some(outcome) = outcome() {
                return outcome;
            }
            others();
            polls = polls.wrapping_add(1);
            if polls < SPINS {
                std::hint::spin_loop();
                continue;
            }
            std::thread::yield_now();
            if !polls.is_multiple_of(64) {
                continue;
            }
            let now = self.watch.progress_count();
            if now != progress_count {
                (progress_count, since) = (now, None);
            }
            let since: RunInstant = *since.get_or_insert_with(RunInstant::now);
            if since.elapsed() >= self.watch.deadline() {
                return overdue(since.elapsed());
            }
        }
    }

    /// The error for a message past its deadline. Ends the job if MPI still uses the buffer.
    #[cold]
    fn overdue(&self, posted: &MpiTransfer, waited: Duration) -> Error {
        let (record, sequence) = (posted.record(), posted.sequence);
        if posted.is_held() {
            self.watch.give_up(&record.to_string(), sequence, waited, "");
        }
        let operation = self.watch.named(record);
        let rank = posted.transfer.peer;
        let missing = vec![MissingRank { rank, last_seen: "its message has not come".into() }];
        self.fail(TimeoutError { operation, sequence, reporter: self.rank, waited, missing }.into())
    }

    pub(crate) fn test_message(&self, id: OperationId) -> Result<bool> {
        if self.process.check_thread().is_err() {
            return Ok(false);
        }
        self.take_if_done(id).map_or(Ok(false), |outcome| outcome.map(|()| true))
    }

    /// Advances all collectives and messages; `true` if any is under way.
    pub(crate) fn progress_all(&self) -> bool {
        self.process.check_thread().is_ok() && (self.progress_collectives() | self.progress_messages())
    }

    pub(crate) fn progress_messages(&self) -> bool {
        let mut messages = lock(&self.messages);
        let mut under_way = false;
        for index in 0..messages.posted.len() {
            if messages.posted[index].is_some() {
                self.advance(&mut messages, index);
                under_way |= !messages.get(index).is_done();
            }
        }
        under_way
    }

    /// Takes a message's outcome if it is complete, or if the communicator has failed and MPI does not use
    /// its buffer.
    pub(crate) fn take_if_done(&self, id: OperationId) -> Option<Result<()>> {
        let mut messages = lock(&self.messages);
        self.advance(&mut messages, id.0);
        let posted = messages.get(id.0);
        if posted.is_done() {
            return Some(messages.take(id).outcome);
        }
        let failed = self.failed.get().filter(|_| !posted.is_held())?;
        messages.take(id);
        Some(Err(failed.clone()))
    }

    /// Advances a message as far as it can without waiting.
    fn advance(&self, messages: &mut MpiMessages, index: usize) {
        let posted = messages.get(index);
        #[cfg(feature = "cuda")]
        if posted.transfer.space == Space::Device {
            self.admission.enter();
        }
        let result = match &mut posted.progress {
            TransferProgress::Send { first, rest } => self.advance_send(first, rest),
            TransferProgress::Recv(_) => self.advance_receive(messages, index),
        };
        if let Err(failure) = result {
            let posted = messages.get(index);
            posted.outcome = Err(self.failure(failure, &posted.record(), posted.sequence));
        }
    }

    fn advance_send(
        &self,
        first: &mut Option<Handle>,
        rest: &mut Vec<Handle>,
    ) -> std::result::Result<(), MpiFailure> {
        let mut outcome = Ok(());
        let mut is_pending = |request: &mut Handle| match self.test_request(request) {
            Ok(done) => !done,
            Err(failure) => {
                outcome = Err(failure);
                false
            }
        };
        if first.as_mut().is_some_and(|request| !is_pending(request)) {
            *first = None;
        }
        rest.retain_mut(is_pending);
        outcome
    }

    /// Tests a request. A complete one is freed by this.
    pub(crate) fn test_request(&self, request: &mut Handle) -> std::result::Result<bool, MpiFailure> {
        let (mut done, mut status) = (0, Status::new());
        // SAFETY: a request that is not complete; no other thread asks for it, since what it belongs to is
        // locked.
        let tested = unsafe { (self.process.mpi.functions.test)(request, &raw mut done, &raw mut status) };
        check("MPI_Test", tested).map(|()| done != 0)
    }

    fn advance_receive(
        &self,
        messages: &mut MpiMessages,
        index: usize,
    ) -> std::result::Result<(), MpiFailure> {
        loop {
            let posted = messages.get(index);
            let transfer = posted.transfer;
            let TransferProgress::Recv(receive) = &mut posted.progress else { unreachable!("a receive") };
            if let Some((request, len)) = &mut receive.piece {
                let (done, len) = (self.test_request(request), *len);
                if !done? {
                    return Ok(());
                }
                receive.piece = None;
                #[cfg(feature = "cuda")]
                if posted.outcome.is_ok() && len > 0 && transfer.space == Space::Device {
                    let Direction::Recv(buffer) = transfer.direction else { unreachable!("a receive") };
                    let target = buffer.wrapping_add(receive.received);
                    posted.outcome = if self.receives_aside(&transfer) {
                        // SAFETY: the rest of the buffer has room for the piece, whose length was right.
                        unsafe { cuda::upload(&receive.aside, target) }
                    } else {
                        cuda::settle_copies()
                    };
                }
                receive.received += len;
            }
            if receive.complete || !messages.is_next(index, &transfer) {
                return Ok(());
            }
            let Some((message, len)) = self.probe(&transfer)? else { return Ok(()) };
            self.receive_piece(messages.get(index), message, len)?;
            if let TransferProgress::Recv(PartialReceive { complete: true, .. }) =
                messages.get(index).progress
            {
                // The next message of this tag belongs to another receive.
                messages.peers[transfer.peer].expected.retain(|expected| *expected != index);
            }
        }
    }

    /// Probes for the next message of the transfer's peer and tag: its handle, and its length in bytes.
    fn probe(&self, transfer: &Transfer) -> std::result::Result<Option<(Handle, usize)>, MpiFailure> {
        let (f, constants) = (&self.process.mpi.functions, &self.process.mpi.constants);
        let (peer, tag) = (transfer.peer as c_int, transfer.tag as c_int);
        let (mut there, mut len) = (0, 0);
        let (mut message, mut status) = (Handle::ZERO, Status::new());
        // SAFETY: the communicator is alive; the variables take the answers.
        unsafe {
            let probed = (f.improbe)(peer, tag, self.comm, &raw mut there, &raw mut message, &raw mut status);
            check("MPI_Improbe", probed)?;
            if there == 0 {
                return Ok(None);
            }
            check("MPI_Get_count", (f.get_count)(&raw const status, constants.byte, &raw mut len))?;
        }
        Ok(Some((message, len.max(0) as usize)))
    }

    /// Receives a probed message: into its buffer, or into memory aside if its length is wrong.
    fn receive_piece(
        &self,
        posted: &mut MpiTransfer,
        mut message: Handle,
        len: usize,
    ) -> std::result::Result<(), MpiFailure> {
        let (mpi, transfer) = (&self.process.mpi, posted.transfer);
        let Direction::Recv(buffer) = transfer.direction else { unreachable!("a receive") };
        let TransferProgress::Recv(receive) = &mut posted.progress else { unreachable!("a receive") };
        let missing = transfer.count * transfer.dtype.size() - receive.received;
        let is_right = len == missing.min(self.process.max_bytes);
        #[cfg(feature = "cuda")]
        let is_aside = !is_right || self.receives_aside(&transfer);
        #[cfg(not(feature = "cuda"))]
        let is_aside = !is_right;
        let target = if is_aside {
            receive.aside = vec![0; len];
            receive.aside.as_mut_ptr()
        } else {
            buffer.wrapping_add(receive.received)
        };
        receive.complete = !is_right || len == missing;
        let mut request = Handle::ZERO;
        // SAFETY: the target has room for the message: the rest of the buffer, by the contract of
        // `Backend::post`, or memory that lives as long as the request.
        check("MPI_Imrecv", unsafe {
            let (target, byte) = (target.cast(), mpi.constants.byte);
            (mpi.functions.imrecv)(target, len as c_int, byte, &raw mut message, &raw mut request)
        })?;
        receive.piece = Some((request, len));
        if !is_right {
            let came = receive.received + len;
            posted.outcome = Err(self.wrong_length(posted, came));
        }
        Ok(())
    }

    /// The error for a message that has another length than its receive expects.
    #[cold]
    fn wrong_length(&self, posted: &MpiTransfer, came: usize) -> Error {
        let Transfer { dtype, peer, .. } = posted.transfer;
        let came = match came.is_multiple_of(dtype.size()) {
            true => format!("{dtype} × {}", came / dtype.size()),
            false => format!("{came} bytes"),
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
}
