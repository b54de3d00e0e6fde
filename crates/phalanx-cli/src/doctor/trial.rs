//! The doctor's tests: ranks that add numbers up, as threads and as processes, on the host and on GPUs.

use super::finding::{Finding, Status};
use super::options::Role;
use crate::error::explain;
use crate::gpu;
use crate::launch;
use anyhow::{Result, ensure};
use phalanx::{BackendKind, Comm, ReduceOp};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Time for a test with processes beyond its ranks' timeout.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(20);
/// Lengths in elements, for which backends choose different algorithms.
const LENGTHS: [usize; 4] = [1, 1000, 100_000, 1_000_000];

/// A test.
#[derive(Debug, Clone, Copy)]
pub struct Trial {
    ranks: usize,
    ranks_are: RanksAre,
    backend: BackendKind,
}

#[derive(Debug, Clone, Copy)]
enum RanksAre {
    Threads,
    Processes,
}

impl Trial {
    /// The tests for these numbers of ranks on the host and of GPUs.
    pub fn all(ranks: usize, gpus: usize) -> Vec<Trial> {
        let places = [(ranks, BackendKind::Host), (gpus, BackendKind::Nccl)];
        let kinds: &[RanksAre] = match cfg!(target_os = "linux") {
            true => &[RanksAre::Threads, RanksAre::Processes],
            false => &[RanksAre::Threads],
        };
        let tests = places.into_iter().filter(|(ranks, _)| *ranks > 0).flat_map(|(ranks, backend)| {
            kinds.iter().map(move |&ranks_are| Trial { ranks, ranks_are, backend })
        });
        tests.collect()
    }

    fn name(self) -> String {
        let on = if self.backend == BackendKind::Nccl { " with GPUs" } else { "" };
        let kind = match self.ranks_are {
            RanksAre::Threads => "threads",
            RanksAre::Processes => "processes",
        };
        format!("all_reduce, {} {kind}{on}", self.ranks)
    }

    /// Runs the test; `timeout` is that of its ranks.
    pub fn run(self, timeout: Duration) -> Finding {
        let start = Instant::now();
        let result = match (self.backend, self.ranks_are) {
            (BackendKind::Nccl, RanksAre::Processes) => in_processes(self.ranks, "gpu-rank", timeout),
            // Threads of another process: a driver may hang.
            (BackendKind::Nccl, RanksAre::Threads) => in_processes(1, "all-gpus", timeout),
            (_, RanksAre::Processes) => in_processes(self.ranks, "host-rank", timeout),
            (_, RanksAre::Threads) => in_threads(self.ranks, BackendKind::Host, timeout),
        };
        let took = format!("{:.1} ms", start.elapsed().as_secs_f64() * 1e3);
        match result {
            Ok(()) => Finding::new(Status::Ok, self.name(), took),
            Err(error) => Finding::new(Status::Failed, self.name(), format!("{took}: {}", explain(&error))),
        }
    }
}

fn in_threads(ranks: usize, backend: BackendKind, timeout: Duration) -> Result<()> {
    Comm::builder().backend(backend).timeout(timeout).try_run(ranks, add_up).map(drop)
}

fn in_processes(ranks: usize, role: &str, timeout: Duration) -> Result<()> {
    let arguments = ["doctor", "--part", role, "--timeout", &timeout.as_secs_f64().to_string()];
    let timeout = timeout.saturating_add(PROCESS_TIMEOUT);
    launch::own_program::run_silently(ranks, arguments.map(Into::into).into(), timeout)
}

/// Runs a process of a test.
pub fn run_role(role: Role, timeout: Duration) -> Result<ExitCode> {
    let rank = |backend| add_up(Comm::builder().backend(backend).timeout(timeout).init()?);
    match role {
        Role::HostRank => rank(BackendKind::Host)?,
        Role::GpuRank => rank(BackendKind::Nccl)?,
        Role::AllGpus => in_threads(gpu::count()?, BackendKind::Nccl, timeout)?,
        _ => unreachable!("no role in a test"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Adds the ranks' numbers up and checks the sums.
fn add_up(comm: Comm) -> Result<()> {
    let ranks = comm.world_size();
    let right = (ranks * (ranks + 1) / 2) as f32;
    for length in LENGTHS {
        let mine = vec![(comm.rank() + 1) as f32; length];
        let sum = all_reduce(&comm, &mine)?;
        let wrong = sum.iter().filter(|&&sum| sum != right).count();
        ensure!(wrong == 0, "{wrong} of {length} sums are wrong on rank {}", comm.rank());
    }
    comm.finalize()?;
    Ok(())
}

/// The sum of the ranks' buffers: on the GPU if the communicator has one.
fn all_reduce(comm: &Comm, mine: &[f32]) -> Result<Vec<f32>> {
    let Ok(stream) = comm.cuda_stream() else {
        let mut sum = vec![0.0; mine.len()];
        comm.all_reduce(mine, &mut sum, ReduceOp::Sum)?;
        return Ok(sum);
    };
    let mine = stream.clone_htod(mine)?;
    let mut sum = stream.alloc_zeros(mine.len())?;
    comm.all_reduce(&mine, &mut sum, ReduceOp::Sum)?;
    comm.sync()?;
    let sum = stream.clone_dtoh(&sum)?;
    stream.synchronize()?;
    Ok(sum)
}
