//! Settings of single collectives.

use super::config::{needs, text};
use super::library::Library;
use crate::buffer::collective_config::RawCollectiveConfig;
use crate::types::error::Result;
use phalanx_sys::nccl::{ncclCollConfig_t, version_code};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Settings of single collectives (`ncclCollConfig_t`, NCCL 2.31), for
/// [`Nccl::configured`](crate::nccl::Nccl::configured). What is not set is the communicator's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CollectiveConfig {
    /// Fewest thread blocks.
    pub min_ctas: Option<i32>,
    /// Most thread blocks, no more than the communicator's.
    pub max_ctas: Option<i32>,
    /// Most thread blocks for NVLink SHARP.
    pub nvls_ctas: Option<i32>,
    /// Thread blocks in a cluster, 0 to 8; the same for all operations of a group.
    pub cga_cluster_size: Option<i32>,
    /// How thread blocks are given out: bits of 0 default, 1 efficiency, 2 none.
    pub cta_policy: Option<i32>,
    /// Which algorithms may be used: a selection in the library's words.
    pub algorithms: Option<String>,
    /// Whether a selection that cannot be had is left to the library instead of being an error.
    pub algorithms_may_differ: bool,
    /// What profiler plugins are told with the operation; 0 for nothing. Values from 2⁶³ up are NCCL's own.
    pub profiler_tag: u64,
}

impl CollectiveConfig {
    /// In the layout of the loaded library.
    pub(crate) fn raw(&self, library: &Library) -> Result<Arc<RawCollectiveConfig>> {
        let since = version_code(2, 31, 0);
        let raw = ncclCollConfig_t::for_version(library.version())
            .filter(|_| library.ncclAllReduceConfig.is_some());
        let Some(mut raw) = raw else {
            needs(library, "of single collectives", since, false)?;
            unreachable!("refused");
        };
        let ints = [
            (self.min_ctas, &mut raw.minCTAs),
            (self.max_ctas, &mut raw.maxCTAs),
            (self.nvls_ctas, &mut raw.nvlsCTAs),
            (self.cga_cluster_size, &mut raw.cgaClusterSize),
            (self.cta_policy, &mut raw.CTAPolicy),
        ];
        for (value, field) in ints {
            *field = value.unwrap_or(*field);
        }
        let algorithms = self.algorithms.as_deref().map(|names| text("algorithms", names)).transpose()?;
        if let Some(algorithms) = &algorithms {
            raw.algSelection = algorithms.as_ptr();
        }
        raw.forceAlgSelection = i32::from(!self.algorithms_may_differ);
        raw.userProfilerTag = self.profiler_tag;
        Ok(Arc::new(RawCollectiveConfig { raw: Some(raw), tag: self.tag(), algorithms }))
    }

    fn tag(&self) -> u8 {
        // Of what is compared only: a profiler's tag makes no difference to the other ranks.
        let compared = CollectiveConfig { profiler_tag: 0, ..self.clone() };
        let mut hasher = DefaultHasher::new();
        compared.hash(&mut hasher);
        (hasher.finish() % 255) as u8 + 1
    }
}
