//! Configurations: structures that grow from release to release.

use super::types::{Flavour, version_code};
use std::ffi::{c_char, c_float, c_int, c_uint, c_void};
use std::mem::offset_of;

/// `NCCL_API_MAGIC`.
pub(super) const MAGIC: c_uint = 0xcafe_beef;

/// The value of an integer field that is not set.
pub const UNDEF_INT: c_int = c_int::MIN;

/// The configuration of a communicator, with the fields of every release up to 2.32.
///
/// The library reads `size` bytes and interprets them by `version`. Both must describe one layout, no newer than the
/// library: see [`ncclConfig_t::for_version`]. RCCL's structure is the same up to its last field, `maxP2pPeers`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct ncclConfig_t {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub blocking: c_int,
    pub cgaClusterSize: c_int,
    pub minCTAs: c_int,
    pub maxCTAs: c_int,
    pub netName: *const c_char,
    pub splitShare: c_int,
    pub trafficClass: c_int,
    pub commName: *const c_char,
    pub collnetEnable: c_int,
    pub CTAPolicy: c_int,
    pub shrinkShare: c_int,
    pub nvlsCTAs: c_int,
    pub nChannelsPerNetPeer: c_int,
    pub nvlinkCentricSched: c_int,
    pub graphUsageMode: c_int,
    pub numRmaCtx: c_int,
    pub maxP2pPeers: c_int,
    pub graphStreamOrdering: c_int,
    pub launchOrderImplicit: c_int,
    pub numRmaSig: c_int,
    pub rmaEagerInit: c_int,
    pub hostCftMode: c_int,
    pub nvlsHostMode: c_int,
}

/// A layout: the version code of its first release, the bytes of its fields, its `sizeof`.
type VersionLayout = (u32, usize, usize);

/// The size of a structure with fields up to `end`, padded to its alignment.
const fn padded(end: usize) -> usize {
    end.next_multiple_of(align_of::<ncclConfig_t>())
}

const INT: usize = size_of::<c_int>();

/// Every layout, the oldest first.
pub const CONFIG_LAYOUTS: [VersionLayout; 11] = [
    layout(version_code(2, 14, 3), offset_of!(ncclConfig_t, blocking) + INT),
    layout(version_code(2, 17, 1), offset_of!(ncclConfig_t, splitShare)),
    layout(version_code(2, 18, 1), offset_of!(ncclConfig_t, splitShare) + INT),
    layout(version_code(2, 26, 2), offset_of!(ncclConfig_t, trafficClass) + INT),
    layout(version_code(2, 27, 3), offset_of!(ncclConfig_t, nvlsCTAs) + INT),
    layout(version_code(2, 28, 3), offset_of!(ncclConfig_t, nvlinkCentricSched) + INT),
    layout(version_code(2, 29, 2), offset_of!(ncclConfig_t, numRmaCtx) + INT),
    layout(version_code(2, 30, 3), offset_of!(ncclConfig_t, maxP2pPeers) + INT),
    layout(version_code(2, 30, 7), offset_of!(ncclConfig_t, graphStreamOrdering) + INT),
    layout(version_code(2, 31, 0), offset_of!(ncclConfig_t, hostCftMode) + INT),
    layout(version_code(2, 32, 0), offset_of!(ncclConfig_t, nvlsHostMode) + INT),
];

const fn layout(version: u32, end: usize) -> VersionLayout {
    (version, end, padded(end))
}

/// RCCL's newest layout: that of its 2.30, which ends before `graphStreamOrdering`.
const RCCL_NEWEST: u32 = version_code(2, 30, 3);

impl ncclConfig_t {
    /// As [`for_version`](ncclConfig_t::for_version), for either library.
    pub fn for_library(flavour: Flavour, version: u32) -> Option<ncclConfig_t> {
        ncclConfig_t::for_version(match flavour {
            Flavour::Nccl => version,
            Flavour::Rccl => version.min(RCCL_NEWEST),
        })
    }

    /// Bytes of the layout's fields, without the padding behind them.
    pub fn used(&self) -> usize {
        let of = |(version, ..): &&VersionLayout| *version == self.version;
        CONFIG_LAYOUTS.iter().find(of).map_or(0, |(_, used, _)| *used)
    }

    /// A configuration without settings, in the newest layout of a library of this version. `None` before 2.14, which has no
    /// configurations.
    pub fn for_version(library: u32) -> Option<ncclConfig_t> {
        let (version, _, size) = CONFIG_LAYOUTS.into_iter().rfind(|(version, ..)| *version <= library)?;
        let (unset, none) = (UNDEF_INT, std::ptr::null());
        Some(ncclConfig_t {
            size,
            magic: MAGIC,
            version,
            blocking: unset,
            cgaClusterSize: unset,
            minCTAs: unset,
            maxCTAs: unset,
            netName: none,
            splitShare: unset,
            trafficClass: unset,
            commName: none,
            collnetEnable: unset,
            CTAPolicy: unset,
            shrinkShare: unset,
            nvlsCTAs: unset,
            nChannelsPerNetPeer: unset,
            nvlinkCentricSched: unset,
            graphUsageMode: unset,
            numRmaCtx: unset,
            maxP2pPeers: unset,
            graphStreamOrdering: unset,
            launchOrderImplicit: unset,
            numRmaSig: unset,
            rmaEagerInit: unset,
            hostCftMode: unset,
            nvlsHostMode: unset,
        })
    }
}

