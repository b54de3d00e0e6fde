//! Values that every layer speaks of: element types, reduction operations, errors, addresses of memory.

pub(crate) mod bits;
#[cfg(feature = "jit")]
pub(crate) mod compile_error;
pub(crate) mod dtype;
pub(crate) mod error;
pub(crate) mod locate;
pub(crate) mod memory;
pub(crate) mod object_error;
pub(crate) mod op;
pub(crate) mod plain;
pub(crate) mod unchecked;

/// The most ranks of a communicator whose ranks know each other's state: a set of them is a bit for each.
pub(crate) const MAX_RANKS: usize = 4096;

/// The most ranks that meet in the memory of one host, which has a mailbox for each pair.
pub(crate) const MAX_HOST_RANKS: usize = 512;
