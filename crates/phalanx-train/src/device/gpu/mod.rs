//! Memory of an NVIDIA GPU.

mod blas;
pub(crate) mod kernels;
mod overlap;

use super::{Device, Number};
use crate::Result;
use crate::checkpoint::bytes::bytes_mut;
use crate::pipeline::gpu::Lines;
pub(crate) use blas::Shape;
use cudarc::cublas::CudaBlas;
use cudarc::driver::sys::{self, CUmemPool_attribute, CUpointer_attribute};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtrMut,
    PushKernelArg, result,
};
use kernels::{ELEMENTS, Images, find, grid_of_fours};
use phalanx::DType;
use std::collections::VecDeque;
use std::mem::size_of;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Memory and processors of an NVIDIA GPU, on one stream. Needs the feature `cuda`.
///
/// Everything is enqueued on the stream, in the order of the calls; only [`download`](Device::download) waits, and
/// [`upload`](Device::upload) of page-locked memory. Communication that is started ([`Overlap`](super::Overlap)) goes on a second stream,
/// and cudarc's events keep the two in order. On a GPU without memory pools, freeing a buffer waits, too. Results are those of
/// [`Host`](super::Host), to the bit where arithmetic is element by element; NaNs may have other bits.
///
/// An operation of a communicator that fails leaves its buffers as they are: the communicator's next call reports the error, so call
/// [`Comm::sync`](phalanx::Comm::sync) where numbers of the GPU decide what to do.
///
/// ```no_run
/// use phalanx_train::device::{Device, Gpu};
///
/// let comm = phalanx::init()?;
/// let gpu = Gpu::new(comm.cuda_stream()?)?;
/// let mut ones = gpu.zeros::<f32>(4)?;
/// gpu.fill(&mut gpu.view_mut(&mut ones, 0..4), 1.0)?;
/// assert_eq!(gpu.download(&gpu.view(&ones, 0..4))?, [1.0; 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Gpu {
    stream: Arc<CudaStream>,
    /// Of communication that goes on beside.
    side: Arc<CudaStream>,
    /// Ends of the last reductions on the side stream.
    reductions: Arc<Mutex<VecDeque<CudaEvent>>>,
    /// Connections for messages.
    pub(crate) lines: Option<Arc<Mutex<Lines>>>,
    /// cuBLAS, from the first product on.
    blas: Arc<Mutex<Option<CudaBlas>>>,
}

impl Gpu {
    /// The GPU of a stream, whose work goes there: of a communicator's, [`Comm::cuda_stream`](phalanx::Comm::cuda_stream). Memory that is
    /// freed on the GPU stays with the process from now on, for its next buffers.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if the driver makes no second stream.
    pub fn new(stream: &Arc<CudaStream>) -> Result<Gpu> {
        let side = stream.context().new_stream()?;
        keep_freed_memory(stream.context())?;
        Ok(Gpu {
            stream: stream.clone(),
            side,
            reductions: Arc::default(),
            lines: None,
            blas: Arc::default(),
        })
    }

    /// The stream of everything but started communication.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    pub(crate) fn kernel(
        &self,
        images: &Images,
        name: &'static str,
        types: &'static [DType],
    ) -> Result<CudaFunction> {
        find(self.stream.context(), images, name, types)
    }

    /// Memory with anything in it.
    pub(crate) fn uninit<T>(&self, len: usize) -> Result<CudaSlice<T>> {
        self.alloc_on(&self.stream, len)
    }

    /// The same for work of another stream. It is freed on this one, behind its users.
    pub(crate) fn alloc_on<T>(&self, stream: &CudaStream, len: usize) -> Result<CudaSlice<T>> {
        let context = self.stream.context();
        context.bind_to_thread()?;
        // The driver has no allocations of 0 bytes.
        let bytes = len.checked_mul(size_of::<T>()).expect("fewer bytes than usize has").max(1);
        // SAFETY: the context is current; the memory is the slice's, which frees it as cudarc's own.
        let mut buffer = unsafe {
            let address = if context.has_async_alloc() {
                result::malloc_async(stream.cu_stream(), bytes)?
            } else {
                result::malloc_sync(bytes)?
            };
            self.stream.upgrade_device_ptr(address, len)
        };
        // As if it were written: other streams wait for the allocation.
        drop(buffer.device_ptr_mut(stream));
        Ok(buffer)
    }

    /// Memory with zero bytes.
    pub(crate) fn zeroed<T>(&self, len: usize) -> Result<CudaSlice<T>> {
        let mut buffer = self.uninit::<T>(len)?;
        // SAFETY: bytes of the whole buffer.
        let bytes = unsafe { buffer.transmute_mut::<u8>(len * size_of::<T>()) };
        self.stream.memset_zeros(&mut bytes.expect("all of it"))?;
        Ok(buffer)
    }

    /// A copy of a list of the host, which is plain data without padding.
    pub(crate) fn upload_list<T: Copy>(&self, list: &[T]) -> Result<CudaSlice<T>> {
        let (mut buffer, len) = (self.uninit::<T>(list.len())?, size_of_val(list));
        // SAFETY: bytes of the whole buffer, and of the list, which has no padding.
        let (to, from) = unsafe {
            let from = std::slice::from_raw_parts(list.as_ptr().cast::<u8>(), len);
            (buffer.transmute_mut::<u8>(len), from)
        };
        self.stream.memcpy_htod(from, &mut to.expect("all of it"))?;
        if is_page_locked(list.as_ptr().cast()) {
            // The driver reads it when the stream comes to it; of other memory it has made a copy.
            self.stream.synchronize()?;
        }
        Ok(buffer)
    }
}

