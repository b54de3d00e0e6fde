//! Dispatch and combine of experts by own kernels (`gpu/kernels/experts.cu`): their scratch, their arguments, their launch.

use super::choose::Protocol;
use super::launch::{KernelArguments, KernelLaunch, launch};
use super::peer_memory::{LocalMemory, PeerMemory, refusal};
use super::setup::Direct;
use super::tunables::{EXPERT_BLOCKS, EXPERT_WARPS, MAX_RANKS};
use crate::backend::nccl::NcclComm;
use crate::backend::nccl::communicator::Communicator;
use crate::contract::Call;
use crate::control::host_channel::HostChannel;
use crate::gpu::kernels::{KernelModule, multiprocessors};
use crate::types::error::Result;
use std::sync::Arc;

/// Bytes of a slot, in both protocols: twice LL's step, and LL128's with its flags.
const SLOT: usize = 1024;
/// Bytes of the numbers of calls and of tokens in `Own`.
const NUMBERS: usize = 128 * 8 + MAX_RANKS * 4;
/// Parts of the scratch begin at multiples of a line.
const LINE: usize = 128;
/// Bytes of a value that is combined (bf16).
const COMBINED: usize = 2;

/// Sizes of dispatches and combines, which were checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertShape {
    /// Experts of each rank.
    pub experts: usize,
    pub max_tokens: usize,
    pub top_k: usize,
    pub hidden: usize,
    /// Bytes of a value that is dispatched.
    pub value: usize,
    /// Scales of a token.
    pub scales: usize,
}

/// Where the parts of the scratch are, and how long it is.
struct ScratchLayout {
    slots: usize,
    returns: usize,
    own: usize,
    bytes: usize,
}

/// Steps of so many bytes.
fn steps(protocol: Protocol, bytes: usize) -> usize {
    bytes.div_ceil(protocol.step())
}

impl ExpertShape {
    /// Steps of a token with its scales.
    fn dispatched_steps(&self, protocol: Protocol) -> usize {
        steps(protocol, self.hidden * self.value) + steps(protocol, self.scales * 4)
    }

    fn layout(&self, ranks: usize, protocol: Protocol) -> ScratchLayout {
        let choices = self.max_tokens * self.top_k;
        let words = 2 * ranks * (1 + self.experts + choices) * 8;
        let slots = 2 * (ranks - 1) * self.max_tokens * self.dispatched_steps(protocol) * SLOT;
        let returns = choices * steps(protocol, self.hidden * COMBINED) * SLOT;
        let own = NUMBERS + (1 + ranks) * choices * 4;
        let slots_at = words.next_multiple_of(LINE);
        let (returns_at, own_at) = (slots_at + slots, slots_at + slots + returns);
        ScratchLayout { slots: slots_at, returns: returns_at, own: own_at, bytes: own_at + own }
    }
}

/// `Arguments` in gpu/kernels/experts.cu.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ExpertArguments {
    scratch: [u64; MAX_RANKS],
    abort: u64,
    /// Addresses of the call's buffers: tokens and rows of a dispatch, rows and tokens of a combine.
    pub input: u64,
    pub scales: u64,
    pub routing: u64,
    pub weights: u64,
    pub output: u64,
    pub row_scales: u64,
    pub counts: u64,
    words: u64,
    slots: u64,
    returns: u64,
    own: u64,
    rank: u32,
    ranks: u32,
    experts: u32,
    max_tokens: u32,
    top_k: u32,
    /// Tokens of this call.
    pub tokens: u32,
    row_bytes: u32,
    scale_bytes: u32,
    /// Bytes of an expert's number.
    pub index_bytes: u32,
}

/// Which of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExpertTask {
    Dispatch,
    Combine,
}

/// Scratch of a rank's dispatches and combines, which its peers write to.
pub(crate) struct ExpertScratch {
    pub memory: Arc<PeerMemory>,
    shape: ExpertShape,
    protocol: Protocol,
    /// Most blocks of a launch: all of them run at once.
    blocks: usize,
    /// Arguments without those of a call.
    arguments: ExpertArguments,
    /// Bytes that it takes of this rank's GPU.
    pub bytes: usize,
}

