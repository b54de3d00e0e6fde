//! Status codes (`ncclResult_t`), their texts, and the last error.

use crate::base::call::Code;
use crate::base::handles::Handle;
use crate::base::lock::lock;
use std::ffi::{CStr, c_char};
use std::sync::Mutex;

pub const SUCCESS: Code = 0;
pub const UNHANDLED_CUDA_ERROR: Code = 1;
pub const SYSTEM_ERROR: Code = 2;
pub const INTERNAL_ERROR: Code = 3;
pub const INVALID_ARGUMENT: Code = 4;
pub const INVALID_USAGE: Code = 5;
pub const REMOTE_ERROR: Code = 6;
pub const IN_PROGRESS: Code = 7;
pub const TIMEOUT: Code = 8;

/// The text of the last error. As in NCCL, the process has one.
static LAST_ERROR: Mutex<[u8; 1024]> = Mutex::new([0; 1024]);

/// Stores the text of an error and returns its code.
pub fn fail(code: Code, text: impl Into<String>) -> Code {
    let mut last = lock(&LAST_ERROR);
    let text = text.into();
    let len = text.len().min(last.len() - 1);
    last.fill(0);
    last[..len].copy_from_slice(&text.as_bytes()[..len]);
    code
}

/// The text of a status code.
fn text(code: Code) -> &'static CStr {
    match code {
        SUCCESS => c"no error",
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        SYSTEM_ERROR => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        INTERNAL_ERROR => c"internal error - please report this issue to the NCCL developers",
        INVALID_ARGUMENT => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        INVALID_USAGE => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        TIMEOUT => c"NCCL operation timed out",
        _ => c"unknown result code",
    }
}

#[allow(non_snake_case, reason = "the C library's name")]
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    text(code).as_ptr()
}

#[allow(non_snake_case, reason = "the C library's name")]
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: Handle) -> *const c_char {
    lock(&LAST_ERROR).as_ptr().cast()
}

#[allow(non_snake_case, reason = "the C library's name")]
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInit() {}
