//! The operating system: shared memory, futexes, memory barriers across processes, other processes, sockets,
//! signals.
//!
//! `linux/` is complete. `portable.rs` serves every other system: thread ranks work on it, process ranks
//! return [`Error::Unsupported`](crate::Error::Unsupported). Both offer the same names.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub(crate) use linux::*;
#[cfg(target_os = "linux")]
pub use linux::{run_on, usable_cores};
#[cfg(target_os = "linux")]
mod memory;

#[cfg(not(target_os = "linux"))]
mod portable;
#[cfg(not(target_os = "linux"))]
pub(crate) use portable::*;
#[cfg(not(target_os = "linux"))]
pub use portable::{run_on, usable_cores};

mod exit;
pub(crate) use exit::at_exit;
pub(crate) use exit::leave;

pub(crate) mod float_mode;

pub(crate) mod log;

mod fresh_file;
pub use fresh_file::fresh_file;

#[cfg(all(
    any(feature = "mpi", feature = "multi-host"),
    target_pointer_width = "64",
    target_endian = "little"
))]
mod interfaces;
#[cfg(all(
    any(feature = "mpi", feature = "multi-host"),
    target_pointer_width = "64",
    target_endian = "little"
))]
pub(crate) use interfaces::interfaces;

mod launcher_socket;
pub(crate) use launcher_socket::LauncherSocket;

mod poll;
pub(crate) use poll::{Waker, poll_sockets, queue_more};

mod private_file;
pub(crate) use private_file::{PrivateError, read_private};

mod random;
pub(crate) use random::random_number;

mod run_instant;
pub(crate) use run_instant::RunInstant;

mod signal;
pub(crate) use signal::UserSignal;

mod surroundings;
pub(crate) use surroundings::{Surroundings, host_name};

pub(crate) mod sync;

mod prefetch;
pub(crate) use prefetch::{first_lines, prefetch};

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

mod thread_mark;
#[cfg(any(feature = "multi-host", feature = "nccl"))]
mod unless_exiting;
pub use thread_mark::ThreadMark;
#[cfg(any(feature = "multi-host", feature = "nccl"))]
pub(crate) use unless_exiting::unless_exiting;

mod socket;
pub use socket::Wire;
pub(crate) use socket::{is_unreachable, lacks_family};
