//! What of the GPU suite is RCCL's and HIP's.

pub use phalanx::rccl::{init_all, version};

use phalanx::{BackendKind, Builder, Comm, DType, hip};
use phalanx_testkit::emulated::Emulated;
use std::io;

pub const BACKEND: BackendKind = BackendKind::Rccl;

/// The newest version of RCCL that was looked at.
pub const NEWEST: &str = "2.30.4";

/// What hides GPUs from a process, and numbers the others anew.
pub const VISIBLE: &str = "HIP_VISIBLE_DEVICES";

pub type Slice<T> = hip::Slice<T>;

/// Settings with which RCCL carries everything out.
pub fn library_alone() -> Builder {
    Comm::builder().backend(BACKEND)
}

/// Every element of a slice is.
pub trait DeviceRepr {}

impl<T> DeviceRepr for T {}

/// The stream that buffers are made on.
pub fn stream(comm: &Comm) -> &hip::Stream {
    comm.hip_stream().expect("a communicator on a GPU")
}

/// Another stream of its GPU.
pub fn new_stream(comm: &Comm) -> Result<hip::Stream, String> {
    let device = hip::Device::new(stream(comm).device()).map_err(|e| e.to_string())?;
    device.new_stream().map_err(|e| e.to_string())
}

/// The types that are reduced: RCCL's 8-bit floats are not the OCP's on every GPU.
pub fn is_reduced(dtype: DType) -> bool {
    !matches!(dtype, DType::I16 | DType::U16 | DType::F8E4M3 | DType::F8E5M2)
}

/// How many GPUs there are, or why there is none.
pub fn gpus() -> Result<usize, String> {
    match hip::device_count() {
        Ok(0) => Err("HIP sees none".into()),
        gpus => gpus.map_err(|error| error.to_string()),
    }
}

pub fn emulated() -> io::Result<Emulated> {
    // Ranks of an odd number; four would take twice as long.
    Ok(Emulated::rccl(NEWEST)?.set("DEVICES", 3))
}

pub fn emulated_as(version: &str) -> io::Result<Emulated> {
    Emulated::rccl(version)
}
