//! The collectives of a team, on a stream.

use super::device::{copy, raw};
use super::limits::{ReductionMethod, ReductionQuery, TEAM_SCRATCH};
use super::memory::{Local, LocalMut, Shared, too_short};
use super::team::Team;
use crate::buffer::stream::{GpuStream, Stream};
use crate::types::dtype::{DType, Element};
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::memory::RawStream;
use cudarc::driver::CudaStream;
use phalanx_sys::nvshmem::{REDUCE_OPS, REDUCE_TYPES, Reduce};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

const REDUCE: &str = "nvshmemx_TYPE_OP_reduce_on_stream";

/// How the PEs' elements are combined, in an order that the library chooses. There is no average.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TeamReduction {
    /// The sum.
    Sum = 0,
    /// The product.
    Prod = 1,
    /// The smallest.
    Min = 2,
    /// The largest.
    Max = 3,
    /// Bit by bit, for integers.
    And = 4,
    /// Bit by bit, for integers.
    Or = 5,
    /// Bit by bit, for integers.
    Xor = 6,
}

impl TeamReduction {
    /// Every reduction.
    pub const ALL: [TeamReduction; 7] = [
        TeamReduction::Sum,
        TeamReduction::Prod,
        TeamReduction::Min,
        TeamReduction::Max,
        TeamReduction::And,
        TeamReduction::Or,
        TeamReduction::Xor,
    ];

    /// The short name: `sum`, `prod`, `min`, `max`, `and`, `or`, `xor`.
    pub const fn name(self) -> &'static str {
        REDUCE_OPS[self as usize]
    }

    /// Whether the library supports it for a type: 8-bit floats are not reduced, and floats have no bitwise
    /// operations.
    pub fn supports(self, dtype: DType) -> bool {
        let is_float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::Bf16);
        column(dtype).is_some() && !(is_float && self as usize >= TeamReduction::And as usize)
    }
}

impl fmt::Display for TeamReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The column of a type in the table of functions.
pub(crate) fn column(dtype: DType) -> Option<usize> {
    let name = match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::F16 => "half",
        DType::Bf16 => "bfloat16",
        DType::I8 => "int8",
        DType::U8 => "uint8",
        DType::I16 => "int16",
        DType::U16 => "uint16",
        DType::I32 => "int32",
        DType::U32 => "uint32",
        DType::I64 => "int64",
        DType::U64 => "uint64",
        DType::F8E4M3 | DType::F8E5M2 | DType::Plain(_) => return None,
    };
    REDUCE_TYPES.iter().position(|known| *known == name)
}

