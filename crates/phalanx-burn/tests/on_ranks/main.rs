//! Modules on ranks against one rank, on ranks as threads and as processes.

mod examples;
mod gradients;
mod learner;
mod modules;
mod training;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use libtest_mimic::{Arguments, Failed, Trial};
use phalanx_burn::{Ranks, Result};
use phalanx_testkit::processes::{self, Launch};
use phalanx_testkit::{Outcome, Scenario};
use std::process::ExitCode;

/// What each rank does, by name.
type Case = (&'static str, fn(&Ranks) -> Result<()>);

const CASES: [&[Case]; 4] = [gradients::CASES, learner::CASES, modules::CASES, training::CASES];

/// In a rank process: the case that its argument names.
fn as_process(comm: phalanx::Comm, args: &[String]) -> Outcome {
    let (_, case) = CASES.concat().into_iter().find(|(name, _)| *name == args[0]).ok_or("no such case")?;
    let ranks = Ranks::new(comm);
    let outcome = case(&ranks).and_then(|()| ranks.finalize());
    outcome.map(|()| String::new()).map_err(|error| error.to_string())
}

fn on_threads(count: usize, case: fn(&Ranks) -> Result<()>) -> std::result::Result<(), Failed> {
    let outcomes = Ranks::run(count, |ranks| case(&ranks).and_then(|()| ranks.finalize()));
    for (rank, outcome) in outcomes?.into_iter().enumerate() {
        outcome.map_err(|error| format!("rank {rank}: {error}"))?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let scenarios = [Scenario::rank("case", as_process)];
    if let Some(code) = processes::serve(&scenarios) {
        return code;
    }
    let mut trials = Vec::new();
    for (name, case) in CASES.concat() {
        for count in 1..=4 {
            trials.push(Trial::test(format!("threads/{name}/{count}"), move || on_threads(count, case)));
            let run = move || Ok(Launch::new("case", count).arg(name).reports().map(drop)?);
            trials.push(Trial::test(format!("processes/{name}/{count}"), run));
        }
    }
    trials.extend(examples::trials());
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Some numbers from -1 to 1.
fn numbers(seed: usize, len: usize) -> Vec<f64> {
    (0..len).map(|index| ((index * 7 + seed * 13 + index / 5) % 11) as f64 / 5.0 - 1.0).collect()
}

fn tensor<const D: usize>(numbers: Vec<f64>, shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(numbers, shape), (device, dtype))
}

/// A parameter of these numbers that is trained.
fn param<const D: usize>(numbers: Vec<f64>, shape: [usize; D], dtype: DType) -> Param<Tensor<D>> {
    let device = Device::flex().autodiff();
    Param::initialized(ParamId::new(), tensor(numbers, shape, dtype, &device).require_grad())
}

/// All numbers of a tensor, without its autodiff association.
fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.clone().inner().into_data().iter::<f64>().collect()
}

/// Two parameters of f64, of which the second may be a clone of the first.
#[derive(Module, Debug)]
struct Pair {
    first: Param<Tensor<1>>,
    second: Param<Tensor<1>>,
}

impl Pair {
    fn new() -> Pair {
        Pair { first: param(vec![0.0; 2], [2], DType::F64), second: param(vec![0.0; 2], [2], DType::F64) }
    }
}

#[track_caller]
fn assert_close(a: &[f64], b: &[f64], most: f64) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= most, "{a} and {b} are {} apart", (a - b).abs());
    }
}

/// Asserts that all ranks have the same bits.
#[track_caller]
fn assert_same_bits(ranks: &Ranks, values: &[f64]) {
    let mut of_first = values.to_vec();
    ranks.comm().broadcast_in_place(&mut of_first, 0).expect("a broadcast");
    assert!(values.iter().zip(&of_first).all(|(a, b)| a.to_bits() == b.to_bits()), "{values:?} {of_first:?}");
}
