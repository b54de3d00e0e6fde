//! One operation of a dry run.

use crate::types::dtype::DType;
use std::fmt;
use std::sync::Arc;

/// An operation that a rank would carry out: an entry in the list of [`dry_run`](crate::dry_run).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DryCall {
    /// The operation's name: `all_reduce`, `send`, ….
    pub operation: &'static str,
    /// Type of the elements; `None` for an operation without data.
    pub dtype: Option<DType>,
    /// Bytes of this rank's input.
    pub send_bytes: usize,
    /// Bytes of this rank's output.
    pub recv_bytes: usize,
    /// The communicator's ranks, as numbers in the whole job.
    pub members: Arc<[usize]>,
    /// The other end of a message, as a number in the whole job.
    pub peer: Option<usize>,
}

impl DryCall {
    /// The larger of input and output, by which benchmarks name an operation's size.
    pub fn bytes(&self) -> usize {
        self.send_bytes.max(self.recv_bytes)
    }
}

impl fmt::Display for DryCall {
    /// `all_gather of f32, 40 B in, 160 B out, 4 ranks from 0 to 6`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.operation)?;
        if let Some(dtype) = self.dtype {
            write!(f, " of {dtype}, {} B in, {} B out", self.send_bytes, self.recv_bytes)?;
        }
        if let Some(peer) = self.peer {
            return write!(f, ", peer {peer}");
        }
        match &*self.members {
            [only] => write!(f, ", rank {only} alone"),
            [first, .., last] => write!(f, ", {} ranks from {first} to {last}", self.members.len()),
            [] => Ok(()),
        }
    }
}
