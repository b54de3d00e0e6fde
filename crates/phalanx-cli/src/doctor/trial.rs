//! The tests: ranks that add numbers up, as threads and as processes, on the host and on GPUs.
//!
//! Short waits, and no output but the verdict.

use super::options::Part;
use crate::gpu;
use crate::launch;
use anyhow::{Result, ensure};
use phalanx::{BackendKind, Comm, ReduceOp};
use std::fmt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// How much longer than the ranks wait for each other a test with processes may take in all.
const PATIENCE: Duration = Duration::from_secs(20);
/// Elements: enough that several algorithms have their turn.
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

/// How a test went.
pub struct Verdict {
    result: Result<()>,
    took: Duration,
}

impl Verdict {
    pub fn passed(&self) -> bool {
        self.result.is_ok()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let took = self.took.as_secs_f64() * 1e3;
        match &self.result {
            Ok(()) => write!(f, "OK      {took:.1} ms"),
            Err(error) => write!(f, "FAILED  {took:.1} ms: {}", crate::explain(error)),
        }
    }
}

impl Trial {
    /// The tests for so many ranks on the host, and so many GPUs.
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

    pub fn name(self) -> String {
        let on = if self.backend == BackendKind::Nccl { " with GPUs" } else { "" };
        let kind = match self.ranks_are {
            RanksAre::Threads => "threads",
            RanksAre::Processes => "processes",
        };
        format!("all_reduce, {} {kind}{on}", self.ranks)
    }

    /// Runs it; its ranks wait for each other for so long at most.
    pub fn run(self, wait: Duration) -> Verdict {
        let start = Instant::now();
        let result = match (self.backend, self.ranks_are) {
            (BackendKind::Nccl, RanksAre::Processes) => in_processes(self.ranks, "gpu-rank", wait),
            // Threads of another process: a driver that hangs must not hold this one up.
            (BackendKind::Nccl, RanksAre::Threads) => in_processes(1, "all-gpus", wait),
            (_, RanksAre::Processes) => in_processes(self.ranks, "host-rank", wait),
            (_, RanksAre::Threads) => in_threads(self.ranks, BackendKind::Host, wait),
        };
        Verdict { result, took: start.elapsed() }
    }
}

fn in_threads(ranks: usize, backend: BackendKind, wait: Duration) -> Result<()> {
    let results = Comm::builder().backend(backend).timeout(wait).run(ranks, add_up)?;
    results.into_iter().collect()
}

fn in_processes(ranks: usize, part: &str, wait: Duration) -> Result<()> {
    let patience = wait.saturating_add(PATIENCE);
    let arguments = ["doctor", "--part", part, "--timeout", &wait.as_secs_f64().to_string()];
    launch::again::run_silently(ranks, arguments.map(Into::into).into(), patience)
}

/// A process of a test.
pub fn take_part(part: Part, wait: Duration) -> Result<ExitCode> {
    let rank = |backend| add_up(Comm::builder().backend(backend).timeout(wait).init()?);
    match part {
        Part::HostRank => rank(BackendKind::Host)?,
        Part::GpuRank => rank(BackendKind::Nccl)?,
        Part::AllGpus => in_threads(gpu::count()?, BackendKind::Nccl, wait)?,
        Part::Survey => unreachable!("no part of a test"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Adds the ranks' numbers up, and sees whether the sum is right.
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

/// The sum of the ranks' buffers, in the memory that their backend is for.
fn all_reduce(comm: &Comm, mine: &[f32]) -> Result<Vec<f32>> {
    let Some(stream) = comm.cuda_stream() else {
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
