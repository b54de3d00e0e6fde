//! Averages of gradients: which of them, by which weight, where they lie.

use crate::{Case, ON_GPUS, Pair, assert_close, here, param, values, widest};
use burn::module::{Lora, Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};
use phalanx_burn::{Error, Ranks, Result};

pub const CASES: &[Case] = &[
    ("gradients/weights", weights),
    ("gradients/on_one_rank_or_none", on_one_rank_or_none),
    ("gradients/frozen", frozen),
    ("gradients/tied", tied),
    ("gradients/adapters", adapters),
    ("gradients/half_precision", half_precision),
    ("gradients/mixed_types", mixed_types),
    ("gradients/what_is_sent", what_is_sent),
    ("gradients/in_place", in_place),
    ("gradients/clip", clipped),
    ("gradients/without_a_wait", without_a_wait),
];

/// Gradients of `value` for the elements of a parameter.
fn gradient(gradients: &mut GradientsParams, param: &Param<Tensor<1>>, value: f64) {
    let data = TensorData::full_dtype(param.shape(), value, param.val().dtype());
    let dtype = data.dtype();
    gradients.register(param.id, Tensor::<1>::from_data(data, (&here(), dtype)));
}

fn gradients_of(params: &[(&Param<Tensor<1>>, f64)]) -> GradientsParams {
    let mut gradients = GradientsParams::new();
    params.iter().for_each(|(param, value)| gradient(&mut gradients, param, *value));
    gradients
}

fn get(gradients: &GradientsParams, id: ParamId) -> Option<Vec<f64>> {
    gradients.get::<1>(id).map(|gradient| values(&gradient))
}

/// 7 samples of gradient 1 and 6 of 14 give 7, and not 7.5.
fn weights(ranks: &Ranks) -> Result<()> {
    let pair = Pair::new();
    let (value, samples) = if ranks.rank() == 0 { (1.0, 7.0) } else { (14.0, 6.0) };
    let mean = ranks.average_by(Some(gradients_of(&[(&pair.first, value)])), samples, &pair)?;
    let others = ranks.world_size() as f64 - 1.0;
    let expected = (7.0 + 6.0 * 14.0 * others) / (7.0 + 6.0 * others);
    assert_close(&get(&mean.expect("batches"), pair.first.id).expect("a gradient"), &[expected; 2], 1e-12);
    for weight in [0.0, -1.0, f64::NAN] {
        let refused = ranks.average_by(Some(gradients_of(&[(&pair.first, 1.0)])), weight, &pair);
        assert!(matches!(refused, Err(Error::Usage(text)) if text.contains("weight")));
    }
    assert!(ranks.average_by(None, 1.0, &pair)?.is_none());
    Ok(())
}

/// What one rank has used counts as zero on the others; what none has used has no gradient.
fn on_one_rank_or_none(ranks: &Ranks) -> Result<()> {
    let pair = Pair::new();
    let own = if ranks.rank() == 0 { vec![(&pair.first, 6.0)] } else { vec![] };
    let mean = ranks.average(gradients_of(&own), &pair)?;
    let expected = 6.0 / ranks.world_size() as f64;
    assert_close(&get(&mean, pair.first.id).expect("a gradient"), &[expected; 2], 1e-12);
    assert!(get(&mean, pair.second.id).is_none());
    assert_eq!(mean.len(), 1);
    Ok(())
}

/// A parameter that is not trained has no gradient, before and afterwards.
fn frozen(ranks: &Ranks) -> Result<()> {
    let mut pair = Pair::new();
    pair.second = pair.second.set_require_grad(false);
    let pair = ranks.broadcast(pair)?;
    let loss = (pair.first.val() * (1.0 + ranks.rank() as f64) + pair.second.val()).sum();
    let gradients = ranks.average(GradientsParams::from_grads(loss.backward(), &pair), &pair)?;
    let expected = (1.0 + ranks.world_size() as f64) / 2.0;
    assert_close(&get(&gradients, pair.first.id).expect("a gradient"), &[expected; 2], 1e-12);
    assert_eq!(gradients.len(), 1);
    Ok(())
}

/// A parameter that is in the module twice is averaged once.
fn tied(ranks: &Ranks) -> Result<()> {
    let first = param(vec![1.0; 2], [2], widest());
    let pair = Pair { second: first.clone(), first };
    let loss = (pair.first.val() + pair.second.val()).sum() * (1.0 + ranks.rank() as f64);
    let gradients = ranks.average(GradientsParams::from_grads(loss.backward(), &pair), &pair)?;
    let expected = 1.0 + ranks.world_size() as f64;
    assert_close(&get(&gradients, pair.first.id).expect("a gradient"), &[expected; 2], 1e-12);
    // What is behind it is not mistaken for it.
    let with_other = (pair, param(vec![0.0; 2], [2], widest()));
    let mean = ranks.average(gradients_of(&[(&with_other.1, 2.0 * ranks.rank() as f64)]), &with_other)?;
    let expected = ranks.world_size() as f64 - 1.0;
    assert_close(&get(&mean, with_other.1.id).expect("a gradient"), &[expected; 2], 1e-12);
    assert_eq!(mean.len(), 1);
    Ok(())
}

