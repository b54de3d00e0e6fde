//! Records of calls: what all ranks must agree on, for comparison and for error messages.

use super::flags::NumberedWords;
use super::layout::{RECORDS, RankState};
use crate::contract::{Blocks, Call, Operation, Wanted};
use crate::types::dtype::DType;
use crate::types::op::ReductionCode;
use std::fmt;

/// In the place of the peer: a receive from whichever rank sends first.
const ANY_RANK: u32 = u32::MAX;

/// A call in the form that ranks compare: all ranks of an operation must have equal records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallRecord {
    pub operation: Operation,
    pub dtype: DType,
    pub reduction: ReductionCode,
    /// See [`Call::config_tag`].
    pub config: u8,
    pub root: u32,
    /// Elements of a block; the sum over all blocks if they differ.
    pub count: u64,
    /// Hash of the list of block lengths if they differ, else 0. For a message, its tag; for a block of an all_to_all_v, its direction.
    pub counts: u64,
}

impl CallRecord {
    #[inline(always)]
    pub fn of(call: &Call<'_>) -> CallRecord {
        let (count, counts) = match call.blocks {
            // Every rank of an all_to_all_v has lengths of its own.
            _ if call.operation == Operation::AllToAllV => (0, 0),
            Blocks::Equal(count) => (count as u64, 0),
            Blocks::Each(counts) => {
                (counts.iter().sum::<usize>() as u64, counts.iter().fold(1, |h, c| mix(h, *c as u64)))
            }
        };
        CallRecord {
            operation: call.operation,
            dtype: call.dtype,
            reduction: call.reduction.code,
            config: call.config_tag(),
            root: call.root as u32,
            count,
            counts,
        }
    }

    /// A wait for such a message.
    pub fn of_probe(wanted: Wanted) -> CallRecord {
        CallRecord {
            root: wanted.source.map_or(ANY_RANK, |source| source as u32),
            counts: wanted.tag.unwrap_or(0).into(),
            ..CallRecord::of(&Call::empty(Operation::Recv))
        }
    }

    /// A wait that concerns one rank, in a window.
    pub fn of_rank(operation: Operation, rank: usize) -> CallRecord {
        CallRecord { root: rank as u32, counts: 1, ..CallRecord::of(&Call::empty(operation)) }
    }

    #[inline(always)]
    fn head(&self) -> u64 {
        u64::from(self.operation as u8)
            | u64::from(self.dtype.code()) << 8
            | u64::from(self.reduction as u8) << 16
            | u64::from(self.config) << 24
            | u64::from(self.root) << 32
    }

    #[inline(always)]
    pub fn words(&self) -> [u64; 3] {
        [self.head(), self.dtype.mark(self.count), self.counts]
    }

    pub fn from_words(words: [u64; 3]) -> Option<CallRecord> {
        let [head, count, counts] = words;
        let (dtype, count) = DType::decode((head >> 8) as u8, count)?;
        Some(CallRecord {
            operation: Operation::from_code(head as u8)?,
            dtype,
            reduction: ReductionCode::from_code((head >> 16) as u8)?,
            config: (head >> 24) as u8,
            root: (head >> 32) as u32,
            count,
            counts,
        })
    }

    /// The fingerprint of a history that ends with this call. Two ranks whose histories differ anywhere keep
    /// different fingerprints for ever (but for a collision of 64-bit hashes), so a mismatch in an operation
    /// in which they exchanged nothing is seen in the next one.
    #[inline(always)]
    pub fn chain(&self, history: u64) -> u64 {
        self.words().into_iter().fold(history, mix)
    }
}

/// One step of the hash (the multiply-and-fold of wyhash).
#[inline(always)]
fn mix(hash: u64, word: u64) -> u64 {
    let product = u128::from(hash ^ 0xa076_1d64_78bd_642f) * u128::from(word ^ 0xe703_7ed1_a0b4_28db);
    (product as u64) ^ ((product >> 64) as u64)
}

