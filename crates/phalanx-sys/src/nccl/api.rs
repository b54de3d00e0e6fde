//! The table of functions, and a loaded library.

use super::config::*;
use super::device::*;
use super::types::*;
use crate::functions::{c_name, table};
use crate::{Library, MissingFunction, NotFound, Search};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

/// A function of the table, and its first release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function {
    /// The function's name.
    pub name: &'static str,
    /// The version code of the first release with it.
    pub since: u32,
    /// The only library with it; `None` if both have it.
    pub only: Option<Flavour>,
    /// The function's type in Rust. Tests compare it with the C header.
    pub signature: &'static str,
}

impl Function {
    /// Whether a release of this library has it.
    pub fn is_of(&self, flavour: Flavour) -> bool {
        self.only.is_none_or(|only| only == flavour)
    }
}

macro_rules! only {
    () => {
        None
    };
    ($flavour:ident) => {
        Some(Flavour::$flavour)
    };
}

macro_rules! api {
    ($( $name:ident $(| $other:ident)? ($($argument:ident: $ty:ty),*) $(-> $answer:ty)?, $(only $flavour:ident)? since $major:literal $minor:literal $patch:literal; )*) => {
        table! {
            /// The functions of the loaded library; `None` where it lacks one.
            #[allow(missing_docs)]
            pub struct Functions {
                $(pub $name: Option<unsafe extern "C" fn($($argument: $ty),*) $(-> $answer)?>,)*
            }
        }

        /// Every function of the table.
        pub const FUNCTIONS: &[Function] = &[$(Function {
            name: stringify!($name),
            since: version_code($major, $minor, $patch),
            only: only!($($flavour)?),
            signature: stringify!(fn($($ty),*) $(-> $answer)?),
        }),*];

        /// The symbol of each function, and RCCL's older spelling of it.
        const SYMBOLS: [(&CStr, Option<&CStr>); FUNCTIONS.len()] =
            [$((c_name(concat!(stringify!($name), "\0")), older_spelling!($($other)?))),*];
    };
}

macro_rules! older_spelling {
    () => {
        None
    };
    ($name:ident) => {
        Some(c_name(concat!(stringify!($name), "\0")))
    };
}

impl Functions {
    fn load(library: &Library, flavour: Flavour) -> Functions {
        let address = |n: usize| {
            if !FUNCTIONS[n].is_of(flavour) {
                return None;
            }
            let (symbol, older) = SYMBOLS[n];
            let older = older.filter(|_| flavour == Flavour::Rccl);
            library.address(symbol).or_else(|| library.address(older?))
        };
        // SAFETY: the fields' types are those of the C header.
        unsafe { Functions::from_addresses(std::array::from_fn(address)) }
    }

    /// The functions that the library lacks.
    fn missing(&self) -> Vec<Function> {
        let functions = FUNCTIONS.iter().zip(self.addresses());
        functions.filter(|(_, address)| address.is_none()).map(|(function, _)| *function).collect()
    }
}

