//! Test tools of phalanx; never published.
//!
//! - [`reference`](mod@reference), [`number`], [`minifloat`]: what every collective must deliver, computed
//!   without looking at the library's kernels; [`ring`] and [`random`]: inputs from a seed; [`program`]:
//!   random calls; [`accesses`]: random accesses to symmetric memory.
//! - [`halo`]: arrays that are spread over ranks, before and after an exchange of halos.
//! - [`threads`], [`processes`]: runs a scenario with its ranks as threads, or as processes of this host.
//! - [`mpi`]: runs scenarios as the ranks of an MPI job, under each MPI that is installed.
//! - [`fault`]: kills, stops and continues a rank's process at a point that it announced.
//! - [`no_threads`], [`full_disk`]: what a process is refused.
//! - [`built`]: builds examples and programs that a test runs.
//! - [`sockets`]: which ports a process has opened.
//! - [`emulated`]: shows processes an emulated CUDA driver and NCCL instead of real ones.
//! - [`fields`], [`verdict`]: how ranks report to the test what they saw.
//! - [`suite`]: runs a suite's trials, or a sample of them.
//! - [`start`]: measures the start of a large job with stand-ins for its ranks.
//! - [`faults`]: the fault suite, for the tests and as a program.
//!
//! Not here: the other tests (`tests/`).

pub mod accesses;
pub mod built;
#[cfg(target_os = "linux")]
pub mod emulated;
pub mod error_stream;
pub mod fault;
pub mod faults;
pub mod fields;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub mod float_mode;
pub mod full_disk;
pub mod gpus;
pub mod halo;
pub mod hosts;
pub mod minifloat;
pub mod mpi;
pub mod networked;
pub mod no_threads;
pub mod number;
pub mod processes;
pub mod program;
pub mod random;
pub mod reference;
pub mod ring;
pub mod scenario;
pub mod sockets;
pub mod start;
pub mod suite;
pub mod threads;
pub mod ucx;
pub mod verdict;

pub use fields::Fields;
pub use number::Number;
pub use scenario::{Body, Outcome, Scenario};
