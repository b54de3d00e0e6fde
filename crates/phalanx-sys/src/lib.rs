//! Raw interfaces of communication libraries, found and loaded at run time: nothing safe, nothing clever.
//!
//! This is the only crate of phalanx that opens libraries. [`Search`] says where a library may be and finds
//! it; each library's module has its types, constants and a table of its functions, all of them optional:
//! versions differ, and a function that is not there is an error when it is needed, not before.

pub mod cuda;
mod files;
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

pub use files::{FileSearch, Found};
pub use library::{Attempt, Library, MissingFunction, NotFound, Place, Search};
