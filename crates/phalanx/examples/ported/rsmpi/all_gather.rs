//! A value and a row of each rank, for every rank.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());

    let powers = comm.all_gather_value(2u64.pow(rank as u32 + 1))?;
    assert!(powers.iter().zip(1..).all(|(power, exponent)| *power == 2u64.pow(exponent)));

    let row: Vec<u64> = (1..=ranks as u64).map(|x| x * (rank as u64 + 1)).collect();
    let mut table = vec![0; ranks * ranks];
    comm.all_gather(&row, &mut table)?;
    if rank == 0 {
        println!("{powers:?}");
        table.chunks(ranks).for_each(|row| println!("{row:?}"));
    }
    assert!(table.iter().enumerate().all(|(i, x)| *x == ((i / ranks + 1) * (i % ranks + 1)) as u64));
    Ok(())
}
