//! The control: without the order that `Ranks` keeps between burn's work and phalanx's, sums are wrong.

// The module itself, which the library does not show.
#[path = "../../src/gpu.rs"]
#[allow(dead_code, unsafe_code)]
mod gpu;

use crate::{GPUS, ON_GPUS, values};
use burn::tensor::{Device, Tensor};
use gpu::{Collective, Gpu, enqueue};
use libtest_mimic::{Failed, Trial};
use phalanx_burn::Result;

pub fn trials() -> Vec<Trial> {
    let control = Trial::test("order", || {
        let _alone = GPUS.lock();
        let (ordered, unordered) = (wrong_sums(true)?, wrong_sums(false)?);
        println!("order: of {ROUNDS} sums, {ordered} are wrong; without the order {unordered}");
        if ordered == 0 && unordered > 0 { Ok(()) } else { Err(Failed::without_message()) }
    });
    let control =
        if *ON_GPUS { control } else { control.with_kind("needs two GPUs").with_ignored_flag(true) };
    vec![control]
}

const ROUNDS: usize = 20;

/// How many sums are wrong on rank 0, each of tensors that take long to make.
fn wrong_sums(in_order: bool) -> Result<usize> {
    let wrong = phalanx::run(2, |comm| {
        let gpu = Gpu::new(comm.gpu().expect("there are two"))?;
        let comm = gpu.place(&comm.share())?;
        let mut wrong = 0;
        for round in 0..ROUNDS {
            let sum = made_slowly(&gpu.device, round + comm.rank());
            let tensors = [sum.clone()];
            if in_order {
                gpu.in_place(&comm, Collective::Sum, tensors.iter())?;
            } else {
                let mut lent = gpu.lend(tensors.iter())?;
                comm.with(|comm| enqueue(comm, Collective::Sum, &mut lent))?;
            }
            comm.sync()?;
            gpu.device.sync().expect("it is there");
            let right = 2.0 * round as f64 + 1.0;
            wrong += usize::from(values(&sum).iter().any(|value| (value - right).abs() > 0.1));
        }
        comm.finalize()?;
        Ok(wrong)
    })?;
    wrong.into_iter().next().expect("rank 0")
}

/// A million times this value, which some products of matrices come before.
fn made_slowly(device: &Device, value: usize) -> Tensor<1> {
    let side = 1024;
    let ones = Tensor::<2>::ones([side, side], device);
    let mut product = ones.clone() * value as f64;
    for _ in 0..40 {
        product = product.matmul(ones.clone()) / side as f64;
    }
    product.reshape([-1]).mul_scalar(1.0)
}
