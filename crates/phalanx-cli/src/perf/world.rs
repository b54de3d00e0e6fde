//! Chooses the ranks: threads, processes that this program starts, or those of a launcher.

use super::options::PerfArgs;
use super::plan::{Backend, Plan};
use super::report::RankKind;
use crate::error::explain;
use crate::log::say;
use crate::{exit, gpu, machine, parse, size};
use anyhow::{Context, Result, anyhow, bail, ensure};

/// The ranks of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum World {
    /// This many threads of this process.
    Threads(usize),
    /// This many processes, to be started by this one.
    Processes(usize),
    /// This process is a rank.
    Rank(RankKind),
}

impl World {
    /// The ranks that the options ask for, or else the launcher's.
    pub fn choose(args: &PerfArgs) -> Result<World> {
        if args.as_rank {
            return Ok(World::Rank(RankKind::Processes));
        }
        // The launcher of a single rank may be an interactive step of Slurm: the options decide.
        let launcher = phalanx::choose()?.launcher.filter(|launcher| launcher.world_size != Some(1));
        let on_nvshmem = args.operation.is_one_sided() || args.backend == Backend::Nvshmem;
        let (threads, processes) = args.ranks().map_err(exit::usage)?;
        match (launcher, threads, processes) {
            (None, Some(_), _) if on_nvshmem => {
                bail!(exit::usage(anyhow!("a process is one PE of NVSHMEM: use -p instead of -t")))
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
            (None, None, None) => Ok(World::Threads(default_threads(args.backend)?.min(parse::MAX_RANKS))),
            (Some(_), None, None) => Ok(World::Rank(RankKind::Launched)),
            (Some(launcher), ..) => {
                let (name, variables) = (launcher.name, launcher.recognised_by.join(", "));
                bail!(exit::usage(anyhow!(
                    "this process is a rank of {name} ({variables}): leave out -t, -p and -g"
                )))
            }
        }
    }

    /// The kind of ranks, for the report.
    pub fn kind(self) -> RankKind {
        match self {
            World::Threads(_) => RankKind::Threads,
            World::Processes(_) => RankKind::Processes,
            World::Rank(kind) => kind,
        }
    }

    /// Checks the plan against the number of ranks and this machine, as far as that is possible before there
    /// are ranks.
    pub fn check(self, plan: &Plan) -> Result<()> {
        let (World::Threads(ranks) | World::Processes(ranks)) = self else {
            return Ok(());
        };
        plan.check(ranks).map_err(exit::usage)?;
        if plan.backend == Backend::Nvshmem {
            phalanx::nvshmem::version()
                .with_context(|| format!("{} needs NVSHMEM", plan.operation.name()))?;
        }
        let on_gpus = match plan.backend {
            Backend::Auto => may_choose_gpus() && are_enough_gpus(ranks),
            named => matches!(named, Backend::Nccl | Backend::Nvshmem),
        };
        plan.check_place(on_gpus).map_err(exit::usage)?;
        if on_gpus {
            // Each rank checks the memory of its GPU.
            return Ok(());
        }
        check_memory(plan, ranks).map_err(exit::usage)
    }
}

/// Checks that the buffers of all ranks fit this machine's memory.
fn check_memory(plan: &Plan, ranks: usize) -> Result<()> {
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

/// The number of thread ranks if the options name none: one per GPU, or per core.
fn default_threads(backend: Backend) -> Result<usize> {
    let cores = machine::usable_cores().max(2);
    match backend {
        Backend::Host => Ok(cores),
        Backend::Nccl => gpu::usable().context("--backend nccl"),
        Backend::Nvshmem => bail!("a process is one PE of NVSHMEM: use -p"),
        Backend::Auto if may_choose_gpus() => Ok(gpu::usable().unwrap_or(cores)),
        Backend::Auto => Ok(cores),
    }
}

/// Whether each rank can have a GPU. If there are some and they cannot be used, says why.
fn are_enough_gpus(ranks: usize) -> bool {
    let count = gpu::count().unwrap_or(0);
    let why_not = match gpu::usable() {
        Ok(gpus) if gpus >= ranks => return true,
        Ok(gpus) => format!("{ranks} ranks cannot have one each of {gpus}"),
        Err(error) => explain(&error),
    };
    if count > 0 {
        say(format_args!("phalanx: the GPUs are not used: {why_not}"));
    }
    false
}

/// Whether `PHALANX_BACKEND` lets the library choose GPUs.
fn may_choose_gpus() -> bool {
    let says = std::env::var("PHALANX_BACKEND").unwrap_or_default();
    matches!(says.as_str(), "" | "auto" | "nccl")
}
