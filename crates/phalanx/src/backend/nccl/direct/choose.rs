//! Choice between the library and phalanx's own kernels, and between the algorithms of these.
//!
//! [`choose`] alone decides, by what is the same on every rank. For example, an all_reduce of 40 KiB between two GPUs over NVLink goes by
//! LL128 in one hop, an all_gather of 8 KiB by LL, and a broadcast of 64 MiB to NCCL.

use super::tunables::*;
use crate::contract::{Call, Operation};
use crate::gpu::kernels::KernelModule;
use crate::rendezvous::environment::variable;
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
        match self.module {
            KernelModule::Norm(_) => 0,
            _ => 2 * usize::from(self.two_hops) + usize::from(self.protocol == Protocol::Ll128),
        }
    }
}

/// What carries collectives on GPUs out: NCCL, or phalanx's own kernels. See [`Config::gpu_algorithm`](super::super::Config).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GpuAlgorithm {
    /// The fastest for each call.
    #[default]
    Auto,
    /// NCCL, for all.
    Nccl,
    /// Own kernels, for all that have one: every rank sends each other what is for it, in packets of 4 bytes of data and 4 of flag.
    Ll,
    /// The same in lines of 120 bytes of data and 8 of flag, where these arrive whole (NVLink; else as `Ll`).
    Ll128,
    /// As `Ll`; in an all_reduce each rank combines a part, and gives it to all.
    TwoHopsLl,
    /// As `Ll128`, with all_reduces in two hops.
    TwoHopsLl128,
}

impl GpuAlgorithm {
    /// All, with their names as `PHALANX_GPU_ALGORITHM` has them.
    pub const NAMES: [(&str, GpuAlgorithm); 6] = [
        ("auto", GpuAlgorithm::Auto),
        ("nccl", GpuAlgorithm::Nccl),
        ("ll", GpuAlgorithm::Ll),
        ("ll128", GpuAlgorithm::Ll128),
        ("two_hops_ll", GpuAlgorithm::TwoHopsLl),
        ("two_hops_ll128", GpuAlgorithm::TwoHopsLl128),
    ];

    /// What a variable asks for.
    pub(crate) fn of_variable(name: &str) -> Result<GpuAlgorithm, UsageError> {
        let Some(value) = variable(name) else { return Ok(GpuAlgorithm::Auto) };
        let found = GpuAlgorithm::NAMES.iter().find(|(name, _)| *name == value);
        found.map(|(_, algorithm)| *algorithm).ok_or_else(|| UsageError::Setting {
            name: name.into(),
            value,
            expected: GpuAlgorithm::NAMES.map(|(name, _)| name).join(", "),
        })
    }

    /// The protocol of own kernels, and whether all_reduces take two hops; `None` unless own kernels are forced.
    fn forced(self) -> Option<(Protocol, bool)> {
        match self {
            GpuAlgorithm::Auto | GpuAlgorithm::Nccl => None,
            GpuAlgorithm::Ll => Some((Protocol::Ll, false)),
            GpuAlgorithm::Ll128 => Some((Protocol::Ll128, false)),
            GpuAlgorithm::TwoHopsLl => Some((Protocol::Ll, true)),
            GpuAlgorithm::TwoHopsLl128 => Some((Protocol::Ll128, true)),
        }
    }
}

/// What the choice depends on beside the call: the same on each rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuTopology {
    pub ranks: usize,
    /// Lines of 128 bytes arrive whole.
    pub nvlink: bool,
    pub algorithm: GpuAlgorithm,
}

