//! Compiles CUDA C++ at run time and launches its kernels, which may use the device functions of NVSHMEM or
//! NCCL.
//!
//! ```no_run
//! # fn main() -> phalanx::Result<()> {
//! use phalanx::cudarc::driver::{CudaContext, LaunchConfig};
//! use phalanx::jit::{Module, Program, reads, value, writes};
//!
//! let gpu = CudaContext::new(0)?;
//! let stream = gpu.default_stream();
//! let image = Program::new(
//!     "axpy.cu",
//!     r#"extern "C" __global__ void axpy(float a, const float* x, float* y, int n) {
//!            int i = blockIdx.x * blockDim.x + threadIdx.x;
//!            if (i < n) y[i] += a * x[i];
//!        }"#,
//! )
//! .compile_for(&gpu)?;
//! let axpy = Module::load(&gpu, &image)?.kernel("axpy")?;
//!
//! let x = stream.clone_htod(&[1.0f32; 1000])?;
//! let mut y = stream.alloc_zeros::<f32>(1000)?;
//! // SAFETY: the arguments are those of the kernel, which stays within the first 1000 elements.
//! unsafe {
//!     axpy.launch(
//!         &stream,
//!         LaunchConfig::for_num_elems(1000),
//!         [value(&2.0f32), reads(&x), writes(&mut y), value(&1000)],
//!     )?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`Program`] is compiled by NVRTC to an [`Image`]; if it [uses NVSHMEM](Program::nvshmem), nvJitLink adds
//! NVSHMEM's device code, and what it [uses of NCCL](Program::nccl) is in NCCL's headers. A [`Module`] is an
//! image on a GPU; a [`Kernel`] of it is launched with any buffer of phalanx. The libraries and headers are
//! found at run time, in wheels, CUDA trees and packages of distributions: what is missing is
//! [`Error::LibraryNotFound`](crate::Error::LibraryNotFound), with every place that was looked at. More:
//! `docs/kernels.md` in the repository.

mod compiler;
mod elf;
mod launch;
mod linker;
mod module;
mod nccl;
mod program;

pub use crate::types::compile_error::{BuildStep, CompileError, Diagnostic};
pub use launch::{Argument, device_comm, peers, reads, value, writes};
pub(crate) use launch::{DeviceHandle, sealed};
pub use module::{Kernel, Module};
pub use program::{Image, Program};
