//! Reductions to one rank and to all, of a rank's own buffers, in blocks, and by an operation of the program's own.

use phalanx::{Bitwise, Comm, ReduceOp, Result, reduce_local};

pub fn run(comm: &Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank() as i32, comm.world_size() as i32);

    if let Some(sum) = comm.reduce_value(rank, ReduceOp::Sum, 0)? {
        assert_eq!(sum, ranks * (ranks - 1) / 2);
    }
    assert_eq!(comm.all_reduce_value(rank, ReduceOp::Max)?, ranks - 1);

    let local = |op| -> Result<u16> {
        let mut b = [0b0011_1100_0011_1100];
        reduce_local(&[0b0000_1111_1111_0000], &mut b, op)?;
        Ok(b[0])
    };
    assert_eq!(local(Bitwise::And)?, 0b0000_1100_0011_0000);
    assert_eq!(local(Bitwise::Or)?, 0b0011_1111_1111_1100);
    assert_eq!(local(Bitwise::Xor)?, 0b0011_0011_1100_1100);

    let factors: Vec<i32> = (0..ranks).collect();
    let mut product = [0];
    comm.reduce_scatter(&factors, &mut product, ReduceOp::Prod)?;
    assert_eq!(product, [rank.wrapping_pow(ranks as u32)]);

    let mut sum = [rank + 1];
    comm.all_reduce_in_place_with(&mut sum, |x, y| x + y)?;
    assert_eq!(sum, [ranks * (ranks + 1) / 2]);
    Ok(())
}
