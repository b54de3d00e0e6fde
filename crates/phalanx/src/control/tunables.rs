//! Tunables of the shared memory of a channel, in bytes unless they say otherwise. They are the same in every process of
//! a job. What is known of how they were chosen is said in `backend/host/tunables.rs`.

use crate::types::plain::MOST_COMBINED_BYTES;

/// Stamped lines of a slot behind its opening.
pub(crate) const SLOT_LINES: usize = 144;

/// Plain bytes of a slot behind its lines.
pub(crate) const SLOT_BYTES: usize = 8 << 10;

/// Chunks of a ring. With fewer, its writer waits for its readers; with more, it leaves the caches when it changes hands.
pub(crate) const FEWEST_CHUNKS: usize = 4;
pub(crate) const MOST_CHUNKS: usize = 8;

/// Bytes of a ring for exchanges.
pub(crate) const EXCHANGE_RING: usize = 512 << 10;

/// Bytes of a chunk of such a ring: two ranks have the most, since a step costs as much as copying some KiB between cores that share no cache.
pub(crate) const EXCHANGE_CHUNK: [usize; 2] = [64 << 10, 128 << 10];

/// Bytes of a chunk of a ring for one way: shorter, since its readers have nothing to do until the first is there.
pub(crate) const ONE_WAY_CHUNK: [usize; 2] = [32 << 10, 128 << 10];

/// Bytes of a chunk for each peer, at least, so that the steps of a scattering operation do not get short.
pub(crate) const CHUNK_PER_RANK: usize = MOST_COMBINED_BYTES;

/// Unused bytes behind a chunk. A processor that reads the end of a chunk prefetches some pages behind it, and would take the next chunk
/// away from its writer. (In a ring for one way, that is what the reader wants next.)
pub(crate) const CHUNK_GAP: usize = 8 << 10;

/// Bytes of a ring for one way, and of a mailbox, among few ranks: more than the caches of its readers, so that a writer finds its lines in
/// a cache that both share.
pub(crate) const ONE_WAY_RING: usize = 2 << 20;

/// Bytes of all rings for one way, and of the mailboxes of a rank: each shrinks as the ranks grow.
pub(crate) const ONE_WAY_RINGS: usize = 64 << 20;
pub(crate) const MAILBOXES: usize = 8 << 20;

/// Chunks of a mailbox, at least; both directions between two ranks share them.
pub(crate) const FEWEST_MAIL_CHUNKS: usize = 4;

/// Bytes of a mailbox's piece and of its chunk: shares of so much for each rank, within bounds. Mailboxes are n².
pub(crate) const MAIL_PIECES: usize = 1 << 20;
pub(crate) const MAIL_PIECE: [usize; 2] = [4 << 10, 16 << 10];
pub(crate) const MAIL_CHUNKS: usize = 512 << 10;
pub(crate) const MAIL_CHUNK: usize = 128 << 10;

/// Message slots of a mailbox: a sender that has filled them looks how many are free, which takes that counter away from the receiver.
pub(crate) const MAIL_SLOTS: usize = 16;

/// Bytes that the kernel copies between two checks whether a peer has failed.
pub(crate) const KERNEL_COPY_STEP: usize = 1 << 20;
