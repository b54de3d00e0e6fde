//! NVSHMEM: symmetric memory, which every PE can put to and get from while the others compute.
//!
//! A *PE* (processing element) is a rank: a process with a GPU. A process has one [`Context`] at a time;
//! memory and teams borrow it, so nothing is used after [`Context::finalize`]. The library is found at run
//! time. Kernels can use [`Symmetric`] memory through cudarc, and the collectives of a [`Comm`](crate::Comm)
//! accept it as buffers.
//!
//! ```no_run
//! use phalanx::nvshmem::{Compare, Context, SignalOp};
//!
//! fn main() -> phalanx::Result<()> {
//!     let comm = phalanx::init()?; // any backend, one process for each PE
//!     let nvshmem = Context::init(&comm)?;
//!     let (me, pes) = (nvshmem.my_pe(), nvshmem.n_pes());
//!     let (mine, inbox) = (nvshmem.alloc::<f32>(1 << 20)?, nvshmem.alloc::<f32>(1 << 20)?);
//!     let arrived = nvshmem.alloc::<u64>(1)?;
//!     let (stream, right) = (nvshmem.stream(), (me + 1) % pes);
//!     nvshmem.put_signal_on_stream(&inbox, &mine, &arrived.signal(0)?, 1, SignalOp::Set, right, stream)?;
//!     nvshmem.signal_wait_until_on_stream(&arrived.signal(0)?, Compare::Ge, 1, stream)?;
//!     nvshmem.sync(stream)?; // the left neighbour's data is in `inbox`
//!     for memory in [mine, inbox] {
//!         memory.free()?;
//!     }
//!     arrived.free()?;
//!     nvshmem.finalize()
//! }
//! ```
//!
//! # What is collective
//! [`Context::init`] and [`finalize`](Context::finalize), allocating, registering and freeing symmetric
//! memory, splitting and destroying teams, and the operations of a [`Team`]: all PEs (of the team) make the
//! same calls in the same order. Dropping is not collective, so memory and teams that are dropped are leaked,
//! with a line in the log.
//!
//! # What is complete when
//! - `put` and `get` wait for pending work on their local buffers, as far as cudarc knows of it, and on those
//!   of earlier `…_nbi` calls; for no other stream. They are complete on this PE when they return. Put data
//!   is at the peer after [`Context::quiet`], a barrier, or with the signal that follows it.
//! - `…_nbi` returns at once: until [`Context::quiet`] (or a barrier) do not write a source and do not read a
//!   destination. This does not affect memory safety, so types do not enforce it.
//! - `…_on_stream` runs in stream order, behind pending work on the local buffers; `…_nbi_on_stream` starts
//!   in stream order, and is complete after [`Context::quiet_on_stream`].
//!
//! # Threads
//! The library is used by one thread (`NVSHMEM_THREAD_SERIALIZED`): a context, and all that borrows it, stays
//! on the thread that made it.
//!
//! # When a peer is missing
//! NVSHMEM's own functions wait without limit. Here a wait on the host has the context's
//! [timeout](Context::set_timeout). If the context was made from a `Comm` on one host, a dead peer is noticed
//! at once, also by a PE that only puts to it: at the next `put`, `quiet` or [`sync`](Context::sync).
//!
//! Such an error is final: the library cannot cancel a call, so every later call returns the same error,
//! nothing is freed, and the process has to end. If its GPU waits for a missing peer, CUDA's exit handlers
//! wait with it: end with [`std::process::abort`]. (`phalanx launch` kills processes that do not end.) On
//! some failures the library itself ends the process.

mod init;

pub use crate::backend::nvshmem::pe::{
    Atomic, AtomicBits, Builder, Compare, Context, Local, LocalMut, Multicast, Peer, Registered, Shared,
    Signal, SignalOp, Slice, SliceMut, SplitTeam, Symmetric, Team, TeamReduction, UniqueId, Waitable,
    openshmem_version, path, version,
};
pub use crate::backend::nvshmem::{Buffer, Nvshmem};
