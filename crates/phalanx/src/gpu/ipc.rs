//! Device memory of other processes: its handles, and opening it.

use super::cuda::failed;
use crate::types::error::Result;
use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUdeviceptr, CUipcMemHandle};
use serde::{Deserialize, Serialize};

/// A handle of an allocation of `cuMemAlloc`, by which other processes of the host open it (`CUipcMemHandle`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IpcHandle(pub [u64; 8]);

impl IpcHandle {
    /// Memory that is reached without a handle.
    pub const NONE: IpcHandle = IpcHandle([0; 8]);

    /// The handle of the allocation that has this address. The memory's GPU is current.
    pub fn of(address: CUdeviceptr) -> Result<IpcHandle> {
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: an out-pointer on the stack; the driver refuses an address that it does not know.
        let result = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) };
        result.result().map_err(|error| failed("cuIpcGetMemHandle", error))?;
        let mut words = [0; 8];
        for (word, bytes) in words.iter_mut().zip(handle.reserved.chunks_exact(8)) {
            *word = u64::from_ne_bytes(std::array::from_fn(|i| bytes[i] as u8));
        }
        Ok(IpcHandle(words))
    }

    /// Opens the memory for the current GPU: where the allocation begins here. As often as it was opened, it has to be [closed](close).
    ///
    /// # Safety
    /// A handle that another process has of its own memory, which keeps the memory until it is closed here.
    pub unsafe fn open(self) -> Result<CUdeviceptr> {
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        for (bytes, word) in handle.reserved.chunks_exact_mut(8).zip(self.0) {
            bytes.iter_mut().zip(word.to_ne_bytes()).for_each(|(to, from)| *to = from as _);
        }
        let mut start: CUdeviceptr = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: the caller's contract; an out-pointer on the stack.
        let result = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut start, handle, flags) };
        result.result().map_err(|error: DriverError| failed("cuIpcOpenMemHandle", error))?;
        Ok(start)
    }
}

/// Closes memory of another process. The GPU is current for which it was opened.
///
/// # Safety
/// It was opened and not closed, and no work that uses it runs or follows.
pub(crate) unsafe fn close(start: CUdeviceptr) {
    // SAFETY: the caller's contract.
    unsafe { sys::cuIpcCloseMemHandle(start) };
}
