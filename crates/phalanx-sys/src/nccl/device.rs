//! The host's part of the device API (`nccl_device.h`, since 2.28.3): device communicators, for kernels of a program.
//!
//! A kernel gets an `ncclDevComm` by value. Its layout changes in nearly every release, and only the kernel knows it, since
//! it is compiled with the library's header. The host needs the size alone.

use super::config::{MAGIC, UNDEF_INT};
use super::types::version_code;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;

/// A device communicator, which kernels get by value. Its size is [`dev_comm_size`], or
/// [`ncclCommProperties_t::devCommRuntimeVersionSize`].
pub type ncclDevComm_t = c_void;
/// The place of a buffer in a device communicator's memory.
pub type ncclDevResourceHandle_t = u32;
/// A signal of GPU-initiated networking.
pub type ncclGinSignal_t = u32;
/// A counter of GPU-initiated networking.
pub type ncclGinCounter_t = u32;
/// A logical endpoint (since 2.31).
pub type ncclCftLeId = u32;
/// Which ranks are connected for GPU-initiated networking: one of [`gin_connection`] (since 2.29.7).
pub type ncclGinConnectionType_t = c_int;
/// The kind of GPU-initiated networking: one of [`gin_type`] (since 2.29.2).
pub type ncclGinType_t = c_int;
/// The team of logical endpoints: one of [`cft_team`] (since 2.31).
pub type ncclCftTeamMode_t = c_int;

/// Values of [`ncclGinConnectionType_t`].
#[allow(missing_docs)]
pub mod gin_connection {
    use super::ncclGinConnectionType_t;
    pub const NONE: ncclGinConnectionType_t = 0;
    pub const FULL: ncclGinConnectionType_t = 1;
    pub const RAIL: ncclGinConnectionType_t = 2;
    /// Since 2.31.
    pub const CUSTOM_STRIDE: ncclGinConnectionType_t = 3;
}

/// Values of [`ncclGinType_t`].
#[allow(missing_docs)]
pub mod gin_type {
    use super::ncclGinType_t;
    pub const NONE: ncclGinType_t = 0;
    pub const PROXY: ncclGinType_t = 2;
    pub const GDAKI: ncclGinType_t = 3;
    /// Since 2.30.7.
    pub const GPI: ncclGinType_t = 4;
    /// Since 2.31.
    pub const EFA_GDA: ncclGinType_t = 5;
}

/// Values of [`ncclCftTeamMode_t`].
#[allow(missing_docs)]
pub mod cft_team {
    use super::ncclCftTeamMode_t;
    pub const FLAT: ncclCftTeamMode_t = 0;
    pub const HIER_MULTIMEM: ncclCftTeamMode_t = 1;
    pub const HIER_LSA: ncclCftTeamMode_t = 2;
}

/// Bits of [`ncclDevCommRequirements_t::cftCaps`].
#[allow(missing_docs)]
pub mod cft_caps {
    use super::c_int;
    pub const NONE: c_int = 0;
    pub const CFT: c_int = 1;
    pub const MULTIMEM: c_int = 2;
}

/// A team: ranks of a communicator at a constant stride.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct ncclTeam_t {
    pub nRanks: c_int,
    pub rank: c_int,
    pub stride: c_int,
}

/// A team's multicast address.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct ncclMultimemHandle_t {
    pub mcBasePtr: *mut c_void,
}

/// Barriers of a team of ranks that load and store each other's memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct ncclLsaBarrierHandle_t {
    pub bufHandle: ncclDevResourceHandle_t,
    pub nBarriers: c_int,
}

/// Barriers over the network.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct ncclGinBarrierHandle_t {
    pub signal0: ncclGinSignal_t,
    pub bufHandle: ncclDevResourceHandle_t,
}

/// Slots of a low-latency all-to-all.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct ncclLLA2AHandle_t {
    pub bufHandle: ncclDevResourceHandle_t,
    pub nSlots: u32,
}

/// Required memory, signals and counters of a device communicator. 2.28.3 reads the fields before `ginSignalCount`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct ncclDevResourceRequirements_t {
    pub next: *mut ncclDevResourceRequirements_t,
    pub bufferSize: usize,
    pub bufferAlign: usize,
    /// Written when the device communicator is ready, unless null.
    pub outBufferHandle: *mut ncclDevResourceHandle_t,
    pub ginSignalCount: c_int,
    pub ginCounterCount: c_int,
    pub outGinSignalStart: *mut ncclGinSignal_t,
    pub outGinCounterStart: *mut ncclGinCounter_t,
}

