//! The values by which algorithms are chosen and waits are made. They are not measured yet.

use std::ffi::CStr;
use std::time::Duration;

/// Polls of a wait before it yields, if every rank of this host has a core.
pub(super) const POLLS: u32 = 200;
/// The same, if ranks share cores.
pub(super) const POLLS_CROWDED: u32 = 4;

/// The receiver fetches longer messages to their place. UCX would put others together in memory that it asks the system for each time, and
/// from there they are copied: measured with TCP, 256 KiB then take 2 to 4 times as long.
pub(super) const FETCHED: usize = 128 << 10;

/// What UCX copies to a TCP connection at once, as it reads such sizes. Measured between two hosts that share two cores: most long operations
/// take 0.6 to 0.9 of the time that they take with 64 KiB, its default (docs/benchmarks/hosts.py, and with UCX_TCP_RX_SEG_SIZE=64k).
pub(super) const TCP_SEGMENT: &CStr = c"256k";

/// Bytes that one message of a window combines, or moves with a stride. They come with their message, so it is shorter than [`FETCHED`].
pub(super) const ACCESSED_AT_ONCE: usize = 64 << 10;

/// Bytes of a piece of a long reduction, of each rank. The next piece is under way while one is combined.
pub(super) const PIECE: usize = 256 << 10;

/// Pieces of that length that a broadcast between two hosts sends as one.
pub(super) const PIECES_TOGETHER: usize = 4;

/// An all_reduce goes in one phase if a rank gets at most so many bytes in it.
pub(super) const ONE_PHASE: usize = 16 << 10;

/// The same, of two ranks.
pub(super) const ONE_PHASE_OF_TWO: usize = 256 << 10;

/// An all_reduce of more bytes is shared out to the ranks of a host, if all hosts have as many.
pub(super) const BY_PLACE: usize = 64 << 10;

/// A broadcast of more bytes goes in parts: each rank passes one on.
pub(super) const BROADCAST_IN_PARTS: usize = 64 << 10;

/// Ranks from which on short operations go in rounds, in which a rank sends to one other.
pub(super) const ROUNDS: usize = 5;

/// The same for blocks: with fewer ranks, rounds take as long as all messages at once, and longer where ranks share cores.
pub(super) const ROUNDS_OF_BLOCKS: usize = 8;

/// A rank takes part in rounds with blocks of at most so many bytes: each is passed on by others, too.
pub(super) const IN_ROUNDS: usize = 4 << 10;

/// Ranks from which on short blocks go to and from a root along a tree.
pub(super) const TREE: usize = 16;

/// Longest blocks of an all_to_all that all ranks of a host send together: they are copied four times more.
pub(super) const EXCHANGE_BY_HOST: usize = 1 << 10;

/// Longest blocks of a gather or scatter that go through a leader of each host.
pub(super) const GATHER_BY_HOST: usize = 16 << 10;

/// A connection that has broken is a reason to fail after this time. Before, the store may know more.
pub(super) const BROKEN: Duration = Duration::from_secs(3);

/// How long peers may take to drop what this rank has given up, before it closes its connections to them.
pub(super) const GIVING_UP: Duration = Duration::from_millis(500);
/// How long UCX may take to let go of buffers after that.
pub(super) const LETTING_GO: Duration = Duration::from_secs(20);

/// How long the records of a rank that called something else may take to come over the store.
pub(super) const RECORDS_COME: Duration = Duration::from_secs(2);
