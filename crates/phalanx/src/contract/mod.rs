//! The contract of a backend: an object that carries out calls which the front has checked.
//!
//! # Validation is not here
//! Lengths, roots, peers and counts are checked once, in `api` (`checks.rs`, `p2p.rs`, `raw/`). A backend trusts its
//! [`Call`]; it reports what it alone can see: other ranks' calls, deadlines, and errors of the operating system.

mod backend;
mod call;
mod dry_call;
mod file;
mod flow;
#[cfg(feature = "cuda")]
mod gpu_window;
mod grid;
pub(crate) mod hosts;
mod kind;
#[cfg(feature = "nccl")]
pub(crate) mod messenger;
#[cfg(feature = "nccl")]
mod norm;
mod operation;
mod shape;
mod stream_sync;
mod transfer;
mod window;
pub mod work;

pub(crate) use backend::{Backend, Departure, StartCollectives, grown_name};
pub(crate) use call::{Blocks, Call};
pub use dry_call::DryCall;
pub(crate) use file::{FileAccess, SharedFile, SharedFiles};
pub(crate) use flow::{Flow, Who};
#[cfg(feature = "cuda")]
pub use gpu_window::GpuBlock;
#[cfg(feature = "cuda")]
pub(crate) use gpu_window::{CopyDirection, GpuRegion, GpuWindow, GpuWindowKey, GpuWindows, RemoteGpuWindow};
pub(crate) use grid::RankGrid;
pub use kind::BackendKind;
#[cfg(feature = "nccl")]
pub(crate) use norm::{RmsNorm, RowFormat};
pub(crate) use operation::Operation;
pub(crate) use shape::Shape;
pub use stream_sync::StreamSyncOps;
pub use transfer::Envelope;
pub(crate) use transfer::{Direction, OperationId, Transfer, Wanted};
pub(crate) use window::{AtomicOp, HostMemory, MappedParts, RemoteSlice, Window};
