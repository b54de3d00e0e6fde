//! The loaded library, and its status codes as errors.

use crate::control::control_channel::AnnouncedCall;
pub(crate) use crate::gpu::nccl::{Library, load};
use crate::types::error::{LibraryError, Result};
use phalanx_sys::nccl::{Flavour, ncclComm_t, ncclResult_t, version_code};
use std::ffi::CStr;

/// Most characters of the library's own account of an error that are kept.
const ACCOUNT: usize = 1024;

impl Library {
    /// A function that must be there.
    #[inline]
    pub fn need<F>(&self, function: Option<F>, name: &'static str) -> Result<F> {
        function.ok_or_else(|| self.api().lacks(name).into())
    }

    /// Whether the end of a communicator waits for all ranks of the host (since NCCL 2.31).
    pub fn ends_together(&self) -> bool {
        self.flavour() == Flavour::Nccl && self.version() >= version_code(2, 31, 0)
    }

    /// Whether several processes may use one GPU (`NCCL_MULTI_RANK_GPU_ENABLE`, since NCCL 2.30).
    pub fn shares_gpus(&self) -> bool {
        let told = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE");
        let is_told = told.is_ok_and(|value| value.trim().parse::<i64>().is_ok_and(|value| value != 0));
        self.flavour() == Flavour::Nccl && self.version() >= version_code(2, 30, 0) && is_told
    }

    /// Asynchronous state of a communicator (`ncclCommGetAsyncError`).
    ///
    /// # Safety
    /// The communicator is there, or is being made, finalized or revoked.
    pub unsafe fn async_state(&self, comm: ncclComm_t) -> Result<ncclResult_t> {
        let get_error = self.need(self.ncclCommGetAsyncError, "ncclCommGetAsyncError")?;
        let mut state = ncclResult_t::Success;
        // SAFETY: the caller's contract; the out-pointer is written during the call.
        let answered = unsafe { get_error(comm, &raw mut state) };
        Ok(if answered == ncclResult_t::Success { state } else { answered })
    }

    /// The error for a status code.
    #[cold]
    pub fn error(&self, result: ncclResult_t, function: &'static str) -> LibraryError {
        LibraryError {
            library: format!(
                "{} {}",
                self.api().name(),
                phalanx_sys::nccl::version_text(self.api().version())
            ),
            function,
            code: result.0,
            text: self.describe(result),
            context: None,
            fatal: false,
        }
    }

    /// The library's texts for a status code and for its last error.
    fn describe(&self, result: ncclResult_t) -> String {
        let mut text = match self.api().ncclGetErrorString {
            // SAFETY: any code is allowed; the text is static.
            Some(describe) => unsafe { text_at(describe(result)) },
            None => String::new(),
        };
        match self.last_error() {
            Ok(account) if !account.is_empty() => text = format!("{text}: {account}"),
            _ => {}
        }
        text
    }

    /// The library's own account of the last error in this process; empty if there was none.
    pub fn last_error(&self) -> Result<String> {
        let last_error = self.need(self.api().ncclGetLastError, "ncclGetLastError")?;
        // SAFETY: the communicator is not looked at; the answer is an array of the library that ends in NUL
        // at 1024 bytes at the latest, which other threads may overwrite meanwhile: it is copied, bounded,
        // lossily.
        let account = unsafe { text_at(last_error(std::ptr::null_mut())) };
        Ok(account.trim().to_owned())
    }
}

/// A text of the library.
///
/// # Safety
/// Null, or bytes that are readable up to a NUL or for `ACCOUNT`.
unsafe fn text_at(start: *const std::ffi::c_char) -> String {
    if start.is_null() {
        return String::new();
    }
    let mut bytes = Vec::new();
    for index in 0..ACCOUNT {
        // SAFETY: within the caller's bound; volatile, since another thread may write.
        let byte = unsafe { start.add(index).cast::<u8>().read_volatile() };
        if byte == 0 {
            break;
        }
        bytes.push(byte);
    }
    bytes.push(0);
    let text = CStr::from_bytes_until_nul(&bytes).expect("ends in NUL");
    text.to_string_lossy().into_owned()
}

impl LibraryError {
    /// Adds the operation in which the error happened.
    pub(crate) fn within(mut self, rank: usize, announced: &AnnouncedCall) -> LibraryError {
        let (operation, sequence) = announced.describe();
        self.context = Some((rank, operation, sequence));
        self
    }
}
