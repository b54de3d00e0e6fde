//! Modules on ranks against one rank, on ranks as threads and as processes. With the feature `cuda` and on a machine with several GPUs, each rank
//! has one of them.

mod examples;
mod gradients;
mod learner;
mod modules;
#[cfg(feature = "cuda")]
mod order;
mod training;

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use libtest_mimic::{Arguments, Failed, Trial};
use phalanx_burn::{Ranks, Result};
use phalanx_testkit::processes::{self, Launch};
use phalanx_testkit::{Outcome, Scenario, gpus};
use std::cell::RefCell;
use std::process::ExitCode;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

/// What each rank does, by name.
type Case = (&'static str, fn(&Ranks) -> Result<()>);

const CASES: [&[Case]; 4] = [gradients::CASES, learner::CASES, modules::CASES, training::CASES];

/// In a rank process: the case that its argument names.
fn as_process(comm: phalanx::Comm, args: &[String]) -> Outcome {
    let (_, case) = CASES.concat().into_iter().find(|(name, _)| *name == args[0]).ok_or("no such case")?;
    let outcome = Ranks::new(comm).and_then(|ranks| perform(&ranks, case));
    outcome.map(|()| String::new()).map_err(|error| error.to_string())
}

fn perform(ranks: &Ranks, case: fn(&Ranks) -> Result<()>) -> Result<()> {
    HERE.replace(ranks.device());
    case(ranks)?;
    ranks.finalize()
}

thread_local! {
    static HERE: RefCell<Device> = RefCell::new(Device::flex());
}

/// Where this rank's tensors are.
fn here() -> Device {
    HERE.with_borrow(Device::clone)
}

/// Whether ranks have GPUs.
static ON_GPUS: LazyLock<bool> =
    LazyLock::new(|| cfg!(feature = "cuda") && gpus::count().is_ok_and(|gpus| gpus > 1));

/// The widest type there is where the tensors are: burn's GPUs have no f64.
fn widest() -> DType {
    if *ON_GPUS { DType::F32 } else { DType::F64 }
}

/// Communicators of one process are used one at a time on GPUs, whose whole context waits for each operation.
static GPUS: Mutex<()> = Mutex::new(());

fn on_threads(count: usize, case: fn(&Ranks) -> Result<()>) -> std::result::Result<(), Failed> {
    let _alone = ON_GPUS.then(|| GPUS.lock());
    let outcomes = phalanx::run(count, |comm| perform(&Ranks::new(comm)?, case));
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
    let counts = if *ON_GPUS { 2..=2 } else { 1..=4 };
    for (name, case) in CASES.concat() {
        for count in counts.clone() {
            trials.push(Trial::test(format!("threads/{name}/{count}"), move || on_threads(count, case)));
            let launch = move || {
                let launch = Launch::new("case", count).arg(name);
                // burn compiles each kernel at its first use.
                let on_gpus = |launch: Launch| launch.on_gpus().deadline(Duration::from_secs(300));
                if *ON_GPUS { on_gpus(launch).env("PHALANX_BACKEND", "nccl") } else { launch }
            };
            let run = move || Ok(launch().reports().map(drop)?);
            trials.push(Trial::test(format!("processes/{name}/{count}"), run));
        }
    }
    if *ON_GPUS {
        trials = trials.into_iter().map(without_what_gpus_lack).collect();
    }
    trials.extend(examples::trials());
    #[cfg(feature = "cuda")]
    trials.extend(order::trials());
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn without_what_gpus_lack(trial: Trial) -> Trial {
    let reasons = [
        ("_f64", "burn has no f64 on GPUs"),
        ("/in_place", "looks at addresses of host memory"),
        ("/sgd_bf16", "burn compiles kernels of bf16 for more than 170 s"),
    ];
    match reasons.iter().find(|(part, _)| trial.name().contains(part)) {
        Some((_, reason)) => trial.with_kind(*reason).with_ignored_flag(true),
        None => trial,
    }
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
    let device = here().autodiff();
    Param::initialized(ParamId::new(), tensor(numbers, shape, dtype, &device).require_grad())
}

/// All numbers of a tensor, without its autodiff association.
fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.clone().inner().into_data().iter::<f64>().collect()
}

/// Two parameters of the widest type, of which the second may be a clone of the first.
#[derive(Module, Debug)]
struct Pair {
    first: Param<Tensor<1>>,
    second: Param<Tensor<1>>,
}

impl Pair {
    fn new() -> Pair {
        Pair { first: param(vec![0.0; 2], [2], widest()), second: param(vec![0.0; 2], [2], widest()) }
    }
}

/// GPUs multiply f32 as TF32.
#[track_caller]
fn assert_close(a: &[f64], b: &[f64], most: f64) {
    let most = if *ON_GPUS && most > 0.0 { most.max(1e-3) } else { most };
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
