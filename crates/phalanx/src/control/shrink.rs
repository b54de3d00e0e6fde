//! Shrink: the surviving ranks of a channel agree on a new channel. Agree: they agree on a flag.
//!
//! They agree in *rounds*, in the memory of the old channel. A rank joins a round and waits until every rank of the round before (at first,
//! of the channel) has joined or is gone. The first of them makes a proposal: a new channel, or whether all flags are set, with the set of
//! the ranks that have joined. A compare-and-swap of the channel's header makes one proposal the decision. A rank outside of the set was
//! left behind.
//!
//! A rank can be lost between joining the round and opening the new channel. The new channel therefore counts only when a rank has seen all
//! its ranks there and *confirmed* it. If a rank is gone, or the deadline passes, it is *discarded*, again by one compare-and-swap, and all
//! go into the next round.

use super::endpoint::{Endpoint, NewChannel};
use super::failure::{ChannelFailure, FailureContext};
use super::layout::{LIFE_LEFT, LIFE_PANICKED, PROPOSAL_WORDS};
use super::liveness::Liveness;
use super::record::CallRecord;
use crate::contract::{Call, Operation};
use crate::os::RunInstant;
use crate::os::sync::Ordering;
use crate::types::MAX_RANKS;
use crate::types::error::{Error, Result};
use std::time::Duration;

/// Published in place of a round by a rank whose shrink or agreement has failed.
const WITHDRAWN: u64 = u64::MAX;

/// Bits beside the round that a rank has joined: it wants to agree on a flag and not on a channel, and its flag.
const AGREES: u64 = 1 << 63;
const FLAG: u64 = 1 << 62;

/// The round after the one that was joined last.
fn next_round(joined: u64) -> u64 {
    if joined == WITHDRAWN { WITHDRAWN } else { (joined & !(AGREES | FLAG)) + 1 }
}

/// States of a new channel.
const OPEN: u32 = 0;
const CONFIRMED: u32 = 1;
const DISCARDED: u32 = 2;

/// Time between two polls of a waiting rank, at first and later.
const TICK: Duration = Duration::from_micros(200);
const LONG_TICK: Duration = Duration::from_millis(5);

/// A decision: the new channel (or the flag), and the ranks that take part, in the old channel's numbers.
struct Survivors {
    word: u64,
    members: Vec<usize>,
}

impl Endpoint {
    /// This rank's endpoint in a channel of the survivors, and the number of this shrink.
    pub fn shrink(&self) -> Result<(Endpoint, u64)> {
        self.check_owner()?;
        self.check_connected()?;
        let joined = &self.own().shrink.joined;
        loop {
            let round = next_round(joined.load(Ordering::Relaxed));
            match self.shrink_round(round) {
                Ok(Some(shrunk)) => return Ok((shrunk, round)),
                Ok(None) => {}
                Err(error) => return Err(self.withdraw(error)),
            }
        }
    }

    /// Whether the flags of all survivors are set: the same answer for each of them.
    pub fn agree(&self, flag: bool) -> Result<bool> {
        self.check_owner()?;
        self.check_connected()?;
        let round = next_round(self.own().shrink.joined.load(Ordering::Relaxed));
        self.agreement_round(round, flag).map_err(|error| self.withdraw(error))
    }

    fn agreement_round(&self, round: u64, flag: bool) -> Result<bool> {
        let joining = AGREES | round | if flag { FLAG } else { 0 };
        let flags = |members: &[usize]| {
            let is_set =
                |rank: &usize| self.channel.state(*rank).shrink.joined.load(Ordering::Acquire) & FLAG != 0;
            Ok((u64::from(members.iter().all(is_set)), ()))
        };
        meet(self, round, joining, flags)?;
        Ok(self.own_decision(round)?.word != 0)
    }

    /// Takes part in no later round.
    fn withdraw(&self, error: Error) -> Error {
        self.own().shrink.joined.store(WITHDRAWN, Ordering::Release);
        self.publish();
        error
    }

    /// The decision of a round that includes this rank.
    fn own_decision(&self, round: u64) -> Result<Survivors> {
        decision(self, round)
            .filter(|decision| decision.members.contains(&self.rank))
            .ok_or(Error::LeftBehind { rank: self.rank })
    }

    /// One round; `None` if a rank of the new channel was lost before all had opened it.
    fn shrink_round(&self, round: u64) -> Result<Option<Endpoint>> {
        let endpoint = self;
        let own = endpoint.rank;
        let made = meet(endpoint, round, round, |members| {
            let made = NewChannel::create(&endpoint.world, members.len())?;
            Ok((made.id(), made))
        })?;
        let decision = self.own_decision(round)?;
        let channel = match made.filter(|made| made.id() == decision.word) {
            Some(made) => made,
            None => match NewChannel::open(&endpoint.world, decision.word) {
                Ok(channel) => channel,
                // Its creator has closed it, since this rank was late.
                Err(_) if decided(endpoint) > round => return Err(Error::LeftBehind { rank: own }),
                Err(error) => return Err(error),
            },
        };
        let rank = decision.members.iter().position(|member| *member == own).expect("contained");
        let members = decision.members.iter().map(|member| endpoint.members()[*member]).collect();
        let shrunk = Endpoint::attach(endpoint.world.clone(), channel, rank, members, endpoint.timeout());
        let counts = confirm(endpoint, &shrunk, round);
        Ok(counts.then_some(shrunk))
    }
}

/// The last round that is decided.
fn decided(endpoint: &Endpoint) -> u64 {
    endpoint.channel.header().decided.load(Ordering::Acquire) >> 16
}

