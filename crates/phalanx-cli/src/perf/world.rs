//! Where the ranks come from: threads, processes that the program starts, or a launcher.
//!
//! `--processes` starts this program again with the same options, as ranks under the launcher of
//! `phalanx launch`.

use super::bench::{self, Audience};
use super::device;
use super::one_sided;
use super::options::PerfArgs;
use super::plan::{Backend, Plan};
use super::podium::Podium;
use super::report::{RankKind, Row};
use crate::launch;
use crate::{gpu, machine, pin, size};
use anyhow::{Context, Result, bail, ensure};
use phalanx::Comm;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

/// The most ranks that share memory.
const MOST_THREADS: usize = 512;

/// The ranks of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum World {
    /// So many threads of this process.
    Threads(usize),
    /// So many processes, still to be started by this one.
    Processes(usize),
    /// This process is a rank already.
    Rank(RankKind),
}

impl World {
    /// The ranks that the options ask for, or else the ones that a launcher has made.
    pub fn choose(args: &PerfArgs) -> Result<World> {
        if args.as_rank {
            return Ok(World::Rank(RankKind::Processes));
        }
        // A launcher of a single rank (an interactive step of Slurm) leaves it to the options.
        let launcher = phalanx::choose()?.launcher.filter(|launcher| launcher.world_size != Some(1));
        let on_nvshmem = args.operation.is_one_sided() || args.backend == Backend::Nvshmem;
        let (threads, processes) = args.ranks()?;
        match (launcher, threads, processes) {
            (None, Some(_), _) if on_nvshmem => {
                bail!("a process is one PE of NVSHMEM: use -p instead of -t")
            }
            (None, Some(threads), _) => Ok(World::Threads(threads)),
            (None, None, Some(processes)) => Ok(World::Processes(processes)),
            (None, None, None) if on_nvshmem => {
                let name = args.operation.name();
                phalanx::nvshmem::version().with_context(|| format!("{name} needs NVSHMEM"))?;
                let gpus = gpu::count().with_context(|| format!("{name} needs GPUs"))?;
                ensure!(gpus > 0, "{name} needs GPUs, and the CUDA driver sees none");
                Ok(World::Processes(gpus))
            }
            (None, None, None) => Ok(World::Threads(usual_threads(args.backend)?.min(MOST_THREADS))),
            (Some(_), None, None) => Ok(World::Rank(RankKind::Launched)),
            (Some(launcher), ..) => {
                let (name, variables) = (launcher.name, launcher.recognised_by.join(", "));
                bail!("this process is a rank of {name} ({variables}): leave out -t, -p and -g")
            }
        }
    }

    /// What the ranks are.
    pub fn kind(self) -> RankKind {
        match self {
            World::Threads(_) => RankKind::Threads,
            World::Processes(_) => RankKind::Processes,
            World::Rank(kind) => kind,
        }
    }

    /// Whether the plan makes sense for these ranks and fits this machine, as far as that is known
    /// before there are any.
    pub fn check(self, plan: &Plan) -> Result<()> {
        let (World::Threads(ranks) | World::Processes(ranks)) = self else {
            return Ok(());
        };
        plan.check(ranks)?;
        if plan.backend == Backend::Nvshmem {
            phalanx::nvshmem::version()
                .with_context(|| format!("{} needs NVSHMEM", plan.operation.name()))?;
        }
        let on_gpus = match plan.backend {
            Backend::Auto => may_choose_gpus() && are_enough_gpus(ranks),
            named => matches!(named, Backend::Nccl | Backend::Nvshmem),
        };
        plan.check_place(on_gpus)?;
        if on_gpus {
            // Each rank looks at the memory of its GPU.
            return Ok(());
        }
        let needed = (plan.largest() as u64).saturating_mul(2).saturating_mul(ranks as u64);
        if let Some(available) = machine::memory("MemAvailable") {
            ensure!(
                needed <= available,
                "{ranks} ranks with two buffers of {} each need {}, and {} of memory are available: \
                 lower --maxbytes",
                size::format(plan.largest() as u64),
                size::format(needed),
                size::format(available)
            );
        }
        Ok(())
    }

    /// Runs the plan on all ranks of this process. Answers with the number of wrong elements.
    pub fn run(self, plan: &Plan, podium: Podium) -> Result<u64> {
        let mut builder = Comm::builder();
        if let Some(backend) = plan.backend_kind() {
            builder = builder.backend(backend);
        }
        if let Some(timeout) = plan.timeout {
            builder = builder.timeout(timeout);
        }
        // Before any rank is pinned: a pinned thread sees one core only.
        let cores = machine::usable_cores();
        match self {
            World::Threads(ranks) => {
                let podium = Mutex::new(Some(podium));
                let take = || podium.lock().unwrap_or_else(PoisonError::into_inner).take();
                let results = builder.run(ranks, |comm| {
                    let podium = if comm.rank() == 0 { take() } else { None };
                    run_rank(comm, plan, cores, podium)
                })?;
                first_cause(results)
            }
            World::Rank(_) => {
                let comm = builder.init().context("the ranks did not find each other")?;
                let rank = comm.rank();
                let podium = (rank == 0).then_some(podium);
                run_rank(comm, plan, cores, podium).with_context(|| format!("rank {rank}"))
            }
            World::Processes(_) => unreachable!("they are started, and then each runs as a rank"),
        }
    }
}

