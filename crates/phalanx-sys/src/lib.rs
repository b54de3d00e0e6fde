//! Raw interfaces of communication libraries, found and loaded at run time: nothing safe, nothing clever.
//!
//! This is the only crate of phalanx that opens libraries. A [`Search`] lists where a library may be, and loads it. Each
//! library has a module with its types, its constants and a table of its functions. Versions have different functions, so
//! most tables have optional entries: a missing function is an error when it is needed, and not before.
//!
//! ```no_run
//! use phalanx_sys::nccl::{Api, NCCL};
//!
//! let nccl = Api::load(&NCCL)?;
//! println!("NCCL {} at {}", phalanx_sys::nccl::version_text(nccl.version()), nccl.path().display());
//! # Ok::<(), phalanx_sys::NotFound>(())
//! ```

/// `Debug` of errors: `unwrap`, and a `main` that returns one, print the message.
macro_rules! debug_is_the_message {
    ($error:ty) => {
        impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    };
}

pub mod cuda;
mod environment;
mod files;
mod folders;
mod functions;
pub mod hip;
mod library;
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
pub mod mpi;
pub mod nccl;
pub mod nvjitlink;
pub mod nvrtc;
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
pub mod nvshmem;
pub mod nvtx;
mod search;
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
pub mod ucx;

pub use environment::is_secure;
pub use files::{FileSearch, Found};
pub use library::{Library, LoadError, MissingFunction, Place, is_loadable};
pub use search::{Attempt, NotFound, Search};