/// Only the adapters of a layer with LoRA have gradients.
fn adapters(ranks: &Ranks) -> Result<()> {
    let device = ranks.device().autodiff();
    let layer: Linear = LinearConfig::new(4, 3).init(&device);
    let layer = ranks.broadcast(layer.apply_lora(Lora::new(2, 1.0)))?;
    let loss = layer.forward::<2>(Tensor::full([5, 4], 1.0 + ranks.rank() as f64, &device)).sum();
    let own = GradientsParams::from_grads(loss.backward(), &layer);
    let adapter = layer.weight.adapter().expect("it was applied");
    let before = values(&own.get::<2>(adapter.b.id).expect("a gradient"));
    let mean = ranks.average(own, &layer)?;
    assert!(mean.get::<2>(layer.weight.id).is_none());
    // The gradient of b is proportional to the batch.
    let factor = (1.0 + ranks.world_size() as f64) / 2.0 / (1.0 + ranks.rank() as f64);
    let expected: Vec<f64> = before.iter().map(|value| value * factor).collect();
    assert_close(&values(&mean.get::<2>(adapter.b.id).expect("a gradient")), &expected, 1e-4);
    Ok(())
}

/// 256 and ones: a sum in bf16 loses the ones, a sum in f32 does not. Nor are shares of the samples rounded to bf16.
fn half_precision(ranks: &Ranks) -> Result<()> {
    let size = ranks.world_size() as f64;
    let own = if ranks.rank() == 0 { 256.0 } else { 1.0 };
    for dtype in [DType::BF16, DType::F16] {
        let pair = Pair { first: param(vec![0.0; 2], [2], dtype), ..Pair::new() };
        let gradients = gradients_of(&[(&pair.first, own)]);
        let in_f32 = ranks.clone().sums_in_f32().average(gradients, &pair)?.remove::<1>(pair.first.id);
        let in_f32 = in_f32.expect("a gradient");
        assert_eq!(in_f32.dtype(), dtype);
        let rounded = param(vec![(255.0 + size) / size; 2], [2], dtype);
        assert_close(&values(&in_f32), &values(&rounded.val()), 0.0);
        // 3/5 of 2 and 2/5 of -3: nothing, but for shares that are rounded.
        let (samples, own) = [(3.0, 2.0), (2.0, -3.0), (1.0, 0.0), (1.0, 0.0)][ranks.rank()];
        let mean = ranks.average_by(Some(gradients_of(&[(&pair.first, own)])), samples, &pair)?;
        let expected = if ranks.world_size() == 1 { 2.0 } else { 0.0 };
        assert_close(&get(&mean.expect("batches"), pair.first.id).expect("a gradient"), &[expected; 2], 1e-6);
    }
    Ok(())
}

/// Parameters of several types in one module.
fn mixed_types(ranks: &Ranks) -> Result<()> {
    let dtypes = [widest(), DType::F32, DType::F16, DType::BF16];
    let params: Vec<Param<Tensor<1>>> = dtypes.iter().map(|dtype| param(vec![0.0; 3], [3], *dtype)).collect();
    let own = params.iter().map(|param| (param, 2.0 * ranks.rank() as f64)).collect::<Vec<_>>();
    let mean = ranks.average(gradients_of(&own), &params)?;
    for (param, dtype) in params.iter().zip(dtypes) {
        let gradient = mean.get::<1>(param.id).expect("a gradient");
        assert_eq!(gradient.dtype(), dtype);
        assert_close(&values(&gradient), &[ranks.world_size() as f64 - 1.0; 3], 0.0);
    }
    Ok(())
}