fn run_rank(comm: Comm, plan: &Plan, cores: usize, podium: Option<Podium>) -> Result<u64> {
    match take_part(&comm, plan, cores, podium) {
        Ok(wrong) => {
            comm.finalize()?;
            Ok(wrong)
        }
        Err(error) => {
            // The others need not wait until they miss this rank.
            comm.abort();
            Err(error)
        }
    }
}

fn take_part(comm: &Comm, plan: &Plan, cores: usize, podium: Option<Podium>) -> Result<u64> {
    plan.check(comm.world_size())?;
    if plan.pin {
        pin::to_core_of(comm.rank())?;
    }
    if plan.operation.is_one_sided() {
        return take_part_one_sided(comm, plan, podium);
    }
    let stream = device::stream(comm, plan)?;
    plan.check_place(stream.is_some())?;
    match &stream {
        Some(stream) => measure(&*comm.on(stream)?, plan, cores, podium),
        None => measure(comm, plan, cores, podium),
    }
}

fn measure(comm: &Comm, plan: &Plan, cores: usize, podium: Option<Podium>) -> Result<u64> {
    let gpus = device::gpus(comm, comm.gpu())?;
    match podium {
        Some(mut podium) => {
            podium.opens(comm, gpus)?;
            let wrong = bench::run(comm, plan, cores, &mut podium)?;
            podium.closes()?;
            Ok(wrong)
        }
        None => bench::run(comm, plan, cores, &mut Nobody),
    }
}

/// The same for the operations of NVSHMEM.
fn take_part_one_sided(comm: &Comm, plan: &Plan, podium: Option<Podium>) -> Result<u64> {
    plan.check_place(true)?;
    let nvshmem = one_sided::context(comm, plan)?;
    let gpus = device::gpus(comm, Some(nvshmem.cuda_context().ordinal()))?;
    let wrong = match podium {
        Some(mut podium) => {
            podium.opens(comm, gpus)?;
            let wrong = one_sided::run(comm, &nvshmem, plan, &mut podium)?;
            podium.closes()?;
            wrong
        }
        None => one_sided::run(comm, &nvshmem, plan, &mut Nobody)?,
    };
    nvshmem.finalize()?;
    Ok(wrong)
}

/// Ranks that are threads, if their number is not given: one per GPU, or per core.
fn usual_threads(backend: Backend) -> Result<usize> {
    let cores = machine::usable_cores().max(2);
    match backend {
        Backend::Host => Ok(cores),
        Backend::Nccl => gpu::usable().context("--backend nccl"),
        Backend::Nvshmem => bail!("a process is one PE of NVSHMEM: use -p"),
        Backend::Auto if may_choose_gpus() => Ok(gpu::usable().unwrap_or(cores)),
        Backend::Auto => Ok(cores),
    }
}

/// Whether each rank has a GPU; if there are some and they are not enough, says so.
fn are_enough_gpus(ranks: usize) -> bool {
    let count = gpu::count().unwrap_or(0);
    let why_not = match gpu::usable() {
        Ok(gpus) if gpus >= ranks => return true,
        Ok(gpus) => format!("{ranks} ranks cannot have one each of {gpus}"),
        Err(error) => crate::error::explain(&error),
    };
    if count > 0 {
        crate::log::say(format_args!("phalanx: the GPUs are not used: {why_not}"));
    }
    false
}

/// Whether the library takes GPUs if there are some.
fn may_choose_gpus() -> bool {
    let says = std::env::var("PHALANX_BACKEND").unwrap_or_default();
    matches!(says.as_str(), "" | "auto" | "nccl")
}

/// The audience of every rank but 0.
struct Nobody;

impl Audience for Nobody {
    fn starts(&mut self, _row: usize, _size: usize) {}

    fn row(&mut self, _row: Row) -> Result<()> {
        Ok(())
    }
}

/// The result of the ranks. When one fails, the others fail for want of it: its error is the one to
/// show.
fn first_cause(results: Vec<Result<u64>>) -> Result<u64> {
    let mut total = 0;
    let mut echo = None;
    for result in results {
        match result {
            // The count is over all ranks already.
            Ok(wrong) => total = wrong,
            Err(error) if is_echo(&error) => echo = echo.or(Some(error)),
            Err(error) => return Err(error),
        }
    }
    echo.map_or(Ok(total), Err)
}

fn is_echo(error: &anyhow::Error) -> bool {
    error.downcast_ref::<phalanx::Error>().is_some_and(phalanx::Error::is_fatal)
}

/// Whether a rank failed because another did, which gave the communicator up.
pub fn was_aborted(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(phalanx::Error::Aborted { .. }))
}

/// Starts this program once for each rank, with the options it was given itself.
pub fn start_processes(ranks: usize) -> Result<ExitCode> {
    let mut arguments: Vec<_> = std::env::args_os().skip(1).collect();
    arguments.push("--as-rank".into());
    launch::own_program::run(ranks, arguments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx::UsageError;

    #[test]
    fn the_cause_is_shown_and_not_its_echo() {
        let echo = || Err(phalanx::Error::Aborted { rank: 1 }.into());
        let cause = || {
            let error = UsageError::WorldSize { world_size: 0, limit: 1 };
            Err(phalanx::Error::from(error).into())
        };
        let shown = |results| first_cause(results).unwrap_err().to_string();
        assert!(shown(vec![echo(), cause(), echo()]).contains("not possible"));
        assert!(shown(vec![Ok(0), echo()]).contains("aborted"));
        assert_eq!(first_cause(vec![Ok(3), Ok(3)]).unwrap(), 3);
    }
}
