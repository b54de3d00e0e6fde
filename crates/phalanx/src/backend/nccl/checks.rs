//! Checks before an operation: the calls of all ranks agree, and no thread waits for a rank that it drives
//! itself.

use super::arrival::Arrival;
use super::{NcclComm, group, parts};
use crate::contract::{Call, Operation};
use crate::control::control_channel::AnnouncedCall;
use crate::control::host_channel::HostChannel;
use crate::os::RunInstant;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::memory::Space;

impl NcclComm {
    /// Compares a call with the other ranks' before anything is enqueued. NCCL itself would hang, or return
    /// wrong data.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn compare(&self, call: &Call<'_>) -> Result<()> {
        let communicator = &self.communicator;
        communicator.check()?;
        let own = AnnouncedCall::call(communicator.collectives() + 1, call);
        communicator.control_channel.announce(&own);
        let mut all = vec![[0u64; AnnouncedCall::WORDS]; communicator.ranks];
        // SAFETY: the caller's contract.
        self.on_host_channel(&own, |channel| unsafe {
            channel.all_gather_words(&own.words(), all.as_flattened_mut())
        })?;
        communicator.control_channel.compare(&all).map_err(|mismatch| communicator.fail(mismatch))?;
        if call.operation != Operation::AllToAllV {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { self.compare_blocks(&own, call) }
    }

    /// Compares the length of each block between its sender and its receiver. Collective.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn compare_blocks(&self, own: &AnnouncedCall, call: &Call<'_>) -> Result<()> {
        let communicator = &self.communicator;
        let mut peers = Vec::new();
        for part in parts::parts(call, communicator.rank, communicator.ranks) {
            let count = part.bytes / call.dtype.size();
            let block = own.block(part.direction.operation(), (part.peer, count));
            peers.extend(communicator.expect_checked(&block, &part)?);
        }
        communicator.wait_for_arrival(&mut Arrival::Peers(peers))?;
        // Tells a rank with matching blocks about mismatches elsewhere.
        // SAFETY: the caller's contract.
        self.on_host_channel(own, |channel| unsafe { channel.collective(&Call::empty(Operation::Barrier)) })
    }

    /// Checks before a collective; carries out posted messages first.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    #[inline(always)]
    pub(crate) unsafe fn prepare(&self, call: &Call<'_>) -> Result<()> {
        if self.settings.driver.is_some() {
            self.check_driver(call.operation)?;
        }
        self.flush()?;
        // A thread that drives all ranks would wait for itself.
        let is_compared = self.settings.check && !self.is_driven_here();
        // SAFETY: the caller's contract.
        if is_compared { unsafe { self.compare(call) } } else { Ok(()) }
    }

    /// Waits until all ranks arrive at a call in which the library blocks without a deadline. An error names
    /// missing ranks.
    pub(crate) fn gather_for(&self, call: &Call<'_>) -> Result<()> {
        let communicator = &self.communicator;
        self.check_driver(call.operation)?;
        communicator.check_awake(call.operation)?;
        let (announced, _) = communicator.next_collective(call, false);
        // SAFETY: one thread at a time makes collective calls; a call without data.
        self.on_host_channel(&announced, |channel| unsafe { channel.collective(call) })
    }

    /// Whether this thread drives all ranks, so that waiting for one would be waiting for itself.
    pub(crate) fn is_driven_here(&self) -> bool {
        let is_this_thread = |driver| driver == std::thread::current().id();
        self.settings.driver.is_some_and(is_this_thread) && self.communicator.ranks > 1
    }

    /// An error for an operation in which this thread would wait for itself. In a group, all ranks'
    /// operations start together.
    #[cold]
    pub(super) fn check_driver(&self, operation: Operation) -> Result<()> {
        if !operation.is_queued_in_groups() {
            return self.refuse_driver(operation.name());
        }
        match self.is_driven_here() && !group::is_open() {
            true => Err(waits_for_itself(
                operation.name(),
                "put the operations of all ranks in one phalanx::group",
            )),
            false => Ok(()),
        }
    }

    /// An error if this thread drives all ranks, for calls that no single thread can make for all of them.
    pub fn refuse_driver(&self, what: &'static str) -> Result<()> {
        let remedy = "give each communicator to a thread of its own, or make the ranks with phalanx::run";
        if self.is_driven_here() { Err(waits_for_itself(what, remedy)) } else { Ok(()) }
    }

    /// A wait for the other ranks on the host channel. Its failure is the communicator's.
    pub(super) fn on_host_channel<'c, R>(
        &'c self,
        announced: &AnnouncedCall,
        operation: impl FnOnce(&'c dyn HostChannel) -> Result<R>,
    ) -> Result<R> {
        let since = RunInstant::now();
        operation(&*self.host_channel).map_err(|error| self.communicator.diagnose(announced, since, error))
    }
}

/// An error if a buffer is in host memory and only GPU memory will do.
pub(crate) fn check_on_device(spaces: &[Space], wanted: &str, remedy: &'static str) -> Result<()> {
    if spaces.iter().all(|space| *space == Space::Device) {
        return Ok(());
    }
    Err(UsageError::Memory { memory: "host memory".into(), wanted: wanted.into(), remedy }.into())
}

#[cold]
fn waits_for_itself(what: &str, remedy: &str) -> Error {
    Error::from(UnsupportedError {
        what: format!("{what} on the thread that called init_all"),
        why: "it waits for the other ranks, which are this thread's to drive".into(),
        remedy: remedy.into(),
    })
}
