//! Modules on all ranks: broadcast, compared, their statistics; data sets; decisions.

use crate::{Case, Pair, assert_close, assert_same_bits, here, numbers, param, tensor, values, widest};
use burn::data::dataset::{Dataset, InMemDataset};
use burn::module::{Module, Param, ParamId, RunningState};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use phalanx_burn::{Error, Ranks, Result, Shard, Uneven};

pub const CASES: &[Case] = &[
    ("modules/broadcast", broadcast),
    ("modules/lazy_parameters", lazy_parameters),
    ("modules/differences", differences),
    ("modules/statistics", statistics),
    ("modules/statistics_under_way", statistics_under_way),
    ("modules/shards", shards),
    ("modules/seeds_and_decisions", seeds_and_decisions),
    ("modules/ended", ended),
];

/// Tensors of all kinds.
#[derive(Module, Debug)]
struct Kinds {
    trained: Param<Tensor<2>>,
    frozen: Param<Tensor<1>>,
    half: Param<Tensor<1>>,
    places: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
    running: RunningState<Tensor<1>>,
}

/// Values of rank 0, with what is trained and how it is checkpointed as before.
fn broadcast(ranks: &Ranks) -> Result<()> {
    let (device, rank) = (here(), ranks.rank());
    let checkpointing = device.clone().autodiff().gradient_checkpointing();
    let trained: Tensor<2> = tensor(numbers(rank, 6), [2, 3], DType::F32, &checkpointing).require_grad();
    let strategy = trained.gradient_checkpointing_strategy();
    let mask = TensorData::new(vec![rank == 0, true], [2]);
    let kinds = Kinds {
        trained: Param::initialized(ParamId::new(), trained),
        frozen: param(vec![rank as f64], [1], widest()).set_require_grad(false),
        half: param(vec![1.0 + rank as f64], [1], DType::BF16),
        places: Param::initialized(ParamId::new(), Tensor::from_data([5 - rank as i64, 7], &device)),
        mask: Param::initialized(ParamId::new(), Tensor::from_data(mask, &device)),
        running: RunningState::new(tensor(vec![rank as f64], [1], DType::F32, &device)),
    };
    let kinds = ranks.broadcast(kinds)?;
    let trained = kinds.trained.val();
    assert_eq!(values(&trained), numbers(0, 6).iter().map(|x| f64::from(*x as f32)).collect::<Vec<_>>());
    assert!(trained.is_require_grad());
    assert_eq!(trained.gradient_checkpointing_strategy(), strategy);
    assert_eq!((values(&kinds.frozen.val()), kinds.frozen.is_require_grad()), (vec![0.0], false));
    assert_eq!((values(&kinds.half.val()), kinds.half.val().dtype()), (vec![1.0], DType::BF16));
    assert_eq!(kinds.places.val().into_data().iter::<i64>().collect::<Vec<_>>(), [5, 7]);
    assert_eq!(kinds.mask.val().into_data().iter::<bool>().collect::<Vec<_>>(), [true, true]);
    assert_eq!(values(&kinds.running.value()), [0.0]);
    // It can be trained.
    let gradients = GradientsParams::from_grads((trained * 2.0).sum().backward(), &kinds);
    assert_eq!(gradients.len(), 1);
    Ok(())
}

/// burn makes parameters when they are first used.
fn lazy_parameters(ranks: &Ranks) -> Result<()> {
    let layer: Linear = ranks.broadcast(LinearConfig::new(5, 4).init(&ranks.device().autodiff()))?;
    assert!(layer.weight.is_require_grad());
    assert_same_bits(ranks, &values(&layer.weight.val()));
    assert_same_bits(ranks, &values(&layer.bias.expect("it has one").val()));
    Ok(())
}

/// Ranks whose modules differ hear of it, all of them, and what the first difference is.
fn differences(ranks: &Ranks) -> Result<()> {
    if ranks.world_size() == 1 {
        return Ok(());
    }
    let last = ranks.world_size() - 1;
    #[track_caller]
    fn refused<T>(outcome: Result<T>, words: &[&str]) {
        let Err(Error::Mismatch(text)) = outcome else { panic!("it was not refused: {words:?}") };
        words.iter().for_each(|word| assert!(text.contains(word), "{word:?} is not in {text:?}"));
    }
    let rank = format!("rank {last} has");
    let is_last = ranks.rank() == last;
    let other = |second: Param<Tensor<1>>| if is_last { Pair { second, ..Pair::new() } } else { Pair::new() };

    let shape = other(param(vec![0.0; 3], [3], widest()));
    let [first, second] = [2, 3].map(|len| format!("second: {:?} [{len}]", widest()));
    refused(ranks.broadcast(shape.clone()), &[&first, &rank, &second]);
    refused(ranks.average(GradientsParams::new(), &shape), &[&first, &second]);
    let dtype = other(param(vec![0.0; 2], [2], DType::BF16));
    refused(ranks.average(GradientsParams::new(), &dtype), &[&rank, "second: BF16 [2];"]);
    let frozen = other(Pair::new().second.set_require_grad(false));
    refused(ranks.average(GradientsParams::new(), &frozen), &[&rank, "not trained"]);
    let first = param(vec![0.0; 2], [2], widest());
    let tied = if is_last { Pair { second: first.clone(), first } } else { Pair::new() };
    refused(ranks.average(GradientsParams::new(), &tied), &[&rank, "tied to parameter 0"]);
    let longer = vec![Pair::new(); if is_last { 2 } else { 1 }];
    refused(ranks.average(GradientsParams::new(), &longer), &["no more parameters", "1.first"]);
    // Nothing has failed.
    ranks.average(GradientsParams::new(), &Pair::new()).map(drop)
}

