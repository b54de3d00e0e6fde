//! [`RemoteGpuWindow`]: a window of another rank's GPU, open for copies.

use super::GpuDescriptor;
use super::completion::GpuCompletion;
use crate::api::comm::Comm;
use crate::buffer::loan::Loan;
use crate::buffer::stream::Stream;
use crate::buffer::{Source, Target};
use crate::contract::{self, CopyDirection, GpuBlock};
use crate::types::dtype::{DType, Plain};
use crate::types::error::{Result, UsageError};
use crate::types::memory::Space;
use crate::watch::Recorder;
use crate::watch::deadline::Limited;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

/// A [`GpuWindow`](super::GpuWindow) of another rank, open for copies. [`Comm::open_gpu`] opens it.
///
/// Copies are enqueued on the stream of the communicator that opened it, or of the view ([`Comm::on`]), in the order of the calls. The local
/// buffer is GPU memory; it is in order with its other users, as in every operation. The copies are complete after [`sync`](Self::sync) or
/// [`Comm::sync`], when [`completion`](Self::completion) answers, or when an event behind them on that
/// stream is.
///
/// All errors of arguments come before anything is enqueued, of a list too. On NVIDIA's GPUs a copy is `cuMemcpyAsync`.
///
/// # Between hosts
/// A thread makes the copies, for which the stream waits. If the window's rank is lost or does not answer by the
/// communicator's deadline, the stream goes on, and the next call on this window or `sync` has the error: what the copies should
/// have written must not be used before one of them has answered well.
///
/// The driver takes about 1,000 pieces of work for a stream. Whoever enqueues more waits, and if that is CUDA's default stream, no other stream of
/// its context takes work meanwhile, so this rank copies nothing for others. Do not enqueue that much behind a copy that waits for
/// another rank, or give the communicator a stream of its own ([`Comm::on`]).
///
/// # How it ends
/// Dropping it waits for its copies, up to ten seconds, and closes the memory; the window's rank waits for that.
pub struct RemoteGpuWindow<T: Plain> {
    window: Arc<dyn contract::RemoteGpuWindow>,
    rank: usize,
    len: usize,
    stream: Stream,
    deadline: Option<Duration>,
    recorder: Arc<Recorder>,
    elements: PhantomData<fn() -> T>,
}

impl Comm {
    /// Opens another rank's GPU memory by its descriptor. Not collective; the other rank does nothing.
    ///
    /// On one host the GPU reaches that memory itself: `cuIpcOpenMemHandle`; among threads `cuCtxEnablePeerAccess`. Copies between hosts go
    /// through host memory and UCX, in pieces of 1 MiB of which two are under way. If the communicator's ranks are on several hosts, each open
    /// window takes 2 MiB of page-locked memory for them and a stream.
    ///
    /// # Errors
    /// [`UsageError::Setting`] for a descriptor by which there is nothing to open: its window was released, is of another communicator or job, or
    /// the descriptor was changed. It may come from anybody: it is compared with what its rank has registered before anything is opened.
    /// As well for another element type. [`UsageError::Rank`] for a rank that is not there;
    /// [`Error::Unsupported`](crate::Error::Unsupported) if this GPU of the same host does not reach that one, or as for [`register_gpu`](Self::register_gpu).
    pub fn open_gpu<T: Plain>(&self, descriptor: &GpuDescriptor) -> Result<RemoteGpuWindow<T>> {
        let (windows, stream) = self.gpu_windows()?;
        self.shape().check_rank("open_gpu", "the descriptor's rank", descriptor.rank)?;
        let (dtype, len) = match DType::decode(descriptor.dtype, descriptor.len) {
            Some((dtype, len)) if dtype == T::dtype() => (dtype, len as usize),
            other => {
                return Err(UsageError::Setting {
                    name: "GpuDescriptor".into(),
                    value: other
                        .map_or("of an unknown type".into(), |(dtype, _)| format!("of elements of {dtype}")),
                    expected: format!("one of elements of {}, as this call has them", T::dtype()),
                }
                .into());
            }
        };
        let opened = windows.open(descriptor.key, descriptor.rank, (dtype, len), stream);
        let window = self.recorder.noted(opened)?;
        Ok(RemoteGpuWindow {
            window: window.into(),
            rank: descriptor.rank,
            len,
            stream: self.stream.clone(),
            deadline: self.deadline,
            recorder: self.recorder.clone(),
            elements: PhantomData,
        })
    }
}

impl<T: Plain> RemoteGpuWindow<T> {
    /// The rank that has the memory.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none, which is not so.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `source` to the window, from index `at` on.
    ///
    /// # Errors
    /// [`UsageError::Range`] if it does not fit, [`UsageError::Memory`] for host memory, [`UsageError::Setting`] if its rank has released the
    /// window, [`UsageError::Captured`] on a stream that is captured; the communicator's failure.
    pub fn put<S: Source<Elem = T> + ?Sized>(&self, source: &S, at: usize) -> Result<()> {
        self.put_list(source, &[GpuBlock { local: 0, remote: at, len: source.len() }])
    }

