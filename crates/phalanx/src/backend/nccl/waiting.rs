//! Waits for the library, for streams and for other ranks, with the deadline and a watch on the peers.

use super::communicator::{Communicator, LockedLibrary};
#[cfg(feature = "nccl")]
use crate::contract::Operation;
use crate::control::control_channel::{AnnouncedCall, WaitGuard};
use crate::gpu::backoff::{Backoff, LOOK};
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, LibraryError, Result};
use crate::types::memory::RawStream;
use phalanx_sys::nccl::ncclResult_t;
#[cfg(feature = "nccl")]
use std::sync::Weak;
use std::time::Duration;

/// How long to look for the lost peer after the library reports a broken connection. A process that ends is found at once.
const BLAME: Duration = Duration::from_millis(2000);

/// The function that reports asynchronous errors.
pub(crate) const ASYNC_ERROR: &str = "ncclCommGetAsyncError";

/// Whether the library rejected a call's arguments and did nothing.
fn is_refusal(error: &LibraryError) -> bool {
    [ncclResult_t::InvalidArgument, ncclResult_t::InvalidUsage].iter().any(|answer| answer.0 == error.code)
}

impl Communicator {
    /// The communicator's asynchronous state.
    pub(crate) fn async_state(&self, _locked: &LockedLibrary<'_>) -> Result<ncclResult_t> {
        // SAFETY: a communicator that is there, or being made.
        unsafe { self.library.async_state(self.handle()) }
    }

    /// Waits for the end of a call that returned `ncclInProgress`.
    pub fn settle(&self, announced: &AnnouncedCall, since: RunInstant) -> Result<()> {
        let mut backoff = Backoff::since(since);
        let _waiting = self.control_channel.waiting();
        loop {
            // Who holds the lock may wait for this rank's GPU, whose work ends at the deadline.
            let state = match self.poll_library()? {
                Some(locked) => self.async_state(&locked)?,
                None => ncclResult_t::InProgress,
            };
            match state {
                ncclResult_t::Success => return Ok(()),
                ncclResult_t::InProgress => {}
                error => return Err(self.fail(self.cause(error, ASYNC_ERROR, announced))),
            }
            if backoff.pause() {
                self.look(announced, since)?;
            }
        }
    }

    /// The error for a status of the library. If the library has lost a peer, waits until that peer is known:
    /// its connection breaks before the end of its process shows.
    pub(crate) fn cause(
        &self,
        answer: ncclResult_t,
        function: &'static str,
        announced: &AnnouncedCall,
    ) -> Error {
        let error = self.library.error(answer, function);
        let since = RunInstant::now();
        while matches!(answer, ncclResult_t::RemoteError | ncclResult_t::SystemError)
            && since.elapsed() < BLAME
        {
            if let Err(failure) = self.control_channel.check_peers(announced, since) {
                return failure;
            }
            std::thread::sleep(LOOK);
        }
        error.within(self.rank, announced).fatal()
    }

    /// The error for a call that the library did not take: the failure, where the communicator has failed
    /// before or has lost a peer.
    ///
    /// A communicator whose call failed for other reasons than its arguments may be connected in part, and is
    /// to be aborted (NCCL's user guide, error handling); the others would wait for this rank.
    #[cold]
    pub(crate) fn refused(&self, error: Error, announced: &AnnouncedCall) -> Error {
        if let Err(failure) = self.check() {
            return failure;
        }
        if let Ok(lost @ ncclResult_t::RemoteError) =
            self.lock_library().and_then(|turn| self.async_state(&turn))
        {
            return self.fail(self.cause(lost, ASYNC_ERROR, announced));
        }
        match error {
            Error::Library(error) if !is_refusal(&error) => {
                self.fail(error.as_ref().clone().within(self.rank, announced).fatal())
            }
            // Another communicator of the group has failed. The peers were announced a call that never
            // starts.
            error if error.is_fatal() => self.fail(error),
            // What is wrong with the arguments is so on all ranks, where it counts as a call.
            error => error,
        }
    }

