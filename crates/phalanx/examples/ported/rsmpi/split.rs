//! Communicators of the odd and of the even ranks: by groups, by the members alone, and by colours.

use phalanx::{Comm, RankGroup, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, all) = (comm.rank(), comm.rank_group());
    let is_odd = rank % 2 == 1;
    let odd = RankGroup::new((1..comm.world_size()).step_by(2))?;
    let even = all.difference(&odd);
    assert_eq!((even.contains(rank), odd.contains(rank)), (!is_odd, is_odd));
    let own = if is_odd { &odd } else { &even };
    let is_of = |part: &Comm, group: &RankGroup| -> Result<bool> {
        Ok(part.all_gather_value(rank)? == group.ranks())
    };

    let part = comm.split_group(own)?.expect("this rank is in its group");
    assert!(is_of(&part, own)?);
    let odd_part = comm.split_group(&odd)?;
    assert_eq!(odd_part.is_some(), is_odd);
    if let Some(part) = odd_part {
        assert!(is_of(&part, &odd)?);
    }
    if !is_odd {
        assert!(is_of(&comm.split_members(&even)?, &even)?);
    }

    assert!(is_of(&comm.split_by(&is_odd)?, own)?);
    let odd_part = comm.split(is_odd.then_some(0), 0)?;
    assert_eq!(odd_part.is_some(), is_odd);
    if let Some(part) = odd_part {
        assert!(is_of(&part, &odd)?);
    }
    Ok(())
}
