//! Messages between two ranks.

use super::Operation;
use crate::types::dtype::{DType, Plain};
use crate::types::error::{Result, UsageError};
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

    /// 0 for a send, 1 for a receive.
    pub fn number(self) -> usize {
        usize::from(matches!(self, Direction::Recv(_)))
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

/// What is known of a message that has come and is not received yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope {
    /// The rank that sent it.
    pub source: usize,
    /// Its tag.
    pub tag: u32,
    /// Its length in bytes.
    pub bytes: usize,
}

impl Envelope {
    /// Its length in elements of a type.
    ///
    /// # Errors
    /// [`UsageError::Setting`](crate::UsageError::Setting) if it is no whole number of them.
    pub fn count<T: Plain>(&self) -> Result<usize> {
        let size = size_of::<T>();
        if self.bytes.is_multiple_of(size) {
            return Ok(self.bytes / size);
        }
        let name = format!("the message of rank {} with tag {}, as {}", self.source, self.tag, T::dtype());
        let (value, expected) = (format!("{} bytes", self.bytes), format!("a multiple of {size}"));
        Err(UsageError::Setting { name, value, expected }.into())
    }
}

/// Which messages a probe looks for: all, where it does not say.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub source: Option<usize>,
    pub tag: Option<u32>,
}

impl Wanted {
    pub fn includes(self, source: usize, tag: u32) -> bool {
        self.source.is_none_or(|wanted| wanted == source) && self.tag.is_none_or(|wanted| wanted == tag)
    }
}

/// A posted transfer or started collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OperationId(pub usize);
