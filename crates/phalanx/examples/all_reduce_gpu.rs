//! The sum of buffers in GPU memory, one GPU to a thread: `cargo run -p phalanx --example all_reduce_gpu [RANKS]`.

use phalanx::{BackendKind, Comm, ReduceOp, Result};

fn main() -> Result<()> {
    let ranks = std::env::args().nth(1).map_or(2, |ranks| ranks.parse().expect("a number of GPUs"));
    let sums = Comm::builder().backend(BackendKind::Nccl).try_run(ranks, |comm| -> Result<f32> {
        let stream = comm.cuda_stream()?;
        let mine = stream.clone_htod(&vec![comm.rank() as f32; 1 << 20])?;
        let mut sum = stream.alloc_zeros::<f32>(1 << 20)?;
        comm.all_reduce(&mine, &mut sum, ReduceOp::Sum)?;
        Ok(stream.clone_dtoh(&sum)?[0])
    })?;
    println!("{sums:?}");
    Ok(())
}
