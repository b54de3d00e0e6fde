//! Requirements of a device communicator, and their form in the loaded release.

use super::properties::{GinConnection, GinType};
use super::teams::Team;
use crate::backend::nccl::config::needs;
use crate::backend::nccl::library::Library;
use crate::types::error::{Error, Result, UsageError};
use phalanx_sys::nccl::{cft_caps, gin_connection, ncclDevCommRequirements_t, version_code};
use std::hash::{DefaultHasher, Hash, Hasher};

/// An additional resource of a device communicator; kernels use it by its
/// [handle](crate::nccl::DeviceComm::resources).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Resource {
    /// Zeroed memory on each rank, which other ranks access like a window.
    Buffer {
        /// Length in bytes.
        bytes: usize,
        /// Alignment of its start in bytes: a power of two, at least 128.
        align: usize,
    },
    /// Barriers of a team whose ranks reach each other's memory (`ncclLsaBarrierCreateRequirement`).
    LsaBarriers {
        /// The team.
        team: Team,
        /// Number of barriers; kernels number them from 0.
        count: i32,
    },
    /// Slots for an all-to-all with little latency (`ncclLLA2ACreateRequirement`): how many a block needs is
    /// [`all_to_all_slots`](crate::nccl::Nccl::all_to_all_slots).
    AllToAllSlots {
        /// Number of blocks.
        blocks: i32,
        /// Slots for each block.
        slots: i32,
    },
}

/// A kernel's handle of a [`Resource`](crate::nccl::Resource).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ResourceHandle(pub(super) [u32; 2]);

impl ResourceHandle {
    /// Handle of a buffer (`ncclDevResourceHandle`): its offset in units of 128 bytes.
    pub fn buffer(self) -> u32 {
        self.0[0]
    }

    /// Handle of another resource (`ncclLsaBarrierHandle`, `ncclLLA2AHandle`), to be passed by value.
    pub fn words(self) -> [u32; 2] {
        self.0
    }
}

/// Requirements of a [`DeviceComm`](crate::nccl::DeviceComm) (`ncclDevCommRequirements_t`). By default only
/// ranks and windows. All ranks must request the same.
///
/// A field that the loaded release does not know is an error that names the first release with it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DeviceRequirements {
    /// Barriers of the [`Lsa`](crate::nccl::TeamKind::Lsa) team (`ncclLsaBarrierSession`): a kernel uses one
    /// for each block, or part of the work, that waits for its counterparts on the other ranks.
    pub lsa_barriers: i32,
    /// Whether to create multicast addresses for the `Lsa` team (NVLink SHARP). The library returns an error
    /// without [`Properties::multimem`](crate::nccl::Properties::multimem).
    pub lsa_multimem: bool,
    /// Barriers of all ranks, over memory and the network (2.28.7).
    pub barriers: i32,
    /// Barriers of the [`Rail`](crate::nccl::TeamKind::Rail) team, over the network (2.28.7).
    pub rail_gin_barriers: i32,
    /// Barriers of all ranks, over the network (2.30.3).
    pub world_gin_barriers: i32,
    /// GPU-initiated networking (GIN) between these ranks (2.28.7). All other `gin` fields, and barriers over
    /// the network, require it.
    pub gin: Option<GinConnection>,
    /// Approximate number of GIN contexts (2.28.7); default 4.
    pub gin_contexts: Option<i32>,
    /// Number of GIN signals, numbered from 0 (2.28.7).
    pub gin_signals: i32,
    /// Number of GIN counters, numbered from 0 (2.28.7).
    pub gin_counters: i32,
    /// Whether the GIN contexts are exclusive to this device communicator (2.29.7).
    pub gin_exclusive_contexts: bool,
    /// Depth of the GIN queues (2.29.7); `None` is the library's choice.
    pub gin_queue_depth: Option<i32>,
    /// Traffic class of GIN (2.30.3).
    pub gin_traffic_class: Option<i32>,
    /// False if no kernel uses strong signals (2.30.7).
    pub gin_strong_signals: Option<bool>,
    /// False if no kernel signals addresses (2.30.7).
    pub gin_va_signals: Option<bool>,
    /// Implementation of GIN (2.31); `None` is the library's choice.
    pub gin_type: Option<GinType>,
    /// Whether to create logical endpoints (2.31).
    pub cft: bool,
    /// Whether to create logical endpoints for multicast (2.31).
    pub cft_multimem: bool,
    /// Barriers by logical endpoints (2.31).
    pub cft_barriers: i32,
    /// Additional resources, in the order of their handles in
    /// [`DeviceComm::resources`](crate::nccl::DeviceComm::resources).
    pub resources: Vec<Resource>,
    /// Teams that need a multicast address, in the order of
    /// [`DeviceComm::multimem`](crate::nccl::DeviceComm::multimem).
    pub multimem_teams: Vec<Team>,
}

