//! Quiet and fence: what completes and orders puts and gets.

use crate::backend::nvshmem::pe::context::Context;
use crate::backend::nvshmem::pe::device::raw;
use crate::types::error::Result;
use cudarc::driver::CudaStream;

impl Context {
    /// Completes all puts and gets of this PE, and waits for that. `nvshmemx_quiet_on_stream`, in place of
    /// `nvshmem_quiet`, which has no timeout
    ///
    /// # Errors
    /// Those of [`sync`](Context::sync).
    pub fn quiet(&self) -> Result<()> {
        self.quiet_on_stream(self.host_stream())?;
        self.sync(self.host_stream())
    }

    /// Orders puts: later puts to a PE arrive after earlier ones. Between GPUs that reach each other,
    /// `nvshmem_fence` is the stronger [`quiet`](Context::quiet), and so is this.
    pub fn fence(&self) -> Result<()> {
        self.quiet()
    }

    /// [`quiet`](Context::quiet) as work on a stream. `nvshmemx_quiet_on_stream`
    ///
    /// It takes over pending `…_nbi` operations: a later quiet or barrier completes them only if it is
    /// ordered behind this stream.
    ///
    /// # Errors
    /// [`UsageError::Memory`](crate::UsageError::Memory) for a stream of another GPU.
    pub fn quiet_on_stream(&self, stream: &CudaStream) -> Result<()> {
        let quiet = self.library.need(self.library.nvshmemx_quiet_on_stream, "nvshmemx_quiet_on_stream")?;
        self.device.check(stream)?;
        self.enter()?;
        // SAFETY: initialised; a stream of the device.
        unsafe { quiet(raw(stream)) };
        Ok(())
    }

    /// [`fence`](Context::fence) as work on a stream. The library has none, so it is the stronger
    /// [`quiet_on_stream`](Context::quiet_on_stream).
    pub fn fence_on_stream(&self, stream: &CudaStream) -> Result<()> {
        self.quiet_on_stream(stream)
    }
}
