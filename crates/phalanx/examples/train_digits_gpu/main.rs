//! Data-parallel training with everything in GPU memory: the network, the images and the gradients, which one all_reduce a
//! step sums. The network and the images are those of `train_digits`.
//!
//! ```text
//! cargo run --release -p phalanx --example train_digits_gpu -- 2             ranks as threads
//! phalanx launch -n 2 -- target/release/examples/train_digits_gpu            ranks as processes
//! ```
//!
//! `--data PATH` names other images; those of the repository are part of the program.

#[path = "../train_digits/digits.rs"]
mod digits;
#[path = "../shared/gpu.rs"]
mod gpu;
#[path = "../shared/kernels.rs"]
mod kernels;
mod network;
#[path = "../train_digits/random.rs"]
mod random;
mod training;

use gpu::Result;
use phalanx::Comm;
use std::path::PathBuf;
use std::process::ExitCode;
use training::train;

/// What rank 0's held-out accuracy must reach for the program to succeed.
const REQUIRED_ACCURACY: f32 = 0.95;
const EPOCHS: usize = 20;

fn main() -> ExitCode {
    gpu::on_ranks("train_digits_gpu", one_rank)
}

/// The file behind `--data`.
fn data() -> Result<Option<PathBuf>> {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--data");
    match (arguments.next(), arguments.next()) {
        (None, _) => Ok(None),
        (Some(_), Some(path)) => Ok(Some(path.into())),
        (Some(option), None) => Err(format!("{option} needs a value").into()),
    }
}

fn one_rank(comm: Comm) -> Result<()> {
    let accuracy = train(&comm, &digits::load(data()?.as_deref())?, EPOCHS)?;
    comm.finalize()?;
    if accuracy < REQUIRED_ACCURACY {
        let (reached, required) = (100.0 * accuracy, 100.0 * REQUIRED_ACCURACY);
        return Err(format!("the held-out accuracy is {reached:.2} %, {required:.0} % are required").into());
    }
    Ok(())
}
