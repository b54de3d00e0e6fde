//! Settings of a communicator.

use super::library::Library;
use crate::types::error::{Error, Result, UnsupportedError};
use phalanx_sys::nccl::{ncclConfig_t, version_code, version_text};
use std::ffi::{CStr, CString};
use std::mem::offset_of;

/// Settings of NCCL communicators (`ncclConfig_t`). What is not set is the library's default.
///
/// A setting that the loaded NCCL does not know yet is an error when a communicator is made, not ignored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// Whether the library never holds the caller (`blocking` = 0; default false). `NCCL_COMM_BLOCKING`
    /// overrides it.
    ///
    /// NCCL then starts a thread for each operation, which costs 60 µs (docs/benchmarks/nccl.md in the
    /// repository). A missing rank is an error within the deadline in either case: without this, ranks wait
    /// for the arrival of all before the library connects them, and a watchdog revokes a communicator that
    /// still holds a thread (`ncclCommRevoke`, 2.28.7; with an older library it ends the process, and says
    /// why).
    pub non_blocking: bool,
    /// What carries collectives on GPUs out, the same on all ranks. Default: `PHALANX_GPU_ALGORITHM`, else the fastest for each call.
    #[cfg(feature = "nccl")]
    pub gpu_algorithm: Option<super::direct::GpuAlgorithm>,
    /// Over how many unique ids the ranks are spread while the communicator of all is made, from 1 to the
    /// number of ranks; the same on all ranks (`ncclCommInitRankScalable`, 2.23). Default: one for 512 ranks, and 1 with an older
    /// library. All connect to the rank that made their id: with thousands of ranks one is not enough.
    pub unique_ids: Option<usize>,
    /// Thread blocks in a cluster, 0 to 8 (2.17).
    pub cga_cluster_size: Option<i32>,
    /// Fewest thread blocks an operation uses (2.17).
    pub min_ctas: Option<i32>,
    /// Most thread blocks an operation uses (2.17).
    pub max_ctas: Option<i32>,
    /// Which network module, by name: `IB`, `Socket`, … (2.17).
    pub net_name: Option<String>,
    /// Whether children of a split share the parent's resources (2.18). NCCL aborts them together: one that fails takes the others along.
    pub split_share: Option<i32>,
    /// The network's traffic class (2.26).
    pub traffic_class: Option<i32>,
    /// A name for logs and profilers (2.27). NCCL keeps the pointer, so that the text is never freed.
    pub comm_name: Option<String>,
    /// Whether collective networks are used (2.27).
    pub collnet_enable: Option<i32>,
    /// How thread blocks are given out: 0 default, 1 efficiency, 2 none (2.27).
    pub cta_policy: Option<i32>,
    /// Whether children of a shrink share the parent's resources (2.27).
    /// [`Comm::shrink`](crate::Comm::shrink) makes a communicator of its own; this is for calls of
    /// [`raw_handle`](crate::nccl::Surface::raw_handle).
    pub shrink_share: Option<i32>,
    /// Thread blocks for NVLink SHARP (2.27).
    pub nvls_ctas: Option<i32>,
    /// Channels for each network peer (2.28).
    pub channels_per_net_peer: Option<i32>,
    /// Whether scheduling is centred on NVLink (2.28).
    pub nvlink_centric_sched: Option<i32>,
    /// How the communicator is used in CUDA graphs: 0 never, 1 in one at a time, 2 mixed (2.29; default 2;
    /// `NCCL_GRAPH_MIXING_SUPPORT` overrides it). Unless mixed, NCCL does not order a launch and operations
    /// outside of it: [`Comm::sync`](crate::Comm::sync), which then waits for all streams that the
    /// communicator was used on, comes between them.
    pub graph_usage_mode: Option<i32>,
    /// Number of contexts for put and signal, which [`Signal::context`](crate::nccl::Signal::context) says
    /// one of (2.29; only the first is of use before 2.31; default 1; more by `NCCL_NUM_RMA_CTX` alone are
    /// not known here).
    pub rma_contexts: Option<i32>,
    /// Most peers for point-to-point (2.30).
    pub max_p2p_peers: Option<i32>,
    /// Whether launches of a CUDA graph are ordered among streams (2.30.7).
    pub graph_stream_ordering: Option<i32>,
    /// Whether operations of several communicators are launched in the order of the calls (2.31).
    /// Communicators of one GPU that overlap have the same.
    pub launch_order_implicit: Option<i32>,
    /// Number of signals of each peer and context, which [`Signal::index`](crate::nccl::Signal::index) says
    /// one of (2.31; default 1).
    pub rma_signals: Option<i32>,
    /// Whether what put and signal need is made with the communicator, and not by the first of them (2.31).
    pub rma_eager_init: Option<i32>,
    /// The host's side of `ncclHostCftMode_t`: 1 on, 2 off, 3 on where it can be had; the same on all ranks
    /// (2.31).
    pub host_cft_mode: Option<i32>,
    /// Which uses of NVLink SHARP are off, as bits: 1 the transport and registered buffers, 2 symmetric
    /// kernels; 0 none, `i32::MAX` all (2.32).
    pub nvls_host_mode: Option<i32>,
}

