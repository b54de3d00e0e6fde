//! Memory of GPUs that other ranks access: [`GpuWindow`], and [`RemoteGpuWindow`](remote::RemoteGpuWindow) at the other end.

pub(crate) mod completion;
pub(crate) mod remote;

use super::comm::Comm;
use crate::buffer::Source;
use crate::buffer::cuda::gather_users;
use crate::buffer::stream::GpuStream;
use crate::contract::{self, GpuRegion, GpuWindowKey, GpuWindows};
use crate::types::dtype::{DType, Plain, unmarked};
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::watch::Recorder;
use crate::watch::deadline::Limited;
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::RangeBounds;
use std::sync::Arc;
use std::time::Duration;

/// How long dropping a window waits for ranks that have it open.
const ENDING: Duration = Duration::from_secs(10);

/// GPU memory of this rank that other ranks copy to and from, without this rank's doing. [`Comm::register_gpu`] makes it of a slice,
/// [`release`](Self::release) gives the slice back.
///
/// Another rank opens it by its [descriptor](Self::descriptor), which the program gives that rank as it likes: as an object
/// ([`Comm::send_object`]), in a file, over HTTP.
///
/// ```no_run
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::{GpuBlock, GpuDescriptor};
/// let comm = phalanx::init()?; // two ranks, with a GPU each
/// if comm.rank() == 0 {
///     let cache = comm.alloc_gpu::<f32>(1 << 20)?; // and what fills it
///     let window = comm.register_gpu(cache)?;
///     comm.send_object(window.descriptor(), 1)?;
///     window.wait_signals(1, 1)?; // rank 1 has read it
///     let cache = window.release()?;
///     # drop(cache);
/// } else {
///     let descriptor: GpuDescriptor = comm.recv_object(0)?;
///     let remote = comm.open_gpu::<f32>(&descriptor)?;
///     let mut own = comm.alloc_gpu::<f32>(2048)?;
///     let first = GpuBlock { local: 0, remote: 4096, len: 1024 };
///     remote.get_list(&mut own, &[first, GpuBlock { local: 1024, remote: 0, len: 1024 }])?;
///     remote.signal()?; // behind the copies, on the same stream
///     remote.sync()?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # What is in order
/// What other ranks put is there after [`wait_signals`](Self::wait_signals) for a signal that they gave afterwards. When
/// the memory may be read or written is between the ranks; a copy that meets another one, or a kernel of this rank, finds or leaves any
/// mixture of the values.
///
/// # How it ends
/// Nobody may copy to memory that is freed. So [`release`](Self::release), and dropping the window, wait until no rank has it open; the others
/// get an error from their next copy, and drop their end. Two ranks that have each other's windows open drop those before their own.
pub struct GpuWindow<T: Plain> {
    slice: ManuallyDrop<CudaSlice<T>>,
    window: Box<dyn contract::GpuWindow>,
    descriptor: GpuDescriptor,
    /// Number of ranks.
    ranks: usize,
    deadline: Option<Duration>,
    recorder: Arc<Recorder>,
}

/// How another rank of the communicator opens a [`GpuWindow`]: a small value that serde knows.
///
/// It holds no address, and gives nobody access who is not a rank of that communicator, on whichever host. It ends with the window.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDescriptor {
    rank: usize,
    key: GpuWindowKey,
    /// The code of the type, and the length with the type's mark.
    dtype: u8,
    len: u64,
}

impl GpuDescriptor {
    /// The rank that has the memory.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Its number of elements.
    pub fn len(&self) -> usize {
        unmarked(self.dtype, self.len) as usize
    }

    /// Whether it has none. A window has some.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The type of its elements; `None` if the descriptor was changed on the way.
    pub fn dtype(&self) -> Option<DType> {
        DType::decode(self.dtype, self.len).map(|(dtype, _)| dtype)
    }
}

