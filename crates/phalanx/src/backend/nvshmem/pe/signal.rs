//! Signals: symmetric words by which a PE tells another that data has arrived.

use super::context::Context;
use super::device::raw;
use super::memory::{Local, Shared, Symmetric, check_index};
use super::one_sided::Mode;
use crate::gpu::backoff::Backoff;
use crate::types::dtype::Element;
use crate::types::error::Result;
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUdeviceptr;
use phalanx_sys::nvshmem::{cmp, signal_op};
use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::Arc;

/// A symmetric `u64` that peers set or add to: an element of [`Symmetric<u64>`](Symmetric::signal).
#[derive(Debug, Clone, Copy)]
pub struct Signal<'a> {
    place: CUdeviceptr,
    memory: PhantomData<&'a ()>,
}

impl Signal<'_> {
    pub(crate) fn new(place: CUdeviceptr) -> Self {
        Signal { place, memory: PhantomData }
    }

    fn pointer(self) -> *mut u64 {
        self.place as *mut u64
    }
}

/// What a signal operation does to the peer's signal; both are atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalOp {
    /// Sets it to the value.
    Set,
    /// Adds the value to it, wrapping.
    Add,
}

impl SignalOp {
    fn code(self) -> c_int {
        match self {
            SignalOp::Set => signal_op::SET,
            SignalOp::Add => signal_op::ADD,
        }
    }
}

/// The comparison of a variable with a value, at which a wait ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Compare {
    Eq,
    Ne,
    Gt,
    Le,
    Lt,
    Ge,
}

impl Compare {
    fn code(self) -> c_int {
        match self {
            Compare::Eq => cmp::EQ,
            Compare::Ne => cmp::NE,
            Compare::Gt => cmp::GT,
            Compare::Le => cmp::LE,
            Compare::Lt => cmp::LT,
            Compare::Ge => cmp::GE,
        }
    }

    fn holds(self, variable: u64, value: u64) -> bool {
        match self {
            Compare::Eq => variable == value,
            Compare::Ne => variable != value,
            Compare::Gt => variable > value,
            Compare::Le => variable <= value,
            Compare::Lt => variable < value,
            Compare::Ge => variable >= value,
        }
    }
}

impl Context {
    /// Puts `source` into `dest` of a PE and then changes the PE's signal: a PE that sees the signal sees the
    /// data. Ordered behind the work on a stream; complete on this PE when the stream gets there.
    /// `nvshmemx_putmem_signal_on_stream`
    ///
    /// # Errors
    /// [`UsageError`](crate::UsageError) for lengths that differ, a PE that does not exist, a stream of
    /// another GPU.
    #[allow(clippy::too_many_arguments, reason = "the arguments of the C function")]
    pub fn put_signal_on_stream<S, D>(
        &self,
        dest: &D,
        source: &S,
        signal: &Signal<'_>,
        value: u64,
        op: SignalOp,
        pe: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        let name = "put_signal_on_stream";
        self.put_signal_as(name, dest, source, (signal, value, op), pe, Mode::OnStream(stream))
    }

    /// As [`put_signal_on_stream`](Context::put_signal_on_stream), and complete on this PE only after
    /// [`quiet_on_stream`](Context::quiet_on_stream): until then the source must not be written.
    /// `nvshmemx_putmem_signal_nbi_on_stream`
    #[allow(clippy::too_many_arguments, reason = "the arguments of the C function")]
    pub fn put_signal_nbi_on_stream<S, D>(
        &self,
        dest: &D,
        source: &S,
        signal: &Signal<'_>,
        value: u64,
        op: SignalOp,
        pe: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        let name = "put_signal_nbi_on_stream";
        self.put_signal_as(name, dest, source, (signal, value, op), pe, Mode::Nbi(stream))
    }