/// Takes part in a round until it is decided; `joining` is what this rank publishes. If it proposes, `make` gets the ranks that have joined,
/// and answers the word of the proposal and what it has made.
fn meet<T>(
    endpoint: &Endpoint,
    round: u64,
    joining: u64,
    make: impl FnOnce(&[usize]) -> Result<(u64, T)>,
) -> Result<Option<T>> {
    let before = match round {
        1 => (0..endpoint.ranks).collect(),
        _ => decision(endpoint, round - 1).ok_or(Error::LeftBehind { rank: endpoint.rank })?.members,
    };
    let lost = endpoint.lost();
    if lost.contains(&endpoint.rank) {
        return Err(Error::LeftBehind { rank: endpoint.rank });
    }
    endpoint.own().shrink.joined.store(joining, Ordering::Release);
    endpoint.publish();
    let has_joined = |rank: usize| {
        (endpoint.channel.state(rank).shrink.joined.load(Ordering::Acquire) ^ joining) & !FLAG == 0
    };
    let is_gone = |rank: usize| {
        let joined = endpoint.channel.state(rank).shrink.joined.load(Ordering::Acquire);
        lost.contains(&rank)
            || joined == WITHDRAWN
            || (rank != endpoint.rank && endpoint.gone(rank).is_some())
    };
    let (mut liveness, mut stopped) = (Liveness::new(), Vec::new());
    let since = RunInstant::now();
    loop {
        if decided(endpoint) >= round {
            return Ok(None);
        }
        // Each rank is read once: one that joins just now is either there or missing.
        let waited_for = before.iter().copied().filter(|rank| !is_gone(*rank) && !stopped.contains(rank));
        let (there, missing): (Vec<usize>, Vec<usize>) = waited_for.partition(|rank| has_joined(*rank));
        let late = since.elapsed() >= endpoint.deadline();
        // At the deadline every rank proposes, since the first may be stopped.
        if late || (missing.is_empty() && there.first() == Some(&endpoint.rank)) {
            if !missing.is_empty() {
                fail_missing(endpoint, &missing, round, since.elapsed());
            }
            let (word, made) = make(&there)?;
            propose(endpoint, round, &there, word);
            return Ok(Some(made));
        }
        // It is told that it was left behind, if it goes on.
        stopped.extend(liveness.find_stopped(endpoint, &missing));
        pause(since);
    }
}

/// Fails the old channel with a timeout that names the missing ranks: a late rank finds it.
fn fail_missing(endpoint: &Endpoint, missing: &[usize], round: u64, waited: Duration) {
    let record = CallRecord::of(&Call::empty(Operation::Shrink));
    let context = FailureContext { reporter: endpoint.rank, sequence: round, record, waited };
    endpoint.fail(&ChannelFailure::Timeout { missing: missing.to_vec(), context });
}

fn propose(endpoint: &Endpoint, round: u64, members: &[usize], word: u64) {
    // These words held the round before last: a rank that still reads them sees that they are outdated.
    let words = &endpoint.own().shrink.proposals[round as usize % 2];
    words[0].store(word, Ordering::Relaxed);
    for (block, set) in words[1..].iter().enumerate() {
        let bits = members.iter().filter(|rank| **rank / 64 == block);
        set.store(bits.fold(0, |set, rank| set | 1 << (rank % 64)), Ordering::Relaxed);
    }
    endpoint.decide_round(round, words);
}

/// The decision of a round, unless a later round is decided already.
fn decision(endpoint: &Endpoint, round: u64) -> Option<Survivors> {
    let header = &endpoint.channel.header().decided;
    let last = header.load(Ordering::Acquire);
    if last >> 16 != round {
        return None;
    }
    let winner = (last & 0xffff) as usize - 1;
    let words = &endpoint.channel.state(winner).shrink.proposals[round as usize % 2];
    let words: [u64; PROPOSAL_WORDS] = std::array::from_fn(|i| words[i].load(Ordering::Acquire));
    let members = (0..MAX_RANKS).filter(|rank| words[1 + rank / 64] & (1 << (rank % 64)) != 0);
    let decision = Survivors { word: words[0], members: members.collect() };
    (header.load(Ordering::Acquire) == last).then_some(decision)
}

/// Waits until it is decided whether the new channel counts. The answer is the same on all its ranks.
fn confirm(old: &Endpoint, new: &Endpoint, round: u64) -> bool {
    let state = &new.channel.header().confirmed;
    let decide = |outcome| new.decide_outcome(OPEN, outcome);
    let life = |rank: usize| new.channel.state(rank).life.state.load(Ordering::Acquire);
    let since = RunInstant::now();
    loop {
        match state.load(Ordering::Acquire) {
            CONFIRMED => return true,
            DISCARDED => return false,
            _ => {}
        }
        let mut absent = new.peers().filter(|rank| life(*rank) == 0).peekable();
        let late = since.elapsed() >= new.deadline() || decided(old) > round;
        // If another rank was first, the next turn of the loop finds its outcome.
        if absent.peek().is_none() {
            decide(CONFIRMED);
        } else if late || absent.any(|rank| new.gone(rank).is_some()) {
            decide(DISCARDED);
        } else {
            pause(since);
        }
    }
}

fn pause(since: RunInstant) {
    std::thread::sleep(if since.elapsed() < Duration::from_millis(50) { TICK } else { LONG_TICK });
}

const _: () = assert!(MAX_RANKS < 1 << 16 && LIFE_LEFT != 0 && LIFE_PANICKED != 0);
