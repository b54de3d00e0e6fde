//! The ranks before an operation, and while one waits: nobody enqueues what waits for a rank that has not come.

use super::{NvshmemComm, gpu};
use crate::contract::{Call, Operation};
use crate::control::control_channel::AnnouncedCall;
use crate::control::host_channel::HostChannel;
use crate::gpu::backoff::Backoff;
use crate::os::sync::lock;
use crate::types::error::Result;
use crate::types::memory::RawStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// How many words each rank tells at a meeting: what it calls, and its [`TransferCheck`].
const WORDS: usize = AnnouncedCall::WORDS + 4;

/// What a rank brings to an operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TransferCheck {
    /// Bytes of the longest block that it knows of.
    pub longest: u64,
    /// What names its buffers on every PE, if both are symmetric memory; else 0.
    pub places: [u64; 2],
    /// The factor of a pre-multiplied sum.
    pub factor: u64,
}

impl NvshmemComm {
    /// Waits until all ranks have come to the same call.
    pub(crate) fn meet(&self, call: &Call<'_>) -> Result<Vec<TransferCheck>> {
        self.meet_with(call, TransferCheck::default())
    }

    /// The same, with what each brings: in the order of the ranks.
    pub(crate) fn meet_with(&self, call: &Call<'_>, offer: TransferCheck) -> Result<Vec<TransferCheck>> {
        self.check()?;
        self.drive_what_is_left()?;
        let number = self.collectives.fetch_add(1, Ordering::Relaxed) + 1;
        let own = AnnouncedCall::call(number, call);
        self.control_channel.announce(&own);
        *lock(&self.last) = Some(own);
        let mut words = [0u64; WORDS];
        words[..AnnouncedCall::WORDS].copy_from_slice(&own.words());
        words[AnnouncedCall::WORDS..].copy_from_slice(&[
            offer.longest,
            offer.places[0],
            offer.places[1],
            offer.factor,
        ]);
        let mut all = vec![[0u64; WORDS]; self.pes.len()];
        // SAFETY: one thread at a time is in a collective.
        self.met(|control| unsafe { control.tell_all(&words, all.as_flattened_mut()) })?;
        let calls: Vec<[u64; AnnouncedCall::WORDS]> =
            all.iter().map(|words| std::array::from_fn(|n| words[n])).collect();
        self.control_channel.compare(&calls).map_err(|mismatch| self.fail(mismatch))?;
        let offer = |words: &[u64; WORDS]| {
            let [longest, send, recv, factor] = std::array::from_fn(|n| words[AnnouncedCall::WORDS + n]);
            TransferCheck { longest, places: [send, recv], factor }
        };
        Ok(all.iter().map(offer).collect())
    }

    /// What all ranks do on the control channel, and the verdict if it fails.
    pub(crate) fn met<R>(&self, meeting: impl FnOnce(&dyn HostChannel) -> Result<R>) -> Result<R> {
        let since = Instant::now();
        meeting(&*self.control).map_err(|error| {
            if !error.is_fatal() {
                return error;
            }
            self.fail(self.control_channel.judge_meeting(&self.errand(), since, error))
        })
    }

    /// Waits until all ranks have come to the same point of an operation.
    pub(crate) fn line_up(&self) -> Result<()> {
        // SAFETY: one thread at a time is in a collective.
        self.met(|control| unsafe { control.collective(&Call::empty(Operation::Barrier)) })
    }

    /// What this rank is in, as the others see it.
    pub(crate) fn errand(&self) -> AnnouncedCall {
        let init = || AnnouncedCall::call(0, &Call::empty(Operation::Init));
        lock(&self.last).unwrap_or_else(init)
    }

    /// Waits until a stream's work is complete.
    pub(crate) fn wait_for(&self, stream: RawStream, subject: &AnnouncedCall) -> Result<()> {
        self.process.device.enter()?;
        let mut patience = Backoff::new();
        let _waiting = self.control_channel.waiting();
        while !gpu::is_idle(stream).map_err(|error| self.fail(error))? {
            if patience.pause() {
                self.look(subject, patience.since)?;
            }
        }
        self.check()
    }

    /// Looks for a reason to give up; if there is one, fails.
    pub(crate) fn look(&self, subject: &AnnouncedCall, since: Instant) -> Result<()> {
        self.control_channel.tell_wait(subject);
        self.control_channel.look(subject, since).map_err(|verdict| self.fail(verdict))
    }

    /// Waits for the library's collectives of this process.
    pub(crate) fn wait_for_last(&self) -> Result<()> {
        self.check()?;
        let Some(stream) = self.process.last() else { return Ok(()) };
        self.wait_for(stream, &self.errand())?;
        self.control_channel.complete(self.collectives.load(Ordering::Relaxed));
        self.process.is_done(stream);
        Ok(())
    }

    /// Leaves together. The last communicator, if it has all PEs, ends the library.
    pub(crate) fn finalize(&self, call: &Call<'_>) -> Result<()> {
        self.settle_messages();
        self.wait_for_last()?;
        // Who has memory, or another communicator, still needs the library.
        let is_last = self.pes.len() == self.process.pes && Arc::strong_count(&self.process) == 1;
        let offer = TransferCheck { longest: u64::from(is_last), ..TransferCheck::default() };
        let all = self.meet_with(call, offer)?;
        let _operating = lock(&self.process.operating);
        self.end_team().map_err(|error| self.fail(error))?;
        if all.iter().all(|offer| offer.longest == 1) {
            self.process.finalize().map_err(|error| self.fail(error))?;
        }
        Ok(())
    }
}
