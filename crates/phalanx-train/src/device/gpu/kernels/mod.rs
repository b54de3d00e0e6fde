//! This crate's GPU kernels: their images, and loading them.
//!
//! The kernels are CUDA C++ in this folder, a module for each file. `.ci/gpu-kernels` compiles them into `images/`; users need
//! no compiler. Tests without a GPU run a model of them, by name: `crates/phalanx-emulated/src/kernels/training`.

use crate::Result;
use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, LaunchConfig};
use cudarc::nvrtc::Ptx;
use miniz_oxide::inflate::decompress_to_vec_zlib;
use phalanx::DType;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Threads of a block, as in `number.cuh`.
pub(crate) const THREADS: usize = 256;
/// Most blocks of a launch: enough to fill a GPU, and each thread goes on with what is behind its first elements.
const BLOCKS: usize = 2048;

/// Code of one module, compressed: PTX, which the driver compiles, and cubins, which are ready for GPUs of their generation.
pub(crate) struct Images {
    name: &'static str,
    ptx: &'static [u8],
    sm_80: &'static [u8],
    sm_90: &'static [u8],
}

macro_rules! modules {
    ($($constant:ident: $name:literal;)*) => {$(
        pub(crate) static $constant: Images = Images {
            name: $name,
            ptx: include_bytes!(concat!("images/", $name, ".ptx.z")),
            sm_80: include_bytes!(concat!("images/", $name, ".sm_80.cubin.z")),
            sm_90: include_bytes!(concat!("images/", $name, ".sm_90.cubin.z")),
        };
    )*};
}

modules! {
    ATTENTION: "attention";
    COMPRESS: "compress";
    ELEMENTS: "elements";
    MATRICES: "matrices";
    NORM: "norm";
    OPTIMIZER: "optimizer";
    ROWS: "rows";
    TENSOR: "tensor";
}

/// A kernel: its module, its name, and the types that it is for.
type Key = (&'static str, &'static str, &'static [DType]);

/// What is loaded in a context. A context that is here is never given back, so its address is of no other one.
#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Arc<CudaModule>>,
    kernels: HashMap<Key, CudaFunction>,
}

/// A kernel, whose module is loaded at its first use in a context.
pub(crate) fn find(
    context: &Arc<CudaContext>,
    images: &Images,
    name: &'static str,
    types: &'static [DType],
) -> Result<CudaFunction> {
    static LOADED: Mutex<Option<HashMap<usize, Loaded>>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = loaded.get_or_insert_default().entry(context.cu_ctx() as usize).or_default();
    let key = (images.name, name, types);
    if let Some(kernel) = loaded.kernels.get(&key) {
        return Ok(kernel.clone());
    }
    let module = match loaded.modules.get(images.name) {
        Some(module) => module.clone(),
        None => {
            let module = load(context, images)?;
            loaded.modules.insert(images.name, module.clone());
            module
        }
    };
    let suffix = types.iter().map(|dtype| format!("_{}", dtype.name())).collect::<String>();
    let kernel = module.load_function(&format!("phalanx_train_{name}{suffix}"))?;
    loaded.kernels.insert(key, kernel.clone());
    Ok(kernel)
}

fn load(context: &Arc<CudaContext>, images: &Images) -> Result<Arc<CudaModule>> {
    let whole = |image| decompress_to_vec_zlib(image).expect("the images are whole");
    let ready = match context.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? {
        8 => Some(images.sm_80),
        9 => Some(images.sm_90),
        _ => None,
    };
    if let Some(Ok(module)) = ready.map(|image| context.load_module(Ptx::from_binary(whole(image)))) {
        return Ok(module);
    }
    // It ends in NUL, as the driver wants it.
    Ok(context.load_module(Ptx::from_binary(whole(images.ptx)))?)
}

/// A grid for so many threads, of which each does more if they are too many.
pub(crate) fn grid(threads: usize) -> LaunchConfig {
    let blocks = threads.div_ceil(THREADS).clamp(1, BLOCKS) as u32;
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS as u32, 1, 1), shared_mem_bytes: 0 }
}

/// A grid for so many elements, of which a thread takes four at a time.
pub(crate) fn grid_of_fours(elements: usize) -> LaunchConfig {
    grid(elements.div_ceil(4))
}

/// A grid for so many rows, of which a block takes one at a time.
pub(crate) fn grid_of_rows(rows: usize) -> LaunchConfig {
    grid(rows.min(BLOCKS) * THREADS)
}
