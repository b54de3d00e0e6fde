//! Memory of the user's: registered for this PE alone, or as symmetric memory.

use super::context::Context;
use super::control::CollectiveCall;
use super::device::failed;
use super::heap::{origin, step};
use super::memory::{Local, LocalMut, MemoryOrigin, Symmetric, byte_count};
use crate::buffer::loan::Loan;
use crate::buffer::stream::Stream;
use crate::buffer::{Source, Target};
use crate::types::dtype::{DType, Element};
use crate::types::error::{Error, Result, UnsupportedError};
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr};
use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;

/// A registered slice of cudarc's, which the library can read and write on this PE: a source of puts, a
/// destination of gets.
///
/// Dropping it waits for operations on it and unregisters the slice; [`into_inner`](Registered::into_inner)
/// also returns the slice.
pub struct Registered<'c, T: Element> {
    context: &'c Context,
    slice: ManuallyDrop<CudaSlice<T>>,
    start: CUdeviceptr,
}

impl Context {
    /// Registers GPU memory of this PE. Not collective. `nvshmemx_buffer_register`
    ///
    /// # Errors
    /// [`Error::Library`] if the library refuses it (empty, or overlapping with another registration).
    pub fn register<T: Element>(&self, slice: CudaSlice<T>) -> Result<Registered<'_, T>> {
        let name = "nvshmemx_buffer_register";
        let register = self.library.need(self.library.nvshmemx_buffer_register, name)?;
        self.library.need(self.library.nvshmemx_buffer_unregister, "nvshmemx_buffer_unregister")?;
        self.device.check(slice.stream())?;
        self.enter()?;
        let (start, bytes) = (slice.device_ptr(slice.stream()).0, slice.num_bytes());
        // SAFETY: initialised; memory of so many bytes, which lives until it is unregistered.
        self.library.check(name, unsafe { register(start as *mut c_void, bytes) })?;
        Ok(Registered { context: self, slice: ManuallyDrop::new(slice), start })
    }

    /// Makes memory that was allocated elsewhere symmetric. Collective, with the same length on all PEs. The
    /// result is a second mapping of the same memory: use its address. Waits for all work of the GPU.
    /// `nvshmemx_buffer_register_symmetric`
    ///
    /// The memory has to come from `cuMemCreate` on this PE's GPU, have the heap's export handles, and be
    /// registered as a whole, in steps of `NVSHMEM_CUMEM_GRANULARITY` (512 MiB by default). The library
    /// unmaps its whole heap on other memory, so this is checked first.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on every PE if one PE's memory is of another kind.
    ///
    /// # Safety
    /// `start` points to GPU memory of `len` elements, aligned for them, which stays mapped until the result
    /// is freed, and to which nobody holds Rust references.
    pub unsafe fn register_symmetric<T: Element>(
        &self,
        start: CUdeviceptr,
        len: usize,
    ) -> Result<Symmetric<'_, T>> {
        let bytes = byte_count::<T>("register_symmetric", len)?;
        let name = "nvshmemx_buffer_register_symmetric";
        let register = self.library.need(self.library.nvshmemx_buffer_register_symmetric, name)?;
        // As for an allocation.
        self.drain()?;
        self.enter()?;
        let fit = self.check_mappable(start, bytes);
        if let Some(control) = &self.control {
            let agreed = control.agree(fit.is_ok(), "register its memory");
            fit?;
            agreed?;
        } else {
            fit?;
        }
        let step = CollectiveCall::new(name, [bytes as u64, 0, 0]);
        // SAFETY: initialised; all PEs have met here with the same size; the memory is of the kind that can
        // be mapped.
        let call = move || unsafe { register(start as *mut c_void, bytes, 0) } as CUdeviceptr;
        let mapped = self.collectively(step, call)?;
        if mapped == 0 {
            // The library has taken its heap down.
            let text = "the memory could not be mapped; NVSHMEM_DEBUG=WARN tells more";
            return Err(self.fail(self.library.error(name, 0, text).fatal()));
        }
        Ok(Symmetric::new(self, mapped, len, MemoryOrigin::Registered(bytes)))
    }

    /// Some address of the heap. Collective where there is none: a single PE's.
    fn heap_address(&self) -> Result<CUdeviceptr> {
        let known = self.heap.borrow().first_key_value().map(|(start, _)| *start);
        known.map_or_else(|| self.reserve(1), Ok)
    }

    /// Checks that memory can be mapped a second time.
    fn check_mappable(&self, start: CUdeviceptr, bytes: usize) -> Result<()> {
        let unfit = |why: String| {
            Error::from(UnsupportedError {
                what: "register_symmetric".into(),
                why,
                remedy: "allocate with cuMemCreate in such steps, or use Context::alloc".into(),
            })
        };
        let Some(created) = origin(start)? else {
            return Err(unfit(format!("the memory at {start:#x} does not come from cuMemCreate")));
        };
        match origin(self.heap_address()?)? {
            Some(heap) if heap == created => {}
            Some(heap) => {
                return Err(unfit(format!(
                    "the memory at {start:#x} was made in another way than the heap: {created:?}, {heap:?}"
                )));
            }
            None => return Err(unfit("the heap has a fixed size (NVSHMEM_DISABLE_CUDA_VMM)".into())),
        }
        let (mut base, mut size) = (0, 0);
        // SAFETY: out-pointers on the stack; an address that the driver knows.
        match unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, start) } {
            CUresult::CUDA_SUCCESS => {}
            error => return Err(failed("cuMemGetAddressRange", error, false)),
        }
        let step = step();
        if base != start || bytes != size || bytes == 0 || !bytes.is_multiple_of(step) {
            return Err(unfit(format!(
                "{bytes} bytes at {start:#x} are not a whole allocation ({size} bytes at {base:#x}) of steps of {step} \
                 (NVSHMEM_CUMEM_GRANULARITY), to which the library rounds up"
            )));
        }
        Ok(())
    }
}

