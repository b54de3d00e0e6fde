//! phalanx's own GPU kernels: their images, and loading them.
//!
//! The kernels are CUDA C++ in this folder: `fifo.cuh` (how GPUs hand data to each other), `element.cuh` (arithmetic), `collectives.cu`,
//! `messages.cu`, `experts.cu`, `copies.cu` (lists of blocks), and `norm.cu` (a sum of rows with what follows it). `.ci/gpu-kernels` compiles them into `images/`: one
//! module for the operations that move data, one for each element type that is reduced, one for each other file and type.
//! Users need no compiler. `phalanx.cuh` is for kernels that programs write.
//!
//! Tests without a GPU run a model of them: `crates/phalanx-emulated/src/kernels` follows these files line by line.

use crate::gpu::cuda::{driver, failed};
use crate::os::sync::lock;
use crate::types::dtype::DType;
use crate::types::error::Result;
use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction, CUresult};
use cudarc::driver::{CudaContext, DriverError, result};
use miniz_oxide::inflate::decompress_to_vec_zlib;
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex};

/// Code of one module, compressed: PTX, which the driver compiles, and cubins, which are ready for GPUs of their generation.
struct Images {
    ptx: &'static [u8],
    sm_80: &'static [u8],
    sm_90: &'static [u8],
}

macro_rules! images {
    ($name:literal) => {
        Images {
            ptx: include_bytes!(concat!("images/", $name, ".ptx.z")),
            sm_80: include_bytes!(concat!("images/", $name, ".sm_80.cubin.z")),
            sm_90: include_bytes!(concat!("images/", $name, ".sm_90.cubin.z")),
        }
    };
}

/// A module: what moves data, or what reduces elements of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum KernelModule {
    Move,
    /// What sends and receives messages.
    Messages,
    Reduce(DType),
    /// A sum of rows with what follows it, of f16 or bf16.
    Norm(DType),
    /// Dispatch and combine of mixtures of experts.
    Experts,
    /// What copies lists of blocks.
    Copies,
}

/// Number of modules.
pub(crate) const MODULES: usize = 20;

impl KernelModule {
    /// Its place among all modules.
    pub fn index(self) -> usize {
        match self {
            KernelModule::Move => 0,
            KernelModule::Reduce(dtype) => 1 + usize::from(dtype.code()),
            KernelModule::Norm(DType::Bf16) => 15,
            KernelModule::Norm(_) => 16,
            KernelModule::Messages => 17,
            KernelModule::Experts => 18,
            KernelModule::Copies => 19,
        }
    }

    fn images(self) -> Images {
        match self {
            KernelModule::Move => images!("move"),
            KernelModule::Messages => images!("messages"),
            KernelModule::Norm(DType::Bf16) => images!("norm_bf16"),
            KernelModule::Norm(_) => images!("norm_f16"),
            KernelModule::Experts => images!("experts"),
            KernelModule::Copies => images!("copies"),
            KernelModule::Reduce(dtype) => match dtype {
                DType::F32 => images!("reduce_f32"),
                DType::F64 => images!("reduce_f64"),
                DType::F16 => images!("reduce_f16"),
                DType::Bf16 => images!("reduce_bf16"),
                DType::F8E4M3 => images!("reduce_f8e4m3"),
                DType::F8E5M2 => images!("reduce_f8e5m2"),
                DType::I8 => images!("reduce_i8"),
                DType::U8 => images!("reduce_u8"),
                DType::I16 => images!("reduce_i16"),
                DType::U16 => images!("reduce_u16"),
                DType::I32 => images!("reduce_i32"),
                DType::U32 => images!("reduce_u32"),
                DType::I64 => images!("reduce_i64"),
                DType::U64 => images!("reduce_u64"),
                DType::Plain(_) => unreachable!("plain data is moved only"),
            },
        }
    }

    /// The names of its kernels: of collectives by protocol and number of hops (LL, LL128, and both again in two hops), of norms with the sum
    /// and without, of experts first those that dispatch.
    fn kernels(self) -> Vec<String> {
        match self {
            KernelModule::Move => ["ll", "ll128"].map(|protocol| format!("phalanx_move_{protocol}")).into(),
            KernelModule::Messages => {
                ["ll", "ll128"].map(|protocol| format!("phalanx_messages_{protocol}")).into()
            }
            KernelModule::Reduce(dtype) => ["reduce_ll", "reduce_ll128", "two_hops_ll", "two_hops_ll128"]
                .map(|kernel| format!("phalanx_{kernel}_{}", dtype.name()))
                .into(),
            KernelModule::Norm(dtype) => {
                ["all_reduce_norm", "norm"].map(|kernel| format!("phalanx_{kernel}_{}", dtype.name())).into()
            }
            KernelModule::Experts => ["dispatch_ll", "dispatch_ll128", "combine_ll", "combine_ll128"]
                .map(|kernel| format!("phalanx_expert_{kernel}"))
                .into(),
            KernelModule::Copies => ["phalanx_copy_blocks".to_owned()].into(),
        }
    }
}

