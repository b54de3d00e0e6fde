//! What `Ranks::average` costs: on CPUs beside the all-reduces that it is made of, on GPUs beside a step of training that averages nothing, and
//! beside burn's own all-reduce.
//!
//! ```text
//! cargo run --release --example average_overhead -- --ranks 2
//! phalanx launch -n 2 -- target/release/examples/average_overhead
//! average_overhead --ranks 2 --device cuda --bytes 134000000
//! ```
//!
//! All are measured in turn, and the fastest round of each counts.

mod shared;

use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use clap::Parser;
use phalanx::ReduceOp;
use phalanx_burn::{Ranks, Result};
use shared::Place;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Compares the average of a module's gradients with plain all-reduces.
#[derive(Parser)]
struct Options {
    #[command(flatten)]
    place: Place,
    /// Parameters.
    #[arg(long, default_value_t = 16)]
    parameters: usize,
    /// Bytes of all parameters together.
    #[arg(long, default_value_t = 33_600_000)]
    bytes: usize,
    /// Rounds.
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Samples of a step on a GPU.
    #[arg(long, default_value_t = 4096)]
    samples: usize,
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

/// Steps of training on a GPU.
#[cfg(feature = "cuda")]
mod steps {
    use super::{Options, Ranks, Result};
    use burn::module::{Module, Param, ParamId};
    use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
    use burn::tensor::distributed::{ReduceOperation, all_reduce};
    use burn::tensor::{Device, Distribution, Tensor};
    use std::time::{Duration, Instant};

    #[derive(Module, Debug)]
    struct Layers {
        layers: Vec<Param<Tensor<2>>>,
    }

    #[derive(Clone, Copy, PartialEq)]
    enum Averaged {
        Not,
        ByPhalanx,
        ByBurn,
    }

    /// The gradients' mean over the GPUs of this process.
    fn by_burn(mut gradients: GradientsParams, model: &Layers, gpus: &[Device]) -> GradientsParams {
        let reduce = |layer: &Param<Tensor<2>>| {
            let gradient = gradients.remove::<2>(layer.id).expect("all are used");
            (layer.id, all_reduce(gradient, ReduceOperation::Mean, gpus.to_vec()))
        };
        let reduced: Vec<_> = model.layers.iter().map(reduce).collect();
        let mut gradients = GradientsParams::new();
        reduced.into_iter().for_each(|(id, mean)| gradients.register(id, mean.resolve()));
        gradients
    }

    /// The fastest time of a step, of some that are not waited for one by one.
    fn time(
        ranks: &Ranks,
        options: &Options,
        averaged: Averaged,
        model: &mut Layers,
        optimizer: &mut ModuleOptimizer,
    ) -> Result<Duration> {
        let device = ranks.device();
        let side = model.layers[0].dims()[0];
        let batch =
            Tensor::<2>::random([options.samples, side], Distribution::Default, &device.clone().autodiff());
        let gpus: Vec<Device> = (0..ranks.world_size()).map(Device::cuda).collect();
        let steps = 10;
        ranks.barrier()?;
        device.sync().expect("it is there");
        let began = Instant::now();
        for _ in 0..steps {
            let forward = |x: Tensor<2>, layer: &Param<Tensor<2>>| x.matmul(layer.val()).tanh();
            let loss = model.layers.iter().fold(batch.clone(), forward).square().mean();
            let gradients = GradientsParams::from_grads(loss.backward(), model);
            let gradients = match averaged {
                Averaged::Not => gradients,
                Averaged::ByPhalanx => ranks.average(gradients, model)?,
                Averaged::ByBurn => by_burn(gradients, model, &gpus),
            };
            *model = optimizer.step(1e-3, model.clone(), gradients);
        }
        device.sync().expect("it is there");
        Ok(began.elapsed() / steps)
    }

    pub fn measure(ranks: &Ranks, options: &Options) -> Result<()> {
        let side = ((options.bytes / 4 / options.parameters) as f64).sqrt() as usize;
        let device = ranks.device().autodiff();
        let spread = Distribution::Normal(0.0, (side as f64).powf(-0.5));
        let layer = |_| {
            Param::initialized(ParamId::new(), Tensor::random([side, side], spread, &device).require_grad())
        };
        let mut model = ranks.broadcast(Layers { layers: (0..options.parameters).map(layer).collect() })?;
        let mut optimizer = SgdConfig::new().init();
        // burn's own is for the GPUs of one process.
        let all = [Averaged::Not, Averaged::ByPhalanx, Averaged::ByBurn];
        let kinds = if options.place.ranks.is_some() { &all[..] } else { &all[..2] };
        let mut fastest = [Duration::MAX; 3];
        for round in 0..options.rounds {
            for (kind, fastest) in kinds.iter().zip(&mut fastest) {
                let time = time(ranks, options, *kind, &mut model, &mut optimizer)?;
                // The first round compiles burn's kernels.
                *fastest = if round == 0 { *fastest } else { time.min(*fastest) };
            }
        }
        if ranks.rank() == 0 {
            let [alone, averaged, burns] = fastest.map(|time| time.as_secs_f64() * 1e3);
            let ratio = averaged / alone;
            println!("step {alone:.2} ms, with average {averaged:.2} ms: {ratio:.3} times as long");
            if kinds.len() == 3 {
                println!("with burn's all_reduce {burns:.2} ms: {:.3} times as long", burns / alone);
            }
        }
        ranks.finalize()
    }
}

/// Steps on GPUs, all-reduces on CPUs.
fn perform(ranks: &Ranks, options: &Options) -> Result<()> {
    #[cfg(feature = "cuda")]
    if ranks.device() != Device::flex() {
        return steps::measure(ranks, options);
    }
    measure(ranks, options)
}

fn main() -> ExitCode {
    let options = Options::parse();
    options.place.run(|comm| perform(&Ranks::new(comm)?, &options))
}
