//! The plan of a run: the options, checked, with every default filled in.
//!
//! Every rank makes the same plan from the same command line.

use super::layout::BufferLengths;
use super::operation::Operation;
use super::reduction::RedOp;
use super::report::Average;
use crate::size;
use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use phalanx::nccl::GpuAlgorithm;
use phalanx::{BackendKind, Comm, DType};
use std::time::Duration;

/// The plan of a run.
#[derive(Debug, Clone)]
pub struct Plan {
    pub operation: Operation,
    /// Bytes, ascending.
    pub sizes: Vec<usize>,
    pub dtypes: Vec<DType>,
    /// `None` where nothing is reduced.
    pub reductions: Vec<Option<RedOp>>,
    pub roots: Roots,
    /// Timed iterations; `None`: enough for a steady median.
    pub iterations: Option<usize>,
    pub warmup: Option<usize>,
    /// Operations in one iteration.
    pub aggregate: usize,
    /// Repetitions of the whole run; `None`: for ever.
    pub cycles: Option<usize>,
    /// Checks of each size.
    pub checks: usize,
    pub timeout: Option<Duration>,
    pub backend: Backend,
    /// What carries collectives on GPUs out; `None`: what the environment says.
    pub algorithm: Option<GpuAlgorithm>,
    pub registration: Registration,
    /// The loop average that is reported as the time; `None`: the median. On GPUs it always is a loop
    /// average.
    pub loop_average: Option<Average>,
    /// Launches of a CUDA graph of all iterations; 0: there is none.
    pub graph_launches: usize,
    /// Whether each iteration on a GPU ends before the next is enqueued.
    pub blocking: bool,
    /// Whether the time of the enqueueing calls is shown.
    pub cpu_time: bool,
    /// Whether every iteration's time is kept.
    pub per_iteration: bool,
    pub pin: bool,
}

/// What moves the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// GPUs if every rank has one, else the host
    Auto,
    /// Shared memory of the host
    Host,
    /// NCCL: every rank has a GPU, on which the buffers are
    Nccl,
    /// NVSHMEM: every rank is a process with a GPU
    Nvshmem,
}

/// How the buffers are registered with the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registration {
    /// Not at all: they are the rank's own memory.
    None,
    /// They are the communicator's memory: peers read it directly, or NCCL has registered it.
    Local,
    /// They are symmetric windows.
    Symmetric,
}

/// The ranks that are the root, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Roots {
    /// The operation has no root.
    None,
    One(usize),
    All,
}

impl Roots {
    /// The roots among this number of ranks.
    pub fn of(self, ranks: usize) -> Vec<Option<usize>> {
        match self {
            Roots::None => vec![None],
            Roots::One(root) => vec![Some(root)],
            Roots::All => (0..ranks).map(Some).collect(),
        }
    }
}

impl Plan {
    /// The loop average that is the time. In a ping-pong, ranks above 1 do nothing: the greatest is that of
    /// the others.
    pub fn average(&self) -> Average {
        match self.operation {
            Operation::PingPong => Average::Greatest,
            _ => self.loop_average.unwrap_or_default(),
        }
    }

    /// The library's name for the backend; `None` if the library chooses.
    pub fn backend_kind(&self) -> Option<BackendKind> {
        match self.backend {
            Backend::Auto => None,
            Backend::Host => Some(BackendKind::Host),
            Backend::Nccl => Some(BackendKind::Nccl),
            // For barriers and figures: NVSHMEM moves the data.
            Backend::Nvshmem if self.operation.is_one_sided() => Some(BackendKind::Host),
            Backend::Nvshmem => Some(BackendKind::Nvshmem),
        }
    }

    /// The layouts of the sizes that hold an element of this type for each rank.
    pub fn layouts(&self, dtype: DType, ranks: usize) -> Vec<BufferLengths> {
        let sizes = self.sizes.iter();
        sizes.filter_map(|&size| BufferLengths::new(self.operation, size, dtype.size(), ranks)).collect()
    }

    /// The bytes of the largest buffer.
    pub fn largest(&self) -> usize {
        self.sizes.last().copied().unwrap_or(0)
    }

    /// Checks that this many ranks can carry out the plan.
    pub fn check(&self, ranks: usize) -> Result<()> {
        if let Some(objection) = self.operation.objection(ranks) {
            bail!("{objection}");
        }
        if let Roots::One(root) = self.roots {
            ensure!(root < ranks, "--root {root} does not exist: the ranks are 0 to {}", ranks - 1);
        }
        let fits =
            |dtype: &DType| BufferLengths::new(self.operation, self.largest(), dtype.size(), ranks).is_some();
        ensure!(
            self.dtypes.iter().any(fits),
            "no size up to {} holds one element for each of {ranks} ranks: raise --maxbytes",
            size::format(self.largest() as u64)
        );
        Ok(())
    }