/// One comparison of the modules, and in each step a header and the gradients that are there; in f32 on request.
fn what_is_sent(_ranks: &Ranks) -> Result<()> {
    let sent = |in_f32: bool| {
        let steps = phalanx::dry_run(0, 1, |comm| -> Result<()> {
            let ranks = if in_f32 { Ranks::new(comm)?.sums_in_f32() } else { Ranks::new(comm)? };
            let pair = Pair { first: param(vec![0.0; 3], [3], DType::BF16), ..Pair::new() };
            for _ in 0..2 {
                ranks.average(gradients_of(&[(&pair.first, 1.0)]), &pair)?;
            }
            Ok(())
        });
        let (outcome, calls) = steps?;
        let of = |call: &phalanx::DryCall| Some((call.operation, call.dtype?, call.recv_bytes));
        outcome.map(|()| calls.iter().filter_map(of).collect::<Vec<_>>())
    };
    let header = ("all_reduce", phalanx::DType::F64, 8 * (1 + 2));
    let compared = ("all_gather", phalanx::DType::U64, 8);
    let gradient = ("all_reduce", phalanx::DType::Bf16, 6);
    assert_eq!(sent(false)?, [compared, header, gradient, header, gradient]);
    let gradient = ("all_reduce", phalanx::DType::F32, 12);
    assert_eq!(sent(true)?, [compared, header, gradient, header, gradient]);
    Ok(())
}

/// The mean is where the gradient was.
fn in_place(ranks: &Ranks) -> Result<()> {
    let pair = Pair { first: param(vec![0.0; 10_000], [10_000], DType::F64), ..Pair::new() };
    let data = TensorData::full_dtype(pair.first.shape(), 1.0 + ranks.rank() as f64, DType::F64);
    let place = data.as_bytes().as_ptr();
    let mut gradients = GradientsParams::new();
    gradients.register(pair.first.id, Tensor::<1>::from_data(data, (&here(), DType::F64)));
    let mut mean = ranks.average(gradients, &pair)?;
    let data = mean.remove::<1>(pair.first.id).expect("a gradient").into_data();
    assert_eq!(data.as_bytes().as_ptr(), place, "it was copied");
    assert_close(
        &data.iter::<f64>().collect::<Vec<_>>(),
        &[(1.0 + ranks.world_size() as f64) / 2.0; 10_000],
        0.0,
    );
    Ok(())
}

/// [3, 0] and [4, 12] have a norm of 13 together.
fn clipped(ranks: &Ranks) -> Result<()> {
    let pair = Pair::new();
    let mut gradients = GradientsParams::new();
    for (param, numbers) in [(&pair.first, [3.0, 0.0]), (&pair.second, [4.0, 12.0])] {
        let data = TensorData::new(numbers.to_vec(), [2]);
        gradients.register(param.id, Tensor::<1>::from_data(data, (&here(), widest())));
    }
    assert_eq!(ranks.clip(&mut gradients, &pair, 13.0)?, 13.0);
    assert_close(&get(&gradients, pair.second.id).expect("a gradient"), &[4.0, 12.0], 0.0);
    assert_eq!(ranks.clip(&mut gradients, &pair, 6.5)?, 13.0);
    assert_close(&get(&gradients, pair.first.id).expect("a gradient"), &[1.5, 0.0], 0.0);
    assert_close(&get(&gradients, pair.second.id).expect("a gradient"), &[2.0, 6.0], 0.0);
    assert!(matches!(ranks.clip(&mut gradients, &pair, 0.0), Err(Error::Usage(_))));
    gradient(&mut gradients, &pair.first, f64::INFINITY);
    assert!(ranks.clip(&mut gradients, &pair, 1.0)?.is_infinite());
    assert_close(&get(&gradients, pair.second.id).expect("a gradient"), &[2.0, 6.0], 0.0);
    ranks.barrier()
}

/// Averages one behind the other, of gradients that are dropped at once, so that their memory is used again. What is long in the making is
/// averaged when it is made.
fn without_a_wait(ranks: &Ranks) -> Result<()> {
    let (side, rounds) = if *ON_GPUS { (1024, 300) } else { (32, 10) };
    let weight = param(vec![0.0; side * side], [side, side], DType::F32);
    let ones = Tensor::<2>::ones([side, side], &here());
    let mut sums = Vec::new();
    for round in 0..rounds {
        // All elements are (round + rank) / side.
        let mut gradient = ones.clone() * ((round + ranks.rank()) as f64 / side as f64);
        for _ in 0..4 {
            gradient = gradient.matmul(ones.clone()) / side as f64;
        }
        let mut gradients = GradientsParams::new();
        gradients.register(weight.id, gradient);
        let mut mean = ranks.average(gradients, &vec![weight.clone()])?;
        let mean = mean.remove::<2>(weight.id).expect("a gradient");
        sums.push(mean.sum().div_scalar(side as f64));
    }
    ranks.sync()?;
    let own = (ranks.world_size() as f64 - 1.0) / 2.0;
    let expected: Vec<f64> = (0..rounds).map(|round| round as f64 + own).collect();
    let wrong = values(&Tensor::cat(sums, 0))
        .iter()
        .zip(&expected)
        .filter(|(sum, right)| (*sum - *right).abs() > 0.01 * **right)
        .count();
    assert_eq!(wrong, 0, "of {rounds} averages");
    Ok(())
}