    /// [`settle`](Communicator::settle), or the error of a communicator that has failed.
    pub fn settle_unless_failed(&self, announced: &AnnouncedCall, since: RunInstant) -> Result<()> {
        self.check()?;
        self.settle(announced, since)
    }

    /// Fails the communicator if a rank is missing or the deadline has passed.
    pub(crate) fn look(&self, announced: &AnnouncedCall, since: RunInstant) -> Result<()> {
        self.control_channel.publish_awaited_rank(announced);
        self.control_channel.check_peers(announced, since).map_err(|failure| self.fail(failure))
    }

    /// Begins a wait for calls that the other ranks have to announce.
    pub(crate) fn begin_wait(&self) -> WaitGuard<'_> {
        self.control_channel.publish();
        self.control_channel.waiting()
    }

    /// Waits until this rank's operations are complete.
    pub fn sync(&self) -> Result<()> {
        self.check_owner()?;
        self.wait_for_copies()?;
        let (announced, stream, collectives, messages) = {
            let last = lock(&self.last);
            (last.announced, last.stream, last.collectives, last.messages)
        };
        let Some(announced) = announced else {
            return self.check();
        };
        self.wait_for(stream, &announced)?;
        let beside = self.streams_beside_the_last();
        beside.iter().try_for_each(|stream| self.wait_for(stream.raw(), &announced))?;
        let mut now = lock(&self.last);
        if now.collectives == collectives && now.messages == messages {
            now.announced = None;
            self.control_channel.have_signals();
        }
        self.control_channel.complete(collectives);
        Ok(())
    }

    /// Waits for copies between GPUs that are not the library's.
    fn wait_for_copies(&self) -> Result<()> {
        #[cfg(feature = "nccl")]
        {
            let copies: Vec<_> = lock(&self.copies).iter().filter_map(Weak::upgrade).collect();
            copies.iter().try_for_each(|copies| copies.sync(self))?;
        }
        Ok(())
    }

    /// Waits until `is_ready`, which takes one other rank at most, with the deadline, looking at that rank.
    #[cfg(feature = "nccl")]
    pub fn wait_for_rank(
        &self,
        operation: Operation,
        rank: usize,
        mut is_ready: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        self.check_owner()?;
        if is_ready()? {
            return Ok(());
        }
        self.check()?;
        self.wait_until(&AnnouncedCall::of_rank(self.collectives(), operation, rank), is_ready)
    }

    /// Waits until `is_ready`, with the deadline, looking at the peers of a call.
    #[cfg(feature = "nccl")]
    pub fn wait_until(
        &self,
        announced: &AnnouncedCall,
        mut is_ready: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let since = RunInstant::now();
        let mut backoff = Backoff::since(since);
        let _waiting = self.begin_wait();
        while !is_ready()? {
            if backoff.pause() {
                self.check()?;
                self.look(announced, since)?;
            }
        }
        Ok(())
    }

    /// Waits until a stream's work is complete, with the deadline, looking for errors and at the peers.
    pub fn wait_for(&self, stream: RawStream, announced: &AnnouncedCall) -> Result<()> {
        self.check()?;
        let _current = self.device.enter();
        self.device.refuse_captured(
            stream,
            "a wait",
            "end the capture before, or let nccl::Graph capture the operations",
        )?;
        let since = RunInstant::now();
        let mut backoff = Backoff::since(since);
        let _waiting = self.control_channel.waiting();
        loop {
            match self.device.is_idle(stream) {
                // Work that was aborted meanwhile, by the watchdog, leaves the stream as work that is
                // complete does.
                Ok(true) => return self.check(),
                Ok(false) => {}
                Err(error) => return Err(self.fail(error)),
            }
            if backoff.pause() {
                self.settle(announced, since)?;
                self.look(announced, since)?;
            }
        }
    }
}
