//! One rank's part in a collective.

#[cfg(feature = "nccl")]
use super::RmsNorm;
use super::{BackendKind, Operation};
#[cfg(feature = "_gpu")]
use crate::buffer::collective_config::RawCollectiveConfig;
use crate::buffer::stream::Stream;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::memory::{RawStream, Space, Span};
use crate::types::op::{CombineInOrder, RawReduction, ReductionCode};

/// The lengths of the ranks' blocks, in elements. Blocks are contiguous and in rank order.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Blocks<'a> {
    /// Every block has this many elements.
    Equal(usize),
    /// Rank r's block has `counts[r]` elements.
    Each(&'a [usize]),
}

impl Blocks<'_> {
    pub fn len(&self, rank: usize) -> usize {
        match self {
            Blocks::Equal(count) => *count,
            Blocks::Each(counts) => counts[rank],
        }
    }

    pub fn offset(&self, rank: usize) -> usize {
        match self {
            Blocks::Equal(count) => count * rank,
            Blocks::Each(counts) => counts[..rank].iter().sum(),
        }
    }

    pub fn longest(&self) -> usize {
        match self {
            Blocks::Equal(count) => *count,
            Blocks::Each(counts) => counts.iter().copied().max().unwrap_or(0),
        }
    }
}

/// One rank's part in a collective, checked.
///
/// What `send` and `recv` point to is given by the operation, with `blocks` as the unit:
///
/// | operation | `send` | `recv` |
/// |---|---|---|
/// | all_reduce, scan, broadcast, reduce | one block | one block |
/// | all_gather, gather | own block | all blocks |
/// | reduce_scatter, scatter | all blocks | own block |
/// | all_to_all | all blocks | all blocks |
///
/// In place, `send` and `recv` point into the same buffer. Where a rooted operation does not use a
/// pointer on this rank it is never read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    pub operation: Operation,
    pub dtype: DType,
    pub reduction: RawReduction,
    /// The combination of a reduction that knows its elements: of a closure, and of elements that are no numbers.
    pub custom: Option<&'a dyn CombineInOrder>,
    pub root: usize,
    pub send: *const u8,
    pub recv: *mut u8,
    /// Which memory `send` and `recv` are in: [`Space::Host`] unless the backend is one for GPUs.
    pub spaces: [Space; 2],
    pub blocks: Blocks<'a>,
    /// The blocks of `recv`: the same, but for all_to_all_v, where `blocks` are those of `send`.
    pub recv_blocks: Blocks<'a>,
    /// The stream on which the operation is enqueued.
    pub stream: RawStream,
    /// Where the factor of a pre-multiplied sum is: in `reduction` itself, or on the GPU at the address in `reduction`, which
    /// is read when the operation runs.
    #[cfg(feature = "_gpu")]
    pub factor_space: Space,
    /// Settings of this call.
    #[cfg(feature = "_gpu")]
    pub config: Option<&'a RawCollectiveConfig>,
    /// What an `all_reduce_rms_norm` does with the sum.
    #[cfg(feature = "nccl")]
    pub norm: Option<RmsNorm>,
}

impl<'a> Call<'a> {
    /// A fingerprint of the call's settings, or of what follows its sum; 0 without either.
    #[inline(always)]
    pub fn config_tag(&self) -> u8 {
        #[cfg(feature = "nccl")]
        if let Some(norm) = &self.norm {
            return norm.tag();
        }
        #[cfg(feature = "_gpu")]
        return self.config.map_or(0, RawCollectiveConfig::tag);
        #[cfg(not(feature = "_gpu"))]
        return 0;
    }

    /// Adds the settings of a stream.
    #[inline(always)]
    pub fn configured(self, #[cfg_attr(not(feature = "_gpu"), expect(unused))] stream: &'a Stream) -> Self {
        Call {
            #[cfg(feature = "_gpu")]
            config: stream.config(),
            ..self
        }
    }

    /// Whether its contributions are combined in rank order on every backend: no library has scans by rank order, nor closures.
    #[inline(always)]
    pub fn is_combined_in_order(&self) -> bool {
        self.operation.scans() || self.custom.is_some()
    }

    /// Whether it is combined by the ranks' processors on every backend for GPUs.
    #[inline(always)]
    pub fn is_combined_on_host(&self) -> bool {
        self.is_combined_in_order() || !self.reduction.code.is_of_gpus()
    }

    /// An error if a call that is combined on the host has buffers in GPU memory.
    pub fn check_combined_on_host(&self, backend: BackendKind) -> Result<()> {
        if !self.is_on_gpu() {
            return Ok(());
        }
        let by = match self.reduction.code {
            ReductionCode::Custom => " by a closure".to_owned(),
            code if code.is_of_gpus() => String::new(),
            code => format!(" by {}", code.name()),
        };
        Err(Error::from(UnsupportedError {
            what: format!("{}{by}, of GPU memory", self.operation.name()),
            why: format!(
                "the backend {backend} combines on the GPU what its library can, and this it has not"
            ),
            remedy: "copy the buffers to the host, or write a kernel (phalanx::jit)".into(),
        }))
    }

    /// Whether any buffer is in GPU memory.
    #[inline]
    pub fn is_on_gpu(&self) -> bool {
        #[cfg(feature = "_gpu")]
        return self.spaces.contains(&Space::Device);
        #[cfg(not(feature = "_gpu"))]
        return false;
    }

    /// Adds the buffers.
    #[inline(always)]
    pub fn with_buffers(self, send: Span, recv: Span) -> Self {
        Call { send: send.start, recv: recv.start, spaces: [send.space, recv.space], ..self }
    }

    /// A call without data.
    #[inline(always)]
    pub fn empty(operation: Operation) -> Call<'static> {
        Call {
            operation,
            dtype: DType::U8,
            reduction: RawReduction { code: ReductionCode::Sum, factor: 0 },
            custom: None,
            root: 0,
            send: std::ptr::null(),
            recv: std::ptr::null_mut(),
            spaces: [Space::Host; 2],
            blocks: Blocks::Equal(0),
            recv_blocks: Blocks::Equal(0),
            stream: RawStream::NONE,
            #[cfg(feature = "_gpu")]
            factor_space: Space::Host,
            #[cfg(feature = "_gpu")]
            config: None,
            #[cfg(feature = "nccl")]
            norm: None,
        }
    }
}
