//! The ranks before an operation, and while one waits: nobody enqueues what waits for a rank that has not come.

use super::NvshmemComm;
use super::gpu;
use crate::control::host_channel::HostChannel;
use crate::control::witness::Subject;
use crate::contract::Backend;
use crate::contract::Call;
use crate::contract::Operation;
use crate::types::memory::RawStream;
use crate::types::error::Result;
use crate::gpu::backoff::Patience;
use crate::os::sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// How many words each rank tells at a meeting: what it calls, and its [`Offer`].
const WORDS: usize = Subject::WORDS + 4;

/// What a rank brings to an operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Bytes of the longest block that it knows of.
    pub longest: u64,
    /// What names its buffers on every PE, if both are symmetric memory; else 0.
    pub places: [u64; 2],
    /// The factor of a pre-multiplied sum.
    pub factor: u64,
}

impl NvshmemComm {
    /// Waits until all ranks have come to the same call.
    pub(crate) fn meet(&self, call: &Call<'_>) -> Result<Vec<Offer>> {
        self.meet_with(call, Offer::default())
    }

    /// The same, with what each brings: in the order of the ranks.
    pub(crate) fn meet_with(&self, call: &Call<'_>, offer: Offer) -> Result<Vec<Offer>> {
        self.check()?;
        self.drive_what_is_left()?;
        let number = self.collectives.fetch_add(1, Ordering::Relaxed) + 1;
        let own = Subject::call(number, call);
        self.witness.announce(&own);
        *lock(&self.last) = Some(own);
        let mut words = [0u64; WORDS];
        words[..Subject::WORDS].copy_from_slice(&own.words());
        words[Subject::WORDS..].copy_from_slice(&[
            offer.longest,
            offer.places[0],
            offer.places[1],
            offer.factor,
        ]);
        let mut all = vec![[0u64; WORDS]; self.pes.len()];
        // SAFETY: one thread at a time is in a collective.
        self.met(|control| unsafe { control.tell_all(&words, all.as_flattened_mut()) })?;
        let calls: Vec<[u64; Subject::WORDS]> =
            all.iter().map(|words| std::array::from_fn(|n| words[n])).collect();
        self.witness.compare(&calls).map_err(|mismatch| self.fail(mismatch))?;
        let offer = |words: &[u64; WORDS]| {
            let [longest, send, recv, factor] = std::array::from_fn(|n| words[Subject::WORDS + n]);
            Offer { longest, places: [send, recv], factor }
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
            self.fail(self.witness.judge_meeting(&self.errand(), since, error))
        })
    }

    /// Waits until all ranks have come to the same point of an operation.
    pub(crate) fn line_up(&self) -> Result<()> {
        // SAFETY: one thread at a time is in a collective.
        self.met(|control| unsafe { control.collective(&Call::empty(Operation::Barrier)) })
    }

    /// What this rank is in, as the others see it.
    pub(crate) fn errand(&self) -> Subject {
        let init = || Subject::call(0, &Call::empty(Operation::Init));
        lock(&self.last).unwrap_or_else(init)
    }

    /// Waits until a stream's work is complete.
    pub(crate) fn wait_for(&self, stream: RawStream, subject: &Subject) -> Result<()> {
        self.process.device.enter()?;
        let mut patience = Patience::new();
        let _waiting = self.witness.waiting();
        while !gpu::is_idle(stream).map_err(|error| self.fail(error))? {
            if patience.pause() {
                self.look(subject, patience.since)?;
            }
        }
        self.check()
    }

    /// Looks for a reason to give up; if there is one, fails.
    pub(crate) fn look(&self, subject: &Subject, since: Instant) -> Result<()> {
        self.witness.tell_wait(subject);
        self.witness.look(subject, since).map_err(|verdict| self.fail(verdict))
    }

    /// Waits for the library's collectives of this process.
    pub(crate) fn wait_for_last(&self) -> Result<()> {
        self.check()?;
        let Some(stream) = self.process.last() else { return Ok(()) };
        self.wait_for(stream, &self.errand())?;
        self.witness.complete(self.collectives.load(Ordering::Relaxed));
        self.process.is_done(stream);
        Ok(())
    }

    /// Leaves together. The last communicator, if it has all PEs, ends the library.
    pub(crate) fn finalize(&self, call: &Call<'_>) -> Result<()> {
        self.settle_messages();
        self.wait_for_last()?;
        // Who has memory, or another communicator, still needs the library.
        let is_last = self.pes.len() == self.process.pes && Arc::strong_count(&self.process) == 1;
        let offer = Offer { longest: u64::from(is_last), ..Offer::default() };
        let all = self.meet_with(call, offer)?;
        let _operating = lock(&self.process.operating);
        self.end_team().map_err(|error| self.fail(error))?;
        if all.iter().all(|offer| offer.longest == 1) {
            self.process.finalize().map_err(|error| self.fail(error))?;
        }
        Ok(())
    }
}