impl Comm {
    /// Allocates `len` zeros on this rank's GPU that other processes can open: memory of `cuMemAlloc`, for
    /// [`register_gpu`](Self::register_gpu). Not collective. It takes whole blocks of 2 MiB, in which the driver hands memory to other processes.
    ///
    /// # Errors
    /// Those of [`register_gpu`](Self::register_gpu), and CUDA's.
    pub fn alloc_gpu<T: Plain>(&self, len: usize) -> Result<CudaSlice<T>> {
        let (windows, stream) = self.gpu_windows()?;
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| UsageError::Overflow {
            operation: "alloc_gpu",
            what: "the length in bytes",
            value: format!("{len} × {}", size_of::<T>()),
            limit: isize::MAX.to_string(),
        })?;
        let address = windows.allocate(bytes)?;
        let stream = stream.cuda().expect("windows are CUDA's memory");
        // SAFETY: so many elements were just allocated on the stream's GPU, zeroes, for whoever owns the address.
        Ok(unsafe { stream.upgrade_device_ptr(address, len) })
    }

    /// Opens a slice to the other ranks: to copy from and to it without this rank's doing. Not collective.
    ///
    /// The slice is memory of [`alloc_gpu`](Self::alloc_gpu), or other memory of `cuMemAlloc`; of that, what lies in the same 2 MiB is open to the
    /// other processes, too. cudarc's own slices cannot be opened by other
    /// processes, since they are of CUDA's pools. The call waits for the work on the slice, so the others find what it holds then.
    /// `cuIpcGetMemHandle`.
    ///
    /// Copies between hosts go through host memory and UCX, which is found at run time: in a job on several hosts the first call starts
    /// a thread that serves them, with 4 MiB of page-locked memory.
    ///
    /// # Errors
    /// The slice is dropped then. [`Error::Unsupported`] for memory of a pool; on backends other than NCCL; on several hosts without UCX, with
    /// how to get it. [`UsageError::Memory`] for a slice of another GPU, [`UsageError::Length`] for an empty one.
    pub fn register_gpu<T: Plain>(&self, mut slice: CudaSlice<T>) -> Result<GpuWindow<T>> {
        let (windows, _) = self.gpu_windows()?;
        let len = Source::len(&slice);
        if len * size_of::<T>() == 0 {
            let rule = "a window has memory";
            return Err(UsageError::Length {
                operation: "register_gpu",
                buffer: "slice",
                actual: len,
                expected: 1,
                rule,
            }
            .into());
        }
        let address = slice.lend(&self.stream)?.span().start as u64;
        gather_users(&mut slice, [])?;
        let (region, own) =
            (GpuRegion { address, dtype: T::dtype(), len }, GpuStream::Cuda(slice.stream().clone()));
        let _limited = self.limited();
        // SAFETY: the window keeps the slice until no rank has it open.
        let window = self.recorder.noted(unsafe { windows.register(region, &own) })?;
        let dtype = T::dtype();
        let descriptor = GpuDescriptor {
            rank: self.rank(),
            key: window.key(),
            dtype: dtype.code(),
            len: dtype.mark(len as u64),
        };
        let slice = ManuallyDrop::new(slice);
        Ok(GpuWindow {
            slice,
            window,
            descriptor,
            ranks: self.world_size(),
            deadline: self.deadline,
            recorder: self.recorder.clone(),
        })
    }

    /// The backend's windows, and the stream of this communicator or view.
    fn gpu_windows(&self) -> Result<(&dyn GpuWindows, &GpuStream)> {
        let windows = self.backend.gpu_windows().zip(self.stream.gpu_stream());
        windows.ok_or_else(|| {
            Error::from(UnsupportedError {
                what: "GPU memory that other ranks access".into(),
                why: format!("the backend {} has none", self.backend()),
                remedy: "use a communicator on the backend nccl; host memory is Comm::symmetric".into(),
            })
        })
    }
}

