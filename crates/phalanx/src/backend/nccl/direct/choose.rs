//! Choice between the library and phalanx's own kernels, and between the algorithms of these.
//!
//! [`choose`] alone decides, by what is the same on every rank. For example, an all_reduce of 40 KiB between two GPUs over NVLink goes by
//! LL128 in one hop, an all_gather of 8 KiB by LL, and a broadcast of 64 MiB to NCCL.

use super::tunables::*;
use crate::contract::{Call, Operation};
use crate::gpu::kernels::KernelModule;
use crate::types::dtype::DType;
use crate::types::error::UsageError;
use crate::types::memory::Space;
use crate::types::op::ReductionCode;

/// How data and flags share a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Ll,
    Ll128,
}

impl Protocol {
    pub fn step(self) -> usize {
        if self == Protocol::Ll { LL_STEP } else { LL128_STEP }
    }

    pub fn lanes(self) -> usize {
        if self == Protocol::Ll { LL_LANES } else { LL128_LANES }
    }
}

/// An own kernel for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Algorithm {
    pub module: KernelModule,
    pub protocol: Protocol,
    /// Whether an all_reduce combines a part on each rank, and gives it to all.
    pub two_hops: bool,
}

impl Algorithm {
    /// The kernel's place in its module.
    pub fn kernel(&self) -> usize {
        2 * usize::from(self.two_hops) + usize::from(self.protocol == Protocol::Ll128)
    }
}

/// What `PHALANX_GPU_ALGORITHM` asks for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Preference {
    /// The fastest.
    #[default]
    Auto,
    /// The library, for all.
    Library,
    /// Own kernels by this protocol, for all that have one; and whether all_reduces take two hops.
    Own { protocol: Protocol, two_hops: bool },
}

impl Preference {
    const NAMES: [(&str, Preference); 6] = [
        ("auto", Preference::Auto),
        ("nccl", Preference::Library),
        ("ll", Preference::Own { protocol: Protocol::Ll, two_hops: false }),
        ("ll128", Preference::Own { protocol: Protocol::Ll128, two_hops: false }),
        ("two_hops_ll", Preference::Own { protocol: Protocol::Ll, two_hops: true }),
        ("two_hops_ll128", Preference::Own { protocol: Protocol::Ll128, two_hops: true }),
    ];

    pub fn parse(name: &str, value: Option<&str>) -> Result<Preference, UsageError> {
        let Some(value) = value else { return Ok(Preference::Auto) };
        let found = Preference::NAMES.iter().find(|(name, _)| *name == value);
        found.map(|(_, preference)| *preference).ok_or_else(|| UsageError::Setting {
            name: name.into(),
            value: value.into(),
            expected: Preference::NAMES.map(|(name, _)| name).join(", "),
        })
    }

    /// One word, for comparison between the ranks.
    pub fn code(self) -> u64 {
        let place = Preference::NAMES.iter().position(|(_, preference)| *preference == self);
        place.expect("all are named") as u64
    }
}

/// What the choice depends on beside the call: the same on each rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuTopology {
    pub ranks: usize,
    /// Lines of 128 bytes arrive whole.
    pub nvlink: bool,
    pub preference: Preference,
}

/// The own kernel that carries a call out; `None` if the library does.
#[inline]
pub(crate) fn choose(call: &Call<'_>, topology: &GpuTopology) -> Option<Algorithm> {
    use Operation::*;
    let reduced = match call.operation {
        AllReduce | Reduce | ReduceScatter | ReduceScatterV => true,
        Broadcast | AllGather | AllGatherV | AllToAll | Gather | GatherV | Scatter | ScatterV => false,
        // Only the two ends of a block know its length.
        _ => return None,
    };
    let longest = call.blocks.longest() * call.dtype.size();
    // A call's settings are the library's.
    if longest == 0 || call.config.is_some() || topology.preference == Preference::Library {
        return None;
    }
    let module = if reduced { KernelModule::Reduce(call.dtype) } else { KernelModule::Move };
    // NCCL has no reductions of 16-bit integers.
    let only_own = reduced && matches!(call.dtype, DType::I16 | DType::U16);
    if let Preference::Own { protocol, two_hops } = topology.preference {
        let protocol = if topology.nvlink { protocol } else { Protocol::Ll };
        return Some(Algorithm { module, protocol, two_hops: two_hops && call.operation == AllReduce });
    }
    let limit = match call.operation {
        _ if !topology.nvlink => LONGEST_LL,
        AllGather | AllGatherV => LONGEST_GATHERED,
        _ => LONGEST,
    };
    if longest > limit && !only_own {
        return None;
    }
    let two_hops =
        call.operation == AllReduce && topology.ranks > 2 && longest * (topology.ranks - 1) > ONE_HOP;
    let hop = if two_hops { longest / topology.ranks } else { longest };
    let protocol = match topology.nvlink && hop > if reduced { LL_REDUCED } else { LL_MOVED } {
        true => Protocol::Ll128,
        false => Protocol::Ll,
    };
    Some(Algorithm { module, protocol, two_hops })
}

/// Whether a call that only own kernels could carry out, for its type, is empty on all ranks.
pub(crate) fn is_empty_of_own_type(call: &Call<'_>) -> bool {
    use Operation::*;
    let is_reduced = matches!(call.operation, AllReduce | Reduce | ReduceScatter | ReduceScatterV);
    is_reduced && matches!(call.dtype, DType::I16 | DType::U16) && call.blocks.longest() == 0
}

/// Whether a call can be carried out at all: a factor of a pre-multiplied sum in host memory, or on the GPU.
pub(crate) fn factor(call: &Call<'_>) -> (u64, bool) {
    let is_address = call.reduction.code == ReductionCode::PreMulSum && call.factor_space == Space::Device;
    (call.reduction.factor, is_address)
}