/// The configuration of one collective (since 2.31), with the fields up to 2.32. As in [`ncclConfig_t`], `size` and
/// `version` describe one layout, no newer than the library: see [`ncclCollConfig_t::for_version`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct ncclCollConfig_t {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    /// Options of other vendors' libraries; NCCL ignores them.
    pub ext: *mut c_void,
    pub minCTAs: c_int,
    pub maxCTAs: c_int,
    pub nvlsCTAs: c_int,
    pub cgaClusterSize: c_int,
    pub algSelection: *const c_char,
    pub forceAlgSelection: c_int,
    pub CTAPolicy: c_int,
    pub userProfilerTag: u64,
    /// A CUDA event.
    pub launchCompletionEvent: *mut c_void,
}

impl ncclCollConfig_t {
    /// A configuration without settings, in the newest layout of a library of this version. `None` before 2.31, which has
    /// none.
    pub fn for_version(library: u32) -> Option<ncclCollConfig_t> {
        let (version, size) = match library {
            code if code >= version_code(2, 32, 0) => (version_code(2, 32, 0), size_of::<ncclCollConfig_t>()),
            code if code >= version_code(2, 31, 0) => {
                (version_code(2, 31, 0), offset_of!(ncclCollConfig_t, launchCompletionEvent))
            }
            _ => return None,
        };
        Some(ncclCollConfig_t {
            size,
            magic: MAGIC,
            version,
            ext: std::ptr::null_mut(),
            minCTAs: UNDEF_INT,
            maxCTAs: UNDEF_INT,
            nvlsCTAs: UNDEF_INT,
            cgaClusterSize: UNDEF_INT,
            algSelection: std::ptr::null(),
            forceAlgSelection: 1,
            CTAPolicy: UNDEF_INT,
            userProfilerTag: 0,
            launchCompletionEvent: std::ptr::null_mut(),
        })
    }
}

/// The encryption of NCCL's TCP sockets (since 2.32).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct ncclEncryptionConfig_t {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub mode: c_int,
    pub psk: *const c_char,
}

/// No encryption.
pub const NCCL_ENCRYPTION_MODE_NONE: c_int = 0;
/// Encryption with a pre-shared key.
pub const NCCL_ENCRYPTION_MODE_PSK: c_int = 1;

impl ncclEncryptionConfig_t {
    /// A mode and its key.
    pub const fn new(mode: c_int, psk: *const c_char) -> ncclEncryptionConfig_t {
        let (size, version) = (size_of::<ncclEncryptionConfig_t>(), version_code(2, 32, 0));
        ncclEncryptionConfig_t { size, magic: MAGIC, version, mode, psk }
    }
}

/// The result of `ncclGroupSimulateEnd` (since 2.22).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct ncclSimInfo_t {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub estimatedTime: c_float,
}

impl ncclSimInfo_t {
    /// A result without an estimate.
    pub const fn new() -> ncclSimInfo_t {
        ncclSimInfo_t {
            size: size_of::<ncclSimInfo_t>(),
            magic: 0x7468_5283,
            version: version_code(2, 22, 3),
            estimatedTime: -1.0,
        }
    }
}

impl Default for ncclSimInfo_t {
    fn default() -> Self {
        ncclSimInfo_t::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_is_no_newer_than_the_library() {
        assert!(ncclConfig_t::for_version(21003).is_none());
        for (library, version, size) in [
            (21403, 21403, 24),
            (21718, 21701, 40),
            (21801, 21801, 48),
            (22605, 22602, 48),
            (22703, 22703, 72),
            (22809, 22803, 80),
            (22907, 22902, 88),
            (23004, 23003, 96),
            (23007, 23007, 96),
            (23102, 23100, 112),
            (23203, 23200, 120),
        ] {
            let config = ncclConfig_t::for_version(library).unwrap();
            assert_eq!((config.version, config.size), (version, size), "library {library}");
        }
        assert!(ncclCollConfig_t::for_version(23007).is_none());
        for (library, version, size) in [(23102, 23100, 64), (23203, 23200, 72)] {
            let config = ncclCollConfig_t::for_version(library).unwrap();
            assert_eq!((config.version, config.size), (version, size), "library {library}");
        }
    }

    /// The layouts of RCCL's headers, from ROCm 5.4 (no configuration) to 2.30, by their last field.
    #[test]
    fn rccl_has_the_same_layouts_up_to_its_last_field() {
        assert!(ncclConfig_t::for_library(Flavour::Rccl, 21304).is_none());
        for (library, used, size) in [
            (21505, offset_of!(ncclConfig_t, blocking) + INT, 24),
            (21605, offset_of!(ncclConfig_t, blocking) + INT, 24),
            (21701, offset_of!(ncclConfig_t, netName) + size_of::<*const c_char>(), 40),
            (21803, offset_of!(ncclConfig_t, splitShare) + INT, 48),
            (21806, offset_of!(ncclConfig_t, splitShare) + INT, 48),
            (22005, offset_of!(ncclConfig_t, splitShare) + INT, 48),
            (22105, offset_of!(ncclConfig_t, splitShare) + INT, 48),
            (23004, offset_of!(ncclConfig_t, maxP2pPeers) + INT, 96),
            (23009, offset_of!(ncclConfig_t, maxP2pPeers) + INT, 96),
            (23203, offset_of!(ncclConfig_t, maxP2pPeers) + INT, 96),
        ] {
            let config = ncclConfig_t::for_library(Flavour::Rccl, library).unwrap();
            assert_eq!((config.used(), config.size), (used, size), "library {library}");
            assert!(config.version <= library);
        }
    }
}
