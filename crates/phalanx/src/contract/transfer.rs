//! Messages between two ranks.

use super::Operation;
use crate::types::dtype::DType;
use crate::types::memory::{RawStream, Space};

/// The direction of a message, and its buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Send(*const u8),
    Recv(*mut u8),
}

impl Direction {
    /// The operation of this direction.
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
    pub space: Space,
    /// The stream on which it is enqueued.
    pub stream: RawStream,
}

impl Transfer {
    /// The operation: a send or a receive.
    pub fn operation(&self) -> Operation {
        self.direction.operation()
    }

    /// A message between buffers in host memory.
    pub fn host(direction: Direction, peer: usize, tag: u32, dtype: DType, count: usize) -> Transfer {
        Transfer { direction, peer, tag, dtype, count, space: Space::Host, stream: RawStream::NONE }
    }
}

// SAFETY: a transfer only describes memory; the contract of `Backend::post` says how long it lives, on any thread.
unsafe impl Send for Transfer {}

/// A posted transfer or started collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OperationId(pub usize);
