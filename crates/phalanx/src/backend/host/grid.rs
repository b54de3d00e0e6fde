//! Ranks in rows and columns, for operations in which no rank hears all others.

use std::ops::Range;

/// About as many rows of neighbouring ranks as a row has ranks; none has more than one rank more than another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    ranks: usize,
    pub rows: usize,
    /// Columns in which every row has a rank.
    pub columns: usize,
    /// This rank's place. The last column of a longer row is not counted in `columns`.
    pub row: usize,
    pub column: usize,
}

impl Grid {
    pub fn new(rank: usize, ranks: usize) -> Grid {
        let rows = ranks.isqrt();
        let mut grid = Grid { ranks, rows, columns: ranks / rows, row: 0, column: 0 };
        grid.row = (0..rows).find(|row| grid.ranks_of(*row).contains(&rank)).expect("each rank has a row");
        grid.column = rank - grid.ranks_of(grid.row).start;
        grid
    }

    /// The ranks of a row.
    #[inline(always)]
    pub fn ranks_of(&self, row: usize) -> Range<usize> {
        row * self.ranks / self.rows..(row + 1) * self.ranks / self.rows
    }

    /// The other ranks of the row, starting behind this one.
    #[inline(always)]
    pub fn row_peers(&self) -> impl Iterator<Item = usize> + use<> {
        let row = self.ranks_of(self.row);
        let rank = row.start + self.column;
        (rank + 1..row.end).chain(row.start..rank)
    }

    /// The other rows, starting behind this one.
    #[inline(always)]
    pub fn other_rows(&self) -> impl Iterator<Item = usize> + use<> {
        (self.row + 1..self.rows).chain(0..self.row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_place_and_every_row_all_columns() {
        for ranks in 1..=512 {
            let grids: Vec<Grid> = (0..ranks).map(|rank| Grid::new(rank, ranks)).collect();
            let mut next = 0;
            for row in 0..grids[0].rows {
                let members = grids[0].ranks_of(row);
                assert_eq!(members.start, next);
                assert!((grids[0].columns..=grids[0].columns + 1).contains(&members.len()));
                for (column, rank) in members.clone().enumerate() {
                    assert_eq!((grids[rank].row, grids[rank].column), (row, column));
                    assert_eq!(grids[rank].row_peers().count(), members.len() - 1);
                    assert!(!grids[rank].row_peers().any(|peer| peer == rank || !members.contains(&peer)));
                    assert!(!grids[rank].other_rows().any(|other| other == row));
                }
                next = members.end;
            }
            assert_eq!(next, ranks);
        }
    }
}
