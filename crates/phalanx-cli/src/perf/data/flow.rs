//! The contents of a rank's buffers before and after each operation.
//!
//! This is the meaning of the operations, written apart from the calls so that it can contradict them.

use crate::perf::layout::{BufferLengths, weighted_counts, weighted_counts_to};
use crate::perf::operation::{Operation, Place};
use std::ops::Range;

/// The content of a range of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// This rank's contribution to a reduction.
    Contribution,
    /// The reduction of all ranks' contributions.
    Reduced,
    /// The reduction of the contributions of the ranks up to this one.
    Scanned,
    /// The reduction of the contributions of the ranks before this one.
    ScannedBefore,
    /// The data of rank `from` for rank `to`. Where all ranks get the same data, `to` is `from`.
    Message { from: usize, to: usize },
    /// The content before the call.
    Untouched,
}

/// A range of a buffer and its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    pub range: Range<usize>,
    /// The index in the content of the range's first element.
    pub first: usize,
    pub content: Content,
}

/// The parts of segments in a window of the buffer, with ranges relative to its start.
pub fn clip(segments: &[Segment], window: &Range<usize>) -> Vec<Segment> {
    let clipped = segments.iter().filter_map(|segment| {
        let start = segment.range.start.max(window.start);
        let end = segment.range.end.min(window.end);
        let first = segment.first + (start - segment.range.start);
        (start < end).then(|| Segment {
            range: start - window.start..end - window.start,
            first,
            content: segment.content,
        })
    });
    clipped.collect()
}

/// An operation from one rank's point of view.
#[derive(Debug, Clone, Copy)]
pub struct Flow {
    pub operation: Operation,
    pub place: Place,
    pub layout: BufferLengths,
    pub rank: usize,
    pub ranks: usize,
    pub root: usize,
}

impl Flow {
    /// The input: the send buffer or, in place, parts of the one buffer.
    pub fn inputs(&self) -> Vec<Segment> {
        let (rank, block) = (self.rank, self.layout.count);
        match self.operation {
            Operation::AllReduce
            | Operation::AllReduceWith
            | Operation::AllReduceCoalesced
            | Operation::Reduce
            | Operation::Scan
            | Operation::ExclusiveScan => {
                vec![whole(block, Content::Contribution)]
            }
            Operation::ReduceScatter => vec![whole(block * self.ranks, Content::Contribution)],
            Operation::Broadcast if !self.is_root() => Vec::new(),
            Operation::Broadcast => vec![whole(block, message(rank, rank))],
            Operation::AllGather | Operation::AllGatherObject | Operation::Gather | Operation::Hypercube => {
                let at = if self.place == Place::InPlace { rank * block } else { 0 };
                vec![segment(at, block, message(rank, rank))]
            }
            Operation::Scatter if !self.is_root() => Vec::new(),
            Operation::Scatter | Operation::AllToAll => self.blocks(|to| message(rank, to)),
            Operation::AllToAllV => {
                let counts = weighted_counts(block * self.ranks, self.ranks, rank);
                one_after_the_other(&counts, |to| message(rank, to))
            }
            Operation::NeighborAllToAll => {
                one_after_the_other(&[block; 2], |side| message(rank, self.neighbor(side)))
            }
            Operation::SendRecv | Operation::RecvAny | Operation::Put | Operation::PutSignal => {
                vec![whole(block, message(rank, (rank + 1) % self.ranks))]
            }
            Operation::Get => vec![whole(block, message(rank, (rank + self.ranks - 1) % self.ranks))],
            Operation::PingPong if rank > 1 => Vec::new(),
            Operation::PingPong => vec![whole(block, message(rank, 1 - rank))],
            Operation::Barrier | Operation::Agree => Vec::new(),
        }
    }

    /// The expected output: the receive buffer or, in place, the parts of the one buffer that the operation
    /// defines.
    pub fn outputs(&self) -> Vec<Segment> {
        let (rank, ranks, block) = (self.rank, self.ranks, self.layout.count);
        let in_place = self.place == Place::InPlace;
        match self.operation {
            Operation::AllReduce | Operation::AllReduceWith | Operation::AllReduceCoalesced => {
                vec![whole(block, Content::Reduced)]
            }
            Operation::Scan => vec![whole(block, Content::Scanned)],
            // Rank 0 keeps what it holds.
            Operation::ExclusiveScan if rank == 0 && in_place => vec![whole(block, Content::Contribution)],
            Operation::ExclusiveScan if rank == 0 => self.untouched(),
            Operation::ExclusiveScan => vec![whole(block, Content::ScannedBefore)],
            Operation::Reduce if self.is_root() => vec![whole(block, Content::Reduced)],
            Operation::Gather if self.is_root() => self.blocks(|from| message(from, from)),
            // Only the root's receive buffer is written. In place, the others' are unspecified.
            Operation::Reduce | Operation::Gather if in_place => Vec::new(),
            Operation::Reduce | Operation::Gather => self.untouched(),
            Operation::ReduceScatter => vec![Segment {
                range: if in_place { rank * block..(rank + 1) * block } else { 0..block },
                first: rank * block,
                content: Content::Reduced,
            }],
            Operation::Broadcast => vec![whole(block, message(self.root, self.root))],
            Operation::AllGather | Operation::AllGatherObject | Operation::Hypercube => {
                self.blocks(|from| message(from, from))
            }
            Operation::Scatter => {
                let at = if in_place { rank * block } else { 0 };
                vec![segment(at, block, message(self.root, rank))]
            }
            Operation::AllToAll => self.blocks(|from| message(from, rank)),
            Operation::AllToAllV => {
                let counts = weighted_counts_to(block * ranks, ranks, rank);
                one_after_the_other(&counts, |from| message(from, rank))
            }
            Operation::NeighborAllToAll => {
                one_after_the_other(&[block; 2], |side| message(self.neighbor(side), rank))
            }
            Operation::SendRecv | Operation::RecvAny | Operation::Put | Operation::PutSignal => {
                vec![whole(block, message((rank + ranks - 1) % ranks, rank))]
            }
            Operation::Get => vec![whole(block, message((rank + 1) % ranks, rank))],
            Operation::PingPong if rank > 1 => self.untouched(),
            Operation::PingPong => vec![whole(block, message(1 - rank, rank))],
            Operation::Barrier | Operation::Agree => Vec::new(),
        }
    }