impl fmt::Display for CallRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.operation.name())?;
        if self.operation == Operation::Grow {
            // The number of joiners is in the place of the root.
            return write!(f, "(by {})", self.root);
        }
        if self.operation == Operation::DeviceComm {
            return write!(f, "(requirements #{:08x})", self.root);
        }
        if self.operation == Operation::Experts {
            return write!(f, "(layout #{:08x})", self.root);
        }
        if self.operation == Operation::SplitGrid {
            return write!(f, "(grid #{:08x})", self.root);
        }
        if self.operation.is_of_window() {
            return write!(f, "(memory {})", self.root);
        }
        if matches!(self.operation, Operation::OneSided | Operation::WaitSignals) && self.counts != 0 {
            return write!(f, "(rank {})", self.root);
        }
        if self.operation.is_empty_handed() {
            return Ok(());
        }
        write!(f, "({}", self.dtype)?;
        // A block of an all_to_all_v says in `counts` which way it goes; the call itself has 0 there.
        let block =
            Operation::from_code(self.counts as u8).filter(|_| self.operation == Operation::AllToAllV);
        match self.operation {
            Operation::AllToAllV if block.is_none() => {}
            Operation::AllToAllV => write!(f, " × {}", self.count)?,
            Operation::Recv if self.count == 0 && self.root == ANY_RANK => {}
            Operation::Send | Operation::Recv => write!(f, " × {}", self.count)?,
            _ if self.counts != 0 => write!(f, " × {}, counts #{:08x}", self.count, self.counts as u32)?,
            _ => write!(f, " × {}", self.count)?,
        }
        if self.operation.reduces() {
            write!(f, ", {}", self.reduction.name())?;
        }
        match block.unwrap_or(self.operation) {
            Operation::ExpertDispatch | Operation::ExpertCombine => write!(f, ", experts {}", self.root)?,
            Operation::AllReduce if self.root != 0 => write!(f, ", parts #{:08x}", self.root)?,
            operation if operation.is_rooted() => write!(f, ", root {}", self.root)?,
            Operation::Send => write!(f, ", to rank {}", self.root)?,
            Operation::Recv if self.root == ANY_RANK => f.write_str(", from any rank")?,
            Operation::Recv => write!(f, ", from rank {}", self.root)?,
            _ => {}
        }
        if matches!(self.operation, Operation::Send | Operation::Recv) && self.counts != 0 {
            write!(f, ", tag {}", self.counts)?;
        }
        if self.config != 0 {
            write!(f, ", settings {:02x}", self.config)?;
        }
        f.write_str(")")
    }
}

impl RankState {
    /// Announces this rank's call number `sequence`, before it does anything else.
    #[inline(always)]
    pub fn announce(&self, sequence: u64, record: &CallRecord) {
        self.records[sequence as usize % RECORDS].write(sequence, record.words());
    }

    /// Takes back the announcement of `sequence`.
    pub fn withdraw(&self, sequence: u64) {
        self.records[sequence as usize % RECORDS].withdraw();
    }

    /// The call that this rank announced under `sequence`, unless it has not come or is long past.
    pub fn announced(&self, sequence: u64) -> Option<CallRecord> {
        self.records[sequence as usize % RECORDS].read(sequence).and_then(CallRecord::from_words)
    }

    /// Whether this rank has announced its call number `sequence`, or a later one.
    pub fn has_come_to(&self, sequence: u64) -> bool {
        let has_come = |place: &NumberedWords| place.number() >= sequence;
        // A later call took the same place; or, of a rank of another host, its neighbour's (see `relay/`).
        has_come(&self.records[sequence as usize % RECORDS]) || self.records.iter().any(has_come)
    }

    /// Announces this rank's message number `number`.
    #[inline(always)]
    pub fn announce_message(&self, number: u64, record: &CallRecord) {
        self.messages[number as usize % 2].write(number, record.words());
    }

    /// The last message this rank announced.
    pub fn last_message(&self) -> Option<CallRecord> {
        let last = self.messages.iter().max_by_key(|message| message.number())?;
        match last.number() {
            0 => None,
            number => last.read(number).and_then(CallRecord::from_words),
        }
    }

    /// The last call this rank announced.
    pub fn last_announced(&self) -> Option<(u64, CallRecord)> {
        let last = self.records.iter().map(NumberedWords::number).max()?;
        if last == 0 { None } else { Some((last, self.announced(last)?)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Blocks;

    #[test]
    fn a_messages_tag_is_shown_if_it_has_one() {
        let call = Call { root: 3, blocks: Blocks::Equal(5), ..Call::empty(Operation::Recv) };
        let plain = CallRecord::of(&call);
        assert_eq!(plain.to_string(), "recv(u8 × 5, from rank 3)");
        assert_eq!(CallRecord { counts: 7, ..plain }.to_string(), "recv(u8 × 5, from rank 3, tag 7)");
    }

    #[test]
    fn lists_of_counts_that_differ_are_told_apart() {
        let text = |counts: &[usize]| {
            let call = Call { blocks: Blocks::Each(counts), ..Call::empty(Operation::AllGatherV) };
            CallRecord::of(&call).to_string()
        };
        let [one, other] = [text(&[1, 2]), text(&[2, 1])];
        assert!(one.starts_with("all_gather_v(u8 × 3, counts #"), "{one}");
        assert_ne!(one, other);
    }
}
