//! Runs a plan on the ranks, from the making of their communicator to its end.

use super::bench;
use super::device;
use super::observer::Silent;
use super::one_sided;
use super::plan::Plan;
use super::reporter::Reporter;
use crate::launch;
use crate::{exit, machine, pin};
use anyhow::{Context, Result};
use phalanx::{Builder, Comm};
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Starts this program once for each rank, with its own options.
pub fn start_processes(ranks: usize) -> Result<ExitCode> {
    let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    arguments.push("--as-rank".into());
    launch::own_program::run(ranks, arguments)
}

/// Runs the plan on this many threads. Returns the number of wrong elements on all ranks.
pub fn run_threads(ranks: usize, plan: &Plan, reporter: Reporter) -> Result<u64> {
    let cores = machine::usable_cores();
    let reporter = Mutex::new(Some(reporter));
    let take = || reporter.lock().unwrap_or_else(PoisonError::into_inner).take();
    let wrong = builder(plan).try_run(ranks, |comm| {
        let reporter = if comm.rank() == 0 { take() } else { None };
        run(comm, plan, cores, reporter)
    })?;
    // Each rank has the number of all ranks.
    Ok(wrong[0])
}

/// Runs the plan on this process as a rank of others. Returns the number of wrong elements on all ranks.
pub fn run_process(plan: &Plan, reporter: Reporter) -> Result<u64> {
    let cores = machine::usable_cores();
    let since = Instant::now();
    let comm = builder(plan).init().context("the ranks did not find each other")?;
    let rank = comm.rank();
    let reporter = (rank == 0).then(|| reporter.started_within(since.elapsed()));
    run(comm, plan, cores, reporter).with_context(|| format!("rank {rank}"))
}

fn builder(plan: &Plan) -> Builder {
    let mut builder = Comm::builder();
    if let Some(backend) = plan.backend_kind() {
        builder = builder.backend(backend);
    }
    if let Some(timeout) = plan.timeout {
        builder = builder.timeout(timeout);
    }
    if plan.algorithm.is_some() {
        let mut config = phalanx::nccl::Config::default();
        config.gpu_algorithm = plan.algorithm;
        builder = builder.nccl(config);
    }
    builder
}

/// Runs the plan on this rank; `cores` are those of the whole process, since a pinned thread sees one.
fn run(comm: Comm, plan: &Plan, cores: usize, reporter: Option<Reporter>) -> Result<u64> {
    match measure(&comm, plan, cores, reporter) {
        Ok(wrong) => {
            comm.finalize()?;
            Ok(wrong)
        }
        Err(error) => {
            // Otherwise the other ranks would wait for this one until their deadline.
            comm.abort();
            Err(error)
        }
    }
}

fn measure(comm: &Comm, plan: &Plan, cores: usize, reporter: Option<Reporter>) -> Result<u64> {
    plan.check(comm.world_size()).map_err(exit::usage)?;
    if plan.pin {
        pin::to_core_of(comm.rank())?;
    }
    if plan.operation.is_one_sided() {
        return measure_one_sided(comm, plan, reporter);
    }
    let stream = device::stream(comm, plan)?;
    plan.check_place(stream.is_some()).map_err(exit::usage)?;
    match &stream {
        Some(stream) => measure_collective(&*comm.on(stream)?, plan, cores, reporter),
        None => measure_collective(comm, plan, cores, reporter),
    }
}

fn measure_collective(comm: &Comm, plan: &Plan, cores: usize, reporter: Option<Reporter>) -> Result<u64> {
    let gpus = device::gpus(comm, comm.gpu())?;
    let Some(reporter) = reporter else { return bench::run(comm, plan, cores, &mut Silent) };
    let mut report = reporter.begin(comm, plan, gpus)?;
    let wrong = bench::run(comm, plan, cores, &mut report)?;
    report.finish()?;
    Ok(wrong)
}

fn measure_one_sided(comm: &Comm, plan: &Plan, reporter: Option<Reporter>) -> Result<u64> {
    plan.check_place(true).map_err(exit::usage)?;
    let nvshmem = one_sided::context(comm, plan)?;
    let gpus = device::gpus(comm, Some(nvshmem.cuda_context().ordinal()))?;
    let wrong = match reporter {
        Some(reporter) => {
            let mut report = reporter.begin(comm, plan, gpus)?;
            let wrong = one_sided::run(comm, &nvshmem, plan, &mut report)?;
            report.finish()?;
            wrong
        }
        None => one_sided::run(comm, &nvshmem, plan, &mut Silent)?,
    };
    nvshmem.finalize()?;
    Ok(wrong)
}

/// Whether a rank failed because another rank aborted the communicator.
pub fn was_aborted(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(phalanx::Error::Aborted { .. }))
}
