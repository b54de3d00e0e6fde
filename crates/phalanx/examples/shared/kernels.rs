//! Kernels that are compiled when they are needed.

use crate::gpu::{Result, missing};
use cudarc::driver::{CudaContext, CudaModule};
use cudarc::nvrtc;
use std::sync::Arc;

/// Compiles kernels for the context's GPU.
pub fn compile(context: &Arc<CudaContext>, source: &str) -> Result<Arc<CudaModule>> {
    // SAFETY: looks whether the loader finds the library, which has no initialiser of note.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        return Err(missing("libnvrtc", "CUDA's compiler at run time", "nvidia-cuda-nvrtc"));
    }
    Ok(context.load_module(nvrtc::compile_ptx(source)?)?)
}