/// Statistics of one feature, as a layer has them after a batch, if its momentum is 1.
fn after(batch: &[f64]) -> BatchNorm {
    let device = here().autodiff();
    let layer = BatchNormConfig::new(1).with_momentum(1.0).init(&device);
    layer.forward(tensor(batch.to_vec(), [batch.len(), 1], DType::F32, &device));
    layer
}

fn variance(numbers: &[f64]) -> (f64, f64) {
    let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
    (mean, numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / numbers.len() as f64)
}

/// The statistics of all batches together.
fn statistics(ranks: &Ranks) -> Result<()> {
    let batch = |rank: usize| numbers(rank, 8).iter().map(|x| x + 3.0 * rank as f64).collect::<Vec<_>>();
    let layer = after(&batch(ranks.rank()));
    let of_one = values(&layer.running_var.value_sync())[0];
    // burn's variance is over n or over n - 1.
    let bias = of_one / variance(&batch(ranks.rank())).1;
    let layer = ranks.average_statistics(vec![layer])?.remove(0);
    let all: Vec<f64> = (0..ranks.world_size()).flat_map(batch).collect();
    let (mean, whole) = variance(&all);
    let within =
        (0..ranks.world_size()).map(|rank| variance(&batch(rank)).1).sum::<f64>() / ranks.world_size() as f64;
    assert_close(&values(&layer.running_mean.value_sync()), &[mean], 1e-5);
    assert_close(&values(&layer.running_var.value_sync()), &[whole - within + bias * within], 1e-4);
    assert_same_bits(ranks, &values(&layer.running_var.value_sync()));
    Ok(())
}

/// What a thread has given last to a running statistic is in what is sent, and does not replace what has come.
fn statistics_under_way(ranks: &Ranks) -> Result<()> {
    let layer = ranks.broadcast(after(&[1.0 + ranks.rank() as f64, 3.0 + ranks.rank() as f64]))?;
    assert_close(&values(&layer.running_mean.value_sync()), &[2.0], 1e-6);
    Ok(())
}

fn shards(ranks: &Ranks) -> Result<()> {
    let (size, rank) = (ranks.world_size(), ranks.rank());
    let samples: Vec<usize> = (0..10).collect();
    let taken = |uneven| -> Vec<usize> {
        let shard = Shard::new(InMemDataset::new(samples.clone()), ranks, uneven);
        shard.iter().map(|sample| sample.expect("in memory")).collect()
    };
    let (dropped, padded) = (taken(Uneven::Drop), taken(Uneven::Pad));
    assert_eq!((dropped.len(), padded.len()), (10 / size, 10usize.div_ceil(size)));
    assert!(dropped.iter().enumerate().all(|(index, sample)| *sample == index * size + rank));
    let mut all = vec![0u64; padded.len() * size];
    ranks.comm().all_gather(&padded.iter().map(|sample| *sample as u64).collect::<Vec<_>>(), &mut all)?;
    assert!(samples.iter().all(|sample| all.contains(&(*sample as u64))));
    let empty = Shard::new(InMemDataset::<usize>::new(vec![]), ranks, Uneven::Pad);
    assert_eq!(empty.len(), 0);
    Ok(())
}

fn seeds_and_decisions(ranks: &Ranks) -> Result<()> {
    let mut seeds = vec![0; ranks.world_size()];
    ranks.comm().all_gather(&[ranks.rank_seed(7)], &mut seeds)?;
    assert_eq!(seeds[ranks.rank()], ranks.rank_seed(7));
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), ranks.world_size());
    assert!(ranks.decide(ranks.rank() == 0)?);
    assert!(!ranks.decide(ranks.rank() != 0)?);
    Ok(())
}

/// A module that outlives its communicator gets an error.
fn ended(ranks: &Ranks) -> Result<()> {
    let comm = ranks.comm().with(|comm| comm.split(Some(0), 0))?.expect("all have a colour");
    let others = Ranks::new(comm)?;
    let kept = others.clone();
    others.finalize()?;
    let outcome = kept.average(GradientsParams::new(), &Pair::new());
    assert!(matches!(outcome, Err(Error::Comm(phalanx::Error::Usage(_)))));
    Ok(())
}
