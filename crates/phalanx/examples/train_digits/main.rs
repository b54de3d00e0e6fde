//! Data-parallel training: every rank has the whole network and computes the gradient of its share of each
//! batch; one all_reduce per step sums the gradients, so all ranks take the same step.
//!
//! ```text
//! cargo run --release -p phalanx --example train_digits -- --ranks 4          ranks as threads
//! phalanx launch -n 4 -- target/release/examples/train_digits                 ranks as processes
//! phalanx launch -n 4 --restarts 2 -- target/release/examples/train_digits --rebuild
//! ```
//!
//! In the last form two ranks may be killed: each is started anew and takes the others' state, and the result is the same, bit for bit.

mod digits;
mod network;
mod options;
mod random;
mod training;

use options::Options;
use phalanx::Comm;
use std::process::ExitCode;
use training::Training;

/// What rank 0's held-out accuracy must reach for the program to succeed.
const REQUIRED_ACCURACY: f32 = 0.95;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> ExitCode {
    match Options::from_args(std::env::args().skip(1)).and_then(|options| run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("train_digits: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    if options.help {
        println!("{}", options::HELP);
        return Ok(());
    }
    if options.ranks.is_none() {
        // Under a launcher this process is one of several ranks.
        let comm = phalanx::init()?;
        if comm.world_size() > 1 {
            return one_rank(comm, options);
        }
    }
    let ranks = options.ranks.unwrap_or(2);
    phalanx::try_run(ranks, |comm| one_rank(comm, options)).map(drop)
}

fn one_rank(mut comm: Comm, options: &Options) -> Result<()> {
    let data = digits::load(options.data.as_deref())?;
    let mut training = Training::new();
    loop {
        match training.run(&comm, &data, options.epochs) {
            Ok(()) => break,
            // A rank is lost. The launcher starts a new process in its place, whose `init` joins here.
            Err(error) if error.is_fatal() && options.rebuild => comm = comm.rebuild()?,
            Err(error) => return Err(error.into()),
        }
    }
    training.check_all_equal(&comm)?;
    comm.finalize()?;
    let accuracy = training.accuracy(&data);
    if accuracy < REQUIRED_ACCURACY {
        return Err(format!(
            "the held-out accuracy is {:.2} %, {:.0} % are required",
            100.0 * accuracy,
            100.0 * REQUIRED_ACCURACY
        )
        .into());
    }
    Ok(())
}
