//! Allocation of symmetric memory, by all PEs together.

use super::context::Context;
use super::control::CollectiveCall;
use super::device::failed;
use super::memory::{MemoryOrigin, Symmetric, byte_count};
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UsageError};
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use std::ffi::c_void;
use std::ops::RangeInclusive;

/// Alignments that the library accepts: from a pointer's to the largest step of its heap (2 GiB).
const ALIGNMENTS: RangeInclusive<usize> = size_of::<*const ()>()..=2 << 30;

impl Context {
    /// Allocates `len` zeroed elements on every PE. Collective, with the same length and type on all PEs.
    /// `nvshmem_malloc` (`nvshmem_calloc` ends the process when memory is short)
    ///
    /// Waits for all work of the GPU, as [`free`](Symmetric::free) does: the library runs a barrier of all
    /// PEs inside, beside which other operations of theirs would fail.
    ///
    /// The heap grows in steps of `NVSHMEM_CUMEM_GRANULARITY` (512 MiB). On GPUs without virtual memory
    /// management its size is fixed: set `NVSHMEM_SYMMETRIC_SIZE` before initialisation.
    ///
    /// # Errors
    /// [`Error::Library`] on a PE that is short of memory, [`Error::Unsupported`] on the others;
    /// [`Error::Mismatch`] if the PEs ask for different sizes (contexts made from a `Comm`);
    /// [`UsageError::Overflow`] for more than `isize::MAX` bytes; those of [`sync`](Context::sync).
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Symmetric<'_, T>> {
        let start = self.reserve_zeroed(byte_count::<T>("alloc", len)?)?;
        Ok(Symmetric::new(self, start, len, MemoryOrigin::Heap))
    }

    /// As [`alloc`](Context::alloc), not zeroed: faster for memory that is written first. `nvshmem_malloc`
    pub fn alloc_uninit<T: Element>(&self, len: usize) -> Result<Symmetric<'_, T>> {
        let start = self.reserve(byte_count::<T>("alloc_uninit", len)?)?;
        Ok(Symmetric::new(self, start, len, MemoryOrigin::Heap))
    }

    /// As [`alloc_uninit`](Context::alloc_uninit), starting at a multiple of `alignment` bytes.
    /// `nvshmem_align`
    ///
    /// # Errors
    /// Also [`UsageError::Setting`] for an alignment that is no power of two, less than 8 or more than 2 GiB.
    pub fn alloc_aligned<T: Element>(&self, len: usize, alignment: usize) -> Result<Symmetric<'_, T>> {
        if !alignment.is_power_of_two() || !ALIGNMENTS.contains(&alignment) {
            return Err(UsageError::Setting {
                name: "alloc_aligned: alignment".into(),
                value: alignment.to_string(),
                expected: format!("a power of two from {} to {}", ALIGNMENTS.start(), ALIGNMENTS.end()),
            }
            .into());
        }
        let bytes = byte_count::<T>("alloc_aligned", len)?;
        let name = "nvshmem_align";
        let align = self.library.need(self.library.nvshmem_align, name)?;
        let step = CollectiveCall::new(name, [alignment as u64, bytes as u64, 0]);
        // SAFETY: initialised; all PEs have met here with the same size; the library accepts the alignment.
        let start = self.obtain(step, bytes, alignment, move || unsafe { align(alignment, bytes) })?;
        Ok(Symmetric::new(self, start, len, MemoryOrigin::Heap))
    }

    /// `bytes` of symmetric memory, whose contents are not specified. Collective. `nvshmem_malloc`
    pub(crate) fn reserve(&self, bytes: usize) -> Result<CUdeviceptr> {
        self.malloc(bytes, false)
    }

    /// PEs also compare `zeroed`.
    fn malloc(&self, bytes: usize, zeroed: bool) -> Result<CUdeviceptr> {
        let name = "nvshmem_malloc";
        let malloc = self.library.need(self.library.nvshmem_malloc, name)?;
        let step = CollectiveCall::new(name, [bytes as u64, zeroed.into(), 0]);
        // SAFETY: initialised; all PEs have met here with the same size.
        self.obtain(step, bytes, 0, move || unsafe { malloc(bytes) })
    }

    /// As `reserve`, zeroed. Not by `nvshmem_calloc`, which ends the process when a heap of fixed size is
    /// full, and grows another heap by the size of one element only.
    pub(crate) fn reserve_zeroed(&self, bytes: usize) -> Result<CUdeviceptr> {
        let start = self.malloc(bytes, true)?;
        if bytes == 0 {
            return Ok(start);
        }
        let stream = self.host_stream();
        self.enter()?;
        // SAFETY: new memory of so many bytes, which nobody uses yet; a stream of the device, which is
        // current.
        match unsafe { sys::cuMemsetD8Async(start, 0, bytes, stream.cu_stream()) } {
            CUresult::CUDA_SUCCESS => self.sync(stream)?,
            error => return Err(self.fail(failed("cuMemsetD8Async", error, true))),
        }
        // No PE puts to memory that another still clears.
        match &self.control {
            Some(control) => {
                control.agree(true, "clear symmetric memory").map_err(|error| self.fail(error))?;
            }
            None => {
                self.world().barrier_on_stream(stream)?;
                self.sync(stream)?;
            }
        }
        Ok(start)
    }

    /// Frees reserved memory. Collective, behind all work of the GPU. `nvshmem_free`
    pub(crate) fn give_back(&self, start: CUdeviceptr, number: u64) -> Result<()> {
        self.release(start, number, MemoryOrigin::Heap)
    }

    /// Runs an allocating call of the library, which returns the address.
    fn obtain(
        &self,
        step: CollectiveCall,
        bytes: usize,
        alignment: usize,
        call: impl FnOnce() -> *mut c_void + Send + 'static,
    ) -> Result<CUdeviceptr> {
        let function = step.function();
        // The library runs a barrier of all PEs inside, beside which operations on streams, and kernels,
        // would fail.
        self.drain()?;
        self.meet(&step)?;
        self.enter()?;
        let room = if bytes == 0 { 0 } else { bytes.saturating_add(alignment) };
        self.together(self.check_room(room), "give more memory to the heap")?;
        let start = self.bounded(step.describe(), move || call() as CUdeviceptr)?;
        let got = if start != 0 || bytes == 0 { Ok(()) } else { Err(self.no_memory(function, bytes)) };
        // Memory allocated on some PEs only cannot be freed together: it stays until the end.
        self.together(got, "allocate symmetric memory")?;
        if bytes > 0 {
            self.heap.borrow_mut().insert(start, bytes as u64);
            self.has_dynamic_heap()?;
        }
        Ok(start)
    }

    #[cold]
    fn no_memory(&self, function: &'static str, bytes: usize) -> Error {
        let text = format!(
            "no {bytes} bytes of symmetric memory are left; NVSHMEM_SYMMETRIC_SIZE (or, with virtual memory management, \
             NVSHMEM_MAX_MEMORY_PER_GPU) is the limit"
        );
        let error = self.library.error(function, 0, text);
        // The library has unmapped a heap that could not grow.
        match self.has_dynamic_heap() {
            Ok(false) => error.into(),
            _ => self.fail(error.fatal()),
        }
    }

    pub(super) fn release(&self, start: CUdeviceptr, number: u64, origin: MemoryOrigin) -> Result<()> {
        self.drain()?;
        match origin {
            MemoryOrigin::Heap => {
                self.heap.borrow_mut().remove(&start);
                let name = "nvshmem_free";
                let free = self.library.need(self.library.nvshmem_free, name)?;
                // SAFETY: allocated by the library and freed once; the GPU is done with it, and the library
                // waits for the other PEs.
                self.collectively(CollectiveCall::new(name, [number, 0, 0]), move || unsafe {
                    free(start as *mut c_void)
                })
            }
            MemoryOrigin::Registered(bytes) => {
                let name = "nvshmemx_buffer_unregister_symmetric";
                let unregister =
                    self.library.need(self.library.nvshmemx_buffer_unregister_symmetric, name)?;
                let step = CollectiveCall::new(name, [number, bytes as u64, 0]);
                // SAFETY: registered by the library with so many bytes, and unregistered once; as above.
                let code =
                    self.collectively(step, move || unsafe { unregister(start as *mut c_void, bytes) })?;
                self.library.check(name, code)
            }
        }
    }
}
