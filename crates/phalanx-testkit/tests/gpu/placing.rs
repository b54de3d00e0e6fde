//! Which GPU a rank gets: launchers show each process all GPUs, in whatever order, or one.

use crate::flavour::{BACKEND, VISIBLE, version};
use crate::world::{DEADLINE, done, download, expect, launch, must, stream, upload, value, values};
use libtest_mimic::{Failed, Trial};
use phalanx::{BackendKind, Comm, Error, GpuStream, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("placed", placed),
    Scenario::process("not_placed", not_placed),
    Scenario::rank("on_the_host", on_the_host),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let several = [
        Trial::test("placing/one_each", || chosen_among(["0", "1"], "0")),
        Trial::test("placing/in_another_order", || chosen_among(["0,1", "1,0"], "0")),
        Trial::test("placing/few_and_all", || chosen_among(["0,1", "0"], "1 0")),
    ];
    let several = several.into_iter().map(|trial| trial.only_if(gpus >= 2, "it takes two GPUs"));
    let one = [
        Trial::test("placing/the_same", the_same),
        Trial::test("placing/told_the_same", told_the_same),
        Trial::test("placing/shared", shared),
        Trial::test("placing/threads_that_share", threads_that_share),
    ];
    several.chain(one.map(|trial| trial.only_if(gpus >= 1, "it takes a GPU"))).collect()
}

/// Two ranks of this host that see these GPUs.
fn seeing(scenario: &str, visible: [&str; 2], arg: &str) -> Launch {
    let scenario = SCENARIOS.iter().find(|other| other.name == scenario).expect("it is above");
    let show = |launch: Launch, rank| launch.env_of(rank, VISIBLE, Some(visible[rank]));
    (0..2).fold(launch(*scenario, 2, arg).env("NCCL_MULTI_RANK_GPU_ENABLE", "0"), show)
}

/// Nobody names a backend: it is this one, since each rank can have a GPU.
fn chosen_among(visible: [&str; 2], numbers: &str) -> Result<(), Failed> {
    let launch = seeing("placed", visible, numbers);
    let launch = (0..2).fold(launch, |launch, rank| launch.env_of(rank, "PHALANX_BACKEND", None));
    Ok(launch.reports().map(drop)?)
}

/// The argument names the numbers of the ranks' GPUs; one if it is the same for all.
fn placed(comm: Comm, args: &[String]) -> Outcome {
    let numbers: Vec<usize> = args[0].split(' ').filter_map(|number| number.parse().ok()).collect();
    let number = numbers[comm.rank() % numbers.len()];
    assert_eq!((comm.backend(), comm.gpu()), (BACKEND, Some(number)));
    assert_eq!(GpuStream::from(stream(&comm)).gpu(), number);
    let ranks = comm.world_size();
    let mut buffer = upload(&comm, &values::<f32>(comm.rank(), 1000))?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
    expect("all_reduce", &download(&comm, &buffer)?, sum)?;
    must("finalize", comm.finalize())?;
    done()
}

/// One GPU for two ranks: told to use NCCL they cannot; left to themselves they do without GPUs.
fn the_same() -> Result<(), Failed> {
    seeing("not_placed", ["0", "0"], "may use 1 (0), and 2 ranks").reports()?;
    let launch = seeing("on_the_host", ["0", "0"], "");
    let launch = (0..2).fold(launch, |launch, rank| launch.env_of(rank, "PHALANX_BACKEND", None));
    Ok(launch.reports().map(drop)?)
}

/// The same error on all ranks.
fn not_placed(args: &[String]) -> Outcome {
    let told = args.get(1).and_then(|gpu| gpu.parse().ok());
    let builder = told.into_iter().fold(Comm::builder(), |builder, gpu| builder.gpu(gpu));
    let Err(error @ Error::Unsupported(_)) = builder.init() else { return Err("it was made".into()) };
    let text = error.to_string();
    let named = ["rank 1 on", "has no GPU of its own", "NCCL_MULTI_RANK_GPU_ENABLE", &args[0]];
    assert!(named.iter().all(|part| text.contains(part)), "{text}");
    done()
}

fn on_the_host(comm: Comm, _: &[String]) -> Outcome {
    assert_eq!(comm.backend(), BackendKind::Host);
    must("barrier", comm.barrier())?;
    done()
}

fn told_the_same() -> Result<(), Failed> {
    let launch = seeing("not_placed", ["0", "0"], "may use 1 (0)").arg("0");
    launch.reports()?;
    // Who names a GPU does not do without, whatever backend is chosen.
    let launch = (0..2).fold(launch, |launch, rank| launch.env_of(rank, "PHALANX_BACKEND", None));
    Ok(launch.reports().map(drop)?)
}

/// Where the library can, processes share a GPU if it is told to let them; else they are told what is
/// missing.
fn shared() -> Result<(), Failed> {
    let version = version()?;
    let parts: Vec<u32> = version.split('.').filter_map(|part| part.parse().ok()).collect();
    let can = BACKEND == BackendKind::Nccl && parts >= vec![2, 30];
    let scenario = if can { "placed" } else { "not_placed" };
    let arg = if scenario == "placed" { "0" } else { "may use 1 (0)" };
    let launch = seeing(scenario, ["0", "0"], arg);
    Ok(launch.env("NCCL_MULTI_RANK_GPU_ENABLE", "1").env("NCCL_MAX_CTAS", "4").reports().map(drop)?)
}

fn threads_that_share() -> Result<(), Failed> {
    let builder = Comm::builder().backend(BACKEND).timeout(DEADLINE / 2).gpu(0);
    let error = builder.run(2, |_| ()).expect_err("two threads on one GPU").to_string();
    assert!(error.contains("GPU of its own"), "{error}");
    Ok(())
}