/// A configuration as the library reads it, with the texts it points to.
pub(crate) struct RawConfig {
    raw: Box<ncclConfig_t>,
    _net_name: Option<CString>,
}

impl RawConfig {
    pub fn as_mut(&mut self) -> *mut ncclConfig_t {
        &raw mut *self.raw
    }
}

impl Config {
    /// Whether the library orders launches of CUDA graphs among its other operations.
    pub(crate) fn mixes_graphs(&self) -> bool {
        // The variable overrides the setting.
        match std::env::var("NCCL_GRAPH_MIXING_SUPPORT") {
            Ok(told) => told.trim() != "0",
            Err(_) => self.graph_usage_mode.is_none_or(|mode| mode == 2),
        }
    }

    /// In the layout of the loaded library; `None` if it has no settings and none is set.
    pub(crate) fn raw(&self, library: &Library) -> Result<Option<RawConfig>> {
        let version = library.version();
        let raw = ncclConfig_t::for_library(library.flavour(), version);
        let Some(mut raw) = raw else {
            let none = *self == Config::default();
            return if none { Ok(None) } else { Err(library.lacks("ncclCommInitRankConfig").into()) };
        };
        raw.blocking = i32::from(!self.non_blocking);
        macro_rules! set {
            ($($setting:ident => $field:ident since $major:literal $minor:literal $patch:literal),* $(,)?) => {$(
                if let Some(value) = self.$setting {
                    needs(library, stringify!($setting), version_code($major, $minor, $patch), offset_of!(ncclConfig_t, $field) < raw.used())?;
                    raw.$field = value;
                }
            )*};
        }
        set! {
            cga_cluster_size => cgaClusterSize since 2 17 1,
            min_ctas => minCTAs since 2 17 1,
            max_ctas => maxCTAs since 2 17 1,
            split_share => splitShare since 2 18 1,
            traffic_class => trafficClass since 2 26 2,
            collnet_enable => collnetEnable since 2 27 3,
            cta_policy => CTAPolicy since 2 27 3,
            shrink_share => shrinkShare since 2 27 3,
            nvls_ctas => nvlsCTAs since 2 27 3,
            channels_per_net_peer => nChannelsPerNetPeer since 2 28 3,
            nvlink_centric_sched => nvlinkCentricSched since 2 28 3,
            graph_usage_mode => graphUsageMode since 2 29 2,
            rma_contexts => numRmaCtx since 2 29 2,
            max_p2p_peers => maxP2pPeers since 2 30 3,
            graph_stream_ordering => graphStreamOrdering since 2 30 7,
            launch_order_implicit => launchOrderImplicit since 2 31 0,
            rma_signals => numRmaSig since 2 31 0,
            rma_eager_init => rmaEagerInit since 2 31 0,
            host_cft_mode => hostCftMode since 2 31 0,
            nvls_host_mode => nvlsHostMode since 2 32 0,
        }
        let net_name = self.net_name.as_deref().map(|name| text("net_name", name)).transpose()?;
        if let Some(name) = &net_name {
            needs(library, "net_name", version_code(2, 17, 1), true)?;
            // Copied by the library during the call.
            raw.netName = name.as_ptr();
        }
        if let Some(name) = &self.comm_name {
            needs(library, "comm_name", version_code(2, 27, 3), true)?;
            // Kept by the library, by all communicators that are split from this one, too.
            let kept: &'static CStr = Box::leak(text("comm_name", name)?.into_boxed_c_str());
            raw.commName = kept.as_ptr();
        }
        Ok(Some(RawConfig { raw: Box::new(raw), _net_name: net_name }))
    }
}

pub(crate) fn needs(library: &Library, setting: &'static str, since: u32, in_layout: bool) -> Result<()> {
    if library.version() >= since && in_layout {
        return Ok(());
    }
    Err(Error::from(UnsupportedError {
        what: format!("the {} setting {setting}", library.name()),
        why: format!(
            "it came with NCCL {}, and {} {} ({}) is loaded",
            version_text(since),
            library.name(),
            version_text(library.version()),
            library.path().display()
        ),
        remedy: format!("leave it unset, or load a newer one ({})", library.flavour().search().variable),
    }))
}

pub(crate) fn text(setting: &'static str, value: &str) -> Result<CString> {
    CString::new(value).map_err(|_| {
        let (name, expected) = (setting.to_owned(), "a text without NUL characters".to_owned());
        crate::types::error::UsageError::Setting { name, value: value.to_owned(), expected }.into()
    })
}