impl<T: Plain> GpuWindow<T> {
    /// What another rank opens it by, with [`Comm::open_gpu`].
    pub fn descriptor(&self) -> &GpuDescriptor {
        &self.descriptor
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        Source::len(&*self.slice)
    }

    /// Whether there are none, which is not so.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements, for operations and kernels of this rank that read.
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }

    /// The elements, for operations and kernels of this rank.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.as_view_mut()
    }

    /// Some of the elements, reading.
    ///
    /// # Panics
    /// If the range ends behind the window.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> CudaView<'_, T> {
        self.slice.slice(range)
    }

    /// Some of the elements.
    ///
    /// # Panics
    /// If the range ends behind the window.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> CudaViewMut<'_, T> {
        self.slice.slice_mut(range)
    }

    /// Waits on the host until a rank has [signalled](remote::RemoteGpuWindow::signal) this window `count` times, beyond the signals that
    /// were waited for before. What that rank put before is in the memory then, for all work that is enqueued from now on.
    ///
    /// The deadline is that of the communicator, or of the view that registered the window.
    ///
    /// # Errors
    /// [`TimeoutError`](crate::TimeoutError) and [`PeerError`](crate::PeerError), as in a collective, with that rank's number: also if it has
    /// left, or is stopped. [`UsageError::Rank`] for a rank that is not there.
    pub fn wait_signals(&self, rank: usize, count: u64) -> Result<()> {
        if rank >= self.ranks {
            return Err(UsageError::Rank {
                operation: "wait_signals",
                role: "rank",
                rank,
                world_size: self.ranks,
            }
            .into());
        }
        let _limited = Limited::to(self.deadline);
        self.recorder.noted(self.window.wait_signals(rank, count))
    }

    /// The slice, as this rank's alone again. Waits until no rank has the window open: from the first moment on, opening it and new copies are
    /// errors there. A rank whose process has ended does not count.
    ///
    /// # Errors
    /// Those of [`wait_signals`](Self::wait_signals), with the rank that still has it open. The memory is leaked then, with a line in
    /// the log, since that rank may write to it. On a communicator that has failed it waits for the others, too, up to ten seconds, and gives the
    /// slice back if they have closed the window. (Between hosts it waits for the copies alone then.) [`UsageError::Setting`] if this rank has it open itself; the memory is leaked, too.
    pub fn release(self) -> Result<CudaSlice<T>> {
        let mut this = ManuallyDrop::new(self);
        let closed = {
            let _limited = Limited::to(this.deadline);
            this.recorder.noted(this.window.close())
        };
        if closed.is_err() {
            this.log_leak();
        }
        // SAFETY: each is taken once, and `this` is not dropped.
        let (slice, window, recorder) = unsafe {
            let (window, recorder) =
                (std::ptr::read(&raw const this.window), std::ptr::read(&raw const this.recorder));
            (ManuallyDrop::take(&mut this.slice), window, recorder)
        };
        drop((window, recorder));
        match closed {
            Ok(()) => Ok(slice),
            Err(error) => {
                std::mem::forget(slice);
                Err(error)
            }
        }
    }

    fn log_leak(&self) {
        crate::os::log::error!(
            rank = self.descriptor.rank,
            "GPU memory is leaked: another rank may have it open ({} elements of {})",
            self.len(),
            T::dtype()
        );
    }
}

impl<T: Plain> Drop for GpuWindow<T> {
    fn drop(&mut self) {
        let limit = if std::thread::panicking() { Duration::ZERO } else { ENDING };
        if self.window.close_within(limit) {
            // SAFETY: taken once; no rank has it open any more.
            drop(unsafe { ManuallyDrop::take(&mut self.slice) });
        } else {
            self.log_leak();
        }
    }
}

impl<T: Plain> fmt::Debug for GpuWindow<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuWindow").field("dtype", &T::dtype()).field("len", &self.len()).finish()
    }
}
