//! What of the suite is NCCL's and CUDA's.

pub use phalanx::cudarc::driver::DeviceRepr;
pub use phalanx::nccl::{init_all, version};

use phalanx::cudarc::driver::{CudaSlice, CudaStream};
use phalanx::nccl::{Config, GpuAlgorithm};
use phalanx::{BackendKind, Builder, Comm, DType};
use phalanx_testkit::emulated::Emulated;
use std::io;
use std::sync::Arc;

pub const BACKEND: BackendKind = BackendKind::Nccl;

/// What hides GPUs from a process, and numbers the others anew.
pub const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

pub type Slice<T> = CudaSlice<T>;

/// Settings with which NCCL carries everything out.
pub fn library_alone() -> Builder {
    let mut config = Config::default();
    config.gpu_algorithm = Some(GpuAlgorithm::Nccl);
    Comm::builder().backend(BACKEND).nccl(config)
}

/// The stream that buffers are made on.
pub fn stream(comm: &Comm) -> &Arc<CudaStream> {
    comm.cuda_stream().expect("a communicator on a GPU")
}

/// Another stream of its GPU.
pub fn new_stream(comm: &Comm) -> Result<Arc<CudaStream>, String> {
    stream(comm).context().new_stream().map_err(|e| e.to_string())
}

/// The types that NCCL reduces.
pub fn is_reduced(dtype: DType) -> bool {
    !matches!(dtype, DType::I16 | DType::U16)
}

/// How many GPUs there are, or why there is none.
pub fn gpus() -> Result<usize, String> {
    phalanx_testkit::gpus::count()
}

pub fn emulated() -> io::Result<Emulated> {
    Emulated::new()
}

pub fn emulated_as(version: &str) -> io::Result<Emulated> {
    Emulated::nccl(version)
}
