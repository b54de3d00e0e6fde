//! The bindings against RCCL's and HIP's headers: names, values and layouts as they stand there, written down.
//!
//! RCCL 2.13.4 (ROCm 5.4), 2.15.5 (5.5), 2.18.3 (6.0), 2.21.5 and 2.30; HIP 5.7 and 6.3.
#![cfg(target_pointer_width = "64")]

use phalanx_sys::hip::{R0000, R0600, hipError_t, hipMemcpyDefault};
use phalanx_sys::nccl::*;
use std::mem::{offset_of, size_of};

/// The functions of RCCL 2.30's header, `nccl.h`, without those that it keeps for older programs under another name.
const NEWEST: [&str; 55] = [
    "ncclMemAlloc",
    "ncclMemFree",
    "ncclGetVersion",
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommInitRank",
    "ncclCommInitAll",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclCommAbort",
    "ncclCommRevoke",
    "ncclCommSplit",
    "ncclCommShrink",
    "ncclCommGetUniqueId",
    "ncclCommGrow",
    "ncclCommInitRankScalable",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclResetDebugInit",
    "ncclCommGetAsyncError",
    "ncclCommCount",
    "ncclCommCuDevice",
    "ncclCommUserRank",
    "ncclCommRegister",
    "ncclCommDeregister",
    "ncclCommSuspend",
    "ncclCommResume",
    "ncclCommMemStats",
    "ncclCommWindowRegister",
    "ncclCommWindowDeregister",
    "ncclWinGetUserPtr",
    "ncclRedOpCreatePreMulSum",
    "ncclRedOpDestroy",
    "ncclReduce",
    "ncclBcast",
    "ncclBroadcast",
    "ncclAllReduce",
    "ncclAllReduceWithBias",
    "ncclReduceScatter",
    "ncclAllGather",
    "ncclAlltoAll",
    "ncclAlltoAllv",
    "ncclGather",
    "ncclScatter",
    "ncclSend",
    "ncclRecv",
    "ncclPutSignal",
    "ncclSignal",
    "ncclWaitSignal",
    "mscclLoadAlgo",
    "mscclRunAlgo",
    "mscclUnloadAlgo",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclGroupSimulateEnd",
];

#[test]
fn every_function_of_the_header_is_in_the_table() {
    for name in NEWEST {
        assert!(FUNCTIONS.iter().any(|function| function.name == name), "{name}");
    }
    let others: Vec<&str> =
        FUNCTIONS.iter().map(|function| function.name).filter(|name| !NEWEST.contains(name)).collect();
    let only = |flavour, name: &str| FUNCTIONS.iter().any(|f| f.name == name && f.only == Some(flavour));
    let is_nccls = |name: &&str| {
        only(Flavour::Nccl, name)
            || name.starts_with("ncclParam")
            || name.ends_with("Config")
            || *name == "ncclSetEncryption"
    };
    assert!(others.iter().all(is_nccls), "NCCL alone has: {others:?}");
    let rccl_only = |name: &str| only(Flavour::Rccl, name);
    assert!(["ncclAlltoAllv", "ncclAllReduceWithBias", "mscclRunAlgo"].into_iter().all(rccl_only));
    assert!(!rccl_only("ncclAlltoAll"));
}

#[test]
fn values() {
    assert_eq!(NCCL_UNIQUE_ID_BYTES, 128);
    let results = [
        (ncclResult_t::Success, 0),
        (ncclResult_t::UnhandledCudaError, 1),
        (ncclResult_t::SystemError, 2),
        (ncclResult_t::InternalError, 3),
        (ncclResult_t::InvalidArgument, 4),
        (ncclResult_t::InvalidUsage, 5),
        (ncclResult_t::RemoteError, 6),
        (ncclResult_t::InProgress, 7),
        // ncclNumResults before 2.30, which no function answers.
        (ncclResult_t::Timeout, 8),
    ];
    assert!(results.iter().all(|(result, value)| result.0 == *value));
    let types = [
        ncclDataType_t::Int8,
        ncclDataType_t::Uint8,
        ncclDataType_t::Int32,
        ncclDataType_t::Uint32,
        ncclDataType_t::Int64,
        ncclDataType_t::Uint64,
        ncclDataType_t::Float16,
        ncclDataType_t::Float32,
        ncclDataType_t::Float64,
        ncclDataType_t::Bfloat16,
        ncclDataType_t::Float8e4m3,
        ncclDataType_t::Float8e5m2,
    ];
    assert!(types.iter().enumerate().all(|(value, dtype)| dtype.0 == value as i32));
    assert_eq!([red_op::Sum, red_op::Prod, red_op::Max, red_op::Min, red_op::Avg], [0, 1, 2, 3, 4]);
    assert_eq!((ncclScalarDevice, ncclScalarHostImmediate), (0, 1));
    assert_eq!((NCCL_WIN_DEFAULT, NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_STRICT_ORDERING), (0, 1, 2));
    assert_eq!((NCCL_WIN_REQUIRED_ALIGNMENT, NCCL_SUSPEND_MEM), (4096, 1));
    assert_eq!((NCCL_SHRINK_DEFAULT, NCCL_SHRINK_ABORT, NCCL_SPLIT_NOCOLOR), (0, 1, -1));
    assert_eq!(UNDEF_INT, i32::MIN);
}

#[test]
fn layouts() {
    let offsets = [
        (offset_of!(ncclConfig_t, size), 0),
        (offset_of!(ncclConfig_t, magic), 8),
        (offset_of!(ncclConfig_t, version), 12),
        (offset_of!(ncclConfig_t, blocking), 16),
        (offset_of!(ncclConfig_t, netName), 32),
        (offset_of!(ncclConfig_t, splitShare), 40),
        (offset_of!(ncclConfig_t, trafficClass), 44),
        (offset_of!(ncclConfig_t, commName), 48),
        (offset_of!(ncclConfig_t, shrinkShare), 64),
        (offset_of!(ncclConfig_t, nvlsCTAs), 68),
        (offset_of!(ncclConfig_t, maxP2pPeers), 88),
    ];
    assert!(offsets.iter().all(|(ours, theirs)| ours == theirs), "{offsets:?}");
    let config = ncclConfig_t::for_library(Flavour::Rccl, version_code(2, 30, 4)).unwrap();
    assert_eq!((config.magic, config.size, config.used()), (0xcafe_beef, 96, 92));
    assert_eq!(size_of::<ncclWaitSignalDesc_t>(), 16);
    let simulation = ncclSimInfo_t::new();
    assert_eq!((simulation.size, simulation.magic), (24, 0x7468_5283));
}

#[test]
fn hip() {
    let codes = [
        (hipError_t::InvalidValue, 1),
        (hipError_t::OutOfMemory, 2),
        (hipError_t::NoDevice, 100),
        (hipError_t::InvalidDevice, 101),
        (hipError_t::NotReady, 600),
        (hipError_t::NotSupported, 801),
    ];
    assert!(codes.iter().all(|(error, value)| error.0 == *value));
    assert_eq!(hipMemcpyDefault, 4);
    // `offsetof` in hip_runtime_api.h of 5.7 and of 6.3.
    assert_eq!((R0000.memory, R0000.architecture), (256, 396));
    assert_eq!((R0600.memory, R0600.architecture), (288, 1160));
}
