//! Messages between two ranks.

use super::Operation;
use crate::types::dtype::DType;
use crate::types::memory::{RawStream, Space};

/// Which way a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Send(*const u8),
    Recv(*mut u8),
}

impl Direction {
    /// What the call is called.
    pub fn operation(self) -> Operation {
        match self {
            Direction::Send(_) => Operation::Send,
            Direction::Recv(_) => Operation::Recv,
        }
    }
}

/// One message to or from a peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    pub direction: Direction,
    pub peer: usize,
    pub tag: u32,
    pub dtype: DType,
    /// Elements.
    pub count: usize,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "without GPUs all memory is the host's"))]
    pub space: Space,
    /// Behind whose work it comes.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "without GPUs all memory is the host's"))]
    pub stream: RawStream,
}

impl Transfer {
    /// What it is called.
    pub fn operation(&self) -> Operation {
        self.direction.operation()
    }

    /// A message between buffers in host memory.
    pub fn host(direction: Direction, peer: usize, tag: u32, dtype: DType, count: usize) -> Transfer {
        Transfer { direction, peer, tag, dtype, count, space: Space::Host, stream: RawStream::NONE }
    }
}

// SAFETY: a transfer is a description; the contract of `Backend::post` says how long its memory lives,
// whichever thread looks at it.
unsafe impl Send for Transfer {}

/// A posted transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OperationId(pub usize);
