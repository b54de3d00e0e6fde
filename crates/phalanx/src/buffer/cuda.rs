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
use cudarc::driver::sys::{CUcontext, CUdeviceptr};
use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice,
    SyncOnDrop, result,
};
use std::sync::Arc;

/// What orders later users of a slice behind the operation that borrowed it, when this is dropped.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    /// `None` if the operation is complete: nobody has to wait for it.
    operation: Option<&'a CudaStream>,
    behind: Behind<'a>,
}

#[derive(Debug)]
enum Behind<'a> {
    /// The event that cudarc keeps for the slice: others wait for it.
    Event(&'a CudaEvent),
    /// The slice's stream waits.
    Stream(Arc<CudaStream>),
}

impl Order<'_> {
    /// The operation is complete: whoever is later need not wait for it.
    pub fn lift(&mut self) {
        self.operation = None;
    }
}

impl Drop for Order<'_> {
    fn drop(&mut self) {
        let Some(operation) = self.operation else { return };
        let _current = Current::keep();
        // An error is kept in the context, whose next call answers it.
        operation.context().record_err(match &self.behind {
            Behind::Event(event) => event.record(operation),
            Behind::Stream(slice) => slice.join(operation),
        });
    }
}

/// The context that was current, which is so again when this is dropped: cudarc makes a stream's current to work with it.
struct Current(Option<CUcontext>);

impl Current {
    fn keep() -> Current {
        Current(result::ctx::get_current().unwrap_or_default())
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if !matches!(result::ctx::get_current(), Ok(now) if now == self.0) {
            // SAFETY: it was current on this thread; null means none.
            let _ = unsafe { result::ctx::set_current(self.0.unwrap_or(std::ptr::null_mut())) };
        }
    }
}

/// How a slice is lent to a lane.
struct Plan<'a> {
    operation: &'a CudaStream,
    /// The slice's stream, if it is another.
    slice: Option<Arc<CudaStream>>,
    /// Whether cudarc tracks the use of slices of its context, which need not be the operation's: a program may have one of its own.
    managed: bool,
}

impl<'a> Plan<'a> {
    #[inline(always)]
    fn new(slice: &Arc<CudaStream>, operation: &'a CudaStream) -> Result<Plan<'a>> {
        let (ours, theirs) = (slice.context(), operation.context());
        if ours.cu_ctx() != theirs.cu_ctx() {
            return Err(wrong_memory(slice, format!("GPU {} and its primary context", theirs.ordinal())));
        }
        let managed = ours.is_managing_stream_synchronization();
        let slice = (slice.cu_stream() != operation.cu_stream()).then(|| slice.clone());
        if managed || slice.is_some() {
            // With an error that is kept, cudarc neither waits nor records.
            ours.check_err()?;
        }
        Ok(Plan { operation, slice, managed })
    }

    /// Lends what `pointer` answers for the operation's stream.
    #[inline(always)]
    fn lend(self, pointer: impl FnOnce(&'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>)) -> Result<Lent<'a>> {
        if self.slice.is_some() || self.managed {
            return self.lend_in_order(pointer);
        }
        // The one stream keeps the order.
        let (address, event) = pointer(self.operation);
        std::mem::forget(event);
        Ok(Lent::device(address, None))
    }

    fn lend_in_order(
        self,
        pointer: impl FnOnce(&'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>),
    ) -> Result<Lent<'a>> {
        let _current = Current::keep();
        let operation = self.operation;
        let (address, recording) = pointer(operation);
        let behind = match (&recording, self.slice) {
            (SyncOnDrop::Record(Some((event, _))), _) if self.managed => Some(Behind::Event(event)),
            (_, None) => None,
            (_, Some(slice)) => {
                slice.context().record_err(operation.join(&slice));
                Some(Behind::Stream(slice))
            }
        };
        // The event is recorded by `Order`: cudarc leaves it out if it tracks nothing in the operation's own context.
        std::mem::forget(recording);
        // Those of the waits, and any before them.
        operation.context().check_err()?;
        if let Some(Behind::Stream(slice)) = &behind {
            slice.context().check_err()?;
        }
        Ok(Lent::device(address, behind.map(|behind| Order { operation: Some(operation), behind })))
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
                plan.lend(|operation| self.device_ptr(operation))
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
                plan.lend(|operation| self.device_ptr_mut(operation))
            }
        }
    )*};
}

device_memory! { CudaSlice<T>, CudaView<'_, T>, CudaViewMut<'_, T> }
device_memory! { mut CudaSlice<T>, CudaViewMut<'_, T> }
