//! The machine's GPUs, as NVIDIA's driver counts them: whether the library that is tested can do anything
//! with them is not asked, or a library that cannot would have its tests left out.

use phalanx::cudarc::driver::CudaContext;

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
