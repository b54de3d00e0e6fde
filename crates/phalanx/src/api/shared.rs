//! [`SharedComm`]: a communicator for several threads, as frameworks need it.

use super::collectives::collectives;
use super::comm::Comm;
use crate::buffer::stream::Stream;
use crate::buffer::{Output, Source, Target};
use crate::contract::{BackendKind, Shape};
use crate::types::error::{Result, UsageError};
use crate::types::op::Reduction;
use parking_lot::ReentrantMutex;
use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A communicator that several threads use: cloneable, `Send` and `Sync`. [`Comm::share`] makes it.
///
/// It is what a layer, a module or an optimiser keeps. One thread at a time is inside an operation; the others wait for it, no longer than
/// its deadline. The ranks' operations must still come in the same order, so threads that use one communicator agree on their order;
/// two threads with operations of their own need two communicators ([`Comm::split`]).
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::{Comm, ReduceOp, SharedComm};
///
/// struct Layer {
///     weights: Vec<f32>,
///     ranks: SharedComm,
/// }
///
/// phalanx::try_run(2, |comm: Comm| -> phalanx::Result<()> {
///     let ranks = comm.share();
///     let mut layers: Vec<_> = (0..3).map(|_| Layer { weights: vec![1.0; 4], ranks: ranks.clone() }).collect();
///     for layer in &mut layers {
///         layer.ranks.all_reduce_in_place(&mut layer.weights, ReduceOp::Sum)?;
///         assert_eq!(layer.weights, [2.0; 4]);
///     }
///     ranks.finalize()?;
///     // The layers' handles answer an error from now on.
///     assert!(layers[0].ranks.barrier().is_err());
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// # How it ends
/// [`finalize`](SharedComm::finalize) through any handle waits for all ranks. Every later call, through any handle, answers
/// [`UsageError::Ended`]. When the last handle is dropped, the rank leaves, as by dropping its [`Comm`].
#[derive(Clone)]
pub struct SharedComm {
    shared: Arc<Shared>,
    view: Option<KeptView>,
}

/// What differs from the communicator in a handle that [`SharedComm::within`] or `SharedComm::on` made.
#[derive(Clone)]
struct KeptView {
    stream: Stream,
    deadline: Option<Duration>,
}

struct Shared {
    /// `None` when it has ended. A thread that is inside may come in again, through another handle.
    comm: ReentrantMutex<RefCell<Option<Comm>>>,
    shape: Shape,
    kind: BackendKind,
}

impl Comm {
    /// This communicator, for several threads and owners.
    pub fn share(self) -> SharedComm {
        let (shape, kind) = (self.shape(), self.backend());
        let comm = ReentrantMutex::new(RefCell::new(Some(self)));
        SharedComm { shared: Arc::new(Shared { comm, shape, kind }), view: None }
    }
}

