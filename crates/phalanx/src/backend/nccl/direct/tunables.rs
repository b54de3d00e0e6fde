//! Sizes and thresholds of phalanx's own kernels. Measured between two and four H200 over NVLink, 2026-11-29, with
//! `docs/benchmarks/gpus.py --modes algorithms` (see docs/benchmarks/gpu-kernels.md).

/// Most ranks of a communicator: threads of a warp keep the numbers of one peer each, in half a warp.
pub(crate) const MAX_RANKS: usize = 16;

/// Bytes that a rank's memory holds for one peer (`Inbox` in gpu/kernels/fifo.cuh).
pub(crate) const INBOX_BYTES: usize = 4_755_456;

/// Bytes of data in a step of a lane, and the number of lanes, by protocol.
pub(crate) const LL_STEP: usize = 512;
pub(crate) const LL_LANES: usize = 128;
pub(crate) const LL128_STEP: usize = 960;
pub(crate) const LL128_LANES: usize = 1024;

/// Longest block, in bytes, that goes by LL; longer ones by LL128.
pub(crate) const LONGEST_BY_LL: usize = 32 << 10;

/// Longest call or message where GPUs reach each other over PCIe, by LL alone.
pub(crate) const LONGEST_LL: usize = 64 << 10;
/// Longest call that goes by an own kernel over NVLink, in bytes of a block times ranks; NCCL carries longer ones out (two and four H200, 2026-11-29).
/// Of an all_reduce's ranks up to four count.
pub(crate) const LONGEST: usize = 64 << 20;
/// Longest message among up to four ranks; among more it is shorter, as a message's lanes are fewer.
pub(crate) const LONGEST_MESSAGE: usize = 32 << 20;
/// Among more than two ranks, in bytes times peers: broadcasts and reductions with a root, whose link carries all; and blocks that a root gathers
/// or scatters.
pub(crate) const LONGEST_OF_ROOT: usize = 2 << 20;
pub(crate) const LONGEST_BLOCK_OF_ROOT: usize = 4 << 20;
/// Longest rows that one kernel sums and normalises between two ranks.
pub(crate) const LONGEST_ROWS: usize = 8 << 20;

/// Longest all_reduce, in bytes times peers, in which every rank sends everything to every other; longer ones take two hops.
pub(crate) const ONE_HOP: usize = 768 << 10;

/// Most warps of a block that normalises rows, and most steps of a row (`MAX_WARPS`, `MAX_STEPS` in gpu/kernels/norm.cu).
pub(crate) const NORM_WARPS: usize = 18;
pub(crate) const NORM_ROW_STEPS: usize = 36;

/// Most messages of a launch (`MOST` in gpu/kernels/messages.cu).
pub(crate) const MESSAGES: usize = 32;

/// Warps of a block of experts' kernels, and most blocks: four communicators' fit on an H100 at once.
pub(crate) const EXPERT_WARPS: usize = 8;
pub(crate) const EXPERT_BLOCKS: usize = 96;

/// Most warps of a kernel that is launched while the one before it runs (`OVERLAPPED` in gpu/kernels/fifo.cuh).
pub(crate) const OVERLAPPED: u32 = 512;

/// Most warps of a block.
pub(crate) const WARPS: usize = 8;
/// Lanes up to which every block has one warp, so that the blocks spread over the GPU.
pub(crate) const SPREAD: usize = 128;
