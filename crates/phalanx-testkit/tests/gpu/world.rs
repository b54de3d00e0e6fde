//! Worlds of ranks with a GPU each, and buffers to fill and check.

pub use crate::flavour::{
    BACKEND, DeviceRepr, Slice, init_all, is_reduced, library_alone, new_stream, stream,
};

use crate::flavour;
use libtest_mimic::{Failed, Trial};
use phalanx::Comm;
pub use phalanx_testkit::emulated::is_emulated as are_emulated;
use phalanx_testkit::emulated::run_again;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::{Body, ErrorContext, Outcome};
use phalanx_testkit::suite::Condition;
use phalanx_testkit::{Number, Scenario};
use std::process::ExitCode;
use std::time::Duration;

/// What a trial may take; the ranks' own deadline is half of it.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Most ranks of a world.
const MOST: usize = 4;

/// So many elements on a GPU; an emulated one computes on this machine's cores.
pub fn elements(len: usize) -> usize {
    if are_emulated() { len / 128 } else { len }
}

/// How many ranks can have a GPU; without GPUs, how the trials ended on emulated ones. GPUs whose library is
/// missing or cannot be used are a failure: nobody would notice that the trials ran on others. Whether a
/// world of them can be made is for the trials to find out.
pub fn gpus() -> Result<usize, ExitCode> {
    let gpus = flavour::gpus().map_err(|reason| run_again(flavour::emulated(), &reason))?;
    match flavour::version() {
        Ok(_) => Ok(gpus.min(MOST)),
        Err(error) => {
            eprintln!("{gpus} GPUs that {} cannot use: {error}", BACKEND.name());
            Err(ExitCode::FAILURE)
        }
    }
}

/// A scenario on threads and on processes, with every number of ranks from `fewest`.
pub fn both(scenario: Scenario, fewest: usize, gpus: usize, args: &'static [&'static str]) -> Vec<Trial> {
    both_named(scenario.name, scenario, fewest, gpus, args)
}

/// The same under another name.
pub fn both_named(
    name: &str,
    scenario: Scenario,
    fewest: usize,
    gpus: usize,
    args: &'static [&'static str],
) -> Vec<Trial> {
    // Without GPUs the trials are ignored, and only their names count.
    let worlds = move || fewest..=gpus;
    let on_threads = Trial::test(format!("threads/{name}"), move || {
        worlds().try_for_each(|ranks| args.iter().try_for_each(|arg| threads(scenario, ranks, arg)))
    });
    let on_processes = Trial::test(format!("processes/{name}"), move || {
        worlds().try_for_each(|ranks| args.iter().try_for_each(|arg| processes(scenario, ranks, arg)))
    });
    vec![
        on_threads.only_if(gpus >= fewest, "there are too few GPUs"),
        on_processes.only_if(gpus >= fewest, "there are too few GPUs"),
    ]
}

pub fn threads(scenario: Scenario, ranks: usize, arg: &str) -> Result<(), Failed> {
    let Body::Rank(body) = scenario.body else { unreachable!("a rank's part") };
    let args = [arg.to_owned()];
    let run = Comm::builder().backend(BACKEND).timeout(DEADLINE / 2).run(ranks, |comm| body(comm, &args));
    let outcomes = run.context(|| format!("{ranks} thread ranks, {arg}"))?;
    let mut problems = outcomes.iter().enumerate().filter_map(|(rank, outcome)| {
        outcome.as_ref().err().map(|problem| format!("\n  rank {rank}: {problem}"))
    });
    match problems.next() {
        None => Ok(()),
        Some(first) => {
            Err(format!("{ranks} thread ranks, {arg}:{first}{}", problems.collect::<String>()).into())
        }
    }
}

pub fn launch(scenario: Scenario, ranks: usize, arg: &str) -> Launch {
    Launch::new(scenario.name, ranks)
        .deadline(DEADLINE)
        .arg(arg)
        .on_gpus()
        .env("PHALANX_BACKEND", BACKEND.name())
}

fn processes(scenario: Scenario, ranks: usize, arg: &str) -> Result<(), Failed> {
    let reports = launch(scenario, ranks, arg).reports();
    reports.map(drop).map_err(|problems| format!("{ranks} process ranks, {arg}:{problems}").into())
}

/// A copy in GPU memory.
pub fn upload<T: Number + DeviceRepr>(comm: &Comm, values: &[T]) -> Result<Slice<T>, String> {
    stream(comm).clone_htod(values).context(|| "upload".into())
}

/// What GPU memory holds when the work before is complete.
pub fn download<T: Number + DeviceRepr>(comm: &Comm, buffer: &Slice<T>) -> Result<Vec<T>, String> {
    comm.sync().context(|| "sync".into())?;
    stream(comm).clone_dtoh(buffer).context(|| "download".into())
}

/// Small whole numbers, different on every rank, whose sums and products every type has exactly.
pub fn value(rank: usize, index: usize) -> i32 {
    ((rank + index) % 3) as i32
}

pub fn values<T: Number>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| T::from_small(value(rank, index))).collect()
}

/// An error that names the first difference.
pub fn expect<T: Number>(
    what: impl std::fmt::Display,
    actual: &[T],
    expected: impl Fn(usize) -> T,
) -> Result<(), String> {
    for (index, value) in actual.iter().enumerate() {
        if !value.same(expected(index)) {
            return Err(format!(
                "{what}: element {index} of {} is {value:?}, expected {:?}",
                actual.len(),
                expected(index)
            ));
        }
    }
    Ok(())
}

/// A scenario's part that must succeed.
pub fn must<T>(what: &str, result: phalanx::Result<T>) -> Result<T, String> {
    result.context(|| what.to_owned())
}

/// Nothing to report.
pub fn done() -> Outcome {
    Ok(String::new())
}
