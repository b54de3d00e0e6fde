//! The plan of a run: the options, checked, with every default filled in.
//!
//! Every rank makes the same plan from the same command line.

use super::layout::Layout;
use super::operation::Operation;
use super::reduction::RedOp;
use super::report::Average;
use crate::size;
use anyhow::{Result, ensure};
use clap::ValueEnum;
use phalanx::{BackendKind, Comm, DType};
use std::time::Duration;

/// What every rank does.
#[derive(Debug, Clone)]
pub struct Plan {
    pub operation: Operation,
    /// Bytes, ascending.
    pub sizes: Vec<usize>,
    pub dtypes: Vec<DType>,
    /// `None` where nothing is reduced.
    pub reductions: Vec<Option<RedOp>>,
    pub roots: Roots,
    /// Timed iterations; `None`: as many as give a steady median.
    pub iterations: Option<usize>,
    pub warmup: Option<usize>,
    /// Operations in one iteration.
    pub aggregate: usize,
    /// How often everything is repeated; `None`: for ever.
    pub cycles: Option<usize>,
    /// How often each result is checked.
    pub checks: usize,
    pub timeout: Option<Duration>,
    pub backend: Backend,
    pub registration: Registration,
    /// Whether the loop average is measured too, and whose is reported as the time. On GPUs it always is.
    pub loop_average: Option<Average>,
    /// How often a CUDA graph of all iterations is launched; 0: there is none.
    pub graph_launches: usize,
    /// Whether each iteration on a GPU is waited for before the next.
    pub blocking: bool,
    /// Whether the time of the calls that enqueue work is shown.
    pub cpu_time: bool,
    /// Whether every iteration's time is kept.
    pub per_iteration: bool,
    pub pin: bool,
}

/// What carries the data.
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

/// What the backend knows of the buffers beforehand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registration {
    /// Nothing.
    None,
    /// The buffers are the communicator's: memory that peers reach directly, or that NCCL has registered.
    Local,
    /// Windows at the same place on every rank.
    Symmetric,
}

/// Which ranks are the root, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Roots {
    /// The operation has none.
    None,
    One(usize),
    All,
}

impl Roots {
    /// The roots in a world of so many ranks.
    pub fn of(self, ranks: usize) -> Vec<Option<usize>> {
        match self {
            Roots::None => vec![None],
            Roots::One(root) => vec![Some(root)],
            Roots::All => (0..ranks).map(Some).collect(),
        }
    }
}

impl Plan {
    /// Whose loop average is the time. Ranks that a ping-pong leaves out have nothing to wait for, and no say.
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
            // It carries barriers and figures; the data goes another way.
            Backend::Nvshmem if self.operation.is_one_sided() => Some(BackendKind::Host),
            Backend::Nvshmem => Some(BackendKind::Nvshmem),
        }
    }

    /// The bytes of the largest buffer.
    pub fn largest(&self) -> usize {
        self.sizes.last().copied().unwrap_or(0)
    }

    /// Whether this many ranks can carry it out.
    pub fn check(&self, ranks: usize) -> Result<()> {
        if let Some(objection) = self.operation.objection(ranks) {
            anyhow::bail!("{objection}");
        }
        if let Roots::One(root) = self.roots {
            ensure!(root < ranks, "--root {root} does not exist: the ranks are 0 to {}", ranks - 1);
        }
        let fits = |dtype: &DType| Layout::new(self.operation, self.largest(), dtype.size(), ranks).is_some();
        ensure!(
            self.dtypes.iter().any(fits),
            "no size up to {} holds one element for each of {ranks} ranks: raise --maxbytes",
            size::format(self.largest() as u64)
        );
        Ok(())
    }

    /// Whether the options make sense for buffers on GPUs, or on the host.
    pub fn check_place(&self, on_gpus: bool) -> Result<()> {
        if on_gpus {
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

    /// Whether a backend can carry the operation out for a type. One that was named alone is always tried, for the
    /// library's own reason why not.
    pub fn can(&self, comm: &Comm, dtype: DType) -> bool {
        let reduced = self.operation.reduces() && comm.backend() == BackendKind::Nccl;
        !(reduced && self.dtypes.len() > 1 && matches!(dtype, DType::I16 | DType::U16))
    }

    /// How many rows a cycle has at most: sizes that hold no element of a type are left out.
    pub fn rows(&self, ranks: usize) -> usize {
        self.sizes.len() * self.dtypes.len() * self.reductions.len() * self.roots.of(ranks).len()
    }
}

/// How one size leads to the next.
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

/// More rows than anybody reads, and few enough to be kept.
const MOST_SIZES: usize = 1_000_000;

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
    let sizes: Vec<usize> = std::iter::successors(Some(min), next).take(MOST_SIZES + 1).collect();
    ensure!(
        sizes.len() <= MOST_SIZES,
        "from {} to {} there are more than {MOST_SIZES} sizes: raise --stepbytes",
        size::format(min as u64),
        size::format(max as u64)
    );
    Ok(sizes)
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
