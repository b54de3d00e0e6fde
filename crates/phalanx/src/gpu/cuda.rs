//! The CUDA driver, found before cudarc needs it: cudarc panics where there is none.

use crate::types::error::{Error, LibraryError, Result, UnsupportedError};
use crate::types::memory::GpuId;
use cudarc::driver::{CudaContext, DriverError, result, sys};
use phalanx_sys::{Library, cuda, is_loadable};
use std::ffi::CStr;
use std::sync::OnceLock;

/// Names by which cudarc finds the driver. (cudarc's own check is not there in all of its loading modes.)
const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// Loads the CUDA driver, under a name by which cudarc finds it too. It stays loaded.
///
/// # Errors
/// [`Error::LibraryNotFound`] if there is no driver; [`Error::Unsupported`] if the file is not a driver, or
/// if cudarc does not find it under its name.
pub(crate) fn driver() -> Result<&'static Library> {
    static DRIVER: OnceLock<Library> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    let found = cuda::DRIVER.open()?;
    let refused = |why: &str| {
        Error::from(UnsupportedError {
            what: format!("{} as the CUDA driver", found.path().display()),
            why: why.into(),
            remedy: "set PHALANX_CUDA_LIB to the driver's libcuda.so.1, or unset it".into(),
        })
    };
    if !found.has(c"cuInit") {
        return Err(refused("it has no cuInit"));
    }
    if !NAMES.iter().any(|name| is_loadable(name)) {
        return Err(refused("its name (SONAME) is not libcuda.so.1"));
    }
    Ok(DRIVER.get_or_init(|| found))
}

/// UUIDs of the GPUs that this process sees, in the driver's order. No context is created.
pub(crate) fn gpu_ids() -> Result<Vec<GpuId>> {
    driver()?;
    let id = |ordinal| {
        let device = result::device::get(ordinal)?;
        Ok(GpuId(result::device::get_uuid(device)?.bytes.map(|byte| byte as u8)))
    };
    (0..CudaContext::device_count()?).map(id).collect()
}

/// How a GPU reaches the memory of another one of its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerLink {
    None,
    /// Over PCIe, without atomic operations.
    Bus,
    /// Over NVLink: atomic operations, and lines of 128 bytes that arrive whole.
    NvLink,
}

/// How one of the GPUs that this process sees reaches another (`cuDeviceGetP2PAttribute`). No context is created.
pub(crate) fn link(from: usize, to: usize) -> Result<PeerLink> {
    let ask = |attribute| {
        let mut answer = 0;
        // SAFETY: an out-pointer on the stack; the driver checks the devices' numbers.
        let result =
            unsafe { sys::cuDeviceGetP2PAttribute(&raw mut answer, attribute, from as i32, to as i32) };
        result.result().map(|()| answer != 0).map_err(|error| failed("cuDeviceGetP2PAttribute", error))
    };
    Ok(if !ask(sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? {
        PeerLink::None
    } else if ask(sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? {
        PeerLink::NvLink
    } else {
        PeerLink::Bus
    })
}

/// The error of a function of the driver.
pub(crate) fn failed(function: &'static str, error: DriverError) -> LibraryError {
    LibraryError {
        library: "CUDA".into(),
        function,
        code: error.0 as i32,
        text: describe(error),
        context: None,
        fatal: false,
    }
}

fn describe(error: DriverError) -> String {
    let text = |text: std::result::Result<&CStr, DriverError>| {
        text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    };
    format!("{}, {}", text(error.error_name()), text(error.error_string()))
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Error {
        failed("the CUDA driver", error).into()
    }
}
