//! Four ranks as a grid of two by two, of which the second dimension is a ring.

use phalanx::{Comm, Grid, RankGroup, Result};

pub fn run(comm: &Comm) -> Result<()> {
    if comm.world_size() < 4 {
        return Ok(());
    }
    let Some(comm) = comm.split_group(&RankGroup::from(0..4))? else {
        return Ok(());
    };
    let grid = Grid::new(&[2, 2], &[false, true])?;
    let rank = comm.rank();
    let coordinates = grid.coordinates(rank);
    let (x, y) = (coordinates[0], coordinates[1]);

    let (column, _) = comm.split_sub_grid(&grid, &[0])?;
    assert_eq!((column.world_size(), column.rank()), (2, x));
    let (row, _) = comm.split_sub_grid(&grid, &[1])?;
    assert_eq!((row.world_size(), row.rank()), (2, y));

    // The first dimension has ends.
    let (source, destination) = grid.shift(rank, 0, 1);
    assert_eq!((source.is_some(), destination.is_some()), (x == 1, x == 0));
    let neighbor = source.or(destination).expect("one of them is there");
    assert_eq!(grid.coordinates(neighbor), [1 - x, y]);

    // The second one is a ring: the neighbor in both directions is the same, and two steps lead back.
    let neighbor = grid.rank_at(&[x as isize, 1 - y as isize]);
    assert_eq!(grid.shift(rank, 1, 1), (neighbor, neighbor));
    assert_eq!(grid.shift(rank, 1, 2), (Some(rank), Some(rank)));
    Ok(())
}
