//! A call as a kernel's arguments, and its launch.

use super::choose::{Algorithm, choose, factor};
use super::experts::ExpertArguments;
use super::messages::MessageArguments;
use super::norm::NormArguments;
use super::setup::Direct;
use super::tunables::{MAX_RANKS, OVERLAPPED, SPREAD, WARPS};
use crate::backend::nccl::device::GpuDevice;
use crate::buffer::stream::GpuStream;
use crate::contract::Call;
use crate::gpu::kernels::{Kernel, KernelModule, Kernels, check};
use crate::os::sync::lock;
use crate::types::error::Result;
use crate::types::memory::RawStream;
use cudarc::driver::sys;

/// `Peer` in gpu/kernels/collectives.cu.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Peer {
    inbox: u64,
    send: u64,
    recv: u64,
    send_bytes: u64,
    recv_bytes: u64,
    send_steps: u32,
    recv_steps: u32,
}

/// `Arguments` in gpu/kernels/collectives.cu.
#[repr(C)]
pub(super) struct Arguments {
    own: u64,
    abort: u64,
    rank: u32,
    ranks: u32,
    op: u32,
    same: u32,
    factor: u64,
    factor_is_address: u32,
    steps: u32,
    peers: [Peer; MAX_RANKS],
}

/// A kernel with its arguments, and where it runs.
pub(crate) struct KernelLaunch {
    pub(super) kernel: Kernel,
    /// In two dimensions.
    pub(super) blocks: [u32; 2],
    pub(super) threads: u32,
    pub(super) stream: RawStream,
    /// The stream beside whose work it runs, if that is not its own: behind what was enqueued there before.
    pub(super) beside: Option<RawStream>,
    pub(super) arguments: KernelArguments,
}

impl KernelLaunch {
    pub(super) fn new(
        kernel: Kernel,
        blocks: [u32; 2],
        threads: u32,
        stream: RawStream,
        arguments: KernelArguments,
    ) -> KernelLaunch {
        KernelLaunch { kernel, blocks, threads, stream, beside: None, arguments }
    }

    /// Runs on this stream, beside the library's part of the same messages or group.
    pub fn beside(&mut self, side: &GpuStream) {
        self.beside = Some(std::mem::replace(&mut self.stream, side.raw()));
    }

    /// Whether it is launched while the kernel before it in the stream still runs, and then waits for that.
    fn overlaps(&self) -> bool {
        self.kernel.waits && self.blocks[0] * self.blocks[1] * (self.threads / 32) <= OVERLAPPED
    }

    pub fn is_beside(&self) -> bool {
        self.beside.is_some()
    }

    /// Where what follows it is enqueued.
    pub fn followed_on(&self) -> RawStream {
        self.beside.unwrap_or(self.stream)
    }
}

/// A kernel's one parameter.
#[expect(clippy::large_enum_variant, reason = "made for one launch, on the stack")]
pub(super) enum KernelArguments {
    Collective(Arguments),
    Norm(NormArguments),
    Messages(Box<MessageArguments>),
    Experts(ExpertArguments),
}

impl KernelArguments {
    fn as_ptr(&self) -> *mut std::ffi::c_void {
        match self {
            KernelArguments::Collective(arguments) => std::ptr::from_ref(arguments).cast_mut().cast(),
            KernelArguments::Norm(arguments) => std::ptr::from_ref(arguments).cast_mut().cast(),
            KernelArguments::Experts(arguments) => std::ptr::from_ref(arguments).cast_mut().cast(),
            KernelArguments::Messages(arguments) => std::ptr::from_ref(&**arguments).cast_mut().cast(),
        }
    }
}

/// The stream of the last kernel: one that runs on another stream waits for it, since both use the same FIFOs.
#[derive(Default)]
pub(crate) struct Order {
    last: Option<RawStream>,
}

