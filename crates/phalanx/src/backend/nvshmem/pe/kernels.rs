//! Kernels that use NVSHMEM's device functions.

use super::Context;
use crate::jit::{Image, Module};
use crate::types::error::Result;
use cudarc::driver::sys::CUlibrary;

impl Context {
    /// Puts an image on this PE's GPU. If it [uses NVSHMEM](crate::jit::Program::nvshmem), its device
    /// functions get the state of this context; the module then borrows it. Waits for whatever the GPU still
    /// does, as the library does, but with the timeout. `nvshmemx_culibrary_init`
    ///
    /// # Errors
    /// As for [`Module::load`](crate::jit::Module::load); [`Error::Library`](crate::Error::Library) if the
    /// image's device code is newer than the loaded library; those of [`sync`](Context::sync).
    pub fn load(&self, image: &Image) -> Result<Module<'_>> {
        image.check()?;
        self.drain()?;
        self.enter()?;
        Module::load_with(self.cuda_context(), image, |library| Ok(Box::new(self.register_kernels(library)?)))
    }

    fn register_kernels(&self, kernels: CUlibrary) -> Result<KernelRegistration<'_>> {
        let library = self.library;
        let name = "nvshmemx_culibrary_init";
        let init = library.need(library.nvshmemx_culibrary_init, name)?;
        library.need(library.nvshmemx_culibrary_finalize, "nvshmemx_culibrary_finalize")?;
        // SAFETY: initialised; a library of the driver that is loaded, on the device that is current.
        library.check(name, unsafe { init(kernels.cast()) })?;
        Ok(KernelRegistration { context: self, kernels })
    }
}

/// Device code that has the state of a context, until this is dropped.
#[derive(Debug)]
pub(crate) struct KernelRegistration<'c> {
    context: &'c Context,
    kernels: CUlibrary,
}

impl Drop for KernelRegistration<'_> {
    fn drop(&mut self) {
        let library = self.context.library;
        // After a failure the library is not called any more.
        if self.context.enter().is_err() {
            return;
        }
        if let Some(finalize) = library.nvshmemx_culibrary_finalize {
            // SAFETY: initialised; registered once, and loaded as long as this lives.
            let code = unsafe { finalize(self.kernels.cast()) };
            if let Err(error) = library.check("nvshmemx_culibrary_finalize", code) {
                crate::os::log::warn!("{error}");
            }
        }
    }
}