impl SharedComm {
    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.shared.shape.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.shared.shape.world_size
    }

    /// Which backend carries the data.
    pub fn backend(&self) -> BackendKind {
        self.shared.kind
    }

    /// Calls `f` with the communicator: for whatever has no method here, and for several operations that no other thread comes between.
    ///
    /// # Errors
    /// Those of `f`; [`UsageError::Ended`] after [`finalize`](SharedComm::finalize) or [`abort`](SharedComm::abort).
    pub fn with<R>(&self, f: impl FnOnce(&Comm) -> Result<R>) -> Result<R> {
        let locked = self.shared.comm.lock();
        let comm = locked.borrow();
        let comm = comm.as_ref().ok_or(UsageError::Ended)?;
        match &self.view {
            None => f(comm),
            Some(view) => f(&comm.view(view.stream.clone(), view.deadline)),
        }
    }

    /// A handle whose operations have another deadline: [`Comm::within`], to keep.
    pub fn within(&self, timeout: Duration) -> Result<SharedComm> {
        let stream = self.with(|comm| Ok(comm.stream.clone()))?;
        Ok(self.viewing(stream, Some(timeout)))
    }

    /// A handle whose operations on GPU memory are enqueued on another stream: [`Comm::on`], to keep.
    ///
    /// # Errors
    /// As for [`Comm::on`].
    #[cfg(feature = "_gpu")]
    pub fn on<'s, S: 's>(&self, stream: &'s S) -> Result<SharedComm>
    where
        crate::buffer::stream::GpuStream: From<&'s S>,
    {
        let (stream, deadline) = self.with(|comm| {
            let view = comm.on(stream)?;
            Ok((view.stream.clone(), view.deadline))
        })?;
        Ok(self.viewing(stream, deadline))
    }

    fn viewing(&self, stream: Stream, deadline: Option<Duration>) -> SharedComm {
        SharedComm { shared: self.shared.clone(), view: Some(KeptView { stream, deadline }) }
    }

    /// Waits until every rank has called it: [`Comm::barrier`].
    pub fn barrier(&self) -> Result<()> {
        self.with(Comm::barrier)
    }

    /// Waits until this rank's operations are complete: [`Comm::sync`].
    pub fn sync(&self) -> Result<()> {
        self.with(Comm::sync)
    }

    /// Sends a buffer to a peer: [`Comm::send`].
    pub fn send<S: Source + ?Sized>(&self, buf: &S, peer: usize) -> Result<()> {
        self.with(|comm| comm.send(buf, peer))
    }

    /// Receives a buffer from a peer: [`Comm::recv`].
    pub fn recv<R: Output + ?Sized>(&self, buf: &mut R, peer: usize) -> Result<()> {
        self.with(|comm| comm.recv(buf, peer))
    }

    /// Sends one buffer and receives another at the same time: [`Comm::send_recv`].
    pub fn send_recv<S, R>(&self, send: &S, dest: usize, recv: &mut R, source: usize) -> Result<()>
    where
        S: Source + ?Sized,
        R: Output<Elem = S::Elem> + ?Sized,
    {
        self.with(|comm| comm.send_recv(send, dest, recv, source))
    }

    /// The communicator of the ranks with the same colour: [`Comm::split`].
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<SharedComm>> {
        Ok(self.with(|comm| comm.split(color, key))?.map(Comm::share))
    }

    /// Ends the communicator on all ranks together: [`Comm::finalize`].
    ///
    /// # Errors
    /// As there; [`UsageError::Ended`] the second time, and inside [`with`](SharedComm::with).
    pub fn finalize(&self) -> Result<()> {
        self.take()?.finalize()
    }

    /// Fails the communicator for every rank, after the operation that another thread is in: [`Comm::abort`].
    ///
    /// # Errors
    /// [`UsageError::Ended`] the second time, and inside [`with`](SharedComm::with).
    pub fn abort(&self) -> Result<()> {
        self.take()?.abort();
        Ok(())
    }

    fn take(&self) -> Result<Comm> {
        let locked = self.shared.comm.lock();
        let taken = locked.try_borrow_mut().ok().and_then(|mut comm| comm.take());
        taken.ok_or_else(|| UsageError::Ended.into())
    }
}

macro_rules! methods_of_shared {
    ($($(#[$doc:meta])* $name:ident<$($generic:ident),+>($($arg:ident),+) |$comm:ident| $run:expr;)+) => {
        /// # Collectives
        ///
        /// Those of [`Comm`].
        impl SharedComm {
            $(methods_of_shared! { @$($generic)+; $name($($arg),+) })+
        }
    };
    (@S R; $name:ident($($arg:ident),+)) => {
        #[doc = concat!("See [`Comm::", stringify!($name), "`].")]
        pub fn $name<S, R>(&self, $($arg: methods_of_shared!(@type $arg)),+) -> Result<()>
        where
            S: Source + ?Sized,
            R: Output<Elem = S::Elem> + ?Sized,
        {
            self.with(|comm| comm.$name($($arg),+))
        }
    };
    (@R; $name:ident($($arg:ident),+)) => {
        #[doc = concat!("See [`Comm::", stringify!($name), "`].")]
        pub fn $name<R>(&self, $($arg: methods_of_shared!(@type $arg)),+) -> Result<()>
        where
            R: Target + ?Sized,
        {
            self.with(|comm| comm.$name($($arg),+))
        }
    };
    (@type send) => { &S };
    (@type recv) => { &mut R };
    (@type buf) => { &mut R };
    (@type op) => { impl Into<Reduction<R::Elem>> };
    (@type root) => { usize };
    (@type $counts:ident) => { &[usize] };
}

collectives! { methods_of_shared }

impl fmt::Debug for SharedComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedComm")
            .field("backend", &self.backend())
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .finish()
    }
}

#[cfg(test)]
#[path = "shared_tests.rs"]
mod tests;