/// Enqueues a launch, which has its place among the communicator's kernels ([`Direct::order`]).
///
/// # Safety
/// The arguments are the kernel's, and the memory behind them lives until the stream's work is complete.
#[inline]
pub(crate) unsafe fn launch(device: &GpuDevice, launch: &KernelLaunch) -> Result<()> {
    let _current = device.enter();
    let mut pointers = [launch.arguments.as_ptr()];
    let ([x, y], stream) = (launch.blocks, launch.stream.0.cast());
    if !launch.overlaps() {
        let (function, none) = (launch.kernel.function, std::ptr::null_mut());
        // SAFETY: the caller's contract; the driver copies the arguments.
        return check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                function,
                x,
                y,
                1,
                launch.threads,
                1,
                1,
                0,
                stream,
                pointers.as_mut_ptr(),
                none,
            )
        });
    }
    let mut early = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: 1,
        blockDimX: launch.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: stream,
        attrs: &raw mut early,
        numAttrs: 1,
    };
    // SAFETY: the caller's contract; the driver copies all of it. The kernel waits for the work before it.
    check("cuLaunchKernelEx", unsafe {
        sys::cuLaunchKernelEx(
            &raw const config,
            launch.kernel.function,
            pointers.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    })
}

/// Makes what follows on a stream wait for what is in another. A stream that is gone has no work.
fn follow(
    device: &GpuDevice,
    before: RawStream,
    after: RawStream,
    stream_of: impl Fn(RawStream) -> Option<GpuStream>,
) -> Result<()> {
    let (Some(before), Some(after)) = (stream_of(before), stream_of(after)) else { return Ok(()) };
    let _current = device.enter();
    device.join(&after, &before)
}

impl Direct {
    /// The own kernel for a call; `None` if the library carries it out.
    #[inline]
    pub fn choose(&self, call: &Call<'_>) -> Option<Algorithm> {
        choose(call, &self.topology)
    }

    /// The launch that carries a call out.
    ///
    /// # Safety
    /// The contract of `Backend::collective`, with addresses in this device's memory.
    #[inline]
    pub unsafe fn prepare(
        &self,
        device: &GpuDevice,
        rank: usize,
        call: &Call<'_>,
        algorithm: Algorithm,
    ) -> Result<KernelLaunch> {
        let kernel = self.loaded(device, algorithm.module)?.get(algorithm.kernel());
        if let Some(norm) = &call.norm {
            return Ok(self.fused(kernel, rank, call, norm));
        }
        let arguments = self.arguments(rank, call, algorithm);
        let lanes = (arguments.steps as usize).clamp(1, algorithm.protocol.lanes());
        // Short calls spread over the GPU; long ones leave room for other communicators' kernels.
        let warps = lanes.div_ceil(SPREAD).next_power_of_two().min(WARPS);
        let (blocks, threads) = ([lanes.div_ceil(warps) as u32, 1], 32 * warps as u32);
        let arguments = KernelArguments::Collective(arguments);
        Ok(KernelLaunch::new(kernel, blocks, threads, call.stream, arguments))
    }

    /// Orders a launch behind the kernels before, and behind what is in these streams.
    #[inline]
    pub fn order(
        &self,
        device: &GpuDevice,
        prepared: &KernelLaunch,
        streams: &[RawStream],
        stream_of: impl Fn(RawStream) -> Option<GpuStream>,
    ) -> Result<()> {
        match prepared.beside {
            None => self.come_after(device, prepared.stream, &stream_of)?,
            Some(main) => self.leave(device, main, prepared.stream, &stream_of)?,
        }
        let others = streams.iter().filter(|other| **other != prepared.stream);
        others.copied().try_for_each(|other| follow(device, other, prepared.stream, &stream_of))
    }

    pub(super) fn loaded(&self, device: &GpuDevice, module: KernelModule) -> Result<&Kernels> {
        let place = &self.kernels[module.index()];
        match place.get() {
            Some(kernels) => Ok(kernels),
            None => {
                let _current = device.enter();
                let kernels = Kernels::load(self.gpu, module)?;
                Ok(place.get_or_init(|| kernels))
            }
        }
    }

