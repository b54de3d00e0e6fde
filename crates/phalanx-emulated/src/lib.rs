//! An emulated CUDA driver, NCCL and NVSHMEM, and HIP and RCCL: one shared library with the C interfaces of all, for
//! tests without a GPU.
//!
//! Put it in a folder as `libcuda.so.1`, `libnccl.so.2` and `libnvshmem_host.so.3` (`libamdhip64.so` and `librccl.so.1`),
//! and programs that load those libraries run on it. Memory
//! of devices is memory of the process, streams are threads, ranks are threads or processes of one host, and every
//! operation moves real data. The testkit's `emulated` module makes the folder and starts programs with it.
//!
//! It is strict and hostile, because its purpose is to expose unsound use of the real libraries:
//! - Freed memory is unmapped and its addresses are never used again; allocations end at a page that cannot be
//!   accessed. New memory and the outputs of operations that have not ended hold garbage.
//! - Streams run late, in an order that differs with the seed. What the C interfaces do not promise, does not happen.
//! - A broken rule ends the process (`SIGABRT`) with a line on standard error that names the function and the rule.
//!
//! [`settings`] has the environment variables (`EMULATED_…`) that choose the devices, the version, and what fails.
//!
//! | Room | What it has |
//! |---|---|
//! | `cuda/` | the driver's functions (`cu…`): contexts, streams, events, memory, copies, graphs |
//! | `hip/` | HIP's functions, over those of the driver |
//! | `nvshmem/` | NVSHMEM's host functions: symmetric memory, one-sided operations, teams |
//! | `nccl/` | NCCL's and RCCL's functions: communicators, groups, operations; `nccl/transport/`: how ranks reach each other |
//! | `call.rs`, `pointers.rs` | what every exported function goes through; pointers that come from C |
//! | `settings.rs`, `random.rs`, `handles.rs`, `violation.rs`, `exit.rs` | the rest of the furniture |
//!
//! Not here: kernels and modules but those of phalanx itself, managed memory, virtual memory management, and
//! the device interfaces of NCCL and NVSHMEM.

#[cfg(target_os = "linux")]
#[macro_use]
mod call;
#[cfg(target_os = "linux")]
mod cuda;
#[cfg(target_os = "linux")]
mod exit;
#[cfg(target_os = "linux")]
mod handles;
#[cfg(target_os = "linux")]
mod hip;
#[cfg(target_os = "linux")]
mod nccl;
#[cfg(target_os = "linux")]
mod nvshmem;
#[cfg(target_os = "linux")]
mod pointers;
#[cfg(target_os = "linux")]
mod random;
#[cfg(target_os = "linux")]
pub mod settings;
#[cfg(target_os = "linux")]
mod violation;

#[cfg(target_os = "linux")]
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after a holder panicked: what is behind a lock here is consistent at every step.
#[cfg(target_os = "linux")]
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