    /// Puts and signals, and waits until that is complete on this PE. Ordered as [`put`](Context::put).
    /// `nvshmemx_putmem_signal_on_stream`
    pub fn put_signal<S, D>(
        &self,
        dest: &D,
        source: &S,
        signal: &Signal<'_>,
        value: u64,
        op: SignalOp,
        pe: usize,
    ) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        self.put_signal_as("put_signal", dest, source, (signal, value, op), pe, Mode::Blocking)
    }

    fn put_signal_as<S, D>(
        &self,
        operation: &'static str,
        dest: &D,
        source: &S,
        (signal, value, op): (&Signal<'_>, u64, SignalOp),
        pe: usize,
        mode: Mode<'_>,
    ) -> Result<()>
    where
        S: Local + ?Sized,
        D: Shared<Elem = S::Elem> + ?Sized,
    {
        let library = self.library;
        let (put, name) = match mode {
            Mode::Nbi(_) => {
                (library.nvshmemx_putmem_signal_nbi_on_stream, "nvshmemx_putmem_signal_nbi_on_stream")
            }
            _ => (library.nvshmemx_putmem_signal_on_stream, "nvshmemx_putmem_signal_on_stream"),
        };
        let put = library.need(put, name)?;
        let (number, bytes) = self.check_put(operation, dest, source, pe)?;
        let stream = self.stream_of(mode);
        if bytes == 0 {
            self.signal_op_on_stream(signal, value, op, pe, stream)?;
            return self.conclude(mode, None);
        }
        self.device.check(stream)?;
        let to = dest.place() as *mut _;
        self.reading(mode, source, |from, stream| {
            // SAFETY: initialised; symmetric memory of so many bytes on the PE, which exists; the source is
            // lent until the operation is enqueued, on a stream of the device, which is current; (nbi) memory
            // of the library's is freed only after a barrier, registered memory after a quiet.
            unsafe { put(to, from, bytes, signal.pointer(), value, op.code(), number, stream) }
        })
    }

    /// Changes a PE's signal, behind the work on a stream. Not ordered with earlier puts, unless a
    /// [`quiet_on_stream`](Context::quiet_on_stream) is between. `nvshmemx_signal_op_on_stream`
    ///
    /// # Errors
    /// [`UsageError`](crate::UsageError) for a PE that does not exist, a stream of another GPU.
    pub fn signal_op_on_stream(
        &self,
        signal: &Signal<'_>,
        value: u64,
        op: SignalOp,
        pe: usize,
        stream: &CudaStream,
    ) -> Result<()> {
        let name = "nvshmemx_signal_op_on_stream";
        let function = self.library.need(self.library.nvshmemx_signal_op_on_stream, name)?;
        let pe = self.check_pe("signal_op_on_stream", pe)?;
        self.device.check(stream)?;
        self.enter()?;
        // SAFETY: initialised; a signal in symmetric memory, a PE that exists, a stream of the device.
        unsafe { function(signal.pointer(), value, op.code(), pe, raw(stream)) };
        Ok(())
    }

    /// Makes a stream wait until this PE's signal fulfils a comparison.
    /// `nvshmemx_signal_wait_until_on_stream`
    ///
    /// If the signal never comes, the stream never goes on; [`Context::sync`] then returns an error.
    ///
    /// # Errors
    /// [`UsageError::Memory`](crate::UsageError) for a stream of another GPU.
    pub fn signal_wait_until_on_stream(
        &self,
        signal: &Signal<'_>,
        compare: Compare,
        value: u64,
        stream: &CudaStream,
    ) -> Result<()> {
        let name = "nvshmemx_signal_wait_until_on_stream";
        let wait = self.library.need(self.library.nvshmemx_signal_wait_until_on_stream, name)?;
        self.device.check(stream)?;
        self.enter()?;
        // SAFETY: initialised; a signal in symmetric memory; a stream of the device.
        unsafe { wait(signal.pointer(), compare.code(), value, raw(stream)) };
        Ok(())
    }

    /// Reads this PE's signal. By a copy, since `nvshmem_signal_fetch` waits for CUDA's default stream and
    /// has no timeout.
    ///
    /// # Errors
    /// Those of [`sync`](Context::sync).
    pub fn signal_fetch(&self, signal: &Signal<'_>) -> Result<u64> {
        self.fetch(signal.place, size_of::<u64>())
    }

    /// Waits on the host, with the timeout, until this PE's signal fulfils a comparison; returns the signal.
    /// Nothing is enqueued: after a timeout the context can still be used.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error); [`Error::Peer`](crate::Error), which is final.
    pub fn signal_wait_until(&self, signal: &Signal<'_>, compare: Compare, value: u64) -> Result<u64> {
        let mut backoff = Backoff::new();
        loop {
            let now = self.signal_fetch(signal)?;
            if compare.holds(now, value) {
                return Ok(now);
            }
            if backoff.pause() {
                self.look(backoff.since).map_err(|error| self.fail(error))?;
                if backoff.since.elapsed() > self.timeout() {
                    return Err(self.late("signal_wait_until"));
                }
            }
        }
    }

    /// Makes a stream wait until an element of this PE's memory fulfils a comparison: for flags that peers
    /// put. `nvshmemx_TYPE_wait_until_on_stream`
    ///
    /// # Errors
    /// [`UsageError`](crate::UsageError) if there is no such element, for a stream of another GPU.
    pub fn wait_until_on_stream<T: Waitable>(
        &self,
        variable: &Symmetric<'_, T>,
        index: usize,
        compare: Compare,
        value: T,
        stream: &CudaStream,
    ) -> Result<()> {
        check_index("wait_until_on_stream", variable.len(), index)?;
        self.device.check(stream)?;
        self.enter()?;
        T::wait(self, variable.place() + (index * size_of::<T>()) as u64, compare.code(), value, stream)
    }
}

/// The types of [`wait_until_on_stream`](Context::wait_until_on_stream): integers of 16, 32 and 64 bits.
pub trait Waitable: Element {
    #[doc(hidden)]
    fn wait(
        context: &Context,
        place: CUdeviceptr,
        cmp: c_int,
        value: Self,
        stream: &CudaStream,
    ) -> Result<()>;
}

macro_rules! waitable {
    ($($ty:ty: $function:ident),*) => {$(
        impl Waitable for $ty {
            fn wait(context: &Context, place: CUdeviceptr, cmp: c_int, value: $ty, stream: &CudaStream) -> Result<()> {
                let wait = context.library.need(context.library.$function, stringify!($function))?;
                // SAFETY: initialised; an element of symmetric memory; a stream of the device.
                unsafe { wait(place as *mut $ty, cmp, value, raw(stream)) };
                Ok(())
            }
        }
    )*};
}

waitable! {
    i16: nvshmemx_short_wait_until_on_stream, u16: nvshmemx_ushort_wait_until_on_stream,
    i32: nvshmemx_int32_wait_until_on_stream, u32: nvshmemx_uint32_wait_until_on_stream,
    i64: nvshmemx_int64_wait_until_on_stream, u64: nvshmemx_uint64_wait_until_on_stream
}
