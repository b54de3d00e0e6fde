//! From a size on the command line to buffer lengths.
//!
//! A row's size is the larger of a rank's two buffers, as in the reference benchmark. Blocks are not aligned
//! to 16 bytes as they are there, for GPUs.

use super::operation::Operation;

/// The lengths of one rank's buffers, in elements. They are the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferLengths {
    /// Elements of the send buffer.
    pub send: usize,
    /// Elements of the receive buffer.
    pub recv: usize,
    /// The `count` of the row: the elements of a block, or of the whole message.
    pub count: usize,
}

impl BufferLengths {
    /// The layout for buffers of at most `bytes`, for elements of `element` bytes; `None` if not even one
    /// element for each rank fits.
    pub fn new(operation: Operation, bytes: usize, element: usize, ranks: usize) -> Option<BufferLengths> {
        let elements = bytes / element;
        let block = elements / ranks;
        let (send, recv, count) = match operation {
            Operation::AllReduce
            | Operation::AllReduceWith
            | Operation::AllReduceCoalesced
            | Operation::Broadcast
            | Operation::Reduce
            | Operation::Scan
            | Operation::ExclusiveScan
            | Operation::SendRecv
            | Operation::RecvAny
            | Operation::PingPong
            | Operation::Put
            | Operation::Get
            | Operation::PutSignal => (elements, elements, elements),
            Operation::AllGather | Operation::AllGatherObject | Operation::Gather | Operation::Hypercube => {
                (block, block * ranks, block)
            }
            Operation::ReduceScatter | Operation::Scatter => (block * ranks, block, block),
            Operation::AllToAll => (block * ranks, block * ranks, block),
            Operation::NeighborAllToAll => (elements / 2 * 2, elements / 2 * 2, elements / 2),
            Operation::AllToAllV => {
                // Counts depend on the distance alone, so every rank has the same total.
                let total = weighted_counts(block * ranks, ranks, 0).iter().sum();
                (total, total, block)
            }
            Operation::Barrier | Operation::Agree => {
                return Some(BufferLengths { send: 0, recv: 0, count: 0 });
            }
        };
        (count > 0 && send.max(recv) > 0).then_some(BufferLengths { send, recv, count })
    }

    /// The elements of the larger buffer, which is the one in place.
    pub fn larger(&self) -> usize {
        self.send.max(self.recv)
    }
}

/// The elements that rank `from` sends to each rank, about `total` in all: none to itself, and to the others
/// in proportion to their distance above it.
pub fn weighted_counts(total: usize, ranks: usize, from: usize) -> Vec<usize> {
    (0..ranks).map(|to| weighted_count(total, ranks, from, to)).collect()
}

/// The elements that rank `to` gets from each rank; the counterpart of [`weighted_counts`].
pub fn weighted_counts_to(total: usize, ranks: usize, to: usize) -> Vec<usize> {
    (0..ranks).map(|from| weighted_count(total, ranks, from, to)).collect()
}

fn weighted_count(total: usize, ranks: usize, from: usize, to: usize) -> usize {
    if ranks == 1 {
        return total;
    }
    let distance = (to + ranks - from) % ranks;
    let sum_of_distances = ranks * (ranks - 1) / 2;
    // The product may not fit in 64 bits.
    (total as u128 * distance as u128 / sum_of_distances as u128) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_the_larger_buffer() {
        let layout = |operation| BufferLengths::new(operation, 4096, 4, 4).unwrap();
        let expect = |send, recv, count| BufferLengths { send, recv, count };
        assert_eq!(layout(Operation::AllReduce), expect(1024, 1024, 1024));
        assert_eq!(layout(Operation::AllGather), expect(256, 1024, 256));
        assert_eq!(layout(Operation::ReduceScatter), expect(1024, 256, 256));
        assert_eq!(layout(Operation::AllToAll), expect(1024, 1024, 256));
        assert_eq!(layout(Operation::Scatter), expect(1024, 256, 256));
    }

    #[test]
    fn sizes_that_hold_no_element_are_left_out() {
        assert_eq!(BufferLengths::new(Operation::AllReduce, 4, 8, 2), None);
        assert_eq!(BufferLengths::new(Operation::AllGather, 4, 4, 2), None);
        assert!(BufferLengths::new(Operation::AllGather, 8, 4, 2).is_some());
        assert!(BufferLengths::new(Operation::Barrier, 0, 4, 2).is_some());
    }

    #[test]
    fn what_one_sends_another_gets() {
        for ranks in 1..=8 {
            for total in [0, 1, 7, 1000, 1 << 20] {
                let sums = |counts: Vec<usize>| counts.iter().sum::<usize>();
                let sent = sums(weighted_counts(total, ranks, 0));
                assert!(sent <= total);
                for rank in 0..ranks {
                    assert_eq!(sums(weighted_counts(total, ranks, rank)), sent);
                    assert_eq!(sums(weighted_counts_to(total, ranks, rank)), sent);
                    for other in 0..ranks {
                        assert_eq!(
                            weighted_counts(total, ranks, rank)[other],
                            weighted_counts_to(total, ranks, other)[rank]
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn farther_ranks_get_more() {
        assert_eq!(weighted_counts(600, 4, 0), [0, 100, 200, 300]);
        assert_eq!(weighted_counts(600, 4, 2), [200, 300, 0, 100]);
        assert_eq!(weighted_counts(600, 1, 0), [600]);
    }
}
