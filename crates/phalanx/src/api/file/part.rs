//! [`ArrayPart`]: which elements of a distributed array a rank has.

use crate::types::error::{Result, UsageError};
use std::ops::Range;

/// Which elements of a distributed array a rank has: ranges of the flat array, in the order in which the rank's buffer has them.
///
/// ```
/// use phalanx::ArrayPart;
/// let part = ArrayPart::block(10, 1, 3); // the second of three ranks
/// assert_eq!((part.len(), part.iter().collect::<Vec<_>>()), (3, vec![4..7]));
/// let part = ArrayPart::block_cyclic(10, 2, 1, 3);
/// assert_eq!((part.len(), part.iter().collect::<Vec<_>>()), (4, vec![2..4, 8..10]));
/// ```
#[doc(alias = "MPI_File_set_view")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrayPart {
    /// Elements of the whole array.
    whole: usize,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Block(Range<usize>),
    /// Blocks of so many elements, from the first on, every so many.
    Cyclic {
        block: usize,
        first: usize,
        every: usize,
    },
    Ranges(Vec<Range<usize>>),
}

impl ArrayPart {
    /// One of `ranks` contiguous blocks of an array of `whole` elements. The first blocks are one element longer if they cannot be equal.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn block(whole: usize, rank: usize, ranks: usize) -> ArrayPart {
        assert!(rank < ranks, "rank {rank} of {ranks}");
        let start = |rank: usize| rank * (whole / ranks) + rank.min(whole % ranks);
        ArrayPart { whole, kind: Kind::Block(start(rank)..start(rank + 1)) }
    }

    /// Every `ranks`-th block of `block` elements, from the block with the rank's number on. The array's last block may be shorter.
    ///
    /// # Panics
    /// If there is no such rank, or for blocks of 0 elements.
    pub fn block_cyclic(whole: usize, block: usize, rank: usize, ranks: usize) -> ArrayPart {
        assert!(rank < ranks && block > 0, "rank {rank} of {ranks}, blocks of {block}");
        ArrayPart { whole, kind: Kind::Cyclic { block, first: rank * block, every: ranks * block } }
    }

    /// Any ranges, such as the rows of a block of a matrix.
    ///
    /// # Errors
    /// [`UsageError::Range`] for one that is not in the array.
    pub fn ranges(whole: usize, ranges: impl IntoIterator<Item = Range<usize>>) -> Result<ArrayPart> {
        let ranges: Vec<Range<usize>> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
        if let Some(range) = ranges.iter().find(|range| range.end > whole) {
            let (at, count) = (range.start, range.len());
            return Err(UsageError::Range { operation: "ArrayPart::ranges", at, count, len: whole }.into());
        }
        Ok(ArrayPart { whole, kind: Kind::Ranges(ranges) })
    }

    /// Elements of the whole array.
    pub fn whole_len(&self) -> usize {
        self.whole
    }

    /// Elements of the part.
    pub fn len(&self) -> usize {
        match &self.kind {
            Kind::Block(range) => range.len(),
            Kind::Cyclic { .. } | Kind::Ranges(_) => self.iter().map(|range| range.len()).sum(),
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// The ranges. None is empty.
    pub fn iter(&self) -> impl Iterator<Item = Range<usize>> + Clone + '_ {
        let (first, every, block, end, listed) = match &self.kind {
            Kind::Block(range) => (range.start, usize::MAX, range.len(), range.end, &[][..]),
            Kind::Cyclic { block, first, every } => (*first, *every, *block, self.whole, &[][..]),
            Kind::Ranges(ranges) => (0, 1, 0, 0, &ranges[..]),
        };
        let blocks = (first..end).step_by(every).map(move |start| start..(start + block).min(end));
        blocks.chain(listed.iter().cloned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_all_ranks_are_the_whole() {
        for (whole, ranks) in [(0, 3), (1, 3), (10, 1), (10, 3), (100, 7)] {
            for block in [0, 1, 4, 13] {
                let part = |rank| match block {
                    0 => ArrayPart::block(whole, rank, ranks),
                    block => ArrayPart::block_cyclic(whole, block, rank, ranks),
                };
                let mut all: Vec<usize> =
                    (0..ranks).flat_map(|rank| part(rank).iter().flatten().collect::<Vec<_>>()).collect();
                all.sort_unstable();
                assert_eq!(
                    all,
                    (0..whole).collect::<Vec<_>>(),
                    "{whole} elements, {ranks} ranks, blocks of {block}"
                );
                let lens = |rank: usize| part(rank).iter().map(|range| range.len()).sum::<usize>();
                assert!(
                    (0..ranks)
                        .all(|rank| lens(rank) == part(rank).len()
                            && (lens(rank) == 0) == part(rank).is_empty())
                );
            }
        }
        assert!(ArrayPart::ranges(10, [0..3, 5..5, 9..10]).is_ok_and(|part| part.len() == 4));
        assert!(ArrayPart::ranges(10, [0..3, 9..11]).is_err());
    }
}
