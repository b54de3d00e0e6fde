//! Collectives and messages as calls of the library. All addresses are in device memory.

use super::communicator::{Communicator, OwnKernel};
use super::device::StreamMemory;
#[cfg(feature = "nccl")]
use super::direct::{KernelLaunch, alone, is_empty_of_own_type, launch};
#[cfg(feature = "nccl")]
use crate::contract::RowFormat;
use crate::contract::{Blocks, Call, Operation};
#[cfg(feature = "nccl")]
use crate::gpu::kernels::{KernelModule, Kernels};
use crate::os::sync::lock;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::memory::{RawStream, Space};
use crate::types::op::{RawReduction, ReductionCode};
use phalanx_sys::nccl::{
    Flavour, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclScalarDevice, ncclScalarHostImmediate, red_op,
};
use std::ffi::c_void;
use std::sync::atomic::Ordering;

/// Whether the library has more to do before the operation is enqueued (`ncclInProgress`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    Enqueued,
    InProgress,
}

/// What needs scratch memory, and what to use without it.
const IN_PLACE: (&str, &str) = ("an all_to_all in place", "use all_to_all (all_to_all_v) with two buffers");
#[cfg(feature = "nccl")]
const QUANTISED: (&str, &str) =
    ("a norm with quantised rows", "use all_reduce_rms_norm, and quantise its rows");

/// Resources of an operation, kept until it is enqueued.
#[derive(Default)]
pub(crate) struct Needs {
    reduction: Option<ncclRedOp_t>,
    /// Freed behind the operation, on its stream.
    pub scratch: Option<StreamMemory>,
    /// What arrived in the scratch, for the buffer it belongs to.
    back: Option<CopyBack>,
    /// The bias of an all_reduce (`ncclAllReduceWithBias`).
    bias: Option<*const c_void>,
    /// Whether the library carries some of it out.
    #[cfg(feature = "nccl")]
    pub by_library: bool,
    /// Own kernels that wait for the group's end, or for the library's part.
    #[cfg(feature = "nccl")]
    pub own_kernels: Vec<KernelLaunch>,
    /// The streams of messages that are on several: their kernels follow all of them.
    #[cfg(feature = "nccl")]
    pub streams: Vec<RawStream>,
    /// The norm of rows whose sum is enqueued.
    #[cfg(feature = "nccl")]
    norm: Option<Box<KernelLaunch>>,
}

/// A copy behind an operation, on its stream.
struct CopyBack {
    to: *mut u8,
    from: *mut u8,
    bytes: usize,
    stream: RawStream,
}

// SAFETY: addresses of GPU memory that the operation has on loan, and of its scratch.
unsafe impl Send for CopyBack {}

impl Needs {
    pub fn with_bias(bias: *const c_void) -> Needs {
        Needs { bias: Some(bias), ..Needs::default() }
    }

    pub fn has_own_kernels(&self) -> bool {
        #[cfg(feature = "nccl")]
        return !self.own_kernels.is_empty();
        #[cfg(not(feature = "nccl"))]
        return false;
    }

    /// Whether some own kernels run beside the library's part.
    pub fn runs_beside(&self) -> bool {
        #[cfg(feature = "nccl")]
        return self.own_kernels.iter().any(KernelLaunch::is_beside);
        #[cfg(not(feature = "nccl"))]
        return false;
    }

    /// Whether nothing has to be freed, or enqueued behind the operation.
    pub fn is_empty(&self) -> bool {
        #[cfg(feature = "nccl")]
        if self.norm.is_some() {
            return false;
        }
        self.reduction.is_none() && self.scratch.is_none()
    }
}

/// Calls a collective of the library, or, with settings of this call, the function of that name that takes
/// them.
macro_rules! collective {
    ($comm:ident, $call:ident, $plain:ident or $configured:ident($($argument:expr),*)) => {
        match $call.config.and_then(|config| config.raw.as_ref()) {
            None => {
                let f = $comm.library.need($comm.library.$plain, stringify!($plain))?;
                $comm.progress(f($($argument),*), stringify!($plain))
            }
            Some(config) => {
                let f = $comm.library.need($comm.library.$configured, stringify!($configured))?;
                $comm.progress(f($($argument,)* &raw const *config), stringify!($configured))
            }
        }
    };
}

