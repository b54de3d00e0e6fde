//! The first program: four ranks, as threads, add up their vectors.
use phalanx::{ReduceOp, Result};

fn main() -> Result<()> {
    let sums = phalanx::try_run(4, |comm| -> Result<f32> {
        let mut x = vec![comm.rank() as f32; 1000];
        comm.all_reduce_in_place(&mut x, ReduceOp::Sum)?;
        Ok(x[0])
    })?;
    for (rank, sum) in sums.into_iter().enumerate() {
        println!("rank {rank}: 0 + 1 + 2 + 3 = {sum}");
    }
    Ok(())
}
