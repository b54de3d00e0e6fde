//! The machine's GPUs, as NVIDIA's driver counts them: whether the library that is tested can do anything
//! with them is not asked, or a library that cannot would have its tests left out.

use phalanx::cudarc::driver::CudaContext;
use std::sync::LazyLock;

/// Says whether NCCL or phalanx's own kernels carry collectives out.
pub const GPU_ALGORITHM: &str = "PHALANX_GPU_ALGORITHM";

/// Whether own kernels carry out all that they can, whatever its length.
pub static ARE_OWN_KERNELS_FORCED: LazyLock<bool> = LazyLock::new(|| {
    std::env::var(GPU_ALGORITHM).is_ok_and(|algorithm| !matches!(&*algorithm, "auto" | "nccl"))
});

/// How many GPUs this process sees, or why there is none.
pub fn count() -> Result<usize, String> {
    // cudarc panics without the driver.
    phalanx_sys::cuda::DRIVER.open().map(std::mem::forget).map_err(|_| "no CUDA driver")?;
    match CudaContext::device_count() {
        Ok(0) => Err("the driver sees none".into()),
        Ok(gpus) => Ok(gpus as usize),
        Err(error) => Err(error.to_string()),
    }
}