impl ncclDevResourceRequirements_t {
    /// No requirements.
    pub const NONE: ncclDevResourceRequirements_t = ncclDevResourceRequirements_t {
        next: std::ptr::null_mut(),
        bufferSize: 0,
        bufferAlign: 0,
        outBufferHandle: std::ptr::null_mut(),
        ginSignalCount: 0,
        ginCounterCount: 0,
        outGinSignalStart: std::ptr::null_mut(),
        outGinCounterStart: std::ptr::null_mut(),
    };

    /// Bytes of the structure in a release; 0 before 2.28.3.
    pub fn size(version: u32) -> usize {
        match version {
            code if code >= SINCE_28_7 => size_of::<ncclDevResourceRequirements_t>(),
            code if code >= SINCE_28_3 => offset_of!(ncclDevResourceRequirements_t, ginSignalCount),
            _ => 0,
        }
    }
}

/// A team that requires a multicast address.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct ncclTeamRequirements_t {
    pub next: *mut ncclTeamRequirements_t,
    pub team: ncclTeam_t,
    pub multimem: bool,
    /// Written when the device communicator is ready, unless null.
    pub outMultimemHandle: *mut ncclMultimemHandle_t,
}

const SINCE_28_3: u32 = version_code(2, 28, 3);
const SINCE_28_7: u32 = version_code(2, 28, 7);
const SINCE_29_2: u32 = version_code(2, 29, 2);

/// The newest release with known layouts.
const NEWEST: u32 = version_code(2, 32, 3);

/// The requirements of a device communicator, with the fields of every release up to 2.32.
///
/// Releases read different parts, which [`with_pointer`](ncclDevCommRequirements_t::with_pointer) selects:
/// - from 2.29.2 on, the layout that `size` and `version` describe;
/// - from 2.28.7 on, the fields behind `size`, `magic` and `version`;
/// - 2.28.3, the shorter [`ncclDevCommRequirements_v22803_t`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct ncclDevCommRequirements_t {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub resourceRequirementsList: *mut ncclDevResourceRequirements_t,
    pub teamRequirementsList: *mut ncclTeamRequirements_t,
    pub lsaMultimem: bool,
    pub barrierCount: c_int,
    pub lsaBarrierCount: c_int,
    pub railGinBarrierCount: c_int,
    pub lsaLLA2ABlockCount: c_int,
    pub lsaLLA2ASlotCount: c_int,
    pub ginForceEnable: bool,
    pub ginContextCount: c_int,
    pub ginSignalCount: c_int,
    pub ginCounterCount: c_int,
    pub ginConnectionType: ncclGinConnectionType_t,
    pub ginExclusiveContexts: bool,
    pub ginQueueDepth: c_int,
    pub ginTrafficClass: c_int,
    pub worldGinBarrierCount: c_int,
    pub ginStrongSignalsRequired: bool,
    pub ginVaSignalsRequired: bool,
    pub ginCustomStride: c_int,
    pub ginType: ncclGinType_t,
    pub useRuntimeVersion: bool,
    pub cftCaps: c_int,
    pub cftBarrierCount: c_int,
}

/// The requirements of 2.28.3.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct ncclDevCommRequirements_v22803_t {
    pub resourceRequirementsList: *mut ncclDevResourceRequirements_t,
    pub teamRequirementsList: *mut ncclTeamRequirements_t,
    pub lsaMultimem: bool,
    pub lsaBarrierCount: c_int,
}

/// Every layout from 2.28.7 on, the oldest first: the version code, and the bytes of the fields.
const REQUIREMENTS_LAYOUTS: [(u32, usize); 6] = {
    const INT: usize = size_of::<c_int>();
    [
        (SINCE_28_7, offset_of!(ncclDevCommRequirements_t, ginConnectionType)),
        (SINCE_29_2, offset_of!(ncclDevCommRequirements_t, ginConnectionType)),
        (version_code(2, 29, 7), offset_of!(ncclDevCommRequirements_t, ginQueueDepth) + INT),
        (version_code(2, 30, 3), offset_of!(ncclDevCommRequirements_t, worldGinBarrierCount) + INT),
        (version_code(2, 30, 7), offset_of!(ncclDevCommRequirements_t, ginVaSignalsRequired) + 1),
        (version_code(2, 31, 0), offset_of!(ncclDevCommRequirements_t, cftBarrierCount) + INT),
    ]
};

