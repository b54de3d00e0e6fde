//! Fifty steps on the ranks' parts of a batch, against one process with the whole batch.

use crate::{Case, assert_close, assert_same_bits, here, numbers, param, tensor, values, widest};
use burn::module::{Module, Param};
use burn::optim::ModuleOptimizer;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::tensor::{DType, Tensor};
use phalanx_burn::{Ranks, Result};
use std::ops::Range;

pub const CASES: &[Case] = &[
    ("training/sgd_f32", |ranks| fifty_steps(ranks, sgd, DType::F32, 1e-6)),
    ("training/sgd_f64", |ranks| fifty_steps(ranks, sgd, DType::F64, 1e-14)),
    ("training/adam_f32", |ranks| fifty_steps(ranks, adam, DType::F32, 1e-6)),
    ("training/adam_f64", |ranks| fifty_steps(ranks, adam, DType::F64, 1e-14)),
    ("training/sgd_bf16", |ranks| fifty_steps(ranks, sgd, DType::BF16, 0.05)),
    ("training/uneven_batches", uneven_batches),
];

#[derive(Module, Debug)]
struct Mlp {
    up: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
    down: Param<Tensor<2>>,
    #[module(skip)]
    ranks: Ranks,
}

impl Mlp {
    fn new(ranks: &Ranks, seed: usize, dtype: DType) -> Mlp {
        Mlp {
            up: param(numbers(seed, 32), [4, 8], dtype),
            bias: param(numbers(seed + 1, 8), [8], dtype),
            down: param(numbers(seed + 2, 16), [8, 2], dtype),
            ranks: ranks.clone(),
        }
    }

    fn loss(&self, x: Tensor<2>, y: Tensor<2>) -> Tensor<1> {
        let inner = (x.matmul(self.up.val()) + self.bias.val().unsqueeze()).tanh();
        (inner.matmul(self.down.val()) - y).square().mean()
    }

    fn values(&self) -> Vec<f64> {
        [values(&self.up.val()), values(&self.bias.val()), values(&self.down.val())].concat()
    }
}

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_momentum(0.9))).init()
}

fn adam() -> ModuleOptimizer {
    AdamConfig::new().init()
}

/// This rank's part of some samples.
fn part(samples: usize, ranks: &Ranks) -> Range<usize> {
    phalanx_train::mesh::part(&(0..samples), ranks.world_size(), ranks.rank())
}

fn train(mut model: Mlp, mut optimizer: ModuleOptimizer, samples: usize, dtype: DType) -> Result<Mlp> {
    let ranks = model.ranks.clone();
    let rows = part(samples, &ranks);
    let device = here().autodiff();
    for step in 0..50 {
        let x = tensor(numbers(step, samples * 4), [samples, 4], dtype, &device);
        let y = tensor(numbers(step + 5, samples * 2), [samples, 2], dtype, &device);
        let loss = model.loss(x.slice([rows.clone()]), y.slice([rows.clone()]));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let gradients = ranks.average_by(Some(gradients), rows.len() as f64, &model)?;
        model = optimizer.step(0.01, model, gradients.expect("there are batches"));
    }
    Ok(model)
}

/// Parts of different lengths, and ranks that begin with different modules.
fn fifty_steps(ranks: &Ranks, optimizer: fn() -> ModuleOptimizer, dtype: DType, most: f64) -> Result<()> {
    let samples = 7 * ranks.world_size() + 3;
    let model = ranks.broadcast(Mlp::new(ranks, ranks.rank(), dtype))?;
    let trained = train(model, optimizer(), samples, dtype)?.values();
    let alone = Ranks::new(phalanx::Comm::builder().run(1, |comm| comm)?.remove(0))?;
    let whole = train(Mlp::new(&alone, 0, dtype), optimizer(), samples, dtype)?.values();
    assert_close(&trained, &whole, most);
    assert!(trained.iter().zip(numbers(0, 32)).any(|(trained, first)| (trained - first).abs() > 0.01));
    assert_same_bits(ranks, &trained);
    Ok(())
}

/// Rank r has r + 1 batches. The ranks that have run out make the same steps, and all know when there are none left.
fn uneven_batches(ranks: &Ranks) -> Result<()> {
    let mut model = ranks.broadcast(Mlp::new(ranks, 0, widest()))?;
    let (mut optimizer, mut steps) = (adam(), 0);
    let device = here().autodiff();
    loop {
        let own = (steps <= ranks.rank()).then(|| {
            let x = tensor(numbers(steps, 12), [3, 4], widest(), &device);
            let loss = model.loss(x, tensor(numbers(9, 6), [3, 2], widest(), &device));
            GradientsParams::from_grads(loss.backward(), &model)
        });
        let Some(gradients) = ranks.average_by(own, 3.0, &model)? else { break };
        model = optimizer.step(0.01, model, gradients);
        steps += 1;
    }
    assert_eq!(steps, ranks.world_size());
    assert_same_bits(ranks, &model.values());
    Ok(())
}