/// A kernel on a GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    pub function: CUfunction,
    /// It waits by itself for the work before it in its stream, so it can be launched earlier (programmatic dependent launch).
    pub waits: bool,
}

/// The kernels of a module on a GPU, in the order of `KernelModule::kernels`. They stay loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernels {
    functions: [CUfunction; 4],
    waits: bool,
}

// SAFETY: handles of the driver, which any thread may use.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    pub fn get(&self, index: usize) -> Kernel {
        Kernel { function: self.functions[index], waits: self.waits }
    }

    /// Loads a module on a GPU, unless it is there. The GPU's context is current.
    pub fn load(gpu: &Arc<CudaContext>, module: KernelModule) -> Result<Kernels> {
        static LOADED: Mutex<Option<HashMap<(usize, KernelModule), Kernels>>> = Mutex::new(None);
        let mut loaded = lock(&LOADED);
        let loaded = loaded.get_or_insert_default();
        if let Some(kernels) = loaded.get(&(gpu.ordinal(), module)) {
            return Ok(*kernels);
        }
        let images = module.images();
        let generation = generation(gpu)?;
        let ready = match generation {
            8 => Some(images.sm_80),
            9 => Some(images.sm_90),
            _ => None,
        };
        let (handle, is_ready) = during_captures(|| match ready.map(load_image) {
            Some(Ok(handle)) => Ok((handle, true)),
            _ => load_image(images.ptx).map(|handle| (handle, false)),
        })?;
        // Only this generation's image has the instructions for it.
        let waits = is_ready && generation == 9 && has_dependent_launches()?;
        let mut kernels = Kernels { functions: [std::ptr::null_mut(); 4], waits };
        for (place, name) in kernels.functions.iter_mut().zip(module.kernels()) {
            let name = CString::new(name).expect("no NUL");
            // SAFETY: a module that stays loaded, a text that ends in NUL, an out-pointer on the stack.
            let result = unsafe { sys::cuModuleGetFunction(place, handle, name.as_ptr()) };
            check("cuModuleGetFunction", result)?;
        }
        loaded.insert((gpu.ordinal(), module), kernels);
        Ok(kernels)
    }
}

/// Whether the driver has programmatic dependent launches, in graphs too: since CUDA 12.3.
fn has_dependent_launches() -> Result<bool> {
    let mut version = 0;
    // SAFETY: an out-pointer on the stack.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(version >= 12030 && driver()?.has(c"cuLaunchKernelEx"))
}

/// The major number of a GPU's compute capability. cudarc's own question would answer an error of something else that
/// its context keeps.
pub(crate) fn generation(gpu: &CudaContext) -> Result<i32> {
    attribute(gpu, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
}

/// How many multiprocessors a GPU has.
pub(crate) fn multiprocessors(gpu: &CudaContext) -> Result<usize> {
    attribute(gpu, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map(|count| count as usize)
}

fn attribute(gpu: &CudaContext, attribute: CUdevice_attribute) -> Result<i32> {
    // SAFETY: a device that is open.
    let answer = unsafe { result::device::get_attribute(gpu.cu_device(), attribute) };
    answer.map_err(|error| failed("cuDeviceGetAttribute", error).into())
}

fn load_image(compressed: &[u8]) -> Result<sys::CUmodule> {
    let image = decompress_to_vec_zlib(compressed).expect("the images are whole");
    let mut module: sys::CUmodule = std::ptr::null_mut();
    // SAFETY: a whole image (PTX ends in NUL), which the driver copies; an out-pointer on the stack.
    check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) })?;
    Ok(module)
}

/// Makes calls that a capture of this thread's streams would refuse, and that have nothing to do with it.
pub(crate) fn during_captures<R>(calls: impl FnOnce() -> R) -> R {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: exchanges this thread's mode with the one on the stack.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    let result = calls();
    // SAFETY: as above: the mode before.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    result
}

pub(crate) fn check(function: &'static str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(failed(function, DriverError(error)).into()),
    }
}
