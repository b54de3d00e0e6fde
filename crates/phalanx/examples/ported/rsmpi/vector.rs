//! A part of a list that has gaps, around the ring: two of every three elements.

use phalanx::{Comm, Result};

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank() as i32, comm.world_size());
    let (next, previous) = ((comm.rank() + 1) % ranks, (comm.rank() + ranks - 1) % ranks);

    let list: Vec<i32> = (1..=6).map(|x| rank * x).collect();
    let sent: Vec<i32> = list.chunks(3).flat_map(|three| &three[..2]).copied().collect();
    let mut packed = [0; 4];
    comm.send_recv(&sent, next, &mut packed, previous)?;
    let mut received = [-1; 6];
    for (three, two) in received.chunks_mut(3).zip(packed.chunks(2)) {
        three[..2].copy_from_slice(two);
    }
    println!("rank {rank} got {received:?}");
    let expected = (1..=6).map(|x| if x % 3 == 0 { -1 } else { previous as i32 * x });
    assert!(received.into_iter().eq(expected));
    Ok(())
}
