//! Waiting for peers: polls, yields, then sleeps on a futex. A sleep ends at times to find out whether the peers can still come.

use super::Endpoint;
use crate::control::diagnosis::is_message;
use crate::control::failure::{ChannelFailure, FailureContext};
use crate::control::flags::Park;
use crate::control::liveness::Liveness;
use crate::control::outer::Wait;
use crate::control::record::CallRecord;
use crate::os::RunInstant;
use crate::os::sync::{AtomicU32, Ordering};
use crate::types::error::{PeerEvent, Result};
use std::time::Duration;

/// Polls at first if every rank has a core: about a microsecond.
const POLLS: u32 = 400;
/// Polls at first if ranks share cores: enough for a peer on another core that is about to finish.
const POLLS_CROWDED: u32 = 24;
/// Then, if every rank has a core, polls with a pause instruction between them: some tens of microseconds.
const PAUSES: u32 = 600;
/// Then yields the core for this long, before it sleeps. A shorter time costs more: a rank that sleeps is late for its peers, which then
/// sleep as well, and many ranks would stay in that state.
const YIELDING: Duration = Duration::from_millis(10);
/// A sleep ends after this time at first, and after twice as much each time, up to the last; then the rank checks that the peers live.
const FIRST_SLEEP: Duration = Duration::from_millis(1);
const LAST_SLEEP: Duration = Duration::from_millis(50);
/// A wait that nothing wakes sleeps this long between two polls, and looks at the peers after this time.
const NAP: Duration = Duration::from_micros(50);
const LOOK: Duration = Duration::from_millis(20);
/// Data of a peer that has left may be under way for this long.
const GRACE: Duration = Duration::from_secs(1);
/// Time between two log lines of a rank that waits.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Polls before a wait pauses or yields.
pub(super) fn polls(crowded: bool) -> u32 {
    if crowded { POLLS_CROWDED } else { POLLS }
}

/// The operation that a rank waits in, for errors: its number and its record.
pub(crate) type PendingOperation = (u64, CallRecord);

/// The ranks that a wait is for. One rank, the usual case, needs no allocation.
pub(crate) enum Peers {
    One([usize; 1]),
    Many(Vec<usize>),
}

impl std::ops::Deref for Peers {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        match self {
            Peers::One(peer) => peer,
            Peers::Many(peers) => peers,
        }
    }
}

/// Publishes the rank that a thread of this rank waits for, until dropped.
struct AwaitedRank<'a> {
    word: &'a AtomicU32,
    published: u32,
}

impl AwaitedRank<'_> {
    fn publish(&mut self, awaited: u32) {
        self.published = awaited;
        self.word.store(awaited, Ordering::Release);
    }
}

impl Drop for AwaitedRank<'_> {
    fn drop(&mut self) {
        // Another thread of the rank may have published another rank since.
        let _ = self.word.compare_exchange(self.published, 0, Ordering::Release, Ordering::Relaxed);
    }
}

impl Endpoint {
    /// Waits until `ready`, which `peer` will make true.
    #[inline(always)]
    pub fn wait(&self, peer: usize, ready: impl Fn() -> bool) -> Result<()> {
        for _ in 0..self.polls {
            if ready() {
                return Ok(());
            }
        }
        let pending = || self.own().last_announced().expect("a rank that waits has announced why");
        self.wait_long(&mut || Ok(ready()), &|| Peers::One([peer]), &|| Peers::One([peer]), &pending)
    }

    /// Waits until `ready`, which needs all of `awaited`: polls, yields, and then sleeps until one of `wakers` has published progress.
    #[cold]
    pub fn wait_long(
        &self,
        ready: &mut dyn FnMut() -> Result<bool>,
        wakers: &dyn Fn() -> Peers,
        awaited: &dyn Fn() -> Peers,
        pending: &dyn Fn() -> PendingOperation,
    ) -> Result<()> {
        if !self.crowded {
            for _ in 0..PAUSES {
                std::hint::spin_loop();
                if ready()? {
                    return Ok(());
                }
            }
        }
        let since = RunInstant::now();
        if self.yield_until(ready, since)? {
            return Ok(());
        }
        self.sleep_until(ready, wakers, awaited, pending, since)
    }

    /// Yields the core until `ready`, or for some time; whether it is.
    fn yield_until(&self, ready: &mut dyn FnMut() -> Result<bool>, since: RunInstant) -> Result<bool> {
        while since.elapsed() < YIELDING {
            std::thread::yield_now();
            if ready()? {
                return Ok(true);
            }
            if let Some(outer) = self.outer.get() {
                (outer.advance)(Wait::Short);
            }
            self.check()?;
        }
        Ok(false)
    }