api! {
    ncclGetVersion(version: *mut c_int) -> ncclResult_t, since 2 3 4;
    ncclGetUniqueId(id: *mut ncclUniqueId) -> ncclResult_t, since 2 0 0;
    ncclCommInitRank(comm: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int) -> ncclResult_t, since 2 0 0;
    ncclCommInitAll(comms: *mut ncclComm_t, devices: c_int, list: *const c_int) -> ncclResult_t, since 2 0 0;
    ncclCommInitRankConfig(comm: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t) -> ncclResult_t, since 2 14 3;
    ncclCommInitRankScalable(comm: *mut ncclComm_t, ranks: c_int, rank: c_int, ids: c_int, list: *mut ncclUniqueId, config: *mut ncclConfig_t) -> ncclResult_t, since 2 23 4;

    ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t, since 2 0 0;
    ncclCommAbort(comm: ncclComm_t) -> ncclResult_t, since 2 4 2;
    ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t, since 2 14 3;
    ncclCommRevoke(comm: ncclComm_t, flags: c_int) -> ncclResult_t, since 2 28 7;

    ncclCommSplit(comm: ncclComm_t, color: c_int, key: c_int, new: *mut ncclComm_t, config: *mut ncclConfig_t) -> ncclResult_t, since 2 18 1;
    ncclCommShrink(comm: ncclComm_t, excluded: *mut c_int, count: c_int, new: *mut ncclComm_t, config: *mut ncclConfig_t, flags: c_int) -> ncclResult_t, since 2 27 3;
    ncclCommGetUniqueId(comm: ncclComm_t, id: *mut ncclUniqueId) -> ncclResult_t, since 2 29 2;
    ncclCommGrow(comm: ncclComm_t, ranks: c_int, id: *const ncclUniqueId, rank: c_int, new: *mut ncclComm_t, config: *mut ncclConfig_t) -> ncclResult_t, since 2 29 2;

    ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t, since 2 0 0;
    ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t, since 2 0 0;
    ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t, since 2 0 0;

    ncclGetErrorString(result: ncclResult_t) -> *const c_char, since 2 0 0;
    ncclCommGetAsyncError(comm: ncclComm_t, error: *mut ncclResult_t) -> ncclResult_t, since 2 4 2;
    ncclGetLastError(comm: ncclComm_t) -> *const c_char, since 2 13 4;
    ncclResetDebugInit(), since 2 24 3;

    ncclAllReduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 0 0;
    ncclBroadcast(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 2 12;
    ncclBcast(buffer: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 0 0;
    ncclReduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 0 0;
    ncclAllGather(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 0 0;
    ncclReduceScatter(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 0 0;
    ncclAlltoAll | ncclAllToAll(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 28 3;
    ncclGather(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 28 3;
    ncclScatter(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 28 3;

    ncclAllReduceConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: stream_t, config: *const ncclCollConfig_t) -> ncclResult_t, since 2 31 0;
    ncclBroadcastConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: stream_t, config: *const ncclCollConfig_t) -> ncclResult_t, since 2 31 0;
    ncclReduceConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: stream_t, config: *const ncclCollConfig_t) -> ncclResult_t, since 2 31 0;
    ncclAllGatherConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, comm: ncclComm_t, stream: stream_t, config: *const ncclCollConfig_t) -> ncclResult_t, since 2 31 0;
    ncclReduceScatterConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: stream_t, config: *const ncclCollConfig_t) -> ncclResult_t, since 2 31 0;
    ncclAlltoAllConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, comm: ncclComm_t, stream: stream_t, config: *const ncclCollConfig_t) -> ncclResult_t, since 2 31 0;
    ncclGatherConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: stream_t, config: *const ncclCollConfig_t) -> ncclResult_t, since 2 31 0;
    ncclScatterConfig(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, root: c_int, comm: ncclComm_t, stream: stream_t, config: *const ncclCollConfig_t) -> ncclResult_t, since 2 31 0;

    ncclSend(send: *const c_void, count: usize, dtype: ncclDataType_t, peer: c_int, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 7 3;
    ncclRecv(recv: *mut c_void, count: usize, dtype: ncclDataType_t, peer: c_int, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 7 3;
    ncclPutSignal(local: *const c_void, count: usize, dtype: ncclDataType_t, peer: c_int, window: ncclWindow_t, offset: usize, signal: c_int, context: c_int, flags: c_uint, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 29 2;
    ncclSignal(peer: c_int, signal: c_int, context: c_int, flags: c_uint, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 29 2;
    ncclWaitSignal(count: c_int, signals: *mut ncclWaitSignalDesc_t, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, since 2 29 2;

    ncclGroupStart() -> ncclResult_t, since 2 0 0;
    ncclGroupEnd() -> ncclResult_t, since 2 0 0;
    ncclGroupSimulateEnd(info: *mut ncclSimInfo_t) -> ncclResult_t, since 2 22 3;

    ncclRedOpCreatePreMulSum(op: *mut ncclRedOp_t, scalar: *mut c_void, dtype: ncclDataType_t, residence: ncclScalarResidence_t, comm: ncclComm_t) -> ncclResult_t, since 2 11 4;
    ncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t, since 2 11 4;

    ncclMemAlloc(start: *mut *mut c_void, bytes: usize) -> ncclResult_t, since 2 19 3;
    ncclMemFree(start: *mut c_void) -> ncclResult_t, since 2 19 3;
    ncclCommRegister(comm: ncclComm_t, start: *mut c_void, bytes: usize, handle: *mut *mut c_void) -> ncclResult_t, since 2 19 3;
    ncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) -> ncclResult_t, since 2 19 3;
    ncclCommWindowRegister(comm: ncclComm_t, start: *mut c_void, bytes: usize, window: *mut ncclWindow_t, flags: c_int) -> ncclResult_t, since 2 27 3;
    ncclCommWindowDeregister(comm: ncclComm_t, window: ncclWindow_t) -> ncclResult_t, since 2 27 3;
    ncclWinGetUserPtr(comm: ncclComm_t, window: ncclWindow_t, start: *mut *mut c_void) -> ncclResult_t, since 2 29 2;

    ncclDevCommCreate(comm: ncclComm_t, requirements: *const ncclDevCommRequirements_t, device: *mut ncclDevComm_t) -> ncclResult_t, only Nccl since 2 28 3;
    ncclDevCommDestroy(comm: ncclComm_t, device: *const ncclDevComm_t) -> ncclResult_t, only Nccl since 2 28 3;
    ncclLsaBarrierCreateRequirement(team: ncclTeam_t, barriers: c_int, handle: *mut ncclLsaBarrierHandle_t, requirement: *mut ncclDevResourceRequirements_t) -> ncclResult_t, only Nccl since 2 28 3;
    ncclGinBarrierCreateRequirement(comm: ncclComm_t, team: ncclTeam_t, barriers: c_int, handle: *mut ncclGinBarrierHandle_t, requirement: *mut ncclDevResourceRequirements_t) -> ncclResult_t, only Nccl since 2 28 7;
    ncclLLA2ACalcSlots(elements: c_int, element_size: c_int) -> c_int, only Nccl since 2 28 3;
    ncclLLA2ACreateRequirement(blocks: c_int, slots: c_int, handle: *mut ncclLLA2AHandle_t, requirement: *mut ncclDevResourceRequirements_t) -> ncclResult_t, only Nccl since 2 28 3;
    ncclTeamWorld(comm: ncclComm_t) -> ncclTeam_t, only Nccl since 2 28 3;
    ncclTeamLsa(comm: ncclComm_t) -> ncclTeam_t, only Nccl since 2 28 3;
    ncclTeamRail(comm: ncclComm_t) -> ncclTeam_t, only Nccl since 2 28 3;
    ncclTeamCft(comm: ncclComm_t, mode: ncclCftTeamMode_t) -> ncclTeam_t, only Nccl since 2 31 0;
    ncclTeamCftMultimem(comm: ncclComm_t) -> ncclTeam_t, only Nccl since 2 31 0;
    ncclTeamRankToWorld(comm: ncclComm_t, team: ncclTeam_t, rank: c_int) -> c_int, only Nccl since 2 28 3;
    ncclTeamRankToLsa(comm: ncclComm_t, team: ncclTeam_t, rank: c_int) -> c_int, only Nccl since 2 28 3;
    ncclCommQueryProperties(comm: ncclComm_t, properties: *mut ncclCommProperties_t) -> ncclResult_t, only Nccl since 2 29 2;
    ncclGetLsaDevicePointer(window: ncclWindow_t, offset: usize, rank: c_int, start: *mut *mut c_void) -> ncclResult_t, only Nccl since 2 29 2;
    ncclGetPeerDevicePointer(window: ncclWindow_t, offset: usize, rank: c_int, start: *mut *mut c_void) -> ncclResult_t, only Nccl since 2 29 2;
    ncclGetLsaMultimemDevicePointer(window: ncclWindow_t, offset: usize, start: *mut *mut c_void) -> ncclResult_t, only Nccl since 2 29 2;
    ncclGetMultimemDevicePointer(window: ncclWindow_t, offset: usize, team: ncclMultimemHandle_t, start: *mut *mut c_void) -> ncclResult_t, only Nccl since 2 29 2;
    ncclGetCftDeviceLeInfo(window: ncclWindow_t, offset: usize, rank: c_int, team: ncclTeam_t, endpoint: *mut ncclCftLeId, endpoint_offset: *mut usize) -> ncclResult_t, only Nccl since 2 31 0;
    ncclGetPeerDeviceLeInfo(window: ncclWindow_t, offset: usize, rank: c_int, endpoint: *mut ncclCftLeId, endpoint_offset: *mut usize) -> ncclResult_t, only Nccl since 2 31 0;
    ncclGetMultimemDeviceLeInfo(window: ncclWindow_t, offset: usize, endpoint: *mut ncclCftLeId, endpoint_offset: *mut usize) -> ncclResult_t, only Nccl since 2 31 0;

    ncclCommSuspend(comm: ncclComm_t, flags: c_int) -> ncclResult_t, since 2 29 7;
    ncclCommResume(comm: ncclComm_t) -> ncclResult_t, since 2 29 7;
    ncclCommMemStats(comm: ncclComm_t, stat: ncclCommMemStat_t, value: *mut u64) -> ncclResult_t, since 2 29 7;

    ncclSetEncryption(config: *const ncclEncryptionConfig_t) -> ncclResult_t, since 2 32 0;

    ncclParamGetParameter(key: *const c_char, value: *mut *const c_char, len: *mut c_int) -> ncclResult_t, since 2 30 4;
    ncclParamGetAllParameterKeys(table: *mut *mut *const c_char, len: *mut c_int) -> ncclResult_t, since 2 30 4;
    ncclParamDumpAll(), since 2 30 4;

    ncclAlltoAllv | ncclAllToAllv(send: *const c_void, send_counts: *const usize, send_offsets: *const usize, recv: *mut c_void, recv_counts: *const usize, recv_offsets: *const usize, dtype: ncclDataType_t, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, only Rccl since 2 10 3;
    ncclAllReduceWithBias(send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, op: ncclRedOp_t, comm: ncclComm_t, stream: stream_t, bias: *const c_void) -> ncclResult_t, only Rccl since 2 22 3;
    mscclLoadAlgo(path: *const c_char, handle: *mut mscclAlgoHandle_t, rank: c_int) -> ncclResult_t, only Rccl since 2 15 5;
    mscclRunAlgo(send: *const c_void, send_counts: *const usize, send_offsets: *const usize, recv: *mut c_void, recv_counts: *const usize, recv_offsets: *const usize, count: usize, dtype: ncclDataType_t, root: c_int, peer: c_int, op: ncclRedOp_t, algorithm: mscclAlgoHandle_t, comm: ncclComm_t, stream: stream_t) -> ncclResult_t, only Rccl since 2 15 5;
    mscclUnloadAlgo(algorithm: mscclAlgoHandle_t) -> ncclResult_t, only Rccl since 2 15 5;
}

/// A loaded NCCL or RCCL.
#[derive(Debug)]
pub struct Api {
    library: Library,
    functions: Functions,
    flavour: Flavour,
    version: u32,
}

impl std::ops::Deref for Api {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Api {
    /// Loads the library of a search and reads its version.
    ///
    /// # Errors
    /// [`NotFound`] if none loads.
    pub fn load(search: &Search) -> Result<Api, NotFound> {
        let library = search.open()?;
        let flavour = Flavour::of(search);
        let functions = Functions::load(&library, flavour);
        let mut version = 0;
        if let Some(get_version) = functions.ncclGetVersion {
            // SAFETY: the pointer is valid; the function needs no initialisation.
            unsafe { get_version(&raw mut version) };
        }
        Ok(Api { library, functions, flavour, version: version as u32 })
    }

    /// The version code: 22809 is 2.28.9.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Which of the two libraries it is.
    pub fn flavour(&self) -> Flavour {
        self.flavour
    }

    /// `NCCL` or `RCCL`.
    pub fn name(&self) -> &'static str {
        self.flavour.search().name
    }

    /// The library's file.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// The functions that the library lacks, without those that only the other library ever had.
    pub fn missing(&self) -> Vec<Function> {
        self.functions.missing().into_iter().filter(|function| function.is_of(self.flavour)).collect()
    }

    /// The error for a missing function.
    #[cold]
    pub fn lacks(&self, function: &'static str) -> MissingFunction {
        MissingFunction {
            function,
            library: self.name(),
            version: version_text(self.version),
            path: self.path().to_owned(),
        }
    }
}