impl Communicator {
    /// Converts a status code.
    #[inline]
    pub(crate) fn progress(&self, result: ncclResult_t, function: &'static str) -> Result<Progress> {
        match result {
            ncclResult_t::Success => Ok(Progress::Enqueued),
            ncclResult_t::InProgress => Ok(Progress::InProgress),
            error => Err(self.library.error(error, function).into()),
        }
    }

    /// Enqueues a collective: an own kernel, or the library's. In a group, the kernel waits for its end.
    ///
    /// # Safety
    /// As for [`enqueue`](Communicator::enqueue).
    #[inline]
    pub(crate) unsafe fn carry_out(
        &self,
        call: &Call<'_>,
        #[cfg_attr(not(feature = "nccl"), expect(unused))] own_kernel: Option<OwnKernel<'_>>,
        #[cfg_attr(not(feature = "nccl"), expect(unused))] is_grouped: bool,
        needs: &mut Needs,
    ) -> Result<Progress> {
        #[cfg(feature = "nccl")]
        if let Some((direct, algorithm)) = own_kernel {
            // SAFETY: the caller's contract.
            let kernel = unsafe { direct.prepare(&self.device, self.rank, call, algorithm) }?;
            if is_grouped {
                needs.own_kernels.push(kernel);
            } else {
                direct.order(&self.device, &kernel, &[], |stream| self.stream_of(stream))?;
                // SAFETY: as above. The FIFOs live until all ranks have left.
                unsafe { launch(&self.device, &kernel) }?;
            }
            return Ok(Progress::Enqueued);
        }
        #[cfg(feature = "nccl")]
        if call.norm.is_some() {
            let sum = self.prepare_norm(call, needs)?;
            // SAFETY: as above; the sum goes to the output, or to scratch of its length.
            return unsafe { self.carry_out(&sum, self.own_kernel(&sum), is_grouped, needs) };
        }
        #[cfg(feature = "nccl")]
        if self.direct.get().is_some() && is_empty_of_own_type(call) {
            return Ok(Progress::Enqueued);
        }
        self.come_after_last(call.stream)?;
        self.note_enqueuing(call.stream);
        #[cfg(feature = "nccl")]
        {
            // An exchange of messages says otherwise where own kernels carry all.
            needs.by_library = true;
        }
        // SAFETY: the caller's contract.
        unsafe { self.enqueue(call, needs) }
    }

    /// Where there are own kernels, orders what follows on a stream behind the operation before, whoever carries it
    /// out: the library orders its own operations only. So a wait for the last one's stream waits for all.
    #[inline]
    pub(crate) fn come_after_last(
        &self,
        #[cfg_attr(not(feature = "nccl"), expect(unused))] stream: RawStream,
    ) -> Result<()> {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.direct.get() {
            return direct.come_after(&self.device, stream, |stream| self.stream_of(stream));
        }
        Ok(())
    }

    /// The library is about to enqueue something, which may be captured in a graph.
    pub(crate) fn note_enqueuing(&self, stream: RawStream) {
        #[cfg(feature = "nccl")]
        self.count_ahead(stream);
        if !self.is_captured.load(Ordering::Relaxed) && self.device.is_captured(stream).unwrap_or(true) {
            self.is_captured.store(true, Ordering::Release);
        }
    }

    /// Gives the own kernels that have waited for the group's end their places, and launches those that do not run beside the library's part.
    ///
    /// # Safety
    /// The contract of `Backend::collective`, for the call that they carry out.
    pub(crate) unsafe fn launch_own_kernels(
        &self,
        #[cfg_attr(not(feature = "nccl"), expect(unused))] needs: &Needs,
    ) -> Result<()> {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.direct.get() {
            for kernel in &needs.own_kernels {
                direct.order(&self.device, kernel, &needs.streams, |stream| self.stream_of(stream))?;
                if !kernel.is_beside() {
                    // SAFETY: the caller's contract. The FIFOs live until all ranks have left.
                    unsafe { launch(&self.device, kernel) }?;
                }
            }
        }
        Ok(())
    }

    /// Lets the own kernels run beside the library's part, so that neither waits for the other.
    pub(crate) fn run_beside(
        &self,
        #[cfg_attr(not(feature = "nccl"), expect(unused))] needs: &mut Needs,
    ) -> Result<()> {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.direct.get().filter(|_| !needs.own_kernels.is_empty()) {
            let side = direct.side(&self.device)?;
            self.adopt(side)?;
            needs.own_kernels.iter_mut().for_each(|kernel| kernel.beside(side));
        }
        Ok(())
    }

