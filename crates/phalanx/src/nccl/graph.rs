//! [`Graph`]: operations in a CUDA graph, captured once and launched many times at the cost of one launch.

use crate::api::comm::{Comm, View};
use crate::api::group::{CommGroup, Group};
use crate::backend::nccl::{HeldGraph, NcclComm, check_on_device};
use crate::buffer::stream::GpuStream;
use crate::contract::{Blocks, Call, Direction};
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::memory::Space;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaStream, DevicePtr};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU64;
use std::sync::Arc;

/// Operations of a communicator on GPUs that were captured in a CUDA graph, with their buffers.
///
/// ```no_run
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::nccl::Graph;
/// use phalanx::{BackendKind, Comm, ReduceOp};
/// Comm::builder().backend(BackendKind::Nccl).try_run(2, |comm| -> phalanx::Result<()> {
///     let stream = comm.cuda_stream()?;
///     let gradients = stream.alloc_zeros::<f32>(1 << 20)?;
///     let mut step = Graph::capture(&comm, gradients, |group, gradients| {
///         group.all_reduce_in_place(gradients, ReduceOp::Avg)
///     })?;
///     for _ in 0..100 {
///         stream.memset_zeros(step.buffers_mut())?; // or a kernel that computes them
///         step.launch()?;
///     }
///     comm.sync()
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// The graph owns the buffers of its operations and lends them between launches. A launch is ordered after
/// earlier work on the buffers and before later work, on any stream. All ranks must capture and launch alike:
/// a launch counts as the calls in it, so errors name a missing or differing rank as usual.
///
/// It borrows its communicator, which cannot be finalized while the graph lives: NCCL would wait for the
/// graph's end. A communicator that fails destroys its graphs; what is left of one owns the buffers.
pub struct Graph<'c, B, F> {
    /// Dropped first.
    graph: Arc<HeldGraph>,
    captured: Captured,
    buffers: B,
    describe: F,
    comm: View<'c>,
}

impl<'c, B, F> Graph<'c, B, F>
where
    F: for<'b> Fn(&mut CommGroup<'_, 'b>, &'b mut B) -> Result<()>,
{
    /// Captures the operations that `describe` gives a group (`cuStreamBeginCapture`, on a stream of the
    /// graph's own). Nothing is carried out yet. Collective.
    ///
    /// Among ranks that are threads the operations are carried out once before, on memory of the same size
    /// that is allocated for it: NCCL connects ranks when they first need it, and the driver does not open
    /// the GPUs of one process to each other while a stream is captured.
    ///
    /// `describe` is called again before each launch, to see that the buffers are still those that were
    /// captured.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on a communicator that is not NCCL's; [`UsageError::Memory`] for buffers in
    /// host memory, which a graph cannot hold; what the operations themselves refuse.
    pub fn capture(comm: &'c Comm, mut buffers: B, describe: F) -> Result<Graph<'c, B, F>> {
        let (Some(stream), Some(nccl)) = (comm.stream.cuda_stream(), NcclComm::of(&*comm.backend)) else {
            return Err(Error::from(UnsupportedError {
                what: "a CUDA graph".into(),
                why: format!("the communicator is the {} backend's", comm.backend()),
                remedy: "use a communicator on GPUs (BackendKind::Nccl)".into(),
            }));
        };
        nccl.refuse_driver("capturing a CUDA graph")?;
        let stream = stream.context().new_stream()?;
        let comm = comm.on(&stream)?;
        let (graph, captured) = {
            let mut group = Group::new();
            describe(&mut group.on(&comm), &mut buffers)?;
            let captured = Captured::of(&group)?;
            // Messages posted earlier are carried out first, and are not part of the graph.
            comm.requests.wait_for_collectives();
            nccl.flush()?;
            rehearse(&group, &comm, &stream)?;
            {
                // Who looks whether the stream is busy, which would spoil the capture, holds the lock or waits for the driver's answer.
                let _locked = nccl.communicator.lock_library()?;
                nccl.communicator.device.wait_for_answers(&GpuStream::Cuda(stream.clone()));
                stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
            }
            let started = group.start_all();
            // Ended even if a call failed: until then the stream is unusable.
            let graph = stream.end_capture(CUgraphInstantiate_flags(0));
            started?;
            (graph?, captured)
        };
        let graph = graph.ok_or_else(|| {
            Error::from(UnsupportedError {
                what: "a CUDA graph of nothing".into(),
                why: "the operations enqueue nothing".into(),
                remedy: "capture operations with data".into(),
            })
        })?;
        graph.upload()?;
        let graph = nccl.hold(graph, GpuStream::Cuda(stream));
        Ok(Graph { graph, captured, buffers, describe, comm })
    }

    /// Enqueues the operations (`cuGraphLaunch`). Collective; [`Comm::sync`] waits for it.
    ///
    /// # Errors
    /// [`UsageError::Memory`] if the buffers are not those that were captured any more: nothing is enqueued.
    pub fn launch(&mut self) -> Result<()> {
        let mut group = Group::new();
        (self.describe)(&mut group.on(&self.comm), &mut self.buffers)?;
        if Captured::of(&group)? != self.captured {
            return Err(UsageError::Memory {
                memory: "other memory, lengths or operations".into(),
                wanted: "what was captured in the CUDA graph".into(),
                remedy: "fill the buffers in place, or capture again",
            }
            .into());
        }
        group.launch(&self.comm, &self.graph)
    }

    /// Returns the buffers, to read them.
    pub fn buffers(&self) -> &B {
        &self.buffers
    }

    /// Returns the buffers, to fill them for the next launch. They must not be replaced by other memory.
    pub fn buffers_mut(&mut self) -> &mut B {
        &mut self.buffers
    }
}

impl<B, F> Graph<'_, B, F> {
    /// Destroys the graph and returns the buffers.
    pub fn into_buffers(self) -> B {
        self.buffers
    }
}

