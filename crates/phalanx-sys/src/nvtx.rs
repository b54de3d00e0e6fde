//! NVTX's C interface, by which a program tells a profiler what it is doing.
//!
//! Without a profiler the functions do nothing. NVTX loads the profiler's library, which [`INJECTION`] names, when the first of them is
//! called.

#![allow(non_camel_case_types, non_snake_case)]

use crate::functions::functions;
use crate::{Library, NotFound, Search};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Where NVTX may be: with CUDA 12.9 and later as `nvtx3interop`, before as `nvToolsExt`.
pub const NVTX: Search = Search {
    name: "NVTX",
    files: &["libnvtx3interop.so.1", "libnvToolsExt.so.1"],
    variable: "PHALANX_NVTX_LIB",
    homes: &["CUDA_HOME", "CUDA_PATH"],
    wheels: &["nvidia/cu13/lib", "nvidia/nvtx/lib"],
    global: false,
};

/// The environment variable by which a profiler names its library to NVTX.
pub const INJECTION: &str = "NVTX_INJECTION64_PATH";

/// Events of one library.
pub type nvtxDomainHandle_t = *mut c_void;
/// A range that has started.
pub type nvtxRangeId_t = u64;

/// `NVTX_VERSION` of the structure below, which NVTX 3 has as NVTX 2 had it.
pub const NVTX_VERSION: u16 = 2;
/// The payload is a `u64`.
pub const NVTX_PAYLOAD_TYPE_UNSIGNED_INT64: c_int = 1;
/// The message is a C string.
pub const NVTX_MESSAGE_TYPE_ASCII: c_int = 1;

/// What is known of an event.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct nvtxEventAttributes_t {
    /// [`NVTX_VERSION`].
    pub version: u16,
    /// The size of this structure.
    pub size: u16,
    /// A number of the program's own; 0 for none.
    pub category: c_uint,
    /// 0 for no colour.
    pub colorType: c_int,
    /// The colour.
    pub color: c_uint,
    /// The payload's type.
    pub payloadType: c_int,
    /// 0.
    pub reserved0: c_int,
    /// A number that belongs to the event.
    pub payload: u64,
    /// The message's type.
    pub messageType: c_int,
    /// The message.
    pub message: *const c_char,
}

functions! {
    nvtxDomainCreateA(name: *const c_char) -> nvtxDomainHandle_t;
    nvtxDomainRangeStartEx(domain: nvtxDomainHandle_t, attributes: *const nvtxEventAttributes_t) -> nvtxRangeId_t;
    nvtxDomainRangeEnd(domain: nvtxDomainHandle_t, range: nvtxRangeId_t) -> ();
}

impl Functions {
    /// Loads NVTX.
    ///
    /// # Errors
    /// [`NotFound`] if there is none.
    pub fn open() -> Result<(Library, Functions), NotFound> {
        let library = NVTX.open()?;
        let functions = Functions::load(&library);
        Ok((library, functions))
    }
}