impl ncclDevCommRequirements_t {
    /// No requirements (`NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER`), in the newest layout of a library of this version. `None`
    /// before 2.28.3, which has no device communicators.
    pub fn for_version(library: u32) -> Option<ncclDevCommRequirements_t> {
        if library < SINCE_28_3 {
            return None;
        }
        let used = ncclDevCommRequirements_t::used(library);
        Some(ncclDevCommRequirements_t {
            size: used.next_multiple_of(align_of::<ncclDevCommRequirements_t>()),
            magic: MAGIC,
            version: library.min(NEWEST),
            resourceRequirementsList: std::ptr::null_mut(),
            teamRequirementsList: std::ptr::null_mut(),
            lsaMultimem: false,
            barrierCount: 0,
            lsaBarrierCount: 0,
            railGinBarrierCount: 0,
            lsaLLA2ABlockCount: 0,
            lsaLLA2ASlotCount: 0,
            ginForceEnable: false,
            ginContextCount: 4,
            ginSignalCount: 0,
            ginCounterCount: 0,
            ginConnectionType: gin_connection::NONE,
            ginExclusiveContexts: false,
            ginQueueDepth: 0,
            ginTrafficClass: UNDEF_INT,
            worldGinBarrierCount: 0,
            ginStrongSignalsRequired: true,
            ginVaSignalsRequired: true,
            ginCustomStride: 1,
            ginType: gin_type::NONE,
            useRuntimeVersion: false,
            cftCaps: cft_caps::NONE,
            cftBarrierCount: 0,
        })
    }

    /// Bytes of the fields in a release; 0 before 2.28.7.
    pub fn used(version: u32) -> usize {
        let layout = REQUIREMENTS_LAYOUTS.iter().rfind(|(since, _)| *since <= version);
        layout.map_or(0, |(_, used)| *used)
    }

    /// The offset of the first byte that a release from 2.28.7 on reads.
    pub fn start(version: u32) -> usize {
        match version >= SINCE_29_2 {
            true => 0,
            false => offset_of!(ncclDevCommRequirements_t, resourceRequirementsList),
        }
    }

    /// The requirements of 2.28.3.
    pub fn of_22803(&self) -> ncclDevCommRequirements_v22803_t {
        ncclDevCommRequirements_v22803_t {
            resourceRequirementsList: self.resourceRequirementsList,
            teamRequirementsList: self.teamRequirementsList,
            lsaMultimem: self.lsaMultimem,
            lsaBarrierCount: self.lsaBarrierCount,
        }
    }

    /// Calls `f` with these requirements in the layout of a library of this version.
    pub fn with_pointer<T>(&self, library: u32, f: impl FnOnce(*const ncclDevCommRequirements_t) -> T) -> T {
        if library < SINCE_28_7 {
            let short = self.of_22803();
            return f((&raw const short).cast());
        }
        f((&raw const *self).wrapping_byte_add(ncclDevCommRequirements_t::start(library)))
    }
}

/// The size of `ncclDevComm` in a release's header; 0 before 2.28.3. Releases behind the newest known one report it
/// themselves ([`ncclCommProperties_t::devCommRuntimeVersionSize`]).
pub fn dev_comm_size(version: u32) -> usize {
    const SIZES: [(u32, usize); 5] = [
        (SINCE_28_3, 88),
        (SINCE_28_7, 200),
        (version_code(2, 29, 7), 224),
        (version_code(2, 30, 3), 240),
        (version_code(2, 31, 0), 248),
    ];
    SIZES.iter().rfind(|(since, _)| *since <= version).map_or(0, |(_, size)| *size)
}

/// The properties of a communicator (since 2.29.2), with the fields up to 2.32. `size` and `version` describe one layout.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct ncclCommProperties_t {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub rank: c_int,
    pub nRanks: c_int,
    pub cudaDev: c_int,
    pub nvmlDev: c_int,
    pub deviceApiSupport: bool,
    pub multimemSupport: bool,
    /// `ginType` in 2.29.2 and 2.29.3, one byte; padding in later releases.
    pub ginType_v22902: u8,
    pub ginType: ncclGinType_t,
    pub nLsaTeams: c_int,
    pub hostRmaSupport: bool,
    pub railedGinType: ncclGinType_t,
    pub commHash: u64,
    pub ginMinStride: c_int,
    pub ginConnectionType: ncclGinConnectionType_t,
    pub ginSupport: [bool; 64],
    pub devCommRuntimeVersionSize: usize,
    pub cftSupport: bool,
    pub cftMulticastSupport: bool,
    pub cftCountedSupport: bool,
}