/// All are enqueued on a stream and run when it gets there; [`Context::sync`](super::Context::sync) waits for
/// a stream. Source and destination are symmetric memory, the same on all PEs of the team.
impl Team<'_> {
    /// Makes each PE's stream wait for all PEs, and completes all puts. `nvshmemx_barrier_on_stream`
    ///
    /// # Errors
    /// [`UsageError::Memory`] for a stream of another GPU.
    pub fn barrier_on_stream(&self, stream: &CudaStream) -> Result<()> {
        let name = "nvshmemx_barrier_on_stream";
        let barrier = self.context.library.need(self.context.library.nvshmemx_barrier_on_stream, name)?;
        self.context.device.check(stream)?;
        self.context.enter()?;
        // SAFETY: initialised; a team that exists; a stream of the device.
        self.context.library.check(name, unsafe { barrier(self.handle, raw(stream)) })
    }

    /// Makes each PE's stream wait for all PEs; puts may still be on their way.
    /// `nvshmemx_team_sync_on_stream`
    ///
    /// # Errors
    /// [`UsageError::Memory`] for a stream of another GPU.
    pub fn sync_on_stream(&self, stream: &CudaStream) -> Result<()> {
        let name = "nvshmemx_team_sync_on_stream";
        let sync = self.context.library.need(self.context.library.nvshmemx_team_sync_on_stream, name)?;
        self.context.device.check(stream)?;
        self.context.enter()?;
        // SAFETY: as above.
        self.context.library.check(name, unsafe { sync(self.handle, raw(stream)) })
    }

    /// As [`barrier_on_stream`](Team::barrier_on_stream), and waits for it on the host, with the timeout.
    /// `nvshmem_barrier` has none.
    ///
    /// It is enqueued on the context's [stream](super::Context::stream), so it waits for all work there: a
    /// team is in one operation at a time. It neither waits for nor completes work on other streams, except
    /// earlier `…_nbi` operations. For a barrier beside other work, use
    /// [`barrier_on_stream`](Team::barrier_on_stream) with an idle stream, and
    /// [`Context::sync`](super::Context::sync).
    ///
    /// # Errors
    /// Those of [`Context::sync`](super::Context::sync): final, also if other work on the context's stream
    /// does not end.
    pub fn barrier(&self) -> Result<()> {
        self.barrier_on_stream(self.context.stream())?;
        self.context.sync(self.context.stream())
    }

    /// As [`sync_on_stream`](Team::sync_on_stream), and waits for it on the host, with the timeout; ordered
    /// as [`barrier`](Team::barrier). `nvshmem_team_sync` has no timeout.
    ///
    /// # Errors
    /// As for [`barrier`](Team::barrier).
    pub fn sync(&self) -> Result<()> {
        self.sync_on_stream(self.context.stream())?;
        self.context.sync(self.context.stream())
    }

    /// Copies `source` of the team's PE `root` into `dest` of all. `nvshmemx_broadcastmem_on_stream`
    ///
    /// # Errors
    /// [`UsageError`] if the lengths differ or there is no such PE.
    pub fn broadcast<D, S>(
        &self,
        dest: &mut D,
        source: &S,
        root: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        D: LocalMut + Shared<Elem = S::Elem> + ?Sized,
        S: Shared + ?Sized,
    {
        let name = "nvshmemx_broadcastmem_on_stream";
        let broadcast =
            self.context.library.need(self.context.library.nvshmemx_broadcastmem_on_stream, name)?;
        if dest.len() != source.len() {
            return Err(too_short("broadcast", "dest", dest.len(), source.len(), "the length of the source"));
        }
        let root = self.check_pe("broadcast", root)?;
        let bytes = bytes_of(source);
        self.enqueue(dest, source, stream, |to, from, stream| {
            // SAFETY: initialised; a team that exists; symmetric memory of so many bytes, lent until it is
            // enqueued.
            self.checked(name, unsafe { broadcast(self.handle, to, from, bytes, root, stream) })
        })
    }

    /// Concatenates `source` of every PE, in the order of their numbers, into `dest` of all, which is as long
    /// as all sources together. `nvshmemx_fcollectmem_on_stream`
    ///
    /// # Errors
    /// [`UsageError::Length`] if it has another length.
    pub fn fcollect<D, S>(&self, dest: &mut D, source: &S, stream: &Arc<CudaStream>) -> Result<()>
    where
        D: LocalMut + Shared<Elem = S::Elem> + ?Sized,
        S: Shared + ?Sized,
    {
        let name = "nvshmemx_fcollectmem_on_stream";
        let fcollect =
            self.context.library.need(self.context.library.nvshmemx_fcollectmem_on_stream, name)?;
        self.check_parts("fcollect", "dest", dest.len(), source.len())?;
        let bytes = bytes_of(source);
        self.enqueue(dest, source, stream, |to, from, stream| {
            // SAFETY: as above; scratch for that from every PE.
            self.checked(name, unsafe { fcollect(self.handle, to, from, bytes, stream) })
        })
    }

    /// Sends the n-th part of every PE's `source` to the team's PE n, whose `dest` gets them in the order of
    /// the senders. `nvshmemx_alltoallmem_on_stream`
    ///
    /// # Errors
    /// [`UsageError`] if the lengths differ, or the PEs cannot share them evenly.
    pub fn alltoall<D, S>(&self, dest: &mut D, source: &S, stream: &Arc<CudaStream>) -> Result<()>
    where
        D: LocalMut + Shared<Elem = S::Elem> + ?Sized,
        S: Shared + ?Sized,
    {
        let name = "nvshmemx_alltoallmem_on_stream";
        let alltoall =
            self.context.library.need(self.context.library.nvshmemx_alltoallmem_on_stream, name)?;
        if dest.len() != source.len() {
            return Err(too_short("alltoall", "dest", dest.len(), source.len(), "the length of the source"));
        }
        if !source.len().is_multiple_of(self.n_pes()) {
            let (operation, buffer, actual) = ("alltoall", "source", source.len());
            return Err(
                UsageError::Indivisible { operation, buffer, actual, world_size: self.n_pes() }.into()
            );
        }
        let bytes = bytes_of(source) / self.n_pes();
        self.enqueue(dest, source, stream, |to, from, stream| {
            // SAFETY: as above; a part of so many bytes for every PE.
            self.checked(name, unsafe { alltoall(self.handle, to, from, bytes, stream) })
        })
    }

    /// Combines `source` of all PEs, element by element, into `dest` of all.
    /// `nvshmemx_TYPE_OP_reduce_on_stream`
    ///
    /// # Errors
    /// [`UsageError::Length`] if the lengths differ; [`Error::Unsupported`] for a type without such a
    /// reduction.
    pub fn reduce<D, S>(
        &self,
        dest: &mut D,
        source: &S,
        op: TeamReduction,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        D: LocalMut + Shared<Elem = S::Elem> + ?Sized,
        S: Shared + ?Sized,
    {
        let reduce =
            self.reduction::<S::Elem>("reduce", op, |dtype, op| self.context.library.reduce(dtype, op))?;
        if dest.len() != source.len() {
            return Err(too_short("reduce", "dest", dest.len(), source.len(), "the length of the source"));
        }
        let count = source.len();
        self.enqueue(dest, source, stream, |to, from, stream| {
            // SAFETY: as above; so many elements of the function's type.
            self.checked(REDUCE, unsafe { reduce(self.handle, to, from, count, stream) })
        })
    }

    /// As [`reduce`](Team::reduce), in place. With three or more PEs, reductions that neither NCCL nor the
    /// switch does are made of pieces of 64 KiB, since the library's own kernels are wrong in place: a
    /// separate buffer is faster.
    pub fn reduce_in_place<D>(
        &self,
        buffer: &mut D,
        op: TeamReduction,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        D: LocalMut + Shared + ?Sized,
    {
        let reduce =
            self.reduction::<D::Elem>("reduce", op, |dtype, op| self.context.library.reduce(dtype, op))?;
        let count = buffer.len();
        self.context.enter()?;
        if count == 0 {
            return Ok(());
        }
        let on_stream = Stream::gpu(GpuStream::from(stream));
        let lent = buffer.lend_mut(&on_stream)?;
        let start: *mut u8 = lent.span().start;
        if self.n_pes() <= 2 || self.method_of::<D::Elem>(op, false) == ReductionMethod::Direct {
            let start = start.cast();
            // SAFETY: as above; the library allows source and destination to be the same.
            return self.checked(REDUCE, unsafe { reduce(self.handle, start, start, count, raw(stream)) });
        }
        let (scratch, size) = (self.context.limits.scratch(self.handle)?, size_of::<D::Elem>());
        for begin in (0..count).step_by(TEAM_SCRATCH / size) {
            let (part, len) = (start.wrapping_add(begin * size), (count - begin).min(TEAM_SCRATCH / size));
            // SAFETY: within the buffer, and the team's scratch, whose last use was on this stream: a team
            // has one operation at a time.
            unsafe { copy(scratch as *mut u8, part, len * size, RawStream(raw(stream))) }?;
            // A peer may read this PE's scratch, and write to its buffer, as soon as it is there itself.
            self.sync_on_stream(stream)?;
            // SAFETY: as above; so many elements.
            let code =
                unsafe { reduce(self.handle, part.cast(), scratch as *const c_void, len, raw(stream)) };
            self.checked(REDUCE, code)?;
        }
        Ok(())
    }

    /// Combines `source` of all PEs; the team's PE n gets the n-th part into its `dest`.
    /// `nvshmemx_TYPE_OP_reducescatter_on_stream`
    ///
    /// # Errors
    /// [`UsageError::Length`] unless `source` is as long as all PEs' `dest`; [`Error::Unsupported`] as for
    /// [`reduce`](Team::reduce).
    pub fn reduce_scatter<D, S>(
        &self,
        dest: &mut D,
        source: &S,
        op: TeamReduction,
        stream: &Arc<CudaStream>,
    ) -> Result<()>
    where
        D: LocalMut + Shared<Elem = S::Elem> + ?Sized,
        S: Shared + ?Sized,
    {
        let reduce = self.reduction::<S::Elem>("reduce_scatter", op, |dtype, op| {
            self.context.library.reduce_scatter(dtype, op)
        })?;
        self.check_parts("reduce_scatter", "source", source.len(), dest.len())?;
        let (name, count) = ("nvshmemx_TYPE_OP_reducescatter_on_stream", dest.len());
        let (pes, size) = (self.n_pes(), size_of::<S::Elem>());
        // What fits into the scratch fits into the library's own.
        let (most, on) = ((TEAM_SCRATCH / pes / size).max(1), &**stream);
        self.enqueue(dest, source, stream, |to, from, stream| {
            match self.method_of::<S::Elem>(op, true) {
                ReductionMethod::InPieces if count > most => {}
                ReductionMethod::Unsupported => return Err(self.not_scattered::<S::Elem>(op)),
                _ => {
                    // SAFETY: as above; so many elements from every PE's part.
                    return self.checked(name, unsafe { reduce(self.handle, to, from, count, stream) });
                }
            }
            let scratch = self.context.limits.scratch(self.handle)?;
            for begin in (0..count).step_by(most) {
                let len = (count - begin).min(most);
                for pe in 0..pes {
                    let part = from.cast::<u8>().wrapping_add((pe * count + begin) * size);
                    // SAFETY: within the source, and the team's scratch, whose last use was on this stream.
                    unsafe {
                        copy(
                            (scratch as *mut u8).wrapping_add(pe * len * size),
                            part,
                            len * size,
                            RawStream(stream),
                        )
                    }?;
                }
                // As above.
                self.sync_on_stream(on)?;
                let to = to.wrapping_byte_add(begin * size);
                // SAFETY: as above; so many elements from every PE's part, of the destination's.
                let code = unsafe { reduce(self.handle, to, scratch as *const c_void, len, stream) };
                self.checked(name, code)?;
            }
            Ok(())
        })
    }

    /// The method for a reduction. See `limits.rs`.
    fn method_of<T: Element>(&self, op: TeamReduction, scatters: bool) -> ReductionMethod {
        let (team, pes, dtype) = (self.handle, self.n_pes(), T::DTYPE);
        self.context.limits.method(self.context.library, ReductionQuery { team, pes, dtype, op, scatters })
    }

    #[cold]
    fn not_scattered<T: Element>(&self, op: TeamReduction) -> Error {
        Error::from(UnsupportedError {
            what: format!("reduce_scatter of {} with {op}", T::DTYPE),
            why: "with NVLink multicast the library is right for sums of f32 only".into(),
            remedy: "use reduce and take this PE's part, or set NVSHMEM_DISABLE_NVLS=1".into(),
        })
    }

    fn checked(&self, name: &'static str, code: i32) -> Result<()> {
        self.context.library.check(name, code)
    }

    fn reduction<T: Element>(
        &self,
        operation: &'static str,
        op: TeamReduction,
        find: impl Fn(usize, usize) -> Option<Reduce>,
    ) -> Result<Reduce> {
        let unsupported = |why: String| {
            Error::from(UnsupportedError {
                what: format!("{operation} of {} with {op}", T::DTYPE),
                why,
                remedy: "use another type or reduction".into(),
            })
        };
        if !op.supports(T::DTYPE) {
            return Err(unsupported("NVSHMEM has no such reduction".into()));
        }
        let dtype = column(T::DTYPE).expect("supported");
        find(dtype, op as usize)
            .ok_or_else(|| unsupported(format!("NVSHMEM {} has no such function", self.context.version())))
    }

    fn check_parts(
        &self,
        operation: &'static str,
        buffer: &'static str,
        whole: usize,
        part: usize,
    ) -> Result<()> {
        match part.checked_mul(self.n_pes()) {
            Some(needed) if needed == whole => Ok(()),
            needed => {
                let rule = "the other buffer's length for each PE of the team";
                Err(too_short(operation, buffer, whole, needed.unwrap_or(usize::MAX), rule))
            }
        }
    }

    fn enqueue<D, S>(
        &self,
        dest: &mut D,
        source: &S,
        stream: &Arc<CudaStream>,
        call: impl FnOnce(*mut c_void, *const c_void, *mut c_void) -> Result<()>,
    ) -> Result<()>
    where
        D: LocalMut + ?Sized,
        S: Local + ?Sized,
    {
        self.context.enter()?;
        if source.is_empty() {
            return Ok(());
        }
        let on_stream = Stream::gpu(GpuStream::from(stream));
        let (from, to) = (source.lend(&on_stream)?, dest.lend_mut(&on_stream)?);
        call(to.span().start.cast(), from.span().start.cast_const().cast(), raw(stream))
    }
}

fn bytes_of<S: Shared + ?Sized>(buffer: &S) -> usize {
    buffer.len() * size_of::<S::Elem>()
}