    fn sleep_until(
        &self,
        ready: &mut dyn FnMut() -> Result<bool>,
        wakers: &dyn Fn() -> Peers,
        awaited: &dyn Fn() -> Peers,
        pending: &dyn Fn() -> PendingOperation,
        since: RunInstant,
    ) -> Result<()> {
        let mut slice = FIRST_SLEEP;
        let mut logged = since;
        let mut liveness = Liveness::new();
        self.publish_wait(pending());
        let mut waiting = AwaitedRank { word: &self.status(self.rank).waits_for, published: 0 };
        let mut outside = self.outer.get().map(|outer| {
            outer.endpoint.publish_wait(outer.pending(pending()));
            (outer, AwaitedRank { word: &outer.endpoint.status(outer.endpoint.rank).waits_for, published: 0 })
        });
        loop {
            let (wakers, peers) = (wakers(), awaited());
            let parks = || wakers.iter().map(|peer| &self.channel.state(*peer).park);
            if let Some(first) = peers.first() {
                waiting.publish(self.members[*first] as u32 + 1);
                if let Some((outer, waiting)) = &mut outside {
                    waiting.publish(outer.endpoint.members[outer.ranks[*first]] as u32 + 1);
                }
            }
            let left = self.deadline().saturating_sub(since.elapsed());
            let turn = self.own().park.prepare(parks(), self.fences);
            let outcome = ready();
            if matches!(outcome, Ok(false)) && !self.has_failed() {
                self.own().park.sleep(turn, slice.min(left));
            }
            Park::finish(parks());
            if outcome? || ready()? {
                return Ok(());
            }
            self.check_outer()?;
            self.check()?;
            if let Some(failure) = self.find_reason(&awaited(), pending, since, &mut liveness) {
                // It may have become ready while the reason was found: a peer that has left had done its part.
                return if ready()? { Ok(()) } else { Err(self.give_up(&failure)) };
            }
            slice = (slice * 2).min(LAST_SLEEP);
            self.log_wait(&peers, pending, since, &mut logged);
        }
    }

    /// Logs now and then what this rank waits for.
    fn log_wait(
        &self,
        peers: &[usize],
        pending: &dyn Fn() -> PendingOperation,
        since: RunInstant,
        logged: &mut RunInstant,
    ) {
        if logged.elapsed() <= LOG_INTERVAL {
            return;
        }
        *logged = RunInstant::now();
        if let Some(outer) = self.outer.get() {
            let mut long_ago = since;
            return outer.endpoint.log_wait(
                &outer.ranks(peers),
                &|| outer.pending(pending()),
                since,
                &mut long_ago,
            );
        }
        let (sequence, record) = pending();
        let seen: Vec<_> =
            peers.iter().map(|peer| format!("rank {peer}: {}", self.last_seen(*peer))).collect();
        crate::os::log::warn!(
            rank = self.rank,
            "waiting since {:.1?} in {record} (operation number {sequence}) for {}",
            since.elapsed(),
            seen.join(", ")
        );
    }

    /// Waits until `ready`, which polls what cannot wake this rank, such as a network: yields, then naps.
    #[cold]
    pub fn poll(
        &self,
        ready: &mut dyn FnMut() -> Result<bool>,
        awaited: &dyn Fn() -> Peers,
        pending: &dyn Fn() -> PendingOperation,
    ) -> Result<()> {
        let since = RunInstant::now();
        if self.yield_until(ready, since)? {
            return Ok(());
        }
        let (mut logged, mut looked, mut left) = (since, since, None);
        let mut liveness = Liveness::new();
        self.publish_wait(pending());
        let mut waiting = AwaitedRank { word: &self.status(self.rank).waits_for, published: 0 };
        loop {
            std::thread::sleep(NAP);
            if ready()? {
                return Ok(());
            }
            self.check()?;
            if looked.elapsed() < LOOK {
                continue;
            }
            looked = RunInstant::now();
            let peers = awaited();
            if let Some(first) = peers.first() {
                waiting.publish(self.members[*first] as u32 + 1);
            }
            match self.find_reason(&peers, pending, since, &mut liveness) {
                None => {}
                Some(ChannelFailure::Peer { event: PeerEvent::Left, .. })
                    if left.get_or_insert(looked).elapsed() < GRACE => {}
                Some(failure) => return if ready()? { Ok(()) } else { Err(self.fail(&failure)) },
            }
            self.log_wait(&peers, pending, since, &mut logged);
        }
    }

    /// Ranks that may send a message of this source, or of any. A rank that has left cannot, but if all have, they are what is waited for.
    pub fn possible_senders(&self, source: Option<usize>) -> Peers {
        if let Some(source) = source {
            return Peers::One([source]);
        }
        let is_there = |peer: &usize| self.gone(*peer) != Some(PeerEvent::Left);
        let there: Vec<usize> = self.peers().filter(is_there).collect();
        Peers::Many(if there.is_empty() { self.peers().collect() } else { there })
    }

    /// A reason to give up a wait for `peer` that a task does by polling since `since`: for [`give_up`](Self::give_up). It does not see
    /// that the peer is stopped.
    pub fn reason_to_give_up(
        &self,
        peer: usize,
        pending: &dyn Fn() -> PendingOperation,
        since: RunInstant,
    ) -> Option<ChannelFailure> {
        self.find_reason(&[peer], pending, since, &mut Liveness::new())
    }

    /// A reason to give up the wait, if there is one.
    pub(in crate::control) fn find_reason(
        &self,
        awaited: &[usize],
        pending: &dyn Fn() -> PendingOperation,
        since: RunInstant,
        liveness: &mut Liveness,
    ) -> Option<ChannelFailure> {
        if let Some(outer) = self.outer.get() {
            return outer.find_reason(awaited, pending, since, liveness);
        }
        let (sequence, record) = pending();
        let context = || FailureContext { reporter: self.rank, sequence, record, waited: since.elapsed() };
        if !is_message(&record)
            && let Some(mismatch) = self.peers().find_map(|peer| self.compare_records(peer, sequence))
        {
            return Some(mismatch);
        }
        for &rank in awaited {
            if let Some(event) = self.gone(rank) {
                return Some(ChannelFailure::Peer { rank, event, context: context() });
            }
        }
        if let Some(rank) = liveness.find_stopped(self, awaited) {
            return Some(ChannelFailure::Peer { rank, event: PeerEvent::Stopped, context: context() });
        }
        if since.elapsed() >= self.deadline() {
            let missing = self.missing(awaited, sequence, &record);
            return Some(ChannelFailure::Timeout { missing, context: context() });
        }
        None
    }
}
