//! Ranks as a grid of several dimensions.

use super::{Call, Operation};

/// A grid of ranks, the last dimension innermost, and the communicators that are wanted of it. Checked: the product of the sizes is
/// the number of ranks, and each group lists dimensions that there are, once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RankGrid<'a> {
    pub sizes: &'a [usize],
    /// For each communicator the dimensions along which its ranks differ.
    pub groups: &'a [&'a [usize]],
}

impl RankGrid<'_> {
    /// The call that ranks compare.
    pub fn call(&self) -> Call<'static> {
        let ends = self.groups.iter().flat_map(|group| group.iter().copied().chain([usize::MAX]));
        let numbers = self.sizes.iter().copied().chain([usize::MAX]).chain(ends);
        let step = |hash: u64, number: usize| {
            (hash ^ number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
        };
        let hash = numbers.fold(1, step);
        Call { root: (hash >> 32) as u32 as usize, ..Call::empty(Operation::SplitGrid) }
    }

    /// The ranks that come together with `rank` in one communicator of a group, in order.
    pub fn members(&self, group: &[usize], rank: usize) -> Vec<usize> {
        let ranks: usize = self.sizes.iter().product();
        (0..ranks).filter(|other| self.place(group, *other) == self.place(group, rank)).collect()
    }

    /// The number of the communicator of a group that has `rank`: its coordinates in the dimensions that the group does not list.
    pub fn place(&self, group: &[usize], rank: usize) -> usize {
        let (mut rest, mut place, mut width) = (rank, 0, 1);
        for (dimension, size) in self.sizes.iter().enumerate().rev() {
            if !group.contains(&dimension) {
                place += rest % size * width;
                width *= size;
            }
            rest /= size;
        }
        place
    }
}

#[cfg(test)]
mod tests {
    use super::RankGrid;

    #[test]
    fn ranks_of_a_group_differ_in_its_dimensions_alone() {
        let grid = RankGrid { sizes: &[2, 3, 2], groups: &[] };
        assert_eq!(grid.members(&[2], 5), [4, 5]);
        assert_eq!(grid.members(&[1], 5), [1, 3, 5]);
        assert_eq!(grid.members(&[0, 2], 5), [4, 5, 10, 11]);
        assert_eq!(grid.members(&[2, 0], 5), [4, 5, 10, 11]);
        assert_eq!(grid.members(&[], 5), [5]);
        assert_eq!(grid.members(&[0, 1, 2], 5), (0..12).collect::<Vec<_>>());
        let places: Vec<usize> = (0..12).map(|rank| grid.place(&[1], rank)).collect();
        assert_eq!(places, [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]);
    }

    #[test]
    fn other_grids_are_other_calls() {
        let call = |sizes: &[usize], groups: &[&[usize]]| RankGrid { sizes, groups }.call().root;
        let one = call(&[2, 3], &[&[0], &[1]]);
        for other in [call(&[3, 2], &[&[0], &[1]]), call(&[2, 3], &[&[0, 1]]), call(&[2, 3], &[&[1], &[0]])] {
            assert_ne!(one, other);
        }
    }
}