    /// Checks that the options have a meaning for buffers on GPUs, or on the host.
    pub fn check_place(&self, on_gpus: bool) -> Result<()> {
        if on_gpus {
            ensure!(
                !self.operation.is_on_host(),
                "{} takes host memory: --backend host",
                self.operation.name()
            );
            return Ok(());
        }
        ensure!(self.graph_launches == 0, "-G: only work on GPUs can be put into CUDA graphs");
        ensure!(
            self.registration != Registration::Symmetric,
            "-R 2: symmetric windows are NCCL's, for GPUs; on the host -R 1 gives memory that peers read directly"
        );
        ensure!(!self.blocking, "-z 1: on the host an operation is complete when its call returns");
        ensure!(
            !self.cpu_time,
            "-C 1: on the host an operation is complete when its call returns: the time is that of the call"
        );
        Ok(())
    }

    /// Whether the communicator's backend has the operation for a type. A type that was named alone is always
    /// tried: the library's error has the reason.
    pub fn can(&self, comm: &Comm, dtype: DType) -> bool {
        let reduced = self.operation.reduces() && comm.backend() == BackendKind::Nccl;
        !(reduced && self.dtypes.len() > 1 && matches!(dtype, DType::I16 | DType::U16))
    }

    /// The rows of a cycle, at most: sizes that hold no element of a type are left out.
    pub fn rows(&self, ranks: usize) -> usize {
        self.sizes.len() * self.dtypes.len() * self.reductions.len() * self.roots.of(ranks).len()
    }
}

/// The step from one size to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Times(usize),
    Plus(usize),
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Step::Times(factor) => write!(f, "{factor}(factor)"),
            Step::Plus(bytes) => write!(f, "{bytes}(bytes)"),
        }
    }
}

/// The most sizes: all rows are kept in memory.
const MAX_SIZES: usize = 1_000_000;

/// The sizes from `min` to `max`.
pub fn sizes(min: usize, max: usize, step: Step) -> Result<Vec<usize>> {
    ensure!(min > 0, "--minbytes must be above 0");
    ensure!(min <= max, "--minbytes {min} is above --maxbytes {max}");
    let stands_still = matches!(step, Step::Times(..=1) | Step::Plus(0));
    ensure!(
        min == max || !stands_still,
        "the largest size is never reached in steps of {step}: give a --stepfactor of 2 or more, or --stepbytes of 1 or more"
    );
    let next = |&size: &usize| match step {
        _ if stands_still => None,
        Step::Times(factor) => size.checked_mul(factor).filter(|&size| size <= max),
        Step::Plus(bytes) => size.checked_add(bytes).filter(|&size| size <= max),
    };
    let sizes: Vec<usize> = std::iter::successors(Some(min), next).take(MAX_SIZES + 1).collect();
    ensure!(
        sizes.len() <= MAX_SIZES,
        "from {} to {} there are more than {MAX_SIZES} sizes: raise --stepbytes",
        size::format(min as u64),
        size::format(max as u64)
    );
    Ok(sizes)
}

/// Checks that each size is a number of whole elements. Sizes below one element are left out of the run.
pub fn check_multiples(sizes: &[usize], dtype: DType) -> Result<()> {
    let element = dtype.size();
    let is_odd = |size: &&usize| **size > element && !size.is_multiple_of(element);
    let Some(odd) = sizes.iter().find(is_odd) else { return Ok(()) };
    let below = odd - odd % element;
    bail!(
        "{odd} bytes are no multiple of {element}, the size of an {dtype}: give {below} or {}",
        below + element
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_grow_by_factor_or_by_bytes() {
        assert_eq!(sizes(4, 64, Step::Times(4)).unwrap(), [4, 16, 64]);
        assert_eq!(sizes(4, 63, Step::Times(4)).unwrap(), [4, 16]);
        assert_eq!(sizes(10, 30, Step::Plus(10)).unwrap(), [10, 20, 30]);
        assert_eq!(sizes(8, 8, Step::Times(1)).unwrap(), [8]);
        assert_eq!(sizes(usize::MAX, usize::MAX, Step::Times(2)).unwrap().len(), 1);
    }

    #[test]
    fn endless_and_empty_ranges_are_refused() {
        assert!(sizes(8, 16, Step::Times(1)).is_err());
        assert!(sizes(8, 16, Step::Times(0)).is_err());
        assert!(sizes(8, 16, Step::Plus(0)).is_err());
        assert!(sizes(16, 8, Step::Times(2)).is_err());
        assert!(sizes(0, 8, Step::Times(2)).is_err());
        let too_many = sizes(1, 64 << 30, Step::Plus(1)).unwrap_err().to_string();
        assert!(too_many.contains("raise --stepbytes"), "{too_many}");
    }

    #[test]
    fn all_roots_are_all_ranks() {
        assert_eq!(Roots::All.of(2), [Some(0), Some(1)]);
        assert_eq!(Roots::One(3).of(8), [Some(3)]);
        assert_eq!(Roots::None.of(8), [None]);
    }
}