/// Keeps freed memory in the GPU's pool, for the next buffers (`CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`). By default, each wait for the GPU gives
/// it back to the driver, and a step of training would map it anew. [`Gpu::new`] does this.
///
/// # Errors
/// The driver's.
pub fn keep_freed_memory(context: &CudaContext) -> Result<()> {
    if !context.has_async_alloc() {
        return Ok(());
    }
    let (mut pool, mut most) = (std::ptr::null_mut(), u64::MAX);
    let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: a device that is open; an out-pointer and a value of the attribute's type, on the stack.
    unsafe {
        sys::cuDeviceGetDefaultMemPool(&raw mut pool, context.cu_device()).result()?;
        sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut most).cast()).result()?;
    }
    Ok(())
}

/// Whether memory of the host is known to the driver.
fn is_page_locked(address: *const u8) -> bool {
    let mut memory_type = 0u32;
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    // SAFETY: an out-pointer on the stack, of the attribute's type. Any address can be asked about.
    let answer = unsafe {
        sys::cuPointerGetAttribute((&raw mut memory_type).cast(), attribute, address as sys::CUdeviceptr)
    };
    answer == sys::CUresult::CUDA_SUCCESS
}

/// The types of a kernel.
pub(crate) trait Types {
    const OF: &'static [DType];
}

impl<A: Number> Types for (A,) {
    const OF: &'static [DType] = &[A::DTYPE];
}

impl<A: Number, B: Number> Types for (A, B) {
    const OF: &'static [DType] = &[A::DTYPE, B::DTYPE];
}

pub(crate) fn check(a: usize, b: usize) {
    assert_eq!(a, b, "views of one length");
}

impl Device for Gpu {
    type Buffer<T: Number> = CudaSlice<T>;
    type View<'a, T: Number> = CudaView<'a, T>;
    type ViewMut<'a, T: Number> = CudaViewMut<'a, T>;

    fn zeros<T: Number>(&self, len: usize) -> Result<CudaSlice<T>> {
        self.zeroed(len)
    }

    fn alloc<T: Number>(&self, len: usize) -> Result<CudaSlice<T>> {
        self.uninit(len)
    }

    fn upload<T: Number>(&self, numbers: &[T]) -> Result<CudaSlice<T>> {
        self.upload_list(numbers)
    }

    fn download<T: Number>(&self, from: &CudaView<'_, T>) -> Result<Vec<T>> {
        let mut numbers = vec![T::default(); from.len()];
        // SAFETY: bytes of the whole view.
        let from = unsafe { from.transmute::<u8>(size_of_val(&numbers[..])) };
        self.stream.memcpy_dtoh(&from.expect("all of it"), bytes_mut(&mut numbers))?;
        self.stream.synchronize()?;
        Ok(numbers)
    }

    fn view<'a, T: Number>(&self, buffer: &'a CudaSlice<T>, range: Range<usize>) -> CudaView<'a, T> {
        buffer.slice(range)
    }

    fn view_mut<'a, T: Number>(
        &self,
        buffer: &'a mut CudaSlice<T>,
        range: Range<usize>,
    ) -> CudaViewMut<'a, T> {
        buffer.slice_mut(range)
    }

    fn reborrow<'a, T: Number>(view: &'a CudaViewMut<'_, T>) -> CudaView<'a, T> {
        view.as_view()
    }

    fn convert<A: Number, B: Number>(
        &self,
        from: &CudaView<'_, A>,
        to: &mut CudaViewMut<'_, B>,
    ) -> Result<()> {
        let len = from.len();
        check(len, to.len());
        if A::DTYPE == B::DTYPE {
            // SAFETY: one type; bytes of the whole views.
            let (from, to) = unsafe { (from.transmute(len), to.transmute_mut::<A>(len)) };
            self.stream.memcpy_dtod::<A, _, _>(&from.expect("all of it"), &mut to.expect("all of it"))?;
            return Ok(());
        }
        let kernel = self.kernel(&ELEMENTS, "convert", <(A, B)>::OF)?;
        let mut launch = self.stream.launch_builder(&kernel);
        // SAFETY: the kernel's parameters; it stays within the views.
        unsafe { launch.arg(from).arg(to).arg(&len).launch(grid_of_fours(len)) }?;
        Ok(())
    }

    fn add<A: Number, B: Number>(
        &self,
        factor: f64,
        from: &CudaView<'_, A>,
        to: &mut CudaViewMut<'_, B>,
    ) -> Result<()> {
        let len = from.len();
        check(len, to.len());
        let kernel = self.kernel(&ELEMENTS, "add", <(A, B)>::OF)?;
        let mut launch = self.stream.launch_builder(&kernel);
        // SAFETY: the kernel's parameters; it stays within the views.
        unsafe { launch.arg(&factor).arg(from).arg(to).arg(&len).launch(grid_of_fours(len)) }?;
        Ok(())
    }

    fn scale<T: Number>(&self, data: &mut CudaViewMut<'_, T>, factor: f64) -> Result<()> {
        let len = data.len();
        let kernel = self.kernel(&ELEMENTS, "scale", <(T,)>::OF)?;
        let mut launch = self.stream.launch_builder(&kernel);
        // SAFETY: the kernel's parameters; it stays within the view.
        unsafe { launch.arg(data).arg(&factor).arg(&len).launch(grid_of_fours(len)) }?;
        Ok(())
    }

    fn fill<T: Number>(&self, data: &mut CudaViewMut<'_, T>, value: f64) -> Result<()> {
        let len = data.len();
        let kernel = self.kernel(&ELEMENTS, "fill", <(T,)>::OF)?;
        let mut launch = self.stream.launch_builder(&kernel);
        // SAFETY: the kernel's parameters; it stays within the view.
        unsafe { launch.arg(data).arg(&value).arg(&len).launch(grid_of_fours(len)) }?;
        Ok(())
    }
}
