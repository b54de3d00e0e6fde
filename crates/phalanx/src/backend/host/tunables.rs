//! Tunables of the host backend, in bytes unless they say otherwise. What shared memory is cut into stands in `control/tunables.rs`.
//!
//! The values were set by hand, over many changes. A line that names ranks, bytes or times says what was measured for it; for the other
//! values no comparison with their neighbours is recorded. `docs/benchmarks/host.md` measures what the algorithms bring, and compares the whole
//! backend with MPI libraries; it names the machines and the commits.

// --- slots -------------------------------------------------------------------------------------------

/// Stamped lines of a block, at most, between ranks that share memory. One line spares its reader a second wait; with more, plain bytes and
/// one stamp win, since polling a line takes it away from its writer.
pub(crate) const BLOCK_LINES: usize = 1;

/// Stamped lines of a block, at most, between hosts, where nothing but lines travels.
pub(crate) const BLOCK_LINES_BETWEEN_HOSTS: usize = 9;

/// Ranks that read from all, at most, of which each polls both lines of an opening. Among 8, 40 bytes in one line take half the time.
pub(crate) const BOTH_LINES_RANKS: usize = 5;

/// Bytes that a rank reads from its peers in an all_reduce by slots, at most, if it has a core of its own.
pub(crate) const SLOTS_READ: usize = 16 << 10;

// --- grid --------------------------------------------------------------------------------------------

/// Ranks of a grid, at least. 16 ranks take 1.7 µs for an all_reduce of 256 bytes by slots, and 3.0 µs in a grid.
pub(crate) const GRID_RANKS: usize = 24;

/// Bytes of an all_reduce for each rank of a grid, at most. The hardware prefetches longer ones better in plain bytes.
pub(crate) const GRID_BYTES_PER_RANK: usize = 32;

/// Bytes of an all_reduce in a grid, at most: all that its rounds write must fit in the lines of a slot.
pub(crate) const GRID_BYTES: usize = 2 << 10;

// --- one-phase, two-phase ----------------------------------------------------------------------------

/// Bytes that a rank reads from its peers in an all_reduce in one phase, at most.
pub(crate) const ONE_PHASE_READ: usize = 64 << 10;

/// Bytes that two phases spare a rank of reading, at least, to be worth a second wait. Ranks that share a core do not compare: a wait is
/// another turn of all of them.
pub(crate) const TWO_PHASE_SAVING: usize = 8 << 10;

/// Chunks that a writer is ahead of its readers, so that they find work; and of ranks that share a core.
pub(crate) const LEAD: usize = 1;
pub(crate) const LEAD_CROWDED: usize = 3;

/// Bytes of a step of two ranks, for a block that is the same for all.
pub(crate) const STEP_OF_TWO: usize = 32 << 10;

/// Bytes of a step of two ranks, for blocks of up to two steps, and pairwise exchanges.
pub(crate) const LONG_STEP_OF_TWO: usize = 64 << 10;

/// Results from this size on are stored past the caches: the last-level cache would only pass them on.
pub(crate) const STREAMING: usize = 8 << 20;

/// The same where data goes one way. The loads of a streaming copy leave lines with the reader, which its writer has to get back.
pub(crate) const STREAMING_ONE_WAY: usize = 16 << 20;

// --- push --------------------------------------------------------------------------------------------

/// Bytes of an all_reduce that is pushed among more than two ranks, at least. Shorter results are better in the cache of their reader. Two
/// ranks push whatever does not go by slots (2 pinned threads in place, 2026-11-27: 32 KiB took 5.0 µs in one phase, and 2.6 by push).
pub(crate) const PUSH: usize = 1 << 20;

/// Bytes from which a push past the caches of peers is tried. It saves much between cores that share no cache, and nothing between others.
pub(crate) const PUSH_STREAMING: usize = 1 << 20;

/// Part of the time that a push past the caches must save, since its readers load the result from memory.
pub(crate) const PUSH_STREAMING_SAVING: f64 = 1.0 / 16.0;

/// Bytes that a rank pushes between two looks whether a peer has failed.
pub(crate) const PUSH_STEP: usize = 512 << 10;

// --- pairwise, kernel copy ---------------------------------------------------------------------------

/// Bytes of a step of a pairwise exchange among more than two ranks. With 128 KiB, the chunks under way do not stay in the caches.
pub(crate) const PAIRWISE_STEP: usize = 32 << 10;

/// Bytes of a block that the kernel copies between processes, at least. At half of this the two are within a tenth of each other, so that a
/// trial there says nothing about longer blocks (H100's host, 2 processes, 2026-11-27: 2 MiB took 536 µs after one, and 422 without).
pub(crate) const KERNEL_COPY: usize = 512 << 10;

/// Bytes of a rank's own block, from which it is stored past the caches beside a kernel copy.
pub(crate) const KERNEL_COPY_STREAMING: usize = 4 << 20;

// --- trials ------------------------------------------------------------------------------------------

/// Operations in a row by one algorithm: first the usual one, then the other, then the usual one again. Every operation gets faster in the
/// first milliseconds of a buffer, and finds the caches as the operation before has left them.
pub(crate) const TRIAL_STRETCH: u32 = 10;

// --- messages ----------------------------------------------------------------------------------------

/// Bytes of a message, at most, that is copied even if its receiver can read the sender's buffer: the sender need not wait.
pub(crate) const MESSAGE_COPIED: usize = 4 << 10;

/// Bytes of a sender's buffer that are read between two looks whether a peer has failed.
pub(crate) const MESSAGE_STEP: usize = 256 << 10;

/// A message from this size on is stored past the caches.
pub(crate) const MESSAGE_STREAMING: usize = 8 << 20;

/// Polls of a wait for a message, before it is left to the endpoint's wait, which sleeps; and of ranks that share a core.
pub(crate) const MESSAGE_POLLS: u32 = 200;
pub(crate) const MESSAGE_POLLS_CROWDED: u32 = 4;

// --- all_to_all_v in place ---------------------------------------------------------------------------

/// Bytes of copies that are under way at once, at least.
pub(crate) const EXCHANGE_COPIES: usize = 1 << 20;

/// Bytes of memory for copies that are kept for the next call, at most.
pub(crate) const EXCHANGE_KEPT: usize = 4 << 20;
