//! AMD's GPUs: streams and memory of HIP, for communicators on RCCL.
//!
//! HIP is found at run time (`PHALANX_HIP_LIB`, the loader's path, ROCm's folders). A [`Slice`] is a buffer
//! of every operation, as cudarc's `CudaSlice` is on NVIDIA's GPUs.
//!
//! ```no_run
//! # fn main() -> phalanx::Result<()> {
//! use phalanx::{BackendKind, Comm, ReduceOp};
//! let results = Comm::builder().backend(BackendKind::Rccl).try_run(2, |comm| -> phalanx::Result<Vec<f32>> {
//!     let stream = comm.hip_stream()?;
//!     let mut gradients = stream.clone_htod(&[comm.rank() as f32; 1024])?;
//!     comm.all_reduce_in_place(&mut gradients, ReduceOp::Sum)?;
//!     stream.clone_dtoh(&gradients)
//! })?;
//! assert_eq!(results, [[1.0; 1024]; 2]);
//! # Ok(())
//! # }
//! ```
//!
//! # Order
//! A slice remembers the streams that used it. Its next use on another stream waits for them: an operation, a
//! copy, a kernel of your own through [`Slice::on`], or freeing the memory. Nothing waits on the host.
//!
//! None of this has run on an AMD GPU so far: see docs/rccl.md in the repository.

mod slice;
mod stream;

pub use slice::{Slice, Use, View, ViewMut};
pub use stream::{HipSource, HipTarget, Stream};

use crate::types::error::{Error, LibraryError, Result, UnsupportedError};
use crate::types::memory::GpuId;
use phalanx_sys::hip::{Api, hipError_t};
use std::ffi::c_int;
use std::sync::OnceLock;

/// The loaded HIP.
pub(crate) fn api() -> Result<&'static Api> {
    static LOADED: OnceLock<Api> = OnceLock::new();
    if let Some(api) = LOADED.get() {
        return Ok(api);
    }
    let api = Api::load()?;
    crate::os::log::info!(
        version = api.version(),
        path = %api.path().display(),
        found = api.library().place().origin,
        "HIP"
    );
    // Another thread may have been faster: the library is the same.
    Ok(LOADED.get_or_init(|| api))
}

/// The version of the HIP runtime that is (or would be) loaded.
///
/// # Errors
/// [`Error::LibraryNotFound`] with every place that was tried.
pub fn version() -> Result<String> {
    Ok(api()?.version())
}

/// How many GPUs HIP shows this process (`hipGetDeviceCount`).
///
/// # Errors
/// [`Error::LibraryNotFound`] without HIP; [`Error::Library`] if it does not start.
pub fn device_count() -> Result<usize> {
    let api = api()?;
    api.device_count().map_err(|error| failed(api, "hipGetDeviceCount", error).into())
}

/// PCI addresses of the GPUs that this process sees, in HIP's order. RCCL identifies GPUs by them too.
pub(crate) fn gpu_ids() -> Result<Vec<GpuId>> {
    let api = api()?;
    let mut ids = Vec::new();
    for number in 0..device_count()? {
        let place = api.bus_id(number).map_err(|error| failed(api, "hipDeviceGetPCIBusId", error))?;
        // As `0000:c1:00.0`. Reversed, since longer addresses differ at their end.
        let mut id = [0; 16];
        place.to_lowercase().bytes().rev().zip(&mut id[1..]).for_each(|(from, to)| *to = from);
        // Older releases of HIP give all parts of a partitioned GPU one address.
        id[0] = ids.iter().filter(|GpuId(other)| other[1..] == id[1..]).count() as u8;
        ids.push(GpuId(id));
    }
    Ok(ids)
}

/// A GPU, as HIP numbers those that this process sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    ordinal: usize,
}

/// Properties of a GPU (`hipGetDeviceProperties`).
pub use phalanx_sys::hip::Properties;

impl Device {
    /// The GPU with this number.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there are fewer; as [`device_count`] without HIP.
    pub fn new(ordinal: usize) -> Result<Device> {
        let count = device_count()?;
        if ordinal < count {
            return Ok(Device { ordinal });
        }
        Err(Error::from(UnsupportedError {
            what: format!("GPU {ordinal}"),
            why: format!("HIP shows this process {count} GPUs"),
            remedy: "use fewer ranks, or look at HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES".into(),
        }))
    }

    /// Its number.
    pub fn ordinal(self) -> usize {
        self.ordinal
    }

    /// Its name, architecture and memory.
    pub fn properties(self) -> Result<Properties> {
        let api = api()?;
        api.properties(self.ordinal).map_err(|error| failed(api, "hipGetDeviceProperties", error).into())
    }

    /// Its default stream. It waits for all blocking streams of the GPU, and they wait for it.
    pub fn default_stream(self) -> Stream {
        Stream::default_of(self.ordinal)
    }

    /// A new stream that does not wait for the default one (`hipStreamCreateWithFlags`,
    /// `hipStreamNonBlocking`).
    pub fn new_stream(self) -> Result<Stream> {
        Stream::new(self.ordinal)
    }
}

/// Guard of a current device: dropping it makes the previous device current again.
pub(crate) struct Current {
    api: &'static Api,
    before: c_int,
    changed: bool,
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.changed {
            // SAFETY: the device was current before.
            unsafe { (self.api.hipSetDevice)(self.before) };
        }
    }
}

/// Makes a device current until the guard is dropped.
pub(crate) fn enter(device: usize) -> Result<Current> {
    let api = api()?;
    let mut before = 0;
    // SAFETY: an out-pointer on the stack, written during the call.
    check(api, "hipGetDevice", unsafe { (api.hipGetDevice)(&raw mut before) })?;
    let changed = before as usize != device;
    if changed {
        // SAFETY: any number is allowed; a wrong one is an error.
        check(api, "hipSetDevice", unsafe { (api.hipSetDevice)(device as c_int) })?;
    }
    Ok(Current { api, before, changed })
}

/// A status code as a result.
#[inline]
pub(crate) fn check(
    api: &Api,
    function: &'static str,
    error: hipError_t,
) -> std::result::Result<(), LibraryError> {
    if error == hipError_t::Success { Ok(()) } else { Err(failed(api, function, error)) }
}

/// The error for a status code.
#[cold]
pub(crate) fn failed(api: &Api, function: &'static str, error: hipError_t) -> LibraryError {
    LibraryError {
        library: format!("HIP {}", api.version()),
        function,
        code: error.0,
        text: api.describe(error),
        context: None,
        fatal: false,
    }
}