impl Direct {
    /// Scratch on all ranks, which have the same shape; or why a rank cannot have it. Collective.
    ///
    /// # Safety
    /// As for `Backend::collective` of the host channel.
    pub unsafe fn make_experts(
        &self,
        host_channel: &dyn HostChannel,
        communicator: &Communicator,
        shape: ExpertShape,
    ) -> Result<Result<ExpertScratch>> {
        let (device, ranks) = (&communicator.device, self.topology.ranks);
        let protocol = self.topology.protocol_of_rows();
        let layout = shape.layout(ranks, protocol);
        let _current = device.enter();
        let begin = || {
            self.loaded(device, KernelModule::Experts)?;
            let blocks = multiprocessors(self.gpu)?.min(EXPERT_BLOCKS);
            LocalMemory::new(host_channel, device, layout.bytes).map(|memory| (blocks, memory))
        };
        let (blocks, local) = match begin() {
            Ok((blocks, memory)) => (blocks, Ok(memory)),
            Err(reason) => (0, Err(reason)),
        };
        // SAFETY: the caller's contract.
        let memory = match unsafe { PeerMemory::exchange(host_channel, device, local, 0, true) }? {
            Ok(memory) => Arc::new(memory),
            Err(reason) => return Ok(Err(reason)),
        };
        self.keep(memory.clone());
        let arguments = ExpertArguments {
            scratch: memory.starts,
            abort: self.abort_word(),
            slots: layout.slots as u64,
            returns: layout.returns as u64,
            own: layout.own as u64,
            rank: communicator.rank as u32,
            ranks: ranks as u32,
            experts: shape.experts as u32,
            max_tokens: shape.max_tokens as u32,
            top_k: shape.top_k as u32,
            ..ExpertArguments::default()
        };
        let bytes = layout.bytes;
        Ok(Ok(ExpertScratch { memory, shape, protocol, blocks, arguments, bytes }))
    }
}

impl NcclComm {
    /// [`Direct::make_experts`] over the host channel.
    ///
    /// # Safety
    /// As for `Backend::collective`.
    pub(crate) unsafe fn make_experts(
        &self,
        direct: &Direct,
        shape: ExpertShape,
    ) -> Result<Result<ExpertScratch>> {
        let communicator = &self.communicator;
        // SAFETY: the caller's contract.
        self.on_host_channel(&communicator.auxiliary_call(), |channel| unsafe {
            direct.make_experts(channel, communicator, shape)
        })
    }
}

impl ExpertScratch {
    /// Arguments of a task, without its buffers.
    pub fn arguments(&self, task: ExpertTask) -> ExpertArguments {
        let ExpertShape { hidden, value, scales, .. } = self.shape;
        let (value, scales) = if task == ExpertTask::Dispatch { (value, scales) } else { (COMBINED, 0) };
        ExpertArguments {
            row_bytes: (hidden * value) as u32,
            scale_bytes: (scales * 4) as u32,
            ..self.arguments
        }
    }

    /// Blocks of a task: a warp for each step, as far as there is room. One block of a dispatch counts the tokens' experts.
    fn blocks_of(&self, task: ExpertTask) -> usize {
        let ExpertShape { max_tokens, hidden, .. } = self.shape;
        let ranks = self.arguments.ranks as usize;
        let (rows, counting) = match task {
            ExpertTask::Dispatch => (ranks * max_tokens * self.shape.dispatched_steps(self.protocol), 1),
            ExpertTask::Combine => ((ranks - 1) * max_tokens * steps(self.protocol, hidden * COMBINED), 0),
        };
        (rows.div_ceil(EXPERT_WARPS) + counting).clamp(1 + counting, self.blocks.max(2))
    }
}

impl Communicator {
    /// Records, announces and enqueues a task of experts, as `operation::collective` does with a collective. In an open group it is enqueued
    /// at once.
    ///
    /// # Safety
    /// The contract of `Backend::collective`, for the buffers in the arguments.
    pub(crate) unsafe fn enqueue_experts(
        &self,
        call: &Call<'_>,
        task: ExpertTask,
        scratch: &ExpertScratch,
        arguments: &ExpertArguments,
    ) -> Result<()> {
        self.check_awake(call.operation)?;
        let direct = self.direct.get().ok_or_else(|| refusal("the communicator has none"))?;
        let (announced, _) = self.next_collective(call, true);
        let enqueue = || {
            let _locked = self.lock_library()?;
            let kernels = direct.loaded(&self.device, KernelModule::Experts)?;
            let index = 2 * usize::from(task == ExpertTask::Combine)
                + usize::from(scratch.protocol == Protocol::Ll128);
            let blocks = [scratch.blocks_of(task) as u32, 1];
            let (threads, arguments) = (32 * EXPERT_WARPS as u32, KernelArguments::Experts(*arguments));
            let kernel = KernelLaunch::new(kernels.get(index), blocks, threads, call.stream, arguments);
            direct.order(&self.device, &kernel, &[], |stream| self.stream_of(stream))?;
            // SAFETY: the caller's contract; the scratch and the FIFOs live until all ranks have left them.
            unsafe { launch(&self.device, &kernel) }
        };
        enqueue().map_err(|error| self.refused(error, &announced))
    }
}
