//! Ranks as a grid of several dimensions: [`Grid`], its [`Neighbors`], and the halos of arrays that are spread over it.

mod by_host;
mod halo;
mod in_flight;
mod neighbors;
#[cfg(feature = "_gpu")]
mod on_gpu;
mod sizes;
mod slab;

pub use in_flight::HaloExchange;
pub use neighbors::Neighbors;

use super::comm::Comm;
use crate::types::error::{Error, Result, UsageError};

/// Ranks as a grid of several dimensions, the last one innermost, as in a C array. `MPI_Cart_create`.
///
/// A value: it has no communicator, and making one needs no communication. Operations take it beside the [`Comm`], whose number of ranks it
/// must have.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::Grid;
///
/// // Six ranks as rows and columns; the rows are rings.
/// let grid = Grid::balanced(6, &[0, 0], &[false, true])?;
/// assert_eq!(grid.sizes(), [3, 2]);
/// assert_eq!(grid.coordinates(5), [2, 1]);
/// assert_eq!(grid.rank_at(&[2, 2]), Some(4));
/// assert_eq!(grid.shift(4, 0, 1), (Some(2), None));
/// # Ok(())
/// # }
/// ```
#[doc(alias = "MPI_Cart_create")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grid {
    sizes: Vec<usize>,
    periodic: Vec<bool>,
}

impl Grid {
    /// A grid with these sizes, outermost first. In a periodic dimension the last rank's neighbor is the first.
    ///
    /// # Errors
    /// [`UsageError::Setting`] if there is no dimension, a size is 0, the number of ranks overflows, or the lists have different lengths.
    pub fn new(sizes: &[usize], periodic: &[bool]) -> Result<Grid> {
        let ranks = sizes.iter().try_fold(1usize, |ranks, size| ranks.checked_mul(*size));
        if sizes.is_empty() || ranks.is_none_or(|ranks| ranks == 0) {
            return Err(refused("sizes", sizes, "a size of at least 1 for each dimension"));
        }
        if periodic.len() != sizes.len() {
            return Err(refused(
                "periodic",
                periodic,
                format!("one entry for each of {} dimensions", sizes.len()),
            ));
        }
        Ok(Grid { sizes: sizes.into(), periodic: periodic.into() })
    }

    /// A grid of so many ranks. Sizes of 0 are chosen: as equal as possible, in decreasing order. `MPI_Dims_create`.
    ///
    /// # Errors
    /// As for [`new`](Grid::new), and if the number of ranks is no multiple of the given sizes.
    #[doc(alias = "MPI_Dims_create")]
    pub fn balanced(ranks: usize, sizes: &[usize], periodic: &[bool]) -> Result<Grid> {
        Grid::new(&sizes::balanced(ranks, sizes)?, periodic)
    }

    /// The sizes of the dimensions, outermost first.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Which dimensions are periodic.
    pub fn periodic(&self) -> &[bool] {
        &self.periodic
    }

    /// The number of ranks: the product of the sizes.
    pub fn ranks(&self) -> usize {
        self.sizes.iter().product()
    }

    /// A rank's place in each dimension. `MPI_Cart_coords`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn coordinates(&self, rank: usize) -> Vec<usize> {
        assert!(rank < self.ranks(), "rank {rank} is not in a grid of {} ranks", self.ranks());
        let mut rest = rank;
        let mut coordinates: Vec<usize> =
            self.sizes.iter().rev().map(|size| take_digit(&mut rest, *size)).collect();
        coordinates.reverse();
        coordinates
    }

    /// The rank at these coordinates, which wrap in periodic dimensions; `None` beyond the grid. `MPI_Cart_rank`.
    ///
    /// # Panics
    /// If there are not as many coordinates as dimensions.
    pub fn rank_at(&self, coordinates: &[isize]) -> Option<usize> {
        assert_eq!(coordinates.len(), self.sizes.len(), "one coordinate for each dimension");
        let mut places = self.sizes.iter().zip(&self.periodic).zip(coordinates);
        places.try_fold(0, |rank, ((size, periodic), coordinate)| {
            let wrapped = coordinate.rem_euclid(*size as isize);
            (*periodic || wrapped == *coordinate).then_some(rank * size + wrapped as usize)
        })
    }

    /// The ranks from which and to which data moves if everybody's goes by so many places in a dimension: `(source, destination)`;
    /// `None` beyond the grid. `MPI_Cart_shift`.
    ///
    /// # Panics
    /// If there is no such rank or dimension.
    #[doc(alias = "MPI_Cart_shift")]
    pub fn shift(&self, rank: usize, dimension: usize, places: isize) -> (Option<usize>, Option<usize>) {
        let coordinates = self.coordinates(rank);
        let at = |places: isize| {
            let mut moved: Vec<isize> = coordinates.iter().map(|coordinate| *coordinate as isize).collect();
            moved[dimension] = moved[dimension].wrapping_add(places);
            self.rank_at(&moved)
        };
        (at(places.wrapping_neg()), at(places))
    }

    /// The part of the grid that varies in these dimensions alone.
    ///
    /// # Errors
    /// [`UsageError::Setting`] for no dimension, for one that there is not, and for others than in increasing order.
    pub fn sub_grid(&self, dimensions: &[usize]) -> Result<Grid> {
        let is_there = |dimension: &usize| *dimension < self.sizes.len();
        if !dimensions.iter().all(is_there) || !dimensions.is_sorted_by(|one, next| one < next) {
            let expected = format!("dimensions below {}, in increasing order", self.sizes.len());
            return Err(refused("dimensions", dimensions, expected));
        }
        let sizes: Vec<usize> = dimensions.iter().map(|dimension| self.sizes[*dimension]).collect();
        let periodic: Vec<bool> = dimensions.iter().map(|dimension| self.periodic[*dimension]).collect();
        Grid::new(&sizes, &periodic)
    }

    /// An error unless it has the ranks of a communicator.
    fn check_ranks(&self, operation: &str, comm: &Comm) -> Result<()> {
        if self.ranks() == comm.world_size() {
            return Ok(());
        }
        let expected = format!("sizes with the number of ranks, {}, as their product", comm.world_size());
        let (name, value) = (format!("{operation}: grid"), format!("{:?}", self.sizes));
        Err(UsageError::Setting { name, value, expected }.into())
    }
}

