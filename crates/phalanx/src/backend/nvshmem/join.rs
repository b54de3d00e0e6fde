//! Joining: the ranks compare their calls before they enqueue anything, and look for dead peers while they
//! wait.

use super::{NvshmemComm, device};
use crate::contract::{Call, Operation};
use crate::control::control_channel::AnnouncedCall;
use crate::control::host_channel::HostChannel;
use crate::gpu::backoff::Backoff;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, Result};
use crate::types::memory::RawStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Words that each rank gives: its call, and its [`CallProposal`].
const WORDS: usize = AnnouncedCall::WORDS + 4;

/// What a rank contributes to the choice of how an operation is carried out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CallProposal {
    /// Bytes of the longest block that the rank knows of.
    pub longest: u64,
    /// The places of its buffers, the same on every PE, if both are symmetric memory; else 0.
    pub places: [u64; 2],
    /// The factor of a pre-multiplied sum.
    pub factor: u64,
}

impl NvshmemComm {
    /// Waits until all ranks make the same call.
    pub(crate) fn join_call(&self, call: &Call<'_>) -> Result<Vec<CallProposal>> {
        self.join_call_with(call, CallProposal::default())
    }

    /// Waits until all ranks make the same call; returns their proposals in rank order.
    pub(crate) fn join_call_with(
        &self,
        call: &Call<'_>,
        proposal: CallProposal,
    ) -> Result<Vec<CallProposal>> {
        self.check()?;
        self.advance_sent()?;
        let number = self.collectives.fetch_add(1, Ordering::Relaxed) + 1;
        let own = AnnouncedCall::call(number, call);
        self.control_channel.announce(&own);
        *lock(&self.last) = Some(own);
        let mut words = [0u64; WORDS];
        words[..AnnouncedCall::WORDS].copy_from_slice(&own.words());
        words[AnnouncedCall::WORDS..].copy_from_slice(&[
            proposal.longest,
            proposal.places[0],
            proposal.places[1],
            proposal.factor,
        ]);
        let mut all = vec![[0u64; WORDS]; self.pes.len()];
        // SAFETY: one thread at a time is in a collective.
        self.on_host_channel(|channel| unsafe { channel.all_gather_words(&words, all.as_flattened_mut()) })?;
        let calls: Vec<[u64; AnnouncedCall::WORDS]> =
            all.iter().map(|words| std::array::from_fn(|n| words[n])).collect();
        self.control_channel.compare(&calls).map_err(|mismatch| self.fail(mismatch))?;
        let proposal = |words: &[u64; WORDS]| {
            let [longest, send, recv, factor] = std::array::from_fn(|n| words[AnnouncedCall::WORDS + n]);
            CallProposal { longest, places: [send, recv], factor }
        };
        Ok(all.iter().map(proposal).collect())
    }

    /// Runs a collective step on the host channel. If it fails, fails the communicator with the diagnosis.
    pub(crate) fn on_host_channel<'c, R>(
        &'c self,
        step: impl FnOnce(&'c dyn HostChannel) -> Result<R>,
    ) -> Result<R> {
        let since = RunInstant::now();
        step(&*self.host_channel).map_err(|error| self.diagnose(&self.current_call(), since, error))
    }

    /// Fails the communicator after a wait on the host channel that has failed.
    #[cold]
    pub(crate) fn diagnose(&self, call: &AnnouncedCall, since: RunInstant, error: Error) -> Error {
        if !error.is_fatal() {
            return error;
        }
        self.fail(self.control_channel.fail_after_exchange(call, since, error))
    }

    /// Waits until all ranks reach this point of an operation.
    pub(crate) fn host_barrier(&self) -> Result<()> {
        // SAFETY: one thread at a time is in a collective.
        self.on_host_channel(|channel| unsafe { channel.collective(&Call::empty(Operation::Barrier)) })
    }

    /// The call that this rank is in, as announced to the others.
    pub(crate) fn current_call(&self) -> AnnouncedCall {
        let init = || AnnouncedCall::call(0, &Call::empty(Operation::Init));
        lock(&self.last).unwrap_or_else(init)
    }

    /// Waits until a stream's work is complete.
    pub(crate) fn wait_for_stream(&self, stream: RawStream, announced: &AnnouncedCall) -> Result<()> {
        self.process.device.enter()?;
        let mut backoff = Backoff::new();
        let _waiting = self.control_channel.waiting();
        while !device::is_idle(stream).map_err(|error| self.fail(error))? {
            if backoff.pause() {
                self.check_peers(announced, backoff.since)?;
            }
        }
        self.check()
    }

    /// Announces the wait and looks for dead or missing peers. If there is one, fails.
    pub(crate) fn check_peers(&self, announced: &AnnouncedCall, since: RunInstant) -> Result<()> {
        self.control_channel.publish_awaited_rank(announced);
        self.control_channel.check_peers(announced, since).map_err(|failure| self.fail(failure))
    }

    /// Waits for this process's collectives of the library.
    pub(crate) fn wait_for_last_collective(&self) -> Result<()> {
        self.check()?;
        let Some(stream) = self.process.last() else { return Ok(()) };
        self.wait_for_stream(stream, &self.current_call())?;
        self.control_channel.complete(self.collectives.load(Ordering::Relaxed));
        self.process.is_done(stream);
        Ok(())
    }

    /// Leaves together. The last communicator, if it has all PEs, finalizes the library.
    pub(crate) fn finalize(&self, call: &Call<'_>) -> Result<()> {
        self.settle_messages();
        self.wait_for_last_collective()?;
        // A process with symmetric memory or another communicator still needs the library.
        let is_last = self.pes.len() == self.process.pes && Arc::strong_count(&self.process) == 1;
        let proposal = CallProposal { longest: u64::from(is_last), ..CallProposal::default() };
        let all = self.join_call_with(call, proposal)?;
        let _operating = lock(&self.process.operating);
        self.end_team().map_err(|error| self.fail(error))?;
        if all.iter().all(|proposal| proposal.longest == 1) {
            self.process.finalize().map_err(|error| self.fail(error))?;
        }
        Ok(())
    }
}
