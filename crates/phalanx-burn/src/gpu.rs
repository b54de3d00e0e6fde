//! Tensors on this rank's GPU: where burn keeps their elements, and the order in which burn and phalanx use them.
//!
//! burn's streams are not shown. So phalanx's stream is ordered against the whole primary context, which burn has, too: what burn has enqueued
//! comes before an operation, and what burn enqueues later comes behind it. The host waits for neither.

use burn::backend::Cube;
use burn::backend::fusion::{Fusion, FusionBackend, FusionTensor};
use burn::tensor::{DType, Device, Tensor};
use cubecl::cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use phalanx::cudarc::driver::sys::{cuCtxRecordEvent, cuCtxWaitEvent};
use phalanx::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use phalanx::{Comm, CommGroup, Element, ReduceOp, SharedComm, bf16, f16};
use phalanx_train::{Error, Result};
use std::any::Any;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// A rank's GPU, as burn and as phalanx see it.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    pub device: Device,
    /// Where phalanx's operations are. Nothing else is.
    stream: Arc<CudaStream>,
}

impl Gpu {
    pub fn new(number: usize) -> Result<Gpu> {
        let context = CudaContext::new(number).map_err(phalanx::Error::from)?;
        // SAFETY: slices of this context object are on one stream only, and free nothing.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(phalanx::Error::from)?;
        Ok(Gpu { device: Device::cuda(number), stream })
    }

    /// The same communicator with its operations on this stream.
    pub fn place(&self, comm: &SharedComm) -> Result<SharedComm> {
        Ok(comm.on(&self.stream)?)
    }

    /// Carries out a collective on each of some tensors, which are changed where they are. It is enqueued when this returns.
    ///
    /// The tensors belong to the caller alone, as results of arithmetic do: burn writes those to memory that nobody else has.
    pub fn in_place<'a>(
        &self,
        comm: &SharedComm,
        collective: Collective,
        tensors: impl Iterator<Item = &'a Tensor<1>>,
    ) -> Result<()> {
        let mut lent = self.lend(tensors)?;
        Ok(comm.with(|comm| self.in_order(|| enqueue(comm, collective, &mut lent)))?)
    }

    /// Runs what enqueues operations on the stream, behind all work of the context until now, and before all later work of the context.
    fn in_order(&self, enqueue: impl FnOnce() -> phalanx::Result<()>) -> phalanx::Result<()> {
        let context = self.stream.context();
        let event = context.new_event(None)?;
        // SAFETY: the event is of this context, and both are alive; the driver keeps a destroyed event for those that wait for it.
        unsafe { cuCtxRecordEvent(context.cu_ctx(), event.cu_event()).result()? };
        self.stream.wait(&event)?;
        let outcome = enqueue();
        event.record(&self.stream)?;
        // SAFETY: as above.
        unsafe { cuCtxWaitEvent(context.cu_ctx(), event.cu_event()).result()? };
        outcome
    }

    /// The elements of those tensors that have some. All work that makes them is enqueued then.
    pub fn lend<'a>(&self, tensors: impl Iterator<Item = &'a Tensor<1>>) -> Result<Vec<Lent>> {
        let used = tensors.filter(|tensor| tensor.dims()[0] > 0);
        used.map(|tensor| self.elements_of(tensor).map_err(Error::Usage)).collect()
    }

    /// One tensor's elements, or why there are none to be had.
    fn elements_of(&self, tensor: &Tensor<1>) -> std::result::Result<Lent, String> {
        let (len, dtype) = (tensor.dims()[0], tensor.dtype());
        let fused = tensor.clone().try_into_primitive::<Cube>().map_err(|error| format!("{error:?}"))?;
        let tensor = resolve(PhantomData::<Cube>, fused);
        if !tensor.is_contiguous() {
            return Err("a tensor's elements are not one behind the other".into());
        }
        let place = tensor.client.get_resource::<<CudaRuntime as Runtime>::Server>(tensor.handle.clone());
        let place = place.map_err(|error| format!("burn does not lend a tensor's memory: {error}"))?;
        let start = place.resource().ptr;
        // SAFETY: burn keeps `len` elements of this type there for as long as the place is held, as `Lent` does.
        let elements = unsafe {
            match dtype {
                DType::F32 => Elements::F32(Foreign::new(&self.stream, start, len)),
                DType::F16 => Elements::F16(Foreign::new(&self.stream, start, len)),
                DType::BF16 => Elements::Bf16(Foreign::new(&self.stream, start, len)),
                other => {
                    return Err(format!("a tensor of {other:?} on a GPU; f32, f16 and bf16 are possible"));
                }
            }
        };
        Ok(Lent { elements, _place: Box::new(place) })
    }
}

/// Enqueues a collective on all elements together, in no order with burn's work.
pub(crate) fn enqueue(comm: &Comm, collective: Collective, lent: &mut [Lent]) -> phalanx::Result<()> {
    phalanx::group(|group| {
        let mut group = group.on(comm);
        lent.iter_mut().try_for_each(|lent| lent.enqueue(&mut group, collective))
    })
}

/// What ranks do with a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Collective {
    Sum,
    Rank0sToAll,
}

/// The tensor as burn's kernels have it, when all that was to be fused with it has been enqueued.
fn resolve<B: FusionBackend>(
    _: PhantomData<Fusion<B>>,
    tensor: FusionTensor<B::FusionRuntime>,
) -> B::FloatTensorPrimitive {
    let client = tensor.client.clone();
    client.resolve_tensor_float::<B>(tensor)
}

/// A tensor's elements, while an operation on them is enqueued. burn may use the memory for something else afterwards: that comes behind the
/// operation.
pub(crate) struct Lent {
    elements: Elements,
    /// burn's word that they stay where they are.
    _place: Box<dyn Any>,
}

enum Elements {
    F32(Foreign<f32>),
    F16(Foreign<f16>),
    Bf16(Foreign<bf16>),
}

impl Lent {
    fn enqueue<'env>(
        &'env mut self,
        group: &mut CommGroup<'_, 'env>,
        collective: Collective,
    ) -> phalanx::Result<()> {
        match &mut self.elements {
            Elements::F32(elements) => elements.enqueue(group, collective),
            Elements::F16(elements) => elements.enqueue(group, collective),
            Elements::Bf16(elements) => elements.enqueue(group, collective),
        }
    }
}

/// Memory of burn as cudarc's, which does not free it.
struct Foreign<T>(ManuallyDrop<CudaSlice<T>>);

impl<T: Element> Foreign<T> {
    /// # Safety
    /// `len` elements are there, for as long as this lives.
    unsafe fn new(stream: &Arc<CudaStream>, start: u64, len: usize) -> Foreign<T> {
        // SAFETY: the caller's contract; it is not dropped as cudarc's memory is.
        Foreign(ManuallyDrop::new(unsafe { stream.upgrade_device_ptr(start, len) }))
    }

    fn enqueue<'env>(
        &'env mut self,
        group: &mut CommGroup<'_, 'env>,
        collective: Collective,
    ) -> phalanx::Result<()> {
        match collective {
            Collective::Sum => group.all_reduce_in_place(&mut *self.0, ReduceOp::Sum),
            Collective::Rank0sToAll => group.broadcast_in_place(&mut *self.0, 0),
        }
    }
}

impl<T> Drop for Foreign<T> {
    fn drop(&mut self) {
        // SAFETY: it is not used again.
        unsafe { ManuallyDrop::take(&mut self.0) }.leak();
    }
}