fn take_digit(rest: &mut usize, size: usize) -> usize {
    let digit = *rest % size;
    *rest /= size;
    digit
}

fn refused(what: &str, value: impl std::fmt::Debug, expected: impl Into<String>) -> Error {
    let (name, value) = (format!("Grid: {what}"), format!("{value:?}"));
    UsageError::Setting { name, value, expected: expected.into() }.into()
}

impl Comm {
    /// The communicator of the ranks that differ from this one in these dimensions of the grid alone, and their grid. `MPI_Cart_sub`.
    ///
    /// Collective, as [`split_grid`](Comm::split_grid), which makes several at once.
    ///
    /// # Errors
    /// [`UsageError::Setting`] for dimensions that are not there or not in increasing order, and for a grid of another number of ranks.
    #[doc(alias = "MPI_Cart_sub")]
    pub fn split_sub_grid(&self, grid: &Grid, dimensions: &[usize]) -> Result<(Comm, Grid)> {
        grid.check_ranks("split_sub_grid", self)?;
        let part = grid.sub_grid(dimensions)?;
        let comm = self.split_grid(grid.sizes(), &[dimensions])?.pop();
        Ok((comm.expect("one for each group"), part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_at_its_coordinates() {
        let grid = Grid::new(&[2, 3, 4], &[false, true, false]).unwrap();
        for rank in 0..grid.ranks() {
            let coordinates: Vec<isize> =
                grid.coordinates(rank).iter().map(|place| *place as isize).collect();
            assert_eq!(grid.rank_at(&coordinates), Some(rank));
        }
        assert_eq!(grid.coordinates(17), [1, 1, 1]);
        assert_eq!(grid.rank_at(&[0, -1, 0]), grid.rank_at(&[0, 2, 0]));
        assert_eq!(grid.rank_at(&[0, 7, 0]), grid.rank_at(&[0, 1, 0]));
        assert_eq!((grid.rank_at(&[-1, 0, 0]), grid.rank_at(&[0, 0, 4])), (None, None));
    }

    #[test]
    fn a_shift_says_where_data_comes_from_and_goes_to() {
        let grid = Grid::new(&[3, 2], &[false, true]).unwrap();
        assert_eq!(grid.shift(0, 0, 1), (None, Some(2)));
        assert_eq!(grid.shift(4, 0, -2), (None, Some(0)));
        assert_eq!(grid.shift(1, 1, 1), (Some(0), Some(0)));
        assert_eq!(grid.shift(1, 1, isize::MIN), (Some(1), Some(1)));
        assert_eq!(grid.shift(1, 0, 0), (Some(1), Some(1)));
    }

    #[test]
    fn what_is_no_grid_is_refused() {
        let text = |result: Result<Grid>| result.unwrap_err().to_string();
        assert!(text(Grid::new(&[2, 0], &[true, true])).contains("at least 1"));
        assert!(text(Grid::new(&[], &[])).contains("at least 1"));
        assert!(text(Grid::new(&[usize::MAX, 2], &[true, true])).contains("at least 1"));
        assert!(text(Grid::new(&[2, 2], &[true])).contains("2 dimensions"));
        let grid = Grid::new(&[2, 3], &[true, false]).unwrap();
        assert!(text(grid.sub_grid(&[2])).contains("below 2"));
        assert!(text(grid.sub_grid(&[0, 0])).contains("below 2"));
        assert_eq!(grid.sub_grid(&[1]).unwrap(), Grid::new(&[3], &[false]).unwrap());
    }
}