    /// Makes a stream go on from here beside another, which has come after the kernels before.
    fn leave(
        &self,
        device: &GpuDevice,
        main: RawStream,
        side: RawStream,
        stream_of: impl Fn(RawStream) -> Option<GpuStream>,
    ) -> Result<()> {
        // What follows on the main stream does not wait for a kernel on the side.
        if lock(&self.order).last != Some(side) {
            self.come_after(device, main, &stream_of)?;
        }
        lock(&self.order).last = Some(side);
        follow(device, main, side, stream_of)
    }

    /// Orders the next kernel behind the last one, if that is on another stream.
    pub fn come_after(
        &self,
        device: &GpuDevice,
        stream: RawStream,
        stream_of: impl Fn(RawStream) -> Option<GpuStream>,
    ) -> Result<()> {
        let mut order = lock(&self.order);
        let before = order.last.replace(stream);
        let Some(before) = before.filter(|before| *before != stream) else { return Ok(()) };
        // A stream that is gone has no work.
        let (Some(before), Some(stream)) = (stream_of(before), stream_of(stream)) else { return Ok(()) };
        let _current = device.enter();
        // Work of a capture runs when its graph is launched, which `Communicator::launch` orders.
        if device.is_captured(before.raw())? != device.is_captured(stream.raw())? {
            return Ok(());
        }
        device.join(&stream, &before)
    }

    fn arguments(&self, rank: usize, call: &Call<'_>, algorithm: Algorithm) -> Arguments {
        let (factor, is_address) = factor(call);
        let peers = self.peers(rank, call, algorithm);
        let block = |peer: &Peer| (peer.send, peer.send_bytes);
        let same = peers[..self.topology.ranks].iter().all(|peer| block(peer) == block(&peers[rank]));
        Arguments {
            own: self.own,
            abort: self.abort_word(),
            rank: rank as u32,
            ranks: self.topology.ranks as u32,
            op: call.reduction.code as u32,
            same: u32::from(same),
            factor,
            factor_is_address: u32::from(is_address),
            steps: peers.iter().map(|peer| peer.send_steps.max(peer.recv_steps)).max().unwrap_or(0),
            peers,
        }
    }

    /// The blocks for and from each rank.
    fn peers(&self, rank: usize, call: &Call<'_>, algorithm: Algorithm) -> [Peer; MAX_RANKS] {
        let ranks = self.topology.ranks;
        let (send, recv) = (call.send.addr() as u64, call.recv.addr() as u64);
        let flow = call.flow();
        let (writes, reads) = (flow.writers.includes(rank), flow.readers.includes(rank));
        // Of an all_reduce in two hops: blocks of whole words, the first of which is the longest, and whose steps all have.
        let bytes = call.blocks.longest() * call.dtype.size();
        let hop = bytes.div_ceil(ranks).next_multiple_of(16);
        let steps = |len: usize| {
            let len = if algorithm.two_hops { hop } else { len };
            len.div_ceil(algorithm.protocol.step()) as u32
        };
        let mut peers = [Peer::default(); MAX_RANKS];
        for (number, peer) in peers.iter_mut().enumerate().take(ranks) {
            peer.inbox = self.inboxes[number];
            let (source, target) = if algorithm.two_hops {
                let block = (number * hop).min(bytes)..((number + 1) * hop).min(bytes);
                (block.clone(), block)
            } else {
                (flow.source(rank, number), flow.target(rank, number))
            };
            if writes && flow.readers.includes(number) {
                peer.send = send + source.start as u64;
                (peer.send_bytes, peer.send_steps) = (source.len() as u64, steps(source.len()));
            }
            if reads && flow.writers.includes(number) {
                peer.recv = recv + target.start as u64;
                (peer.recv_bytes, peer.recv_steps) = (target.len() as u64, steps(target.len()));
            }
        }
        peers
    }
}
