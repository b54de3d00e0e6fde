//! An array that is spread over a grid of ranks, and what each rank's part holds before and after its halo is exchanged.

use crate::random::Random;
use phalanx::Grid;

/// What cells beyond the edge of the array hold, and a halo before the exchange.
const OUTSIDE: u64 = u64::MAX;

/// The array, of any number of dimensions.
#[derive(Debug)]
pub struct Spread {
    /// Ranks in each dimension, whether it is a ring, and the halo's width.
    pub dimensions: Vec<(usize, bool, usize)>,
    /// Own cells of the ranks in a dimension beyond the width, by place.
    pub extra: Vec<usize>,
}

impl Spread {
    /// One for so many ranks: 1 to 4 dimensions, widths of 0 to 3.
    pub fn random(random: &mut Random, ranks: usize) -> Spread {
        let mut rest = ranks;
        let mut sizes: Vec<usize> = (0..random.below(4))
            .map(|_| {
                let divisors: Vec<usize> = (1..=rest).filter(|size| rest.is_multiple_of(*size)).collect();
                let size = divisors[random.below(divisors.len())];
                rest /= size;
                size
            })
            .collect();
        sizes.insert(random.below(sizes.len() + 1), rest);
        let dimensions =
            sizes.into_iter().map(|size| (size, random.below(2) == 0, random.below(4))).collect();
        Spread { dimensions, extra: (0..7).map(|_| random.below(4)).collect() }
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.dimensions.iter().map(|(ranks, ..)| ranks).product()
    }

    /// The ranks.
    pub fn grid(&self) -> Grid {
        let sizes: Vec<usize> = self.dimensions.iter().map(|(ranks, ..)| *ranks).collect();
        let periodic: Vec<bool> = self.dimensions.iter().map(|(_, periodic, _)| *periodic).collect();
        Grid::new(&sizes, &periodic).expect("a grid of at least one rank")
    }

    /// The halo's width in each dimension.
    pub fn width(&self) -> Vec<usize> {
        self.dimensions.iter().map(|(_, _, width)| *width).collect()
    }

    /// The shape of the part at these coordinates, with its halo.
    pub fn shape(&self, place: &[usize]) -> Vec<usize> {
        let dimensions = self.dimensions.iter().enumerate();
        dimensions.map(|(d, (_, _, width))| self.own(d, place[d]) + 2 * width).collect()
    }

    /// The part at these coordinates, without and with the halo.
    pub fn part(&self, place: &[usize]) -> [Vec<u64>; 2] {
        let cells = self.cells(place);
        let own = |(index, is_own): &(Option<u64>, bool)| index.filter(|_| *is_own).unwrap_or(OUTSIDE);
        let all = |(index, _): &(Option<u64>, bool)| index.unwrap_or(OUTSIDE);
        [cells.iter().map(own).collect(), cells.iter().map(all).collect()]
    }

    /// Own cells at a place of a dimension.
    fn own(&self, dimension: usize, place: usize) -> usize {
        let (_, _, width) = self.dimensions[dimension];
        width.max(1) + self.extra[(3 * dimension + place) % self.extra.len()]
    }

    /// The place in the whole array of a local place; `None` beyond an edge.
    fn global(&self, dimension: usize, place: usize, local: usize) -> Option<usize> {
        let (ranks, periodic, width) = self.dimensions[dimension];
        let before: usize = (0..place).map(|place| self.own(dimension, place)).sum();
        let whole: usize = (0..ranks).map(|place| self.own(dimension, place)).sum();
        let at = (before + local).checked_sub(width);
        match at {
            Some(at) if at < whole => Some(at),
            _ if periodic => Some((before + local + whole - width) % whole),
            _ => None,
        }
    }

    /// Each cell of a rank's array: its place in the whole array, and whether it is the rank's own.
    fn cells(&self, place: &[usize]) -> Vec<(Option<u64>, bool)> {
        let mut cells = vec![(Some(0), true)];
        for (dimension, (_, _, width)) in self.dimensions.iter().enumerate() {
            let own = self.own(dimension, place[dimension]);
            let locals = 0..own + 2 * width;
            let longer = |(cell, is_own): (Option<u64>, bool), local: usize| {
                let global = self.global(dimension, place[dimension], local);
                let index = cell.zip(global).map(|(cell, at)| cell * 1000 + at as u64);
                (index, is_own && (*width..width + own).contains(&local))
            };
            cells = cells
                .into_iter()
                .flat_map(|cell| locals.clone().map(move |local| longer(cell, local)))
                .collect();
        }
        cells
    }
}