/// The own kernel that carries a call out; `None` if the library does.
#[inline]
pub(crate) fn choose(call: &Call<'_>, topology: &GpuTopology) -> Option<Algorithm> {
    use Operation::*;
    let reduced = match call.operation {
        AllReduce | Reduce | ReduceScatter | ReduceScatterV => true,
        Broadcast | AllGather | AllGatherV | AllToAll | Gather | GatherV | Scatter | ScatterV => false,
        AllReduceRmsNorm => return fused(call, topology),
        // Only the two ends of a block know its length.
        _ => return None,
    };
    let longest = call.blocks.longest() * call.dtype.size();
    // NCCL has no reductions of 16-bit integers.
    let only_own = reduced && matches!(call.dtype, DType::I16 | DType::U16);
    // A call's settings are the library's.
    let by_library = call.config.is_some_and(|config| config.raw.is_some() || !only_own);
    if longest == 0 || by_library || topology.algorithm == GpuAlgorithm::Nccl {
        return None;
    }
    let module = if reduced { KernelModule::Reduce(call.dtype) } else { KernelModule::Move };
    if let Some((protocol, two_hops)) = topology.algorithm.forced() {
        let protocol = if topology.nvlink { protocol } else { Protocol::Ll };
        return Some(Algorithm { module, protocol, two_hops: two_hops && call.operation == AllReduce });
    }
    let peers = topology.ranks - 1;
    let limit = match call.operation {
        _ if !topology.nvlink => LONGEST_LL,
        AllReduce => LONGEST / topology.ranks.min(4),
        Broadcast | Reduce if peers > 1 => LONGEST_OF_ROOT / peers,
        Gather | GatherV | Scatter | ScatterV if peers > 1 => LONGEST_BLOCK_OF_ROOT / peers,
        _ => LONGEST / topology.ranks,
    };
    if longest > limit && !only_own {
        return None;
    }
    let two_hops = call.operation == AllReduce && topology.ranks > 2 && longest * peers > ONE_HOP;
    let hop = if two_hops { longest / topology.ranks } else { longest };
    let protocol = if topology.nvlink && hop > LONGEST_BY_LL { Protocol::Ll128 } else { Protocol::Ll };
    Some(Algorithm { module, protocol, two_hops })
}

/// The kernel that sums rows and normalises them, by LL128 in one hop; without it they are summed by an all_reduce.
fn fused(call: &Call<'_>, topology: &GpuTopology) -> Option<Algorithm> {
    let (bytes, peers) = (call.blocks.longest() * call.dtype.size(), topology.ranks - 1);
    let limit = if topology.ranks == 2 { LONGEST_ROWS } else { ONE_HOP / peers };
    let is_wanted = match topology.algorithm {
        GpuAlgorithm::Auto => bytes <= limit,
        algorithm => algorithm == GpuAlgorithm::Ll128,
    };
    let module = KernelModule::Norm(call.dtype);
    let algorithm = Algorithm { module, protocol: Protocol::Ll128, two_hops: false };
    (topology.nvlink && bytes > 0 && is_wanted).then_some(algorithm)
}

impl GpuTopology {
    /// The protocol of messages and of rows of several KiB.
    pub fn protocol_of_rows(&self) -> Protocol {
        let forced = self.algorithm.forced().map(|(protocol, _)| protocol);
        if self.nvlink { forced.unwrap_or(Protocol::Ll128) } else { Protocol::Ll }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::collective_config::RawCollectiveConfig;
    use crate::contract::Blocks;

    #[test]
    fn a_collective_beside_a_computation_goes_by_the_library() {
        let config = RawCollectiveConfig::of_library();
        for algorithm in [GpuAlgorithm::Auto, GpuAlgorithm::TwoHopsLl128] {
            let topology = GpuTopology { ranks: 2, nvlink: true, algorithm };
            for (dtype, only_own) in [(DType::F32, false), (DType::I16, true)] {
                let blocks = Blocks::Equal(1000);
                let alone = Call { dtype, blocks, ..Call::empty(Operation::AllReduce) };
                let beside = Call { config: Some(&config), ..alone };
                assert!(choose(&alone, &topology).is_some());
                // NCCL has no sum of 16-bit integers.
                assert_eq!(choose(&beside, &topology).is_some(), only_own);
            }
        }
    }
}
