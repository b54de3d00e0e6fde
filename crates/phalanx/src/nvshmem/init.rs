//! NVSHMEM over a [`Comm`].

use crate::api::comm::Comm;
use crate::backend::nvshmem::pe::{Builder, Context, PeControl};
use crate::backend::nvshmem::{Nvshmem, NvshmemComm};
use crate::start;
use crate::types::error::Result;

impl Comm {
    /// NVSHMEM's own features; `None` on other backends.
    pub fn nvshmem(&self) -> Option<Nvshmem<'_>> {
        self.requests.wait_for_collectives();
        NvshmemComm::of(&*self.backend).map(|nvshmem| Nvshmem::new(nvshmem, &self.stream))
    }
}

impl Builder {
    /// As [`Context::init`], with these settings.
    pub fn init(mut self, comm: &Comm) -> Result<Context> {
        self.timeout = Some(self.timeout.unwrap_or_else(|| comm.timeout()));
        self.gpu = self.gpu.or_else(|| comm.gpu());
        let control = control(comm)?;
        self.init_between(control, &comm.host_topology())
    }
}

impl Context {
    /// Makes each rank of a communicator a PE, with its rank as its number. Collective over the communicator.
    ///
    /// The communicator may have any backend; it carries the unique id. Over it the PEs also compare their
    /// collective calls and find missing PEs. `nvshmemx_hostlib_init_attr`
    ///
    /// # Errors
    /// [`Error::LibraryNotFound`](crate::Error::LibraryNotFound) without NVSHMEM or the CUDA driver,
    /// [`Error::Unsupported`](crate::Error::Unsupported) without a GPU, for ranks that are threads of one
    /// process, and for a second context; on every PE, before the library is entered.
    /// [`Error::Unsupported`](crate::Error::Unsupported), too, if PEs share a GPU that MPS does not divide,
    /// and if [`init_from_environment`](Context::init_from_environment) found other PEs before: the library
    /// is then finalized. [`Error::Library`](crate::Error::Library) if the library fails,
    /// [`Error::Timeout`](crate::Error::Timeout) if it does not return (its thread is then left running,
    /// since nothing can end it). After these two the process cannot have a context any more.
    pub fn init(comm: &Comm) -> Result<Context> {
        Context::builder().init(comm)
    }
}

/// The channels on which PEs compare calls and find missing peers. Collective.
fn control(comm: &Comm) -> Result<PeControl> {
    comm.requests.wait_for_collectives();
    let name = format!("{}/nvshmem", comm.recorder.name());
    let backend = &*comm.backend;
    // SAFETY: this thread has the communicator, which is not `Sync`, and no job is under way.
    let channels = unsafe { (start::host_channel(backend)?, start::host_channel(backend)?) };
    if let (Some(host_channel), Some(watch_channel)) = channels {
        return Ok(PeControl::over(host_channel, watch_channel, name));
    }
    // SAFETY: as above.
    let part = unsafe { backend.split(Some(0), backend.rank() as i64) }?;
    Ok(PeControl::without_watch(part.expect("everybody has a colour").into(), name))
}