    /// Copies the window's elements from index `at` on to `target`, as many as that has. Errors are those of [`put`](Self::put).
    pub fn get<D: Target<Elem = T> + ?Sized>(&self, target: &mut D, at: usize) -> Result<()> {
        let len = target.len();
        self.get_list(target, &[GpuBlock { local: 0, remote: at, len }])
    }

    /// Copies blocks of `source` to the window. Of blocks that overlap there, any may be the last.
    ///
    /// # Errors
    /// Those of [`put`](Self::put), and [`UsageError::Length`] for a block that `source` does not have.
    pub fn put_list<S: Source<Elem = T> + ?Sized>(&self, source: &S, blocks: &[GpuBlock]) -> Result<()> {
        self.check("put", "source", source.len(), blocks)?;
        self.copy(CopyDirection::Put, source.lend(&self.stream)?, blocks)
    }

    /// Copies blocks of the window to `target`. Errors are those of [`put_list`](Self::put_list).
    pub fn get_list<D: Target<Elem = T> + ?Sized>(&self, target: &mut D, blocks: &[GpuBlock]) -> Result<()> {
        self.check("get", "target", target.len(), blocks)?;
        self.copy(CopyDirection::Get, target.lend_mut(&self.stream)?, blocks)
    }

    /// Tells the window's rank when all work on this stream so far is complete, such as the copies: its
    /// [`wait_signals`](super::GpuWindow::wait_signals) returns then. A function of the host does it (`cuLaunchHostFunc`), which
    /// takes some microseconds.
    ///
    /// # Errors
    /// As of [`put`](Self::put), but for arguments.
    pub fn signal(&self) -> Result<()> {
        self.recorder.noted(self.window.signal())
    }

    /// Whether the copies so far are complete. Does not wait.
    pub fn is_complete(&self) -> Result<bool> {
        self.recorder.noted(self.window.is_complete())
    }

    /// Waits until the copies and signals so far are complete.
    ///
    /// The deadline is that of the communicator, or of the view that opened the window.
    ///
    /// # Errors
    /// Those of [`Comm::sync`].
    pub fn sync(&self) -> Result<()> {
        let _limited = Limited::to(self.deadline);
        self.recorder.noted(self.window.sync())
    }

    /// [`sync`](Self::sync) as a future, for the copies and signals so far.
    ///
    /// ```no_run
    /// # async fn fetch(comm: phalanx::Comm, cache: phalanx::GpuDescriptor) -> phalanx::Result<()> {
    /// let remote = comm.open_gpu::<f32>(&cache)?;
    /// let mut own = comm.alloc_gpu::<f32>(remote.len())?;
    /// remote.get(&mut own, 0)?;
    /// remote.completion().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn completion(&self) -> GpuCompletion {
        GpuCompletion::new(self.window.clone(), self.recorder.clone(), self.deadline)
    }

    /// An error unless all blocks are in a buffer of so many elements, and in the window.
    fn check(
        &self,
        operation: &'static str,
        buffer: &'static str,
        local_len: usize,
        blocks: &[GpuBlock],
    ) -> Result<()> {
        let fits =
            |start: usize, len: usize, end: usize| start.checked_add(len).is_some_and(|last| last <= end);
        for &GpuBlock { local, remote, len } in blocks {
            if !fits(remote, len, self.len) {
                return Err(UsageError::Range { operation, at: remote, count: len, len: self.len }.into());
            }
            if !fits(local, len, local_len) {
                let (actual, expected) = (local_len, local.saturating_add(len));
                let rule = "the end of a block";
                return Err(UsageError::Length { operation, buffer, actual, expected, rule }.into());
            }
        }
        Ok(())
    }

    fn copy(&self, direction: CopyDirection, local: Loan<'_>, blocks: &[GpuBlock]) -> Result<()> {
        if local.span().space != Space::Device {
            return Err(UsageError::Memory {
                memory: "host memory".into(),
                wanted: "memory of its GPU".into(),
                remedy: "copy it to a CudaSlice first",
            }
            .into());
        }
        // SAFETY: the blocks are in the window and in the buffer, just checked; the buffer is lent to the stream.
        let copied = unsafe { self.window.copy(direction, local.span().start, size_of::<T>(), blocks) };
        self.recorder.noted(copied)
    }
}

impl<T: Plain> fmt::Debug for RemoteGpuWindow<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteGpuWindow")
            .field("rank", &self.rank)
            .field("dtype", &T::dtype())
            .field("len", &self.len)
            .finish()
    }
}
