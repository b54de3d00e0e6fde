//! Types and constants, and the searches for the libraries.

use crate::Search;
use std::ffi::{c_int, c_void};

/// Where NCCL may be.
pub const NCCL: Search = Search {
    name: "NCCL",
    files: &["libnccl.so.2", "libnccl.so"],
    variable: "PHALANX_NCCL_LIB",
    homes: &["NCCL_HOME", "NCCL_ROOT", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"],
    wheels: &["nvidia/nccl/lib"],
    global: false,
};

/// Where RCCL may be.
pub const RCCL: Search = Search {
    name: "RCCL",
    files: &["librccl.so.1", "librccl.so"],
    variable: "PHALANX_RCCL_LIB",
    homes: &["RCCL_HOME", "ROCM_PATH", "ROCM_HOME"],
    wheels: &["_rocm_sdk_libraries*/lib", "_rocm_sdk_devel/lib", "torch/lib"],
    global: false,
};

/// The two libraries with this interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Flavour {
    /// NVIDIA's NCCL, on CUDA.
    Nccl,
    /// AMD's RCCL, on HIP.
    Rccl,
}

impl Flavour {
    /// Where the library may be.
    pub const fn search(self) -> &'static Search {
        match self {
            Flavour::Nccl => &NCCL,
            Flavour::Rccl => &RCCL,
        }
    }

    /// The library of a search.
    pub fn of(search: &Search) -> Flavour {
        if search.name == RCCL.name { Flavour::Rccl } else { Flavour::Nccl }
    }
}

/// A communicator.
pub type ncclComm_t = *mut c_void;
/// A window: memory that all ranks registered in one collective call.
pub type ncclWindow_t = *mut c_void;
/// `cudaStream_t` or `hipStream_t`.
pub type stream_t = *mut c_void;
/// A reduction operator: one of [`red_op`], or a handle of `ncclRedOpCreatePreMulSum`.
pub type ncclRedOp_t = c_int;
/// An algorithm of `mscclLoadAlgo` (RCCL 2.15 to 2.27).
pub type mscclAlgoHandle_t = c_int;
/// A parameter of the library (since 2.30).
pub type ncclParamHandle_t = *mut c_void;
/// Where the scalar of a reduction is.
pub type ncclScalarResidence_t = c_int;
/// A statistic of a communicator's memory, one of [`mem_stat`] (since 2.29).
pub type ncclCommMemStat_t = c_int;

/// The id by which ranks find each other when they make a communicator.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ncclUniqueId {
    /// Opaque.
    pub internal: [u8; NCCL_UNIQUE_ID_BYTES],
}

/// Bytes of a unique id.
pub const NCCL_UNIQUE_ID_BYTES: usize = 128;

/// A status code.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ncclResult_t(pub c_int);

/// The known status codes.
#[allow(missing_docs)]
impl ncclResult_t {
    pub const Success: Self = Self(0);
    pub const UnhandledCudaError: Self = Self(1);
    pub const SystemError: Self = Self(2);
    pub const InternalError: Self = Self(3);
    pub const InvalidArgument: Self = Self(4);
    pub const InvalidUsage: Self = Self(5);
    pub const RemoteError: Self = Self(6);
    pub const InProgress: Self = Self(7);
    pub const Timeout: Self = Self(8);
}

/// An element type.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ncclDataType_t(pub c_int);

#[allow(missing_docs)]
impl ncclDataType_t {
    pub const Int8: Self = Self(0);
    pub const Uint8: Self = Self(1);
    pub const Int32: Self = Self(2);
    pub const Uint32: Self = Self(3);
    pub const Int64: Self = Self(4);
    pub const Uint64: Self = Self(5);
    pub const Float16: Self = Self(6);
    pub const Float32: Self = Self(7);
    pub const Float64: Self = Self(8);
    /// Since 2.10.
    pub const Bfloat16: Self = Self(9);
    /// Since 2.24.
    pub const Float8e4m3: Self = Self(10);
    /// Since 2.24.
    pub const Float8e5m2: Self = Self(11);
}

/// The built-in reduction operators.
#[allow(missing_docs)]
pub mod red_op {
    use super::ncclRedOp_t;
    pub const Sum: ncclRedOp_t = 0;
    pub const Prod: ncclRedOp_t = 1;
    pub const Max: ncclRedOp_t = 2;
    pub const Min: ncclRedOp_t = 3;
    /// Since 2.10.
    pub const Avg: ncclRedOp_t = 4;
}

/// The scalar of a pre-multiplied sum is in device memory, and read by each operation.
pub const ncclScalarDevice: ncclScalarResidence_t = 0;
/// The scalar of a pre-multiplied sum is in host memory, and copied during the call.
pub const ncclScalarHostImmediate: ncclScalarResidence_t = 1;

/// A window without flags.
pub const NCCL_WIN_DEFAULT: c_int = 0;
/// A symmetric window: at the same offset on every rank. Collectives on it are fastest.
pub const NCCL_WIN_COLL_SYMMETRIC: c_int = 1;
/// Operations on the window are ordered.
pub const NCCL_WIN_STRICT_ORDERING: c_int = 2;
/// The alignment of a window's start, in bytes.
pub const NCCL_WIN_REQUIRED_ALIGNMENT: usize = 4096;

/// Shrinks a communicator without failures.
pub const NCCL_SHRINK_DEFAULT: c_int = 0;
/// Aborts running operations, then shrinks.
pub const NCCL_SHRINK_ABORT: c_int = 1;
/// The color of a rank that joins no communicator of a split.
pub const NCCL_SPLIT_NOCOLOR: c_int = -1;
/// Suspends a communicator's memory.
pub const NCCL_SUSPEND_MEM: c_int = 1;

/// The statistics of `ncclCommMemStats`.
#[allow(missing_docs)]
pub mod mem_stat {
    use super::ncclCommMemStat_t;
    pub const GpuMemSuspend: ncclCommMemStat_t = 0;
    pub const GpuMemSuspended: ncclCommMemStat_t = 1;
    pub const GpuMemPersist: ncclCommMemStat_t = 2;
    pub const GpuMemTotal: ncclCommMemStat_t = 3;
}

/// A number of signals of a peer to wait for.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ncclWaitSignalDesc_t {
    /// Number of signals.
    pub opCnt: c_int,
    /// The peer.
    pub peer: c_int,
    /// The signal's index.
    pub sigIdx: c_int,
    /// The context.
    pub ctx: c_int,
}

/// The version code of a release, as in `ncclGetVersion`.
pub const fn version_code(major: u32, minor: u32, patch: u32) -> u32 {
    if major <= 2 && minor <= 8 {
        major * 1000 + minor * 100 + patch
    } else {
        major * 10000 + minor * 100 + patch
    }
}

/// A version code as text: 22809 is 2.28.9.
pub fn version_text(code: u32) -> String {
    let (major, rest) =
        if code < 10_000 { (code / 1000, code % 1000) } else { (code / 10_000, code % 10_000) };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}