impl DeviceRequirements {
    /// Fingerprint by which ranks compare their requirements.
    pub(super) fn tag(&self) -> u32 {
        // Excludes the rank's own number in a team.
        let everybodys = |team: &Team| Team { rank: 0, ..*team };
        let resource = |resource: &Resource| match resource {
            Resource::LsaBarriers { team, count } => {
                Resource::LsaBarriers { team: everybodys(team), count: *count }
            }
            other => *other,
        };
        let compared = DeviceRequirements {
            resources: self.resources.iter().map(resource).collect(),
            multimem_teams: self.multimem_teams.iter().map(everybodys).collect(),
            ..self.clone()
        };
        let mut hasher = DefaultHasher::new();
        compared.hash(&mut hasher);
        hasher.finish() as u32
    }

    /// In the layout of the loaded library; without the lists.
    pub(super) fn raw(&self, library: &Library) -> Result<ncclDevCommRequirements_t> {
        let raw = ncclDevCommRequirements_t::for_version(library.version());
        let mut raw = raw.ok_or_else(|| Error::from(library.lacks("ncclDevCommCreate")))?;
        let since = |setting, minor, patch| needs(library, setting, version_code(2, minor, patch), true);
        let number = |name: &'static str, value: i32, minor, patch| {
            if value < 0 {
                return Err(negative(name, value));
            }
            if value > 0 {
                since(name, minor, patch)?;
            }
            Ok(value)
        };
        raw.lsaBarrierCount = number("lsa_barriers", self.lsa_barriers, 28, 3)?;
        raw.lsaMultimem = self.lsa_multimem;
        raw.barrierCount = number("barriers", self.barriers, 28, 7)?;
        raw.railGinBarrierCount = number("rail_gin_barriers", self.rail_gin_barriers, 28, 7)?;
        raw.worldGinBarrierCount = number("world_gin_barriers", self.world_gin_barriers, 30, 3)?;
        raw.ginSignalCount = number("gin_signals", self.gin_signals, 28, 7)?;
        raw.ginCounterCount = number("gin_counters", self.gin_counters, 28, 7)?;
        raw.cftBarrierCount = number("cft_barriers", self.cft_barriers, 31, 0)?;
        if let Some(contexts) = self.gin_contexts {
            since("gin_contexts", 28, 7)?;
            raw.ginContextCount = number("gin_contexts", contexts, 28, 7)?;
        }
        if let Some(depth) = self.gin_queue_depth {
            since("gin_queue_depth", 29, 7)?;
            raw.ginQueueDepth = number("gin_queue_depth", depth, 29, 7)?;
        }
        if self.gin_exclusive_contexts {
            since("gin_exclusive_contexts", 29, 7)?;
            raw.ginExclusiveContexts = true;
        }
        if let Some(class) = self.gin_traffic_class {
            since("gin_traffic_class", 30, 3)?;
            raw.ginTrafficClass = class;
        }
        if let Some(strong) = self.gin_strong_signals {
            since("gin_strong_signals", 30, 7)?;
            raw.ginStrongSignalsRequired = strong;
        }
        if let Some(va) = self.gin_va_signals {
            since("gin_va_signals", 30, 7)?;
            raw.ginVaSignalsRequired = va;
        }
        if let Some(ty) = self.gin_type {
            since("gin_type", 31, 0)?;
            raw.ginType = ty.code();
        }
        for (name, asked, bit) in
            [("cft", self.cft, cft_caps::CFT), ("cft_multimem", self.cft_multimem, cft_caps::MULTIMEM)]
        {
            if asked {
                since(name, 31, 0)?;
                raw.cftCaps |= bit;
            }
        }
        self.connect(library, &mut raw)?;
        Ok(raw)
    }

    fn connect(&self, library: &Library, raw: &mut ncclDevCommRequirements_t) -> Result<()> {
        let since = |setting, minor, patch| needs(library, setting, version_code(2, minor, patch), true);
        match self.gin {
            None => {}
            // Before 2.29.7 there were no kinds of connections.
            Some(GinConnection::Full) if library.version() < version_code(2, 29, 7) => {
                since("gin", 28, 7)?;
                raw.ginForceEnable = true;
            }
            Some(GinConnection::Full) => raw.ginConnectionType = gin_connection::FULL,
            Some(GinConnection::Rail) => {
                since("gin, between ranks of a rail,", 29, 7)?;
                raw.ginConnectionType = gin_connection::RAIL;
            }
            Some(GinConnection::Stride(stride)) => {
                since("gin, with a stride,", 31, 0)?;
                if stride < 1 {
                    return Err(negative("gin: the stride", stride));
                }
                raw.ginConnectionType = gin_connection::CUSTOM_STRIDE;
                raw.ginCustomStride = stride;
            }
        }
        Ok(())
    }
}

pub(super) fn negative(name: &str, value: i32) -> Error {
    let expected = "a number of things, none or more; of a stride, 1 or more".to_owned();
    UsageError::Setting { name: format!("device_comm: {name}"), value: value.to_string(), expected }.into()
}
