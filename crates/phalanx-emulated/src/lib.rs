//! An emulated CUDA driver, NCCL, NVSHMEM, HIP and RCCL: one shared library with all their C interfaces, for
//! tests without a GPU.
//!
//! Put the library into a folder as `libcuda.so.1`, `libnccl.so.2` and `libnvshmem_host.so.3`
//! (`libamdhip64.so` and `librccl.so.1`), and programs that load those names run on it. Device memory is
//! memory of the process. Streams are threads, ranks are threads or processes of one host, and every
//! operation moves real data. The testkit's `emulated` module makes the folder and starts programs with it.
//!
//! The emulator is strict and hostile, because it is there to expose unsound use of the real libraries:
//! - Freed memory is unmapped and its addresses are never used again. Each allocation ends at an inaccessible
//!   page. New memory, and the output of an operation that has not ended, hold garbage.
//! - Streams run late, in an order that depends on the seed. Only the order that the C interfaces promise is
//!   kept.
//! - A broken rule aborts the process (`SIGABRT`) with a line on standard error that names the function and
//!   the rule.
//!
//! [`settings`] lists the environment variables (`EMULATED_…`) that choose devices, versions and failures.
//!
//! # Layers
//! A folder uses its own files and rows further down in this table. `hip/`, `nccl/`, `nvshmem/` and `kernels/` do
//! not use each other.
//!
//! | Folder | What it has |
//! |---|---|
//! | `hip/` | HIP's functions, in terms of the driver's |
//! | `nccl/` | functions of NCCL and RCCL: communicators, groups, operations, and the transport between ranks |
//! | `nvshmem/` | NVSHMEM's host functions: symmetric memory, one-sided operations, teams |
//! | `kernels/` | modules, launches, and phalanx's own kernels |
//! | `cuda/` | the driver's functions (`cu…`): contexts, streams, events, memory, copies, graphs |
//! | `arithmetic.rs` | element types and reductions, for NCCL and NVSHMEM |
//! | `base/` | exported functions, pointers and handles from C, settings, random choices, violations |
//!
//! Inside a folder the imports have no cycle; its `mod.rs` lists the files from the top down.
//!
//! # Not here
//! Kernels and modules other than phalanx's own, managed memory, kernels that use the device interfaces of
//! NCCL or NVSHMEM.

#[cfg(target_os = "linux")]
mod arithmetic;
#[cfg(target_os = "linux")]
mod base;
#[cfg(target_os = "linux")]
mod cuda;
#[cfg(target_os = "linux")]
mod hip;
#[cfg(target_os = "linux")]
mod kernels;
#[cfg(target_os = "linux")]
mod nccl;
#[cfg(target_os = "linux")]
mod nvshmem;

#[cfg(target_os = "linux")]
pub use base::settings;
