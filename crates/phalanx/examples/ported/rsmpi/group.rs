//! Groups of ranks, of which others are made.

use phalanx::{Comm, RankGroup, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let all = comm.rank_group();
    assert_eq!(all.len(), ranks);
    assert_eq!(all.place_of(rank), Some(rank));
    assert_eq!(all.union(&comm.rank_group()), all);

    let empty = all.difference(&all);
    assert_eq!(empty, RankGroup::default());
    assert!(all.intersection(&empty).is_empty());

    let places: Vec<usize> = (0..ranks / 2).collect();
    let (first, second) = (all.include(&places)?, all.exclude(&places)?);
    assert_ne!(first, second);
    assert_eq!(all.intersection(&first), first);
    assert_eq!(all.intersection(&second), second);
    assert_eq!(all.difference(&second), first);
    assert_eq!(all.difference(&first), second);
    assert_eq!(first.union(&second), all);
    assert!(first.intersection(&second).is_empty());
    assert!(first.contains(rank) != second.contains(rank));

    let places: Vec<usize> = (0..ranks).rev().collect();
    let reversed = all.include(&places)?;
    assert_eq!(reversed.translate(&[rank], &all)?, [Some(places[rank])]);
    Ok(())
}