impl<B: std::fmt::Debug, F> std::fmt::Debug for Graph<'_, B, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let operations = self.captured.operations.len();
        f.debug_struct("Graph").field("operations", &operations).field("buffers", &self.buffers).finish()
    }
}

/// Runs a group's operations once on scratch memory, where NCCL cannot connect the ranks during a capture.
fn rehearse(group: &Group<'_>, comm: &Comm, stream: &Arc<CudaStream>) -> Result<()> {
    /// Alignment in bytes that suits every type and NCCL's kernels.
    const ALIGNMENT: usize = 512;
    let nccl = NcclComm::of(&*comm.backend).expect("a graph is made on a communicator of NCCL");
    if !nccl.is_of_threads() {
        return Ok(());
    }
    let sizes = |call: &Call<'_>| call.flow().used(comm.rank(), comm.world_size());
    let mut bytes = 0;
    let mut count = |len: usize| bytes += len.max(1).next_multiple_of(ALIGNMENT);
    group.calls().flat_map(sizes).for_each(&mut count);
    let norms = group.calls().filter_map(|call| Some(call.norm?.lens(call.dtype, call.blocks.longest())));
    norms.flatten().for_each(&mut count);
    group.transfers().for_each(|transfer| count(transfer.count * transfer.dtype.size()));
    let memory = stream.alloc_zeros::<u8>(bytes)?;
    let (start, _in_use) = memory.device_ptr(stream);
    let mut next = start as usize;
    let rehearsal = group.elsewhere(sizes, |len| {
        let place = next;
        next += len.max(1).next_multiple_of(ALIGNMENT);
        place as *mut u8
    });
    rehearsal.start_all()?;
    comm.sync()
}

/// The operations and registrations that a graph captured.
#[derive(PartialEq)]
struct Captured {
    operations: Vec<[u64; 6]>,
    /// An address may come again, with other mappings in the library.
    registrations: Vec<Option<NonZeroU64>>,
}

impl Captured {
    fn of(group: &Group<'_>) -> Result<Captured> {
        Ok(Captured { operations: signatures(group)?, registrations: group.registrations().collect() })
    }
}

/// A group's operations: arguments, lengths of blocks and addresses. An error if some are in host memory.
fn signatures(group: &Group<'_>) -> Result<Vec<[u64; 6]>> {
    let on_gpu = |spaces: &[Space]| {
        check_on_device(spaces, "the memory of a GPU, for a CUDA graph", "use a CudaSlice or nccl::Buffer")
    };
    let calls = group.calls().map(|call| {
        on_gpu(&call.spaces)?;
        let Call { operation, dtype, reduction, root, .. } = *call;
        let what = operation as u64
            | u64::from(dtype.code()) << 8
            | (reduction.code as u64) << 16
            | (root as u64) << 32;
        let (send, recv) = (call.send.addr() as u64, call.recv.addr() as u64);
        let mut lengths = DefaultHasher::new();
        for blocks in [call.blocks, call.recv_blocks] {
            if let Blocks::Each(counts) = blocks {
                counts.hash(&mut lengths);
            }
        }
        if let Some(norm) = &call.norm {
            norm.hash_into(&mut lengths);
        }
        Ok([what, reduction.factor, call.blocks.longest() as u64, send, recv, lengths.finish() << 1])
    });
    let transfers = group.transfers().map(|transfer| {
        on_gpu(&[transfer.space])?;
        let (way, address) = match transfer.direction {
            Direction::Send(source) => (1, source.addr()),
            Direction::Recv(target) => (2, target.addr()),
        };
        let what = way | u64::from(transfer.dtype.code()) << 8 | (transfer.peer as u64) << 32;
        Ok([what, 0, transfer.count as u64, address as u64, 0, 1])
    });
    calls.chain(transfers).collect()
}

impl Group<'_> {
    /// Launches the CUDA graph of these operations.
    pub(crate) fn launch(&self, comm: &Comm, graph: &HeldGraph) -> Result<()> {
        comm.requests.wait_for_collectives();
        let nccl = NcclComm::of(&*comm.backend).expect("a graph is made on a communicator of NCCL");
        let records: Vec<_> = self.calls().map(|call| comm.recorder.begin(call)).collect();
        let launched = nccl.launch(graph, self.calls(), self.transfers());
        records.into_iter().fold(launched, |launched, record| comm.recorder.end(record, launched))
    }
}
