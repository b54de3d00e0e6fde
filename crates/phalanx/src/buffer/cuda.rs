//! cudarc's device memory as buffers.
//!
//! An operation runs on its lane's stream, which may be another than the one that the memory is used on. cudarc
//! keeps, for each slice, an event behind its last read and its last write, so that other streams (and the
//! slice's own end) wait for them. Where it tracks nothing (memory that was made before the context had a second
//! stream, tracking switched off) the slice's stream itself is made to wait.
//!
//! An operation on the host, MPI's, begins when the slice's own stream has done its work, and is complete when it returns.

use super::{Source, Target};
use crate::dtype::Element;
use crate::error::{Error, Result, UsageError};
use crate::lane::{Lane, Lent};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop,
};
use std::sync::Arc;

/// What orders later users of a slice behind the operation that borrowed it.
#[derive(Debug)]
pub(crate) enum Order<'a> {
    /// cudarc records its event when this is dropped.
    Tracked { event: SyncOnDrop<'a> },
    /// The slice's stream waits for the operation's, if there is one, when this is dropped.
    Joined { slice: Arc<CudaStream>, operation: Option<&'a CudaStream> },
}

impl Order<'_> {
    /// The operation is complete: whoever is later need not wait for it.
    pub fn lift(&mut self) {
        match self {
            Order::Tracked { event } => {
                std::mem::forget(std::mem::replace(event, SyncOnDrop::Record(None)));
            }
            Order::Joined { operation, .. } => *operation = None,
        }
    }
}

impl Drop for Order<'_> {
    fn drop(&mut self) {
        if let Order::Joined { slice, operation: Some(operation) } = self {
            // An error is kept in the context, whose next call answers it.
            slice.context().record_err(slice.join(operation));
        }
    }
}

/// How a slice is lent to a lane.
struct Plan<'a> {
    operation: &'a CudaStream,
    /// The slice's stream, if it is another.
    slice: Option<Arc<CudaStream>>,
    /// Whether cudarc tracks the use of slices on both streams.
    managed: bool,
}

impl<'a> Plan<'a> {
    #[inline(always)]
    fn new(slice: &Arc<CudaStream>, operation: &'a CudaStream) -> Result<Plan<'a>> {
        let (ours, theirs) = (slice.context(), operation.context());
        if ours.cu_ctx() != theirs.cu_ctx() {
            return Err(wrong_memory(slice, format!("GPU {} and its primary context", theirs.ordinal())));
        }
        Ok(Plan {
            operation,
            slice: (slice.cu_stream() != operation.cu_stream()).then(|| slice.clone()),
            managed: ours.is_managing_stream_synchronization() && theirs.is_managing_stream_synchronization(),
        })
    }

    #[inline(always)]
    fn lent(self, (address, event): (CUdeviceptr, SyncOnDrop<'a>)) -> Lent<'a> {
        let tracked = self.managed && matches!(event, SyncOnDrop::Record(Some(_)));
        let order = match self.slice {
            _ if tracked => Some(Order::Tracked { event }),
            None => None,
            Some(slice) => {
                slice.context().record_err(self.operation.join(&slice));
                Some(Order::Joined { slice, operation: Some(self.operation) })
            }
        };
        Lent::device(address, order)
    }
}

/// Lends a slice to an operation on the host: when its own stream has done its work. The address is taken on that stream, so
/// that it has come behind other users of the slice; later ones come when the operation is complete.
#[cold]
fn lend_on_host<'l>(
    slice: &Arc<CudaStream>,
    lane: &Lane,
    address: impl FnOnce() -> CUdeviceptr,
) -> Result<Lent<'l>> {
    let Some(guest) = lane.guest() else {
        return Err(wrong_memory(slice, "host memory".into()));
    };
    guest.check(slice)?;
    let address = address();
    guest.wait(slice)?;
    Ok(Lent::device(address, None))
}

#[cold]
fn wrong_memory(slice: &CudaStream, wanted: String) -> Error {
    UsageError::Memory {
        memory: format!("the memory of GPU {}", slice.context().ordinal()),
        wanted,
        remedy: "use a communicator of that GPU (Comm::gpu says which one it has), or copy the buffer",
    }
    .into()
}

macro_rules! device_memory {
    ($($ty:ty),*) => {$(
        // SAFETY: device memory of `len` elements, borrowed; the plan orders what comes later behind the operation.
        unsafe impl<T: Element> Source for $ty {
            type Elem = T;
            #[inline]
            fn len(&self) -> usize {
                DeviceSlice::len(self)
            }
            #[inline]
            fn lend<'l>(&'l self, lane: &'l Lane) -> Result<Lent<'l>> {
                let Some(operation) = lane.cuda_stream() else {
                    let own = DeviceSlice::stream(self).clone();
                    return lend_on_host(&own, lane, || self.device_ptr(&own).0);
                };
                let plan = Plan::new(DeviceSlice::stream(self), operation)?;
                let pointer = self.device_ptr(plan.operation);
                Ok(plan.lent(pointer))
            }
        }
    )*};
    (mut $($ty:ty),*) => {$(
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe impl<T: Element> Target for $ty {
            #[inline]
            fn lend_mut<'l>(&'l mut self, lane: &'l Lane) -> Result<Lent<'l>> {
                let Some(operation) = lane.cuda_stream() else {
                    let own = DeviceSlice::stream(self).clone();
                    return lend_on_host(&own, lane, || self.device_ptr_mut(&own).0);
                };
                let plan = Plan::new(DeviceSlice::stream(self), operation)?;
                let pointer = self.device_ptr_mut(plan.operation);
                Ok(plan.lent(pointer))
            }
        }
    )*};
}

device_memory! { CudaSlice<T>, CudaView<'_, T>, CudaViewMut<'_, T> }
device_memory! { mut CudaSlice<T>, CudaViewMut<'_, T> }
