//! Addresses of host and GPU memory, and raw streams; the identity of a GPU.

use serde::{Deserialize, Serialize};

/// Which memory an address is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Host,
    Device,
}

/// Where a buffer starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub start: *mut u8,
    pub space: Space,
}

impl Span {
    #[inline]
    pub fn host(start: *mut u8) -> Span {
        Span { start, space: Space::Host }
    }

    pub fn device(address: u64) -> Span {
        Span { start: address as *mut u8, space: Space::Device }
    }

    /// So many bytes further.
    pub fn at(self, bytes: usize) -> Span {
        Span { start: self.start.wrapping_add(bytes), ..self }
    }
}

/// A stream of a GPU (`cudaStream_t`, `hipStream_t`); null for host backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawStream(pub *mut std::ffi::c_void);

impl RawStream {
    pub const NONE: RawStream = RawStream(std::ptr::null_mut());
}

/// Memory that a backend gave out: address and what keeps it alive.
pub(crate) struct Allocation {
    pub start: *mut u8,
    /// Gives the memory back when dropped.
    pub keep: Box<dyn Send + Sync>,
}

/// A GPU, however processes number it: its UUID, or (AMD's) its place on the host's buses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct GpuId(pub [u8; 16]);

#[cfg(feature = "nccl")]
impl GpuId {
    /// It in two words, for memory that ranks share.
    pub fn words(&self) -> [u64; 2] {
        let (words, _) = self.0.as_chunks();
        [words[0], words[1]].map(u64::from_ne_bytes)
    }

    pub fn from_words(words: [u64; 2]) -> GpuId {
        GpuId(std::array::from_fn(|i| words[i / 8].to_ne_bytes()[i % 8]))
    }
}