impl<T: Element> Registered<'_, T> {
    /// For cudarc's copies and kernels, reading.
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }

    /// For cudarc's copies and kernels.
    ///
    /// The slice itself is not given out: a caller could free it while the library writes to it.
    /// ```compile_fail,E0308
    /// # use phalanx::cudarc::driver::CudaSlice;
    /// # fn f(buffer: &mut phalanx::nvshmem::Registered<'_, f32>, other: CudaSlice<f32>) -> CudaSlice<f32> {
    /// std::mem::replace(buffer.view_mut(), other)
    /// # }
    /// ```
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.as_view_mut()
    }

    /// Waits for operations on the slice, and unregisters it. `nvshmemx_buffer_unregister`
    ///
    /// # Errors
    /// If the context has failed: the memory is then leaked, since the library may still use it.
    pub fn into_inner(self) -> Result<CudaSlice<T>> {
        let mut this = ManuallyDrop::new(self);
        this.end()?;
        // SAFETY: taken once, since `this` is not dropped.
        Ok(unsafe { ManuallyDrop::take(&mut this.slice) })
    }

    fn end(&self) -> Result<()> {
        let name = "nvshmemx_buffer_unregister";
        let unregister = self.context.library.need(self.context.library.nvshmemx_buffer_unregister, name)?;
        // Operations on streams, and those that a quiet completes.
        self.context.drain()?;
        self.context.quiet()?;
        // SAFETY: registered once, unregistered once, and nothing uses it any more. The answer is no more
        // than whether it was known: transports that need no registration do not keep any.
        unsafe { unregister(self.start as *mut c_void) };
        Ok(())
    }
}

impl<T: Element> Drop for Registered<'_, T> {
    fn drop(&mut self) {
        match self.end() {
            // SAFETY: dropped once.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.slice) },
            Err(error) => {
                crate::os::log::error!(
                    pe = self.context.my_pe(),
                    "registered GPU memory is leaked, the library may still use it: {error}"
                );
            }
        }
    }
}

impl<T: Element> Local for Registered<'_, T> {}
impl<T: Element> LocalMut for Registered<'_, T> {}

// SAFETY: the slice's.
unsafe impl<T: Element> Source for Registered<'_, T> {
    type Elem = T;

    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn len(&self) -> usize {
        self.slice.len()
    }

    fn lend<'l>(&'l self, stream: &'l Stream) -> Result<Loan<'l>> {
        self.slice.lend(stream)
    }
}

// SAFETY: as above, and `&mut self` is exclusive.
unsafe impl<T: Element> Target for Registered<'_, T> {
    fn lend_mut<'l>(&'l mut self, stream: &'l Stream) -> Result<Loan<'l>> {
        self.slice.lend_mut(stream)
    }
}

impl<T: Element> fmt::Debug for Registered<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("nvshmem::Registered")
            .field("dtype", &T::DTYPE)
            .field("len", &self.slice.len())
            .finish()
    }
}
