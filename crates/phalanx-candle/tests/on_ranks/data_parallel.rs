//! Gradients averaged over ranks.

use crate::{Case, assert_close, here, numbers};
use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{AdamW, Module, Optimizer, VarMap};
use phalanx_candle::{ColumnParallelLinear, DataParallel, Init, Ranks, Settings, Weights, part};

pub const CASES: &[Case] = &[
    ("data_parallel/fifty_steps", fifty_steps),
    ("data_parallel/weights", weights),
    ("data_parallel/unused_and_missing", unused_and_missing),
    ("data_parallel/uneven_batches", uneven_batches),
    ("data_parallel/half_precision", half_precision),
    ("data_parallel/clip", clip),
    ("data_parallel/differences", differences),
];

/// A gradient of `value` for each of these variables.
fn gradients_of(variables: &[(&Var, f64)]) -> Result<GradStore> {
    let mut loss = Tensor::zeros((), DType::F64, &here())?;
    for (variable, value) in variables {
        loss = (loss + (variable.as_tensor().to_dtype(DType::F64)? * *value)?.sum_all()?)?;
    }
    loss.backward()
}

/// Three ranks' parts of a batch, step by step, are as one process with the whole batch; and all ranks have the same bits.
fn fifty_steps(ranks: &Ranks) -> Result<()> {
    let (size, rank) = (ranks.world_size(), ranks.rank());
    let samples = 7 * size + 3;
    let (x, y) = ((numbers(1, &[samples, 4])? / 5.0)?, (numbers(2, &[samples, 2])? / 5.0)?);
    let train = |variables: &VarMap, ranks: &Ranks, rows: std::ops::Range<usize>| -> Result<()> {
        let weights = Weights::variables(&alone(ranks)?, variables, 5 + ranks.rank() as u64, DType::F64);
        let weight = weights.get((8, 4), "up", &Init::Normal { mean: 0.0, deviation: 0.5 })?;
        let down = weights.get((2, 8), "down", &Init::Normal { mean: 0.0, deviation: 0.5 })?;
        let settings = Settings { bucket_bytes: 100, ..Settings::default() };
        let named = variables.data().lock().expect("not poisoned").clone().into_iter().collect();
        let parallel = DataParallel::with(ranks, named, settings)?;
        let mut optimizer = AdamW::new_lr(variables.all_vars(), 0.01)?;
        for _ in 0..50 {
            let (x, y) = (x.narrow(0, rows.start, rows.len())?, y.narrow(0, rows.start, rows.len())?);
            let out = x.matmul(&weight.t()?)?.tanh()?.matmul(&down.t()?)?;
            let loss = (out - y)?.sqr()?.sum_all()?;
            let loss = (loss / rows.len() as f64)?;
            let gradients = parallel.average(Some(loss.backward()?), rows.len() as f64)?;
            optimizer.step(&gradients.expect("there are batches"))?;
        }
        Ok(())
    };
    let (variables, whole) = (VarMap::new(), VarMap::new());
    train(&variables, ranks, part(&(0..samples), size, rank))?;
    // One process begins with rank 0's parameters: its seed is rank 0's.
    let one = alone(ranks)?;
    train(&whole, &one, 0..samples)?;
    let whole = whole.data().lock().expect("not poisoned");
    let trained = variables.data().lock().expect("not poisoned");
    for name in ["down", "up"] {
        let variable = &trained[name];
        assert_close(variable, &whole[name], 1e-5);
        let bits: Vec<f64> = variable.flatten_all()?.to_vec1()?;
        let of_first = ranks.broadcast(variable, 0)?.flatten_all()?.to_vec1::<f64>()?;
        assert!(bits.iter().zip(&of_first).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
    }
    Ok(())
}

fn alone(ranks: &Ranks) -> Result<Ranks> {
    Ok(ranks.split(Some(ranks.rank() as u32), 0)?.expect("it has a colour"))
}

/// 7 samples of gradient 1 and 6 of 14 give 7, and not 7.5.
fn weights(ranks: &Ranks) -> Result<()> {
    let variable = Var::zeros(3, DType::F64, &here())?;
    let parallel = DataParallel::with(ranks, vec![("a".into(), variable.clone())], Settings::default())?;
    let (gradient, samples) = if ranks.rank() == 0 { (1.0, 7.0) } else { (14.0, 6.0) };
    let gradients =
        parallel.average(Some(gradients_of(&[(&variable, gradient)])?), samples)?.expect("batches");
    let others = ranks.world_size() as f64 - 1.0;
    let expected = (7.0 + 6.0 * 14.0 * others) / (7.0 + 6.0 * others);
    let expected = Tensor::full(expected, 3, &here())?;
    assert_close(gradients.get(&variable).expect("a gradient"), &expected, 1e-12);
    for weight in [0.0, -1.0, f64::NAN] {
        let refused = parallel.average(Some(gradients_of(&[(&variable, 1.0)])?), weight);
        assert!(refused.is_err_and(|error| error.to_string().contains("weight")));
    }
    ranks.barrier()
}

/// A variable that some ranks used counts as 0 elsewhere; one that none used has no gradient.
fn unused_and_missing(ranks: &Ranks) -> Result<()> {
    let size = ranks.world_size() as f64;
    let make = || Var::zeros((2, 2), DType::F64, &here());
    let (all, one, none) = (make()?, make()?, make()?);
    let named = vec![("all".into(), all.clone()), ("one".into(), one.clone()), ("none".into(), none.clone())];
    let parallel = DataParallel::with(ranks, named, Settings::default())?;
    let own = if ranks.rank() == 0 { vec![(&all, 2.0), (&one, 6.0)] } else { vec![(&all, 2.0)] };
    let gradients = parallel.average(Some(gradients_of(&own)?), 1.0)?.expect("batches");
    assert_close(gradients.get(&all).expect("a gradient"), &Tensor::full(2.0, (2, 2), &here())?, 1e-12);
    assert_close(
        gradients.get(&one).expect("a gradient"),
        &Tensor::full(6.0 / size, (2, 2), &here())?,
        1e-12,
    );
    assert!(gradients.get(&none).is_none());
    Ok(())
}

/// Rank r has r + 1 batches. The ranks that have run out make the same steps, and all know when there are none left.
fn uneven_batches(ranks: &Ranks) -> Result<()> {
    let variable = Var::zeros(2, DType::F64, &here())?;
    let parallel = DataParallel::with(ranks, vec![("a".into(), variable.clone())], Settings::default())?;
    let mut steps = 0;
    loop {
        let own =
            (steps <= ranks.rank()).then(|| gradients_of(&[(&variable, 1.0 + steps as f64)])).transpose()?;
        let Some(gradients) = parallel.average(own, 4.0)? else { break };
        let expected = Tensor::full(1.0 + steps as f64, 2, &here())?;
        assert_close(gradients.get(&variable).expect("a gradient"), &expected, 1e-12);
        steps += 1;
    }
    assert_eq!(steps, ranks.world_size());
    Ok(())
}

/// In bf16, 256 and many ones; summed in f32 nothing is lost.
fn half_precision(ranks: &Ranks) -> Result<()> {
    let size = ranks.world_size();
    let variables = [DType::BF16, DType::F32, DType::F16].map(|dtype| Var::zeros(4, dtype, &here()));
    let variables = variables.into_iter().collect::<Result<Vec<_>>>()?;
    let named =
        variables.iter().enumerate().map(|(number, variable)| (format!("{number}"), variable.clone()));
    let settings = Settings { sums_in_f32: true, ..Settings::default() };
    let parallel = DataParallel::with(ranks, named.collect(), settings)?;
    let own = if ranks.rank() == 0 { 256.0 } else { 1.0 };
    let gradients = gradients_of(&variables.iter().map(|variable| (variable, own)).collect::<Vec<_>>())?;
    let gradients = parallel.average(Some(gradients), 1.0)?.expect("batches");
    let mean = (256.0 + (size - 1) as f64) / size as f64;
    for variable in &variables {
        let gradient = gradients.get(variable).expect("a gradient");
        assert_eq!(gradient.dtype(), variable.dtype());
        let rounded = Tensor::full(mean, 4, &here())?.to_dtype(variable.dtype())?;
        assert_close(gradient, &rounded, 1e-4);
    }
    Ok(())
}

/// [3] on one rank and [4] on another are parts of one parameter, [12] is on both: the norm is 13.
fn clip(ranks: &Ranks) -> Result<()> {
    let size = ranks.world_size();
    let (split, whole) = (Var::zeros(1, DType::F64, &here())?, Var::zeros(1, DType::F64, &here())?);
    let named = vec![("split".into(), split.clone()), ("whole".into(), whole.clone())];
    let parallel = DataParallel::with(&alone(ranks)?, named, Settings::default())?;
    // candle has no gradient of 0 times a variable.
    let own = [3.0, 4.0, 0.0, 0.0, 0.0][ranks.rank()];
    let mut gradients = gradients_of(&[(&split, own), (&whole, 12.0)])?;
    let norm = parallel.clip_split(&mut gradients, 6.5, ranks, |name| name == "split")?;
    let expected = if size == 1 { 153f64.sqrt() } else { 13.0 };
    assert!((norm - expected).abs() < 1e-12, "{norm}");
    let scaled = Tensor::full(12.0 * 6.5 / expected, 1, &here())?;
    assert_close(gradients.get(&whole).expect("a gradient"), &scaled, 1e-12);
    let again = parallel.clip_split(&mut gradients, 100.0, ranks, |name| name == "split")?;
    assert!((again - 6.5).abs() < 1e-12);
    let own = gradients.get(&split).map_or(Ok(0.0), |gradient| gradient.get(0)?.to_scalar::<f64>())?;
    let alone = parallel.clip(&mut gradients, 100.0)?;
    assert!((alone - own.hypot(12.0 * 6.5 / expected)).abs() < 1e-12);
    assert!(parallel.clip(&mut gradients, 0.0).is_err());
    Ok(())
}

/// Ranks whose variables differ hear of it, all of them.
fn differences(ranks: &Ranks) -> Result<()> {
    let shape = if ranks.rank() == 1 { 3 } else { 2 };
    let variable = Var::zeros(shape, DType::F32, &here())?;
    let made = DataParallel::with(ranks, vec![("a".into(), variable)], Settings::default());
    match ranks.world_size() {
        1 => drop(made?),
        _ => assert!(made.unwrap_err().to_string().contains("rank 1 has other variables")),
    }
    let integers = Var::zeros(2, DType::U32, &here())?;
    let refused = DataParallel::with(ranks, vec![("ids".into(), integers)], Settings::default());
    assert!(refused.unwrap_err().to_string().contains("u32"));
    // Parameters of a layer are variables as any others.
    let variables = VarMap::new();
    let layer = ColumnParallelLinear::new(
        2,
        4,
        true,
        &Weights::variables(&alone(ranks)?, &variables, 1, DType::F32),
    )?;
    layer.forward(&Tensor::ones((1, 2), DType::F32, &here())?)?;
    assert_eq!(DataParallel::new(ranks, &variables)?.variables().len(), 2);
    Ok(())
}
