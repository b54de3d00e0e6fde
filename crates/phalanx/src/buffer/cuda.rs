//! cudarc's device memory as buffers.
//!
//! An operation may run on another stream than the slice's own. cudarc keeps an event behind the last read and the last
//! write of each slice; other streams, and freeing the slice, wait for them. Where cudarc tracks nothing (memory older than
//! the context's second stream, or tracking switched off), the slice's own stream is made to wait instead.
//!
//! An operation on the host (MPI) starts when the slice's own stream has done its work, and is complete when it returns.

use super::loan::Loan;
use super::stream::Stream;
use super::{Source, Target};
use crate::types::dtype::{DType, Plain};
use crate::types::error::{Error, Result, UsageError};
use cudarc::driver::sys::{
    CUcontext, CUdeviceptr, CUevent, CUevent_flags, CUevent_wait_flags, CUstream, CUstreamCaptureStatus,
};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut,
    DeviceSlice, DriverError, SyncOnDrop, result,
};
use std::sync::Arc;

/// Dropping it orders later users of a slice behind the operation that borrowed the slice.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    plan: Plan<'a>,
    /// cudarc's event for this kind of access. Other streams wait for its latest record.
    event: Option<&'a CudaEvent>,
    /// The operation is complete: no later use has to wait for it.
    is_lifted: bool,
}

impl Order<'_> {
    /// Marks the operation as complete: later uses need not wait for it.
    pub fn lift(&mut self) {
        self.is_lifted = true;
    }
}

impl Drop for Order<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_lifted {
            return;
        }
        // A group's closure may have made the context's second stream since the loan began.
        let event = self.event.filter(|_| self.plan.is_managed());
        if event.is_some() || self.plan.must_join(event.is_some()) {
            self.plan.put_behind(event);
        }
    }
}

/// Restores the current context when dropped. cudarc makes a stream's context current to work with the stream.
pub(super) struct Current(Option<CUcontext>);

impl Current {
    fn keep() -> Current {
        Current(result::ctx::get_current().unwrap_or_default())
    }

