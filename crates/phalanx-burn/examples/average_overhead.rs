//! What `Ranks::average` costs beside the all-reduces that it is made of.
//!
//! ```text
//! cargo run --release --example average_overhead -- --ranks 2
//! phalanx launch -n 2 -- target/release/examples/average_overhead
//! ```
//!
//! Both are measured in turn, on as many elements in as many parts, and the fastest round of each counts.

mod shared;

use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use clap::Parser;
use phalanx::ReduceOp;
use phalanx_burn::{Ranks, Result};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Compares the average of a module's gradients with plain all-reduces.
#[derive(Parser)]
struct Options {
    /// Ranks as threads of this process. Without it, the launcher's ranks; or one.
    #[arg(long)]
    ranks: Option<usize>,
    /// Parameters.
    #[arg(long, default_value_t = 16)]
    parameters: usize,
    /// Bytes of all parameters together.
    #[arg(long, default_value_t = 33_600_000)]
    bytes: usize,
    /// Rounds.
    #[arg(long, default_value_t = 40)]
    rounds: usize,
}

#[derive(Module, Debug)]
struct Parts {
    parts: Vec<Param<Tensor<1>>>,
}

fn measure(ranks: &Ranks, options: &Options) -> Result<()> {
    let len = options.bytes / 4 / options.parameters;
    let device = Device::flex();
    let one = |_| Param::initialized(ParamId::new(), Tensor::ones([len], &device));
    let module = Parts { parts: (0..options.parameters).map(one).collect() };
    let mut gradients = GradientsParams::new();
    for part in &module.parts {
        gradients.register(part.id, Tensor::<1>::ones([len], &device));
    }
    let mut plain = vec![vec![1.0f32; len]; options.parameters];
    let (mut averaged, mut reduced) = (Duration::MAX, Duration::MAX);
    for _ in 0..options.rounds {
        ranks.barrier()?;
        let began = Instant::now();
        gradients = ranks.average(gradients, &module)?;
        averaged = averaged.min(began.elapsed());
        ranks.barrier()?;
        let began = Instant::now();
        plain.iter_mut().try_for_each(|part| ranks.comm().all_reduce_in_place(part, ReduceOp::Avg))?;
        reduced = reduced.min(began.elapsed());
    }
    if ranks.rank() == 0 {
        let [averaged, reduced] = [averaged, reduced].map(|time| time.as_secs_f64() * 1e3);
        let ratio = averaged / reduced;
        println!("average {averaged:.2} ms, all_reduce {reduced:.2} ms: {ratio:.2} times as long");
    }
    ranks.finalize()
}

fn main() -> ExitCode {
    let options = Options::parse();
    shared::on_ranks(options.ranks, |ranks| measure(&ranks, &options))
}