/// Every layout, the oldest first: the version code, and the bytes of the fields.
const PROPERTIES_LAYOUTS: [(u32, usize); 4] = [
    (SINCE_29_2, offset_of!(ncclCommProperties_t, ginType_v22902) + 1),
    (version_code(2, 29, 7), offset_of!(ncclCommProperties_t, railedGinType) + size_of::<c_int>()),
    (version_code(2, 31, 0), offset_of!(ncclCommProperties_t, cftSupport)),
    (version_code(2, 32, 0), offset_of!(ncclCommProperties_t, cftCountedSupport) + 1),
];

impl ncclCommProperties_t {
    /// Properties to be filled in (`NCCL_COMM_PROPERTIES_INITIALIZER`), in the newest layout of a library of this version.
    /// `None` before 2.29.2.
    pub fn for_version(library: u32) -> Option<ncclCommProperties_t> {
        let used = ncclCommProperties_t::used(library);
        (used > 0).then(|| ncclCommProperties_t {
            size: used.next_multiple_of(align_of::<ncclCommProperties_t>()),
            magic: MAGIC,
            version: library.min(NEWEST),
            rank: 0,
            nRanks: 0,
            cudaDev: 0,
            nvmlDev: 0,
            deviceApiSupport: false,
            multimemSupport: false,
            ginType_v22902: 0,
            ginType: gin_type::NONE,
            nLsaTeams: 0,
            hostRmaSupport: false,
            railedGinType: gin_type::NONE,
            commHash: 0,
            ginMinStride: 0,
            ginConnectionType: gin_connection::NONE,
            ginSupport: [false; 64],
            devCommRuntimeVersionSize: 0,
            cftSupport: false,
            cftMulticastSupport: false,
            cftCountedSupport: false,
        })
    }

    /// Bytes of the fields in a release; 0 before 2.29.2.
    pub fn used(version: u32) -> usize {
        PROPERTIES_LAYOUTS.iter().rfind(|(since, _)| *since <= version).map_or(0, |(_, used)| *used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes of each release's headers.
    #[test]
    fn layouts_are_no_newer_than_the_library() {
        assert!(ncclDevCommRequirements_t::for_version(22707).is_none());
        assert!(ncclCommProperties_t::for_version(22809).is_none());
        for (library, comm, resources, requirements, properties) in [
            (22803, 88, 32, 0, 0),
            (22807, 200, 56, 72, 0),
            (22809, 200, 56, 72, 0),
            (22902, 200, 56, 72, 40),
            (22903, 200, 56, 72, 40),
            (22907, 224, 56, 88, 56),
            (23003, 240, 56, 96, 56),
            (23007, 240, 56, 96, 56),
            (23102, 248, 56, 120, 144),
            (23203, 248, 56, 120, 152),
        ] {
            assert_eq!(dev_comm_size(library), comm, "{library}");
            assert_eq!(ncclDevResourceRequirements_t::size(library), resources, "{library}");
            let asked = ncclDevCommRequirements_t::for_version(library).expect("it has them");
            assert_eq!((asked.size, asked.version), (requirements, library));
            let known = ncclCommProperties_t::for_version(library).map_or(0, |known| known.size);
            assert_eq!(known, properties, "{library}");
        }
        let later = ncclDevCommRequirements_t::for_version(version_code(2, 40, 1)).expect("it has them");
        assert_eq!((later.size, later.version), (120, NEWEST));
    }

    #[test]
    fn each_library_reads_its_own_layout() {
        let mut asked = ncclDevCommRequirements_t::for_version(NEWEST).expect("it has them");
        (asked.lsaMultimem, asked.barrierCount, asked.lsaBarrierCount) = (true, 3, 5);
        // SAFETY: the pointer is to the structure that a library of that version reads, and valid during the call.
        asked.with_pointer(22803, |read| unsafe {
            let read = read.cast::<ncclDevCommRequirements_v22803_t>();
            assert!((*read).lsaMultimem && (*read).lsaBarrierCount == 5);
        });
        let start = (&raw const asked).addr();
        assert_eq!(asked.with_pointer(22809, |read| read.addr()), start + 16);
        assert_eq!(asked.with_pointer(22902, |read| read.addr()), start);
    }
}