    /// The rank before this one, or the one behind it.
    fn neighbor(&self, side: usize) -> usize {
        (self.rank + [self.ranks - 1, 1][side]) % self.ranks
    }

    fn is_root(&self) -> bool {
        self.rank == self.root
    }

    fn untouched(&self) -> Vec<Segment> {
        vec![whole(self.layout.recv, Content::Untouched)]
    }

    /// A block for each rank, one after the other.
    fn blocks(&self, content: impl Fn(usize) -> Content) -> Vec<Segment> {
        one_after_the_other(&vec![self.layout.count; self.ranks], content)
    }
}

fn message(from: usize, to: usize) -> Content {
    Content::Message { from, to }
}

fn whole(len: usize, content: Content) -> Segment {
    segment(0, len, content)
}

fn segment(at: usize, len: usize, content: Content) -> Segment {
    Segment { range: at..at + len, first: 0, content }
}

fn one_after_the_other(counts: &[usize], content: impl Fn(usize) -> Content) -> Vec<Segment> {
    let mut at = 0;
    let place = |(rank, &count): (usize, &usize)| {
        let segment = segment(at, count, content(rank));
        at += count;
        segment
    };
    counts.iter().enumerate().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    fn flow(operation: Operation, place: Place, rank: usize, ranks: usize, root: usize) -> Flow {
        let layout = BufferLengths::new(operation, 960, 4, ranks).unwrap();
        Flow { operation, place, layout, rank, ranks, root }
    }

    /// Every message that somebody expects is one that somebody sends, with the same length.
    #[test]
    fn what_is_expected_is_sent() {
        for operation in Operation::value_variants().iter().copied() {
            for ranks in [2, 4, 8] {
                for place in operation.places().iter().copied() {
                    let sent: Vec<Segment> =
                        (0..ranks).flat_map(|rank| flow(operation, place, rank, ranks, 1).inputs()).collect();
                    for rank in 0..ranks {
                        for expected in flow(operation, place, rank, ranks, 1).outputs() {
                            if matches!(expected.content, Content::Message { .. }) {
                                assert!(
                                    sent.iter().any(|segment| segment.content == expected.content
                                        && segment.range.len() == expected.range.len()),
                                    "{operation:?} {place:?}: nobody sends {expected:?}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn segments_stay_in_their_buffers() {
        for operation in Operation::value_variants().iter().copied() {
            for rank in 0..4 {
                for place in operation.places().iter().copied() {
                    let flow = flow(operation, place, rank, 4, 0);
                    let (send, recv) = match place {
                        Place::OutOfPlace => (flow.layout.send, flow.layout.recv),
                        Place::InPlace => (flow.layout.larger(), flow.layout.larger()),
                    };
                    assert!(flow.inputs().iter().all(|segment| segment.range.end <= send));
                    assert!(flow.outputs().iter().all(|segment| segment.range.end <= recv));
                }
            }
        }
    }

    #[test]
    fn clipped_segments_hold_what_the_whole_ones_do() {
        let segments = [
            Segment { range: 5..20, first: 100, content: message(0, 1) },
            Segment { range: 20..25, first: 0, content: Content::Reduced },
        ];
        let whole = |at: usize| {
            let segment = segments.iter().find(|segment| segment.range.contains(&at))?;
            Some((segment.content, segment.first + at - segment.range.start))
        };
        for width in [1, 4, 7, 30] {
            for start in (0..30).step_by(width) {
                let clipped = clip(&segments, &(start..start + width));
                for at in start..start + width {
                    let here = clipped.iter().find(|segment| segment.range.contains(&(at - start)));
                    let found = here.map(|s| (s.content, s.first + (at - start) - s.range.start));
                    assert_eq!(found, whole(at), "{at} in the window from {start}");
                }
            }
        }
    }

    #[test]
    fn the_root_alone_gets_a_reduction() {
        let outputs = |rank| flow(Operation::Reduce, Place::OutOfPlace, rank, 4, 2).outputs();
        assert_eq!(outputs(2), [whole(240, Content::Reduced)]);
        assert_eq!(outputs(0), [whole(240, Content::Untouched)]);
    }
}