    /// Launches the own kernels that run beside the library's part, once that is enqueued: it may have to connect ranks or load its kernels
    /// first, and some of that waits for all that runs on the GPU.
    ///
    /// # Safety
    /// That of [`launch_own_kernels`](Communicator::launch_own_kernels), which came before.
    pub(crate) unsafe fn launch_beside(
        &self,
        #[cfg_attr(not(feature = "nccl"), expect(unused))] needs: &Needs,
    ) -> Result<()> {
        #[cfg(feature = "nccl")]
        for kernel in needs.own_kernels.iter().filter(|kernel| kernel.is_beside()) {
            // SAFETY: the caller's contract. The FIFOs live until all ranks have left.
            unsafe { launch(&self.device, kernel) }?;
        }
        Ok(())
    }

    /// Orders what follows on the streams of own kernels behind these, and on each of the streams of messages behind all of them.
    pub(crate) fn rejoin(
        &self,
        #[cfg_attr(not(feature = "nccl"), expect(unused))] needs: &Needs,
    ) -> Result<()> {
        #[cfg(feature = "nccl")]
        {
            for kernel in &needs.own_kernels {
                self.come_after_last(kernel.followed_on())?;
            }
            needs.streams.iter().try_for_each(|stream| self.come_after_last(*stream))?;
        }
        Ok(())
    }

