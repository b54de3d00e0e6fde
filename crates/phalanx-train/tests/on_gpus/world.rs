//! Worlds of ranks with a GPU each.

use libtest_mimic::{Failed, Trial};
use phalanx::{BackendKind, Comm};
use phalanx_testkit::Scenario;
pub use phalanx_testkit::emulated::EMULATED;
use phalanx_testkit::emulated::{Emulated, run_again};
use phalanx_testkit::processes::{Launch, ranks_per_gpu};
use phalanx_testkit::scenario::Body;
use phalanx_testkit::suite::Condition;
use std::process::ExitCode;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(60);
/// Numbers of ranks of the trials.
const RANKS: &[usize] = &[1, 2, 4];

/// How many GPUs there are; without any, how the trials ended on emulated ones.
pub fn gpus() -> Result<usize, ExitCode> {
    let gpus = phalanx_testkit::gpus::count().map_err(|reason| run_again(Emulated::new(), &reason))?;
    match phalanx::nccl::version() {
        Ok(_) => Ok(gpus),
        Err(error) => {
            eprintln!("{gpus} GPUs that NCCL cannot use: {error}");
            Err(ExitCode::FAILURE)
        }
    }
}

/// Whether there is cuBLAS.
pub fn has_cublas() -> bool {
    // SAFETY: loading runs the library's own code alone.
    unsafe { phalanx::cudarc::cublas::sys::is_culib_present() }
}

/// Each scenario on threads and on processes, with each number of ranks; those in `alone` with one. Those `of_products` need cuBLAS.
pub fn trials(scenarios: &[Scenario], alone: &[&str], of_products: &[Scenario], gpus: usize) -> Vec<Trial> {
    let (mut trials, has_cublas) = (Vec::new(), has_cublas());
    for scenario in scenarios.iter().copied() {
        let is_alone = alone.contains(&scenario.name);
        for ranks in RANKS.iter().copied().filter(|ranks| *ranks == 1 || !is_alone) {
            let name = if is_alone { scenario.name.to_owned() } else { format!("{}/{ranks}", scenario.name) };
            let on_threads = Trial::test(format!("threads/{name}"), move || threads(scenario, ranks));
            let on_processes = Trial::test(format!("processes/{name}"), move || processes(scenario, ranks));
            // Threads do not share a GPU.
            let can_multiply = has_cublas || of_products.iter().all(|other| other.name != scenario.name);
            let (reason, missing) = (format!("it takes {ranks} GPUs"), "libcublas.so is not found");
            for (trial, most) in [(on_threads, gpus), (on_processes, gpus * ranks_per_gpu())] {
                trials.push(trial.only_if(ranks <= most, &reason).only_if(can_multiply, missing));
            }
        }
    }
    trials
}

fn threads(scenario: Scenario, ranks: usize) -> Result<(), Failed> {
    let Body::Rank(body) = scenario.body else { unreachable!("a rank's part") };
    let builder = Comm::builder().backend(BackendKind::Nccl).timeout(DEADLINE / 2);
    let outcomes = builder.run(ranks, |comm| body(comm, &[]))?;
    let problem = |(rank, outcome): (usize, &phalanx_testkit::Outcome)| {
        outcome.as_ref().err().map(|problem| format!("rank {rank}: {problem}"))
    };
    let problems: Vec<String> = outcomes.iter().enumerate().filter_map(problem).collect();
    if problems.is_empty() { Ok(()) } else { Err(problems.join("\n").into()) }
}

fn processes(scenario: Scenario, ranks: usize) -> Result<(), Failed> {
    let launch = Launch::new(scenario.name, ranks).deadline(DEADLINE).on_gpus();
    Ok(launch.env("PHALANX_BACKEND", BackendKind::Nccl.name()).reports().map(drop)?)
}
