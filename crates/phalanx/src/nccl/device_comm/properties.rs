//! Queries the properties of a communicator, as far as the loaded release reports them.

use crate::nccl::Nccl;
use crate::types::error::{Error, Result};
use phalanx_sys::nccl::{gin_connection, gin_type, ncclCommProperties_t, version_code};
use std::ffi::c_int;

/// Ranks that GPU-initiated networking (GIN) connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GinConnection {
    /// All ranks.
    Full,
    /// Ranks of a [`Rail`](crate::nccl::TeamKind::Rail) team (2.29.7).
    Rail,
    /// Ranks at this stride (2.31).
    Stride(i32),
}

/// Implementation of GPU-initiated networking (`ncclGinType_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GinType {
    /// A host thread does the networking.
    Proxy,
    /// The GPU does the networking, with Mellanox's adapters.
    Gdaki,
    /// The GPU does the networking, through a plugin (2.30.7).
    Gpi,
    /// The GPU does the networking, with Amazon's adapters (2.31).
    EfaGda,
    /// A type that this version of phalanx does not know.
    Other(i32),
}

impl GinType {
    /// `None` for no networking.
    fn from_code(code: c_int) -> Option<GinType> {
        match code {
            gin_type::NONE => None,
            gin_type::PROXY => Some(GinType::Proxy),
            gin_type::GDAKI => Some(GinType::Gdaki),
            gin_type::GPI => Some(GinType::Gpi),
            gin_type::EFA_GDA => Some(GinType::EfaGda),
            other => Some(GinType::Other(other)),
        }
    }

    pub(super) fn code(self) -> c_int {
        match self {
            GinType::Proxy => gin_type::PROXY,
            GinType::Gdaki => gin_type::GDAKI,
            GinType::Gpi => gin_type::GPI,
            GinType::EfaGda => gin_type::EFA_GDA,
            GinType::Other(code) => code,
        }
    }
}

/// Properties of a communicator (`ncclCommProperties_t`, 2.29.2). A property that the loaded release does not
/// report is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Properties {
    /// NVML's number of its GPU.
    pub nvml_gpu: i32,
    /// Whether it supports [device communicators](crate::nccl::Nccl::device_comm).
    pub device_api: bool,
    /// Whether NVLink multicast is available.
    pub multimem: bool,
    /// GPU-initiated networking between all ranks; `None` if there is none.
    pub gin: Option<GinType>,
    /// Number of [`Lsa`](crate::nccl::TeamKind::Lsa) teams (2.29.7).
    pub lsa_teams: Option<usize>,
    /// Whether put and signal of the host work (2.29.7).
    pub host_rma: Option<bool>,
    /// As `gin`, in [`Rail`](crate::nccl::TeamKind::Rail) teams (2.29.7).
    pub rail_gin: Option<Option<GinType>>,
    /// Hash of the communicator: equal on all its ranks, and almost surely different for other communicators
    /// (2.31).
    pub comm_hash: Option<u64>,
    /// The smallest stride of [`GinConnection::Stride`](crate::nccl::GinConnection::Stride) (2.31).
    pub gin_min_stride: Option<i32>,
    /// Ranks that GPU-initiated networking can connect (2.31). For a stride, see `gin_min_stride`.
    pub gin_connection: Option<Option<GinConnection>>,
    /// Types that can be requested in
    /// [`DeviceRequirements::gin_type`](crate::nccl::DeviceRequirements::gin_type) (2.31).
    pub gin_types: Option<Vec<GinType>>,
    /// Support of logical endpoints: at all, with multicast, with counters (2.32).
    pub cft: Option<(bool, bool, bool)>,
}

impl Nccl<'_> {
    pub(super) fn raw_properties(&self) -> Result<ncclCommProperties_t> {
        let communicator = &self.comm.communicator;
        let library = communicator.library;
        let name = "ncclCommQueryProperties";
        let query = library.need(library.ncclCommQueryProperties, name)?;
        let properties = ncclCommProperties_t::for_version(library.version());
        let mut properties = properties.ok_or_else(|| Error::from(library.lacks(name)))?;
        // SAFETY: a usable communicator; the structure is written during the call.
        communicator.call(name, |comm| unsafe { query(comm, &raw mut properties) })?;
        Ok(properties)
    }

    /// Queries what the communicator supports (`ncclCommQueryProperties`, 2.29.2).
    ///
    /// # Errors
    /// [`Error::MissingFunction`](crate::Error::MissingFunction) if the library is too old for it.
    pub fn properties(&self) -> Result<Properties> {
        let raw = self.raw_properties()?;
        let version = self.comm.communicator.library.version();
        let has = |minor, patch| version >= version_code(2, minor, patch);
        let connection = match raw.ginConnectionType {
            gin_connection::FULL => Some(GinConnection::Full),
            gin_connection::RAIL => Some(GinConnection::Rail),
            gin_connection::CUSTOM_STRIDE => Some(GinConnection::Stride(raw.ginMinStride)),
            _ => None,
        };
        let supported = |code: &usize| raw.ginSupport[*code];
        let types = || (0..raw.ginSupport.len()).filter(supported);
        Ok(Properties {
            nvml_gpu: raw.nvmlDev,
            device_api: raw.deviceApiSupport,
            multimem: raw.multimemSupport,
            gin: GinType::from_code(if has(29, 7) { raw.ginType } else { raw.ginType_v22902.into() }),
            lsa_teams: has(29, 7).then_some(raw.nLsaTeams as usize),
            host_rma: has(29, 7).then_some(raw.hostRmaSupport),
            rail_gin: has(29, 7).then_some(GinType::from_code(raw.railedGinType)),
            comm_hash: has(31, 0).then_some(raw.commHash),
            gin_min_stride: has(31, 0).then_some(raw.ginMinStride),
            gin_connection: has(31, 0).then_some(connection),
            gin_types: has(31, 0)
                .then(|| types().filter_map(|code| GinType::from_code(code as c_int)).collect()),
            cft: has(32, 0).then_some((raw.cftSupport, raw.cftMulticastSupport, raw.cftCountedSupport)),
        })
    }
}
