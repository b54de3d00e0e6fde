//! [`Peers`]: memory through which kernels of a program send to those of the other ranks.

use super::nccl_comm::Nccl;
use super::surface::Surface;
use crate::backend::nccl::direct::{PeerFifos, PeersArgument};
use crate::backend::nccl::kernel_streams::KernelStreams;
use crate::buffer::stream::GpuStream;
use crate::contract::{Call, Operation};
use crate::types::error::{Error, Result, UnsupportedError};
use cudarc::driver::CudaStream;
use std::sync::Arc;

/// FIFOs between the GPUs of a host for kernels of a program's own: made by [`Nccl::peers`].
///
/// A kernel includes `<phalanx.cuh>`, which [`jit::Program`](crate::jit::Program) always has, and takes a `phalanx::Peers` by value. Its warps
/// send and receive steps of some hundred bytes through a `phalanx::Warp`, in the protocols of phalanx's own collectives: a step takes 1 µs
/// from GPU to GPU.
///
/// ```
/// const DOUBLE_OF_THE_NEXT: &str = r#"
/// #include <phalanx.cuh>
/// using Warp = phalanx::Warp<phalanx::Ll>;
/// // One warp: `to` gets twice what the next rank has in `from`; at most 512 bytes.
/// extern "C" __global__ void double_of_the_next(phalanx::Peers peers, const float* from, float* to, int n) {
///     Warp warp(peers, 0);
///     phalanx::u64 step[Warp::UNITS];
///     Warp::load(step, from, n * 4);
///     if (!warp.send((peers.rank + peers.ranks - 1) % peers.ranks, step)) return;
///     if (!warp.receive((peers.rank + 1) % peers.ranks, step)) return;
///     for (unsigned i = 0; i < 2 * Warp::UNITS; i++) ((float*)step)[i] *= 2;
///     Warp::store(step, to, n * 4);
/// }"#;
/// ```
///
/// All ranks launch the same kernels in the same order, and of one `Peers` one kernel at a time: on one stream, or on streams that wait for each
/// other. Blocks that wait for peers must all run at once. A kernel may be captured in a graph and replayed.
///
/// A rank that is missing or lost ends the communicator, as in any operation: [`sync`](Peers::sync) names it, and the kernels leave, since their
/// warps' calls return `false`.
pub struct Peers<'c> {
    surface: Surface<'c>,
    fifos: PeerFifos,
    streams: KernelStreams,
    number: u32,
}

impl<'a> Nccl<'a> {
    /// Makes FIFOs between the ranks' GPUs for kernels of the program. Collective.
    ///
    /// They take 4.5 MiB of each GPU for each peer. [`free`](Peers::free) gives that back; a dropped one's goes with the communicator.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on every rank where own kernels cannot run: between hosts, for one rank, for GPUs that do not reach each other's
    /// memory, with `PHALANX_GPU_ALGORITHM=nccl`.
    pub fn peers(&self) -> Result<Peers<'a>> {
        let (comm, front) = (self.comm, self.front);
        let Some(direct) = comm.communicator.direct.get() else {
            return Err(refused(
                "own GPU kernels cannot run between these ranks (the log at level debug says why)",
            ));
        };
        self.gather(&Call::empty(Operation::Peers))?;
        // SAFETY: one thread at a time makes collective calls.
        let fifos = unsafe { comm.make_fifos(direct) }?.map_err(|reason| refused(&reason.to_string()))?;
        let number = front.next_memory();
        Ok(Peers { surface: **self, fifos, streams: KernelStreams::default(), number })
    }
}

fn refused(why: &str) -> Error {
    UnsupportedError {
        what: "peers for kernels of the program".into(),
        why: why.into(),
        remedy: "use NCCL's device API (Nccl::device_comm), or a collective and a kernel".into(),
    }
    .into()
}

impl Peers<'_> {
    /// Whether kernels may use the protocol `Ll128`: where lines of 128 bytes arrive whole, which is so over NVLink. It carries 15 bytes of data
    /// in 16, and has 1,024 lanes. `Ll` works everywhere, carries half as much, is faster up to 32 KiB, and has 128 lanes.
    pub fn has_ll128(&self) -> bool {
        self.fifos.nvlink
    }

    /// Bytes of GPU memory that it takes on each rank.
    pub fn bytes(&self) -> usize {
        self.fifos.bytes
    }

    /// Returns it as an argument for a kernel that cudarc launches on this stream:
    /// `stream.launch_builder(&kernel).arg(peers.argument(&stream)?)`. [`jit::peers`](crate::jit::peers) does so for kernels of `jit`.
    ///
    /// # Errors
    /// [`UsageError::Memory`](crate::UsageError::Memory) for a stream of another GPU, and the communicator's own if it has failed or ended.
    pub fn argument(&self, stream: &Arc<CudaStream>) -> Result<&PeersArgument> {
        self.launched_on(&GpuStream::Cuda(stream.clone()))?;
        Ok(&self.fifos.argument)
    }

    fn launched_on(&self, stream: &GpuStream) -> Result<()> {
        self.streams.add(&self.surface.comm.communicator, stream)
    }

    /// Waits for the streams on which kernels were launched with it, with the communicator's deadline. [`Comm::sync`](crate::Comm::sync) waits
    /// for the communicator's operations alone.
    ///
    /// # Errors
    /// The communicator's failure, as of [`Comm::sync`](crate::Comm::sync), where a rank is gone or the deadline passes.
    pub fn sync(&self) -> Result<()> {
        self.streams.sync(&self.surface.comm.communicator)
    }

    /// Gives the memory back. Collective: waits for the kernels, and for all ranks. Graphs with such kernels must not be launched any more.
    /// The driver gets the memory when no communicator of the process has work on a GPU.
    ///
    /// # Errors
    /// Those of [`sync`](Peers::sync) and [`Comm::barrier`](crate::Comm::barrier); the memory then goes with the communicator.
    pub fn free(self) -> Result<()> {
        self.surface.prepare()?;
        self.sync()?;
        self.surface.free_peer_memory(&self.fifos.memory, self.number)
    }
}

impl std::fmt::Debug for Peers<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peers").field("number", &self.number).field("bytes", &self.bytes()).finish()
    }
}

#[cfg(feature = "jit")]
impl crate::jit::sealed::Sealed for Peers<'_> {}

#[cfg(feature = "jit")]
impl crate::jit::DeviceHandle for Peers<'_> {
    fn as_bytes(&self) -> &[u8] {
        let argument = std::ptr::from_ref(&self.fifos.argument);
        // SAFETY: a structure without padding that lives as long as `self`, read as bytes.
        unsafe { std::slice::from_raw_parts(argument.cast(), size_of::<PeersArgument>()) }
    }

    fn launched_on(&self, stream: &GpuStream) -> Result<()> {
        Peers::launched_on(self, stream)
    }
}