    /// Makes a context current until the guard is dropped.
    pub fn enter(context: &CudaContext) -> Result<Current> {
        let current = Current::keep();
        if current.0 != Some(context.cu_ctx()) {
            // SAFETY: a context that is alive.
            unsafe { result::ctx::set_current(context.cu_ctx()) }?;
        }
        Ok(current)
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

/// How a slice and the operation's stream are ordered.
#[derive(Debug, Clone, Copy)]
struct Plan<'a> {
    operation: &'a CudaStream,
    /// The slice's own stream.
    slice: &'a CudaStream,
    access: Access,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

impl<'a> Plan<'a> {
    /// # Safety
    /// The slice's stream is borrowed for as long as the slice is, which keeps it.
    #[inline(always)]
    unsafe fn new(slice: *const CudaStream, operation: &'a CudaStream, access: Access) -> Result<Plan<'a>> {
        // SAFETY: the caller's contract.
        let slice = unsafe { &*slice };
        let (ours, theirs) = (slice.context(), operation.context());
        if ours.cu_ctx() != theirs.cu_ctx() {
            return Err(wrong_memory(slice, format!("GPU {} and its primary context", theirs.ordinal())));
        }
        Ok(Plan { operation, slice, access })
    }

    /// Whether cudarc tracks uses of the slice. Its context object may differ from the operation's: a program may have its own.
    #[inline(always)]
    fn is_managed(&self) -> bool {
        self.slice.context().is_managing_stream_synchronization()
    }

    /// Whether the two streams must wait for each other. They must if the slice is not tracked, or tracked by a context object
    /// that does not know the other's streams.
    #[inline(always)]
    fn must_join(&self, is_tracked: bool) -> bool {
        self.slice.cu_stream() != self.operation.cu_stream()
            && (!is_tracked || !Arc::ptr_eq(self.slice.context(), self.operation.context()))
    }

    /// Lends the address that `pointer` returns for the operation's stream.
    #[inline(always)]
    fn lend(self, pointer: impl FnOnce(&'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>)) -> Result<Loan<'a>> {
        if self.is_managed() || self.must_join(false) {
            return self.lend_in_order(pointer);
        }
        // One stream: it keeps the order.
        let (address, recording) = pointer(self.operation);
        Ok(self.loan(address, recording))
    }

    fn lend_in_order(
        self,
        pointer: impl FnOnce(&'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>),
    ) -> Result<Loan<'a>> {
        // While the context keeps an error, cudarc neither waits nor records.
        self.slice.context().check_err()?;
        let _current = Current::keep();
        let operation = self.operation;
        // Before anything is enqueued: a captured stream cannot wait for work outside of the capture, nor the reverse.
        if is_captured(operation) && (self.is_managed() || !is_captured(self.slice)) {
            return Err(cannot_be_captured());
        }
        let (address, recording) = pointer(operation);
        let has_event = matches!(recording, SyncOnDrop::Record(Some(_)));
        if self.must_join(has_event && self.is_managed()) {
            operation.join(self.slice)?;
        }
        // Errors of the waits, and earlier ones.
        operation.context().check_err()?;
        Ok(self.loan(address, recording))
    }

    #[inline(always)]
    fn loan(self, address: CUdeviceptr, recording: SyncOnDrop<'a>) -> Loan<'a> {
        // `Order` records the event: cudarc would not, if the operation's own context tracks nothing.
        let event = event_of(recording);
        Loan::device(address).ordered(Some(Order { plan: self, event, is_lifted: false }))
    }

    /// Orders later users of the slice behind the operation. Calls the driver directly: cudarc's functions do nothing while the
    /// context keeps an unrelated error.
    #[inline(never)]
    fn put_behind(&self, event: Option<&CudaEvent>) {
        let _current = Current::keep();
        let (ours, theirs) = (self.operation.cu_stream(), self.slice.cu_stream());
        // SAFETY: the streams and the event are alive, and of this context; the driver keeps a destroyed event for streams that
        // wait for it.
        let ordered = unsafe {
            result::ctx::set_current(self.operation.context().cu_ctx()).and_then(|()| {
                let recorded = event.map_or(Ok(()), |event| {
                    // Recording a read's event forgets the previous read, so this one first waits for it.
                    let behind_reader = match self.access {
                        Access::Read => wait(ours, event.cu_event()),
                        Access::Write => Ok(()),
                    };
                    behind_reader.and(result::event::record(event.cu_event(), ours))
                });
                let joined = if self.must_join(event.is_some()) { join(theirs, ours) } else { Ok(()) };
                recorded.and(joined)
            })
        };
        // The context keeps the error and returns it from its next call.
        self.slice.context().record_err(ordered);
    }
}

/// Whether a stream is being captured into a graph.
fn is_captured(stream: &CudaStream) -> bool {
    // The default stream cannot be captured, and querying it is an error while a blocking stream is captured.
    !stream.cu_stream().is_null()
        && matches!(stream.capture_status(), Ok(status) if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

#[cold]
fn cannot_be_captured() -> Error {
    UsageError::Captured {
        what: "a buffer that cudarc keeps in order with other streams",
        remedy: "let nccl::Graph capture the operation, or use memory that was made on that stream, in a context that tracks nothing \
                 (CudaContext::disable_event_tracking)",
    }
    .into()
}

/// # Safety
/// Both are alive.
unsafe fn wait(stream: CUstream, event: CUevent) -> std::result::Result<(), DriverError> {
    // SAFETY: the caller's contract.
    unsafe { result::stream::wait_event(stream, event, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
}

/// Makes a stream wait for the work that is enqueued on another.
///
/// # Safety
/// Both are alive, and of the current context.
unsafe fn join(stream: CUstream, other: CUstream) -> std::result::Result<(), DriverError> {
    // SAFETY: the caller's contract; the driver keeps a destroyed event for streams that wait for it.
    unsafe {
        let behind = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        let joined = result::event::record(behind, other).and_then(|()| wait(stream, behind));
        result::event::destroy(behind)?;
        joined
    }
}

/// The event that cudarc would record at the end of a use. cudarc's own recording is suppressed.
#[inline(always)]
fn event_of(recording: SyncOnDrop<'_>) -> Option<&CudaEvent> {
    let event = match &recording {
        SyncOnDrop::Record(record) => record.map(|(event, _)| event),
        SyncOnDrop::Sync(_) => None,
    };
    std::mem::forget(recording);
    event
}

/// Makes a slice's own stream wait for all users that its events know and for `readers`, and later users wait for that.
///
/// Calls the driver directly: cudarc ignores the events while the context keeps an error.
pub(crate) fn gather_users<T>(
    slice: &mut CudaSlice<T>,
    readers: impl IntoIterator<Item = CUstream>,
) -> std::result::Result<(), DriverError> {
    let own = slice.stream().clone();
    let read = event_of(slice.device_ptr(&own).1).map(CudaEvent::cu_event);
    let write = event_of(slice.device_ptr_mut(&own).1).map(CudaEvent::cu_event);
    let _current = Current::keep();
    // SAFETY: the slice's stream and events are alive, and so are the readers; all are of this context.
    unsafe {
        result::ctx::set_current(own.context().cu_ctx())?;
        [read, write].into_iter().flatten().try_for_each(|event| wait(own.cu_stream(), event))?;
        readers.into_iter().try_for_each(|reader| join(own.cu_stream(), reader))?;
        write.map_or(Ok(()), |event| result::event::record(event, own.cu_stream()))
    }
}

/// Lends a slice to an operation on the host, when the slice's own stream has done its work.
///
/// The address is taken on that stream, so that it waits for other users of the slice first.
#[cold]
fn lend_on_host<'l>(
    slice: &Arc<CudaStream>,
    stream: &Stream,
    address: impl FnOnce() -> CUdeviceptr,
) -> Result<Loan<'l>> {
    let Some(access) = stream.cuda_access() else {
        return Err(wrong_memory(slice, "host memory".into()));
    };
    access.check(slice)?;
    let address = address();
    access.wait(slice)?;
    Ok(Loan::device(address))
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
        unsafe impl<T: Plain> Source for $ty {
            type Elem = T;
            #[inline]
            fn dtype(&self) -> DType {
                T::dtype()
            }
            #[inline]
            fn len(&self) -> usize {
                DeviceSlice::len(self)
            }
            #[inline]
            fn lend<'l>(&'l self, stream: &'l Stream) -> Result<Loan<'l>> {
                let Some(operation) = stream.cuda_stream() else {
                    let own = DeviceSlice::stream(self).clone();
                    return lend_on_host(&own, stream, || self.device_ptr(&own).0);
                };
                let own = Arc::as_ptr(DeviceSlice::stream(self));
                // SAFETY: the stream of the slice, which is borrowed.
                let plan = unsafe { Plan::new(own, operation, Access::Read) }?;
                plan.lend(|operation| self.device_ptr(operation))
            }
        }
    )*};
    (mut $($ty:ty),*) => {$(
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe impl<T: Plain> Target for $ty {
            #[inline]
            fn lend_mut<'l>(&'l mut self, stream: &'l Stream) -> Result<Loan<'l>> {
                let Some(operation) = stream.cuda_stream() else {
                    let own = DeviceSlice::stream(self).clone();
                    return lend_on_host(&own, stream, || self.device_ptr_mut(&own).0);
                };
                let own = Arc::as_ptr(DeviceSlice::stream(self));
                // SAFETY: the stream of the slice, which is borrowed.
                let plan = unsafe { Plan::new(own, operation, Access::Write) }?;
                plan.lend(|operation| self.device_ptr_mut(operation))
            }
        }
    )*};
}

device_memory! { CudaSlice<T>, CudaView<'_, T>, CudaViewMut<'_, T> }
device_memory! { mut CudaSlice<T>, CudaViewMut<'_, T> }