    /// The all_reduce of an `all_reduce_rms_norm` that no one kernel carries out. The norm, which is kept, follows when it is enqueued.
    #[cfg(feature = "nccl")]
    fn prepare_norm<'a>(&self, call: &Call<'a>, needs: &mut Needs) -> Result<Call<'a>> {
        let Some(norm) = &call.norm else { return Ok(*call) };
        let _current = self.device.enter();
        let mut sum = Call { operation: Operation::AllReduce, norm: None, ..*call };
        if norm.format != RowFormat::AsInput {
            let bytes = call.blocks.longest() * call.dtype.size();
            let scratch = StreamMemory::new(&self.device, bytes, call.stream, QUANTISED)?;
            sum.recv = scratch.start;
            needs.scratch = Some(scratch);
        }
        let gpu = self.device.cuda().expect("NCCL's GPUs are CUDA's");
        let kernels = Kernels::load(gpu, KernelModule::Norm(call.dtype))?;
        if call.blocks.longest() > 0 {
            let normed = Call { send: sum.recv, ..*call };
            needs.norm = Some(Box::new(alone(kernels.get(1), &normed, norm)));
        }
        Ok(sum)
    }

    /// Enqueues what follows an operation: the norm of a sum, a copy out of the scratch.
    ///
    /// # Safety
    /// The contract of `Backend::collective`, for the call.
    pub(crate) unsafe fn follow(&self, needs: &mut Needs) -> Result<()> {
        if let Some(CopyBack { to, from, bytes, stream }) = needs.back.take() {
            let _current = self.device.enter();
            // SAFETY: both have so many bytes; the scratch is freed behind this, on the stream.
            unsafe { self.device.copy(to, from, bytes, stream) }?;
        }
        #[cfg(feature = "nccl")]
        if let Some(norm) = needs.norm.take() {
            // SAFETY: the caller's contract: buffers of the call, and scratch that lives on the stream.
            return unsafe { launch(&self.device, &norm) };
        }
        Ok(())
    }

    /// Enqueues a collective by the library.
    ///
    /// # Safety
    /// The contract of `Backend::collective`, with addresses in this device's memory; the device's library
    /// lock is held, or this is inside a group.
    #[inline]
    pub(crate) unsafe fn enqueue(&self, call: &Call<'_>, needs: &mut Needs) -> Result<Progress> {
        use Operation::*;
        // For one rank the library launches at once, on the device that is current, whichever the stream's
        // is.
        let _current = (self.ranks == 1).then(|| self.device.enter());
        // SAFETY: the caller's contract, in each.
        unsafe {
            match call.operation {
                // Its kernel for one rank leaves the end of some lengths out: `can_multiply_alone` knows
                // which.
                ReduceScatterV if self.ranks == 1 => {
                    self.reducing_alone(&Call { operation: Reduce, root: 0, ..*call }, needs)
                }
                AllReduce | Reduce | ReduceScatter if self.ranks == 1 => self.reducing_alone(call, needs),
                AllReduce | Reduce | ReduceScatter => self.reducing(call, needs),
                Broadcast | AllGather => self.moving(call),
                AllToAll | AllToAllV if self.is_sent_from_where_it_goes(call) => {
                    self.all_to_all_in_place(call, needs)
                }
                AllToAll | Gather | Scatter => self.rearranging(call),
                ReduceScatterV => self.reduce_scatter_v(call, needs),
                AllToAllV => self.all_to_all_v(call, needs),
                AllGatherV | GatherV | ScatterV => self.messages(call),
                Barrier | Split | Finalize | Init | Shrink | Grow | Alloc | Suspend | Resume
                | WaitSignals | DeviceComm | SplitGrid | Send | Recv | Scan | ExclusiveScan | Symmetric
                | SharedByHost | AllReduceRmsNorm | Experts | ExpertDispatch | ExpertCombine | Epoch
                | EndEpoch | Free | OneSided | Peers | File => {
                    unreachable!("nothing to enqueue")
                }
            }
        }
    }

    unsafe fn reducing(&self, call: &Call<'_>, needs: &mut Needs) -> Result<Progress> {
        let (dtype, op) = self.reduction(call, needs)?;
        let (send, recv, count, root) =
            (call.send.cast(), call.recv.cast(), call.blocks.longest(), call.root as i32);
        let (comm, stream) = (self.handle(), call.stream.0);
        // SAFETY: the caller's contract; the types are the header's.
        unsafe {
            match (call.operation, needs.bias) {
                (Operation::AllReduce, Some(bias)) => {
                    let name = "ncclAllReduceWithBias";
                    let f = self.library.need(self.library.ncclAllReduceWithBias, name)?;
                    self.progress(f(send, recv, count, dtype, op, comm, stream, bias), name)
                }
                (Operation::AllReduce, None) => {
                    collective!(self, call, ncclAllReduce or ncclAllReduceConfig(send, recv, count, dtype, op, comm, stream))
                }
                (Operation::Reduce, _) => {
                    collective!(self, call, ncclReduce or ncclReduceConfig(send, recv, count, dtype, op, root, comm, stream))
                }
                _ => {
                    collective!(self, call, ncclReduceScatter or ncclReduceScatterConfig(send, recv, count, dtype, op, comm, stream))
                }
            }
        }
    }

    /// A reduction of one rank: a copy, unless it multiplies or adds a bias.
    unsafe fn reducing_alone(&self, call: &Call<'_>, needs: &mut Needs) -> Result<Progress> {
        let mut call = *call;
        match call.reduction.code {
            // The library makes a multiplication by one of an average.
            ReductionCode::Avg => call.reduction = RawReduction { code: ReductionCode::Sum, factor: 0 },
            ReductionCode::PreMulSum => can_multiply_alone(call.dtype, call.blocks.len(0))?,
            _ => {}
        }
        if call.reduction.code != ReductionCode::PreMulSum && needs.bias.is_none() {
            // A copy, also of types that the library does not reduce.
            let bytes = call.blocks.len(0) * call.dtype.size();
            call = Call { dtype: DType::U8, blocks: Blocks::Equal(bytes), ..call };
        }
        // SAFETY: the caller's contract.
        unsafe { self.reducing(&call, needs) }
    }

    /// Collectives without arithmetic, as bytes: this works for every type.
    unsafe fn moving(&self, call: &Call<'_>) -> Result<Progress> {
        let bytes = call.blocks.longest() * call.dtype.size();
        let (send, recv, dtype) = (call.send.cast(), call.recv.cast(), ncclDataType_t::Uint8);
        let (comm, stream, root) = (self.handle(), call.stream.0, call.root as i32);
        // SAFETY: the caller's contract; the types are the header's.
        unsafe {
            if call.operation == Operation::Broadcast {
                collective!(self, call, ncclBroadcast or ncclBroadcastConfig(send, recv, bytes, dtype, root, comm, stream))
            } else {
                collective!(self, call, ncclAllGather or ncclAllGatherConfig(send, recv, bytes, dtype, comm, stream))
            }
        }
    }

    /// Collectives that came with 2.28; older libraries exchange messages.
    unsafe fn rearranging(&self, call: &Call<'_>) -> Result<Progress> {
        let library = self.library;
        let is_there = match call.operation {
            Operation::AllToAll => library.ncclAlltoAll.is_some(),
            Operation::Gather => library.ncclGather.is_some(),
            _ => library.ncclScatter.is_some(),
        };
        if !is_there {
            // SAFETY: the caller's contract.
            return unsafe { self.messages(call) };
        }
        let bytes = call.blocks.longest() * call.dtype.size();
        let (send, recv, dtype) = (call.send.cast(), call.recv.cast(), ncclDataType_t::Uint8);
        let (comm, stream, root) = (self.handle(), call.stream.0, call.root as i32);
        // SAFETY: the caller's contract; the types are the header's.
        unsafe {
            match call.operation {
                Operation::AllToAll => {
                    collective!(self, call, ncclAlltoAll or ncclAlltoAllConfig(send, recv, bytes, dtype, comm, stream))
                }
                Operation::Gather => {
                    collective!(self, call, ncclGather or ncclGatherConfig(send, recv, bytes, dtype, root, comm, stream))
                }
                _ => {
                    collective!(self, call, ncclScatter or ncclScatterConfig(send, recv, bytes, dtype, root, comm, stream))
                }
            }
        }
    }

    /// Whether blocks are sent from the memory they go to. Empty buffers may have one address, too.
    fn is_sent_from_where_it_goes(&self, call: &Call<'_>) -> bool {
        std::ptr::eq(call.send, call.recv) && call.flow().send_len(self.rank, self.ranks) > 0
    }

    /// The library has no in-place form of either: the blocks are sent from a copy. Where the buffer may be registered, they also arrive in
    /// one: from memory that is not registered to memory that is, NCCL 2.28 crashes or never ends.
    unsafe fn all_to_all_in_place(&self, call: &Call<'_>, needs: &mut Needs) -> Result<Progress> {
        let sent = call.flow().send_len(self.rank, self.ranks);
        let may_be_registered = !lock(&self.registrations).is_empty();
        let received = if may_be_registered { call.flow().recv_len(self.rank, self.ranks) } else { 0 };
        let _current = self.device.enter();
        let scratch = StreamMemory::new(&self.device, sent + received, call.stream, IN_PLACE)?;
        let (buffer, stream, copy) = (call.recv, call.stream, scratch.start);
        needs.scratch = Some(scratch);
        let mut call = Call { send: copy, ..*call };
        if may_be_registered {
            call.recv = copy.wrapping_add(sent);
            needs.back = Some(CopyBack { to: buffer, from: call.recv, bytes: received, stream });
        }
        let call = &call;
        // SAFETY: the scratch lives on the stream until after the operation; the buffer has so many bytes.
        unsafe {
            self.device.copy(copy, buffer, sent, stream)?;
            if call.operation == Operation::AllToAllV {
                self.all_to_all_v(call, needs)
            } else {
                self.rearranging(call)
            }
        }
    }

    /// One reduce for each block, to the rank that gets it.
    unsafe fn reduce_scatter_v(&self, call: &Call<'_>, needs: &mut Needs) -> Result<Progress> {
        let (dtype, op) = self.reduction(call, needs)?;
        self.grouped(|| {
            for rank in (0..self.ranks).filter(|rank| call.blocks.len(*rank) > 0) {
                let (count, offset) = (call.blocks.len(rank), call.blocks.offset(rank) * call.dtype.size());
                let (send, recv) = (call.send.wrapping_add(offset).cast(), call.recv.cast());
                let (comm, stream, root) = (self.handle(), call.stream.0, rank as i32);
                // SAFETY: the caller's contract; the block lies in the buffer.
                unsafe {
                    collective!(self, call, ncclReduce or ncclReduceConfig(send, recv, count, dtype, op, root, comm, stream))
                }?;
            }
            Ok(())
        })
    }

    /// Calls of the library that start together. The group ends also if one fails: no thread stays inside.
    pub(crate) fn grouped(&self, calls: impl FnOnce() -> Result<()>) -> Result<Progress> {
        let start = self.library.need(self.library.ncclGroupStart, "ncclGroupStart")?;
        let end = self.library.need(self.library.ncclGroupEnd, "ncclGroupEnd")?;
        // SAFETY: ended below, on this thread.
        self.progress(unsafe { start() }, "ncclGroupStart")?;
        let called = calls();
        // SAFETY: started above, on this thread.
        let ended = self.progress(unsafe { end() }, "ncclGroupEnd");
        called.and(ended)
    }

    /// The type and the library's reduction; a pre-multiplied sum is made for the operation.
    fn reduction(&self, call: &Call<'_>, needs: &mut Needs) -> Result<(ncclDataType_t, ncclRedOp_t)> {
        let dtype = self.reduced_type(call.dtype)?;
        let op = match call.reduction.code {
            ReductionCode::Sum => red_op::Sum,
            ReductionCode::Prod => red_op::Prod,
            ReductionCode::Min => red_op::Min,
            ReductionCode::Max => red_op::Max,
            ReductionCode::Avg => red_op::Avg,
            ReductionCode::PreMulSum => {
                let name = "ncclRedOpCreatePreMulSum";
                let create = self.library.need(self.library.ncclRedOpCreatePreMulSum, name)?;
                let (mut op, mut factor) = (0, call.reduction.factor);
                let (scalar, residence) = match call.factor_space {
                    Space::Host => ((&raw mut factor).cast(), ncclScalarHostImmediate),
                    Space::Device => (factor as *mut c_void, ncclScalarDevice),
                };
                // SAFETY: a factor on the host has the type's bits at its start (little endian) and is read
                // during the call; one on the device is read when the operation is carried out, by the
                // caller's contract.
                let result = unsafe { create(&raw mut op, scalar, dtype, residence, self.handle()) };
                self.progress(result, name)?;
                needs.reduction = Some(op);
                op
            }
            code => unreachable!("{} runs on the host", code.name()),
        };
        Ok((dtype, op))
    }

    /// Gives back what was needed only until the operation was enqueued.
    pub(crate) fn release(&self, needs: &mut Needs) {
        if let (Some(op), Some(destroy)) = (needs.reduction.take(), self.library.ncclRedOpDestroy)
            && let Ok(_locked) = self.lock_library()
        {
            // SAFETY: made for one operation, which is enqueued; destroyed once.
            unsafe { destroy(op, self.handle()) };
        }
    }
}

