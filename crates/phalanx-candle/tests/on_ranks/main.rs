//! Operations and layers against one rank: values and gradients, on ranks as threads and as processes. With the feature
//! `cuda` and on a machine with GPUs, each rank has one of them.

mod checkpoints;
mod collectives;
mod data_parallel;
mod errors;
mod examples;
mod tensor_parallel;

use candle_core::{DType, Device, Result, Tensor};
use libtest_mimic::{Arguments, Failed, Trial};
use phalanx_candle::Ranks;
use phalanx_testkit::processes::{self, Launch};
use phalanx_testkit::suite;
use phalanx_testkit::{Outcome, Scenario, gpus};
use std::cell::RefCell;
use std::process::ExitCode;

/// What each rank does, by name.
type Case = (&'static str, fn(&Ranks) -> Result<()>);

const CASES: [&[Case]; 5] =
    [checkpoints::CASES, collectives::CASES, tensor_parallel::CASES, data_parallel::CASES, errors::CASES];

/// In a rank process: the case that its argument names.
fn as_process(comm: phalanx::Comm, args: &[String]) -> Outcome {
    let mut cases = [CASES.concat(), tensor_parallel::GPU_CASES.to_vec()].concat().into_iter();
    let run = || -> Result<()> {
        let ranks = Ranks::new(comm)?;
        let (killed, case) = errors::KILLED;
        if args[0] == killed {
            // The communicator has failed then, and does not end with the others.
            return perform(&ranks, case);
        }
        let (_, case) = cases.find(|(name, _)| *name == args[0]).expect("a case");
        perform(&ranks, case)?;
        ranks.finalize()
    };
    run().map(|()| String::new()).map_err(|error| error.to_string())
}

fn perform(ranks: &Ranks, case: fn(&Ranks) -> Result<()>) -> Result<()> {
    HERE.replace(ranks.device().clone());
    case(ranks)
}

thread_local! {
    static HERE: RefCell<Device> = const { RefCell::new(Device::Cpu) };
}

/// Where this rank's tensors are.
fn here() -> Device {
    HERE.with_borrow(Device::clone)
}

fn on_threads(count: usize, case: fn(&Ranks) -> Result<()>) -> std::result::Result<(), Failed> {
    // NCCL compares calls only if it is told to.
    let builder = phalanx::Comm::builder().check(true);
    let outcomes = builder.run(count, |comm| {
        let ranks = Ranks::new(comm)?;
        perform(&ranks, case)?;
        ranks.finalize()
    })?;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        outcome.map_err(|error| format!("rank {rank}: {error}"))?;
    }
    Ok(())
}

/// Processes that run a case.
fn launch(case: &str, count: usize, on_gpus: bool) -> Launch {
    let launch = Launch::new("case", count).arg(case);
    if on_gpus { launch.on_gpus().env("PHALANX_BACKEND", "nccl").env("PHALANX_CHECK", "1") } else { launch }
}

/// All but rank 1 see that it is gone.
fn killed(launch: Launch) -> std::result::Result<(), Failed> {
    let ended = launch.run()?;
    match ended.iter().all(|one| one.outcome.is_ok() == (one.rank != 1)) {
        true => Ok(()),
        false => Err(processes::describe(&ended).into()),
    }
}

/// Left to CI: it trains for seconds.
const SLOW: &[&str] = &["examples/train_gpt"];

fn main() -> ExitCode {
    let scenarios = [Scenario::rank("case", as_process)];
    if let Some(code) = processes::serve(&scenarios) {
        return code;
    }
    let gpus = gpus::count().ok().filter(|_| cfg!(feature = "cuda"));
    let (on_gpus, most) = (gpus.is_some(), gpus.unwrap_or(5));
    let processes = 2..=most.min(if on_gpus { 4 } else { 3 });
    let mut trials = Vec::new();
    let only_on_gpus = if on_gpus { tensor_parallel::GPU_CASES } else { &[] };
    for (name, case) in [&CASES.concat(), only_on_gpus].concat() {
        for count in 1..=most.min(5) {
            trials.push(Trial::test(format!("threads/{name}/{count}"), move || on_threads(count, case)));
        }
        for count in processes.clone() {
            let run = move || Ok(launch(name, count, on_gpus).reports().map(drop)?);
            trials.push(Trial::test(format!("processes/{name}/{count}"), run));
        }
    }
    for count in processes {
        let (name, _) = errors::KILLED;
        trials.push(Trial::test(format!("processes/{name}/{count}"), move || {
            killed(launch(name, count, on_gpus))
        }));
    }
    trials.extend(examples::trials());
    let mut args = Arguments::from_args();
    if on_gpus {
        // The trials share them.
        args.test_threads = Some(1);
    }
    suite::run(&args, trials, &[], SLOW)
}

/// Some numbers: small integers, so that sums in any order are the same.
fn numbers(seed: usize, shape: &[usize]) -> Result<Tensor> {
    let len: usize = shape.iter().product();
    let number = |index: usize| ((index * 7 + seed * 13 + index / 5) % 11) as f64 - 5.0;
    Tensor::from_vec((0..len).map(number).collect::<Vec<_>>(), shape, &here())
}

/// The inner product.
fn dot(a: &Tensor, b: &Tensor) -> Result<f64> {
    (a * b)?.to_dtype(DType::F64)?.sum_all()?.to_scalar()
}

/// The sum over the ranks.
fn over_ranks(ranks: &Ranks, value: f64) -> Result<f64> {
    let mut sum = [value];
    ranks.comm().all_reduce_in_place(&mut sum, phalanx::ReduceOp::Sum).expect("a sum");
    Ok(sum[0])
}

/// Asserts that two tensors differ by at most `most` anywhere.
#[track_caller]
fn assert_close(a: &Tensor, b: &Tensor, most: f64) {
    assert_eq!(a.dims(), b.dims());
    if a.elem_count() == 0 {
        return;
    }
    let far = |a: &Tensor, b: &Tensor| -> Result<f64> {
        (a.to_dtype(DType::F64)? - b.to_dtype(DType::F64)?)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>()
    };
    let far = far(a, b).expect("a difference");
    assert!(far <= most, "{far} apart:\n{a}\n{b}");
}
