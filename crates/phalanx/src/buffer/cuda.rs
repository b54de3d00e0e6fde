//! cudarc's device memory as buffers.
//!
//! An operation runs on its stream's stream, which may be another than the one that the memory is used on. cudarc
//! keeps, for each slice, an event behind its last read and its last write, so that other streams (and the
//! slice's own end) wait for them. Where it tracks nothing (memory that was made before the context had a second
//! stream, tracking switched off) the slice's stream itself is made to wait.
//!
//! An operation on the host, MPI's, begins when the slice's own stream has done its work, and is complete when it returns.

use super::loan::Loan;
use super::stream::Stream;
use super::{Source, Target};
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UsageError};
use cudarc::driver::sys::{
    CUcontext, CUdeviceptr, CUevent, CUevent_flags, CUevent_wait_flags, CUstream, CUstreamCaptureStatus,
};
use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice,
    DriverError, SyncOnDrop, result,
};
use std::sync::Arc;

/// What orders later users of a slice behind the operation that borrowed it, when this is dropped.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    plan: Plan<'a>,
    /// The event that cudarc keeps for uses of this kind: others wait for its latest record.
    event: Option<&'a CudaEvent>,
    /// The operation is complete: nobody has to wait for it.
    is_lifted: bool,
}

impl Order<'_> {
    /// The operation is complete: whoever is later need not wait for it.
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
        // A group's closure may have made the context's second stream since the slice was lent.
        let event = self.event.filter(|_| self.plan.is_managed());
        if event.is_some() || self.plan.must_join(event.is_some()) {
            self.plan.put_behind(event);
        }
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

/// How a slice is lent to a stream.
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

    /// Whether cudarc tracks the use of slices of its context, which need not be the operation's: a program may have one of its own.
    #[inline(always)]
    fn is_managed(&self) -> bool {
        self.slice.context().is_managing_stream_synchronization()
    }

    /// Whether the streams wait for each other: what is not tracked, or only by a context that does not know of the other's streams,
    /// is in order on the slice's own stream.
    #[inline(always)]
    fn must_join(&self, is_tracked: bool) -> bool {
        self.slice.cu_stream() != self.operation.cu_stream()
            && (!is_tracked || !Arc::ptr_eq(self.slice.context(), self.operation.context()))
    }

    /// Lends what `pointer` answers for the operation's stream.
    #[inline(always)]
    fn lend(self, pointer: impl FnOnce(&'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>)) -> Result<Loan<'a>> {
        if self.is_managed() || self.must_join(false) {
            return self.lend_in_order(pointer);
        }
        // The one stream keeps the order.
        let (address, recording) = pointer(self.operation);
        Ok(self.loan(address, recording))
    }

    fn lend_in_order(
        self,
        pointer: impl FnOnce(&'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>),
    ) -> Result<Loan<'a>> {
        // With an error that is kept, cudarc neither waits nor records.
        self.slice.context().check_err()?;
        let _current = Current::keep();
        let operation = self.operation;
        // Before anything is enqueued: a wait for what is outside of a capture ends it, and nobody outside can wait for what is in it.
        if is_captured(operation) && (self.is_managed() || !is_captured(self.slice)) {
            return Err(cannot_be_captured());
        }
        let (address, recording) = pointer(operation);
        let has_event = matches!(recording, SyncOnDrop::Record(Some(_)));
        if self.must_join(has_event && self.is_managed()) {
            operation.join(self.slice)?;
        }
        // Those of the waits, and any before them.
        operation.context().check_err()?;
        Ok(self.loan(address, recording))
    }

    #[inline(always)]
    fn loan(self, address: CUdeviceptr, recording: SyncOnDrop<'a>) -> Loan<'a> {
        // The event is recorded by `Order`: cudarc leaves it out if it tracks nothing in the operation's own context.
        let event = event_of(recording);
        Loan::device(address, Some(Order { plan: self, event, is_lifted: false }))
    }

    /// Puts later users of the slice behind the operation. By the driver's own functions: cudarc's do nothing if the context keeps an
    /// error of something else.
    #[inline(never)]
    fn put_behind(&self, event: Option<&CudaEvent>) {
        let _current = Current::keep();
        let (ours, theirs) = (self.operation.cu_stream(), self.slice.cu_stream());
        // SAFETY: the streams and the event are alive, and of this context; an event that is destroyed is kept by the driver for who
        // waits for it.
        let ordered = unsafe {
            result::ctx::set_current(self.operation.context().cu_ctx()).and_then(|()| {
                let recorded = event.map_or(Ok(()), |event| {
                    // A read's event forgets the read before, on whatever stream that is: it is complete when this one is.
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
        // Kept in the context, whose next call answers it.
        self.slice.context().record_err(ordered);
    }
}

/// Whether what is enqueued on a stream goes into a graph.
fn is_captured(stream: &CudaStream) -> bool {
    // The default stream cannot be captured, and to ask about it is an error while one is that waits for it.
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

/// Puts a stream behind what is enqueued on another.
///
/// # Safety
/// Both are alive, and of the current context.
unsafe fn join(stream: CUstream, other: CUstream) -> std::result::Result<(), DriverError> {
    // SAFETY: the caller's contract; an event that is destroyed is kept by the driver for who waits for it.
    unsafe {
        let behind = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        let joined = result::event::record(behind, other).and_then(|()| wait(stream, behind));
        result::event::destroy(behind)?;
        joined
    }
}

/// The event of a use that cudarc would record at its end, which does not happen: others wait for its latest record.
#[inline(always)]
fn event_of(recording: SyncOnDrop<'_>) -> Option<&CudaEvent> {
    let event = match &recording {
        SyncOnDrop::Record(record) => record.map(|(event, _)| event),
        SyncOnDrop::Sync(_) => None,
    };
    std::mem::forget(recording);
    event
}

/// Puts a slice's own stream behind all users that its events know, and behind these readers; and later users behind that. By the
/// driver's own functions: cudarc does not look at the events while the context keeps an error, or when the stream that made it do so is
/// gone.
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

/// Lends a slice to an operation on the host: when its own stream has done its work. The address is taken on that stream, so
/// that it has come behind other users of the slice; later ones come when the operation is complete.
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
    Ok(Loan::device(address, None))
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
        unsafe impl<T: Element> Target for $ty {
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
