//! Why a communicator has failed: one failure per channel, the same for every rank.
//!
//! A rank that finds a reason writes it into its own state and proposes it with a compare-and-swap of the channel's header. The first
//! proposal counts; a rank that loses reads the winner's.

use super::layout::{ChannelHeader, FAILURE_WORDS, RankState};
use super::record::CallRecord;
use crate::contract::{Call, Operation};
use crate::os::sync::{AtomicU64, Ordering};
use crate::types::MAX_RANKS;
use crate::types::error::{Error, MismatchError, MissingRank, PeerError, PeerEvent, TimeoutError};
use std::time::Duration;

/// The operation in which a rank found the failure, and how long it had waited.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct FailureContext {
    pub reporter: usize,
    pub sequence: u64,
    pub record: CallRecord,
    pub waited: Duration,
}

impl FailureContext {
    /// The last call that this rank announced.
    pub fn of_last(state: &RankState, reporter: usize) -> FailureContext {
        let call = || (0, CallRecord::of(&Call::empty(Operation::Barrier)));
        let (sequence, record) = state.last_announced().unwrap_or_else(call);
        FailureContext { reporter, sequence, record, waited: Duration::ZERO }
    }
}

/// The reason of a failure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ChannelFailure {
    Mismatch { sequence: u64, lower: (usize, CallRecord), higher: (usize, CallRecord) },
    Peer { rank: usize, event: PeerEvent, context: FailureContext },
    Timeout { missing: Vec<usize>, context: FailureContext },
    Aborted { rank: usize },
}

const MISMATCH: u64 = 1;
const PEER: u64 = 2;
const TIMEOUT: u64 = 3;
const ABORTED: u64 = 4;

/// Where the bit set of missing ranks starts in a failure's words.
const MASK: usize = 16;

const NO_RECORD: [u64; 3] = [0; 3];

impl ChannelFailure {
    /// Makes this the channel's failure, if it has none yet.
    pub fn propose(&self, header: &ChannelHeader, own: &RankState, rank: usize) {
        // This rank's words are unused: a rank stops after its first proposal.
        self.write(&own.failure);
        let _ = header.failure.compare_exchange(0, rank as u32 + 1, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The failure as words of shared memory.
    pub fn words(&self) -> Vec<u64> {
        let words = [const { AtomicU64::new(0) }; FAILURE_WORDS];
        self.write(&words);
        words.into_iter().map(AtomicU64::into_inner).collect()
    }

    fn write(&self, words: &[AtomicU64]) {
        let put = |index: usize, value: u64| words[index].store(value, Ordering::Relaxed);
        let put_record = |index: usize, record: [u64; 3]| (0..3).for_each(|i| put(index + i, record[i]));
        let put_context = |context: &FailureContext| {
            put(2, context.reporter as u64);
            put(3, context.sequence);
            put(4, context.waited.as_nanos() as u64);
            put_record(5, context.record.words());
        };
        put_record(8, NO_RECORD);
        match self {
            ChannelFailure::Mismatch { sequence, lower, higher } => {
                put(0, MISMATCH);
                put(1, lower.0 as u64);
                put(2, higher.0 as u64);
                put(3, *sequence);
                put_record(5, lower.1.words());
                put_record(8, higher.1.words());
            }
            ChannelFailure::Peer { rank, event, context } => {
                put(0, PEER);
                put(1, *rank as u64);
                put(11, *event as u64);
                put_context(context);
            }
            ChannelFailure::Timeout { missing, context } => {
                put(0, TIMEOUT);
                put_context(context);
                for block in 0..MAX_RANKS / 64 {
                    let bits = missing.iter().filter(|rank| **rank / 64 == block);
                    put(MASK + block, bits.fold(0, |mask, rank| mask | 1 << (rank % 64)));
                }
            }
            ChannelFailure::Aborted { rank } => {
                put(0, ABORTED);
                put(1, *rank as u64);
            }
        }
    }

    /// Reads the winning rank's words.
    pub fn read(state: &RankState) -> Option<ChannelFailure> {
        let get = |index: usize| state.failure[index].load(Ordering::Relaxed);
        let record = |index: usize| CallRecord::from_words([get(index), get(index + 1), get(index + 2)]);
        let context = || {
            Some(FailureContext {
                reporter: get(2) as usize,
                sequence: get(3),
                waited: Duration::from_nanos(get(4)),
                record: record(5)?,
            })
        };
        Some(match get(0) {
            MISMATCH => ChannelFailure::Mismatch {
                sequence: get(3),
                lower: (get(1) as usize, record(5)?),
                higher: (get(2) as usize, record(8)?),
            },
            PEER => ChannelFailure::Peer {
                rank: get(1) as usize,
                event: match get(11) {
                    0 => PeerEvent::Died,
                    1 => PeerEvent::Left,
                    2 => PeerEvent::Panicked,
                    3 => PeerEvent::Refused,
                    4 => PeerEvent::Stopped,
                    _ => PeerEvent::Unreachable,
                },
                context: context()?,
            },
            TIMEOUT => ChannelFailure::Timeout {
                missing: (0..MAX_RANKS)
                    .filter(|rank| get(MASK + rank / 64) & (1 << (rank % 64)) != 0)
                    .collect(),
                context: context()?,
            },
            ABORTED => ChannelFailure::Aborted { rank: get(1) as usize },
            _ => return None,
        })
    }

    /// The ranks that this failure names as gone or missing.
    pub fn lost(&self) -> &[usize] {
        match self {
            ChannelFailure::Peer { rank, .. } => std::slice::from_ref(rank),
            ChannelFailure::Timeout { missing, .. } => missing,
            ChannelFailure::Mismatch { .. } | ChannelFailure::Aborted { .. } => &[],
        }
    }

    /// The error that every rank returns. `of_communicator` follows an operation; `last_seen` describes a missing rank.
    pub fn into_error(self, of_communicator: &str, last_seen: impl Fn(usize) -> String) -> Error {
        match self {
            ChannelFailure::Mismatch { sequence, lower, higher } => MismatchError {
                rank: higher.0,
                theirs: match lower.1 == higher.1 {
                    true => format!("{} with another list of counts, or after other calls,", higher.1),
                    false => higher.1.to_string(),
                },
                other_rank: lower.0,
                ours: lower.1.to_string(),
                sequence,
            }
            .into(),
            ChannelFailure::Peer { rank, event, context } => PeerError {
                rank,
                event,
                reporter: context.reporter,
                operation: format!("{}{of_communicator}", context.record),
                sequence: context.sequence,
                waited: context.waited,
                refusal: None,
            }
            .into(),
            ChannelFailure::Timeout { missing, context } => TimeoutError {
                operation: format!("{}{of_communicator}", context.record),
                sequence: context.sequence,
                reporter: context.reporter,
                waited: context.waited,
                missing: missing
                    .into_iter()
                    .map(|rank| MissingRank { rank, last_seen: last_seen(rank) })
                    .collect(),
            }
            .into(),
            ChannelFailure::Aborted { rank } => Error::Aborted { rank },
        }
    }
}
