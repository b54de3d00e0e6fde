//! The GPUs of this machine, as the CUDA driver describes them, and the libraries that connect them.
//!
//! Nothing here makes a context, so no GPU memory is used.

use anyhow::{Context, Result, ensure};
use phalanx::cudarc::driver::result::device;
use phalanx::cudarc::driver::sys::{self, CUdevice, CUdevice_P2PAttribute, CUdevice_attribute};
use phalanx::cudarc::driver::{CudaContext, DriverError};
use phalanx_sys::cuda::DRIVER;
use phalanx_sys::nccl::{Api, NCCL, version_text};
use phalanx_sys::{Library, NotFound};
use std::sync::OnceLock;

/// Bytes, at most, of a GPU's PCI address with its final 0.
const PCI_LENGTH: usize = 32;

/// The driver's library. Call it before anything of cudarc, which panics without a driver.
pub fn driver() -> Result<&'static Library, NotFound> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    match LIBRARY.get() {
        Some(library) => Ok(library),
        None => DRIVER.open().map(|library| LIBRARY.get_or_init(|| library)),
    }
}

/// The number of GPUs that this process sees.
pub fn count() -> Result<usize> {
    driver()?;
    let count = CudaContext::device_count().map_err(explain).context("the CUDA driver does not start")?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// The number of ranks that can have a GPU each, connected by NCCL. An error gives the reason for none.
pub fn usable() -> Result<usize> {
    let count = count()?;
    ensure!(count > 0, "the CUDA driver sees no GPU (CUDA_VISIBLE_DEVICES hides those it does not name)");
    Api::load(&NCCL)?;
    Ok(count)
}

/// Version and file of NCCL, if it can be loaded.
pub fn nccl() -> Option<String> {
    let api = Api::load(&NCCL).ok()?;
    Some(format!("NCCL {} ({})", version_text(api.version()), api.path().display()))
}

/// Version and file of NVSHMEM, if it can be loaded.
pub fn nvshmem() -> Option<String> {
    let (version, path) = (phalanx::nvshmem::version().ok()?, phalanx::nvshmem::path().ok()?);
    Some(format!("NVSHMEM {version} ({})", path.display()))
}

/// A GPU.
#[derive(Debug, Clone, Copy)]
pub struct Gpu(CUdevice);

/// The link between two GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Whether each GPU can access the other's memory.
    pub access: bool,
    /// The driver's ranking of this machine's links: 0 is the fastest.
    pub rank: Option<i32>,
    /// Whether atomic operations work over it, as they do over NVLink.
    pub atomics: bool,
}

impl Gpu {
    /// The GPU with this number, below [`count`].
    pub fn number(ordinal: usize) -> Result<Gpu> {
        driver()?;
        Ok(Gpu(device::get(i32::try_from(ordinal)?).map_err(explain)?))
    }

    pub fn name(self) -> Result<String> {
        device::get_name(self.0).map_err(explain)
    }

    /// The bytes of its memory.
    pub fn memory(self) -> Result<u64> {
        // SAFETY: the device is one of the driver's.
        Ok(unsafe { device::total_mem(self.0) }.map_err(explain)? as u64)
    }

    /// The compute capability, as `9.0`.
    pub fn capability(self) -> Result<String> {
        let minor = self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(format!("{}.{minor}", self.generation()?))
    }

    /// The compute capability's major number.
    pub fn generation(self) -> Result<i32> {
        self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    }

    fn attribute(self, attribute: CUdevice_attribute) -> Result<i32> {
        // SAFETY: the device is one of the driver's.
        unsafe { device::get_attribute(self.0, attribute) }.map_err(explain)
    }

    /// The PCI address, as `0000:19:00.0`.
    pub fn pci(self) -> Result<String> {
        let mut text = [0u8; PCI_LENGTH];
        // SAFETY: the driver writes at most this many bytes, with the final 0.
        let result = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), PCI_LENGTH as i32, self.0) };
        result.result().map_err(explain)?;
        Ok(text.iter().take_while(|&&byte| byte != 0).map(|&byte| char::from(byte)).collect())
    }

    /// The link from this GPU to another.
    pub fn link(self, other: Gpu) -> Result<Link> {
        let mut access = 0;
        // SAFETY: an out-pointer on the stack, written during the call.
        unsafe { sys::cuDeviceCanAccessPeer(&raw mut access, self.0, other.0) }.result().map_err(explain)?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: as above.
            let result = unsafe { sys::cuDeviceGetP2PAttribute(&raw mut value, which, self.0, other.0) };
            result.result().ok().map(|()| value)
        };
        use CUdevice_P2PAttribute::{
            CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED as ATOMICS,
            CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK as RANK,
        };
        Ok(Link { access: access != 0, rank: attribute(RANK), atomics: attribute(ATOMICS) == Some(1) })
    }
}

/// The CUDA version of the driver, as `12.8`.
pub fn driver_version() -> Result<String> {
    driver()?;
    let mut version = 0;
    // SAFETY: an out-pointer on the stack, written during the call.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(explain)?;
    Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// The error with the driver's own text. cudarc's error shows the name of its Rust constant.
fn explain(error: DriverError) -> anyhow::Error {
    phalanx::Error::from(error).into()
}
