//! Quiet and fence: what completes and orders puts and gets.

use crate::backend::nvshmem::pe::context::Context;
use crate::backend::nvshmem::pe::device::raw;
use crate::types::error::Result;
use cudarc::driver::CudaStream;

impl Context {
    /// Makes everything that this PE put complete, and everything it got be there; waits for it.
    /// `nvshmemx_quiet_on_stream`, in place of `nvshmem_quiet`, which has no timeout
    ///
    /// # Errors
    /// Those of [`sync`](Context::sync).
    pub fn quiet(&self) -> Result<()> {
        self.quiet_on_stream(self.host_stream())?;
        self.sync(self.host_stream())
    }

    /// What this PE puts to a PE from here on comes there after what it put before. Between GPUs that reach each other,
    /// `nvshmem_fence` is the stronger [`quiet`](Context::quiet), and so is this.
    pub fn fence(&self) -> Result<()> {
        self.quiet()
    }

    /// [`quiet`](Context::quiet) as work on a stream. `nvshmemx_quiet_on_stream`
    ///
    /// It takes over what `…_nbi` has begun: a quiet or barrier that comes later completes that only if it comes behind this stream.
    ///
    /// # Errors
    /// [`UsageError::Memory`] for a stream of another GPU.
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