/// Whether the kernel that multiplies for one rank does so with all elements. It has none for 8-bit floats,
/// and it gives each of its blocks the length's quotient, rounded down, so that the last elements of some
/// lengths are left out (`oneRankReduce` in the source, up to 2.30 at least).
fn can_multiply_alone(dtype: DType, len: usize) -> Result<()> {
    let bytes = len * dtype.size();
    let blocks = bytes.div_ceil(16 * 1024).clamp(1, 32);
    let covered = (len / blocks).next_multiple_of(16 / dtype.size()) * blocks;
    if covered >= len && !matches!(dtype, DType::F8E4M3 | DType::F8E5M2) {
        return Ok(());
    }
    Err(Error::from(UnsupportedError {
        what: format!("a pre-multiplied sum of {len} × {dtype} by one rank"),
        why: "NCCL's kernel for one rank leaves out elements, or does not exist".into(),
        remedy: "multiply before, or use a multiple of 512 bytes (no 8-bit floats)".into(),
    }))
}

impl Communicator {
    /// The type in reductions.
    #[inline]
    pub(crate) fn reduced_type(&self, dtype: DType) -> Result<ncclDataType_t> {
        if self.library.flavour() == Flavour::Rccl && matches!(dtype, DType::F8E4M3 | DType::F8E5M2) {
            return Err(Error::from(UnsupportedError {
                what: format!("a reduction of {dtype} by RCCL"),
                why: "on some of AMD's GPUs these are other formats than the OCP's (it moves them, as bytes)"
                    .into(),
                remedy: "convert to f16 or bf16".into(),
            }));
        }
        reduced_type(dtype)
    }
}

/// The type in reductions.
#[inline]
fn reduced_type(dtype: DType) -> Result<ncclDataType_t> {
    Ok(match dtype {
        DType::F32 => ncclDataType_t::Float32,
        DType::F64 => ncclDataType_t::Float64,
        DType::F16 => ncclDataType_t::Float16,
        DType::Bf16 => ncclDataType_t::Bfloat16,
        DType::F8E4M3 => ncclDataType_t::Float8e4m3,
        DType::F8E5M2 => ncclDataType_t::Float8e5m2,
        DType::I8 => ncclDataType_t::Int8,
        DType::U8 => ncclDataType_t::Uint8,
        DType::I32 => ncclDataType_t::Int32,
        DType::U32 => ncclDataType_t::Uint32,
        DType::I64 => ncclDataType_t::Int64,
        DType::U64 => ncclDataType_t::Uint64,
        DType::Plain(_) => unreachable!("plain data is moved only"),
        DType::I16 | DType::U16 => {
            return Err(Error::from(UnsupportedError {
                what: format!("a reduction of {dtype}"),
                why: "NCCL has no 16-bit integers (it moves them, as bytes)".into(),
                remedy: "convert to i32 or u32, or use the host backend".into(),
            }));
        }
    })
}
