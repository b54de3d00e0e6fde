//! [`Nccl`]: NCCL's own features, for one communicator.

use super::surface::Surface;
use crate::api::comm::{Comm, View};
use crate::backend::nccl::collective_config::CollectiveConfig;
use crate::backend::nccl::init::before_the_first;
use crate::backend::nccl::memory::{Buffer, Registration};
use crate::start;
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UnsupportedError};
use cudarc::driver::{CudaContext, CudaSlice};
use phalanx_sys::nccl::{
    Flavour, NCCL_ENCRYPTION_MODE_PSK, ncclEncryptionConfig_t, ncclResult_t, version_text,
};
use std::sync::Arc;

/// NCCL's own features, for one communicator: those of [`Surface`], and cudarc's side of them.
#[derive(Debug, Clone, Copy)]
pub struct Nccl<'a>(Surface<'a>);

impl<'a> std::ops::Deref for Nccl<'a> {
    type Target = Surface<'a>;

    fn deref(&self) -> &Surface<'a> {
        &self.0
    }
}

impl<'a> Nccl<'a> {
    pub(crate) fn new(surface: Surface<'a>) -> Nccl<'a> {
        Nccl(surface)
    }

    /// This communicator with settings for its collectives (`ncclAllReduceConfig` and its like, NCCL 2.31): how many thread blocks,
    /// which algorithms. All ranks give an operation the same settings; [checked](crate::Builder::check), a difference is an error.
    ///
    /// Messages, and what is made of messages (`all_gather_v`, `gather_v`, `scatter_v`, `all_to_all_v`), have none.
    ///
    /// ```no_run
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx::{ReduceOp, nccl::CollectiveConfig};
    /// # let comm = phalanx::init()?;
    /// let mut few = CollectiveConfig::default();
    /// few.max_ctas = Some(4); // leaves the GPU to what it computes meanwhile
    /// let nccl = comm.nccl().expect("NCCL");
    /// let mut gradients = nccl.alloc::<f32>(1 << 20)?;
    /// nccl.configured(&few)?.all_reduce_in_place(&mut gradients, ReduceOp::Sum)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error) if the library is too old for it. What is wrong with a setting the library says when
    /// an operation is called.
    pub fn configured(&self, config: &CollectiveConfig) -> Result<View<'a>> {
        let config = config.raw(self.comm.communicator.library)?;
        Ok(self.front.with_lane(self.stream.clone().configured(config)))
    }

    /// The GPU's context.
    pub fn context(&self) -> &'a Arc<CudaContext> {
        self.comm.communicator.device.cuda().expect("NCCL's GPUs are CUDA's")
    }

    /// Memory that operations of this communicator are fastest on: a symmetric window if the library has them (not on a thread that
    /// drives [all ranks](init_all)), else registered. `len` elements, zero. Collective: every rank allocates as many bytes.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        self.best_buffer(len)
    }

    /// [`alloc`](Nccl::alloc) with a choice. `ncclMemAlloc`, `ncclCommRegister`, `ncclCommWindowRegister`.
    ///
    /// # Errors
    /// [`Error::MissingFunction`](crate::Error) if the library is too old for it.
    pub fn alloc_as<T: Element>(&self, len: usize, registration: Registration) -> Result<Buffer<T>> {
        self.buffer(len, registration)
    }

    /// Registers memory that the program has with the communicator (`ncclCommRegister`, 2.19), so that operations need not copy
    /// through the library's own: all ranks register what they use in an operation, or none. The buffer owns the slice, so that the memory
    /// is not freed while it is registered; [`Buffer::into_slice`] gives it back. Not collective.
    ///
    /// Memory of CUDA's pools (`cuMemAllocAsync`, which is what cudarc's own slices have) cannot be registered from NCCL 2.30 on, and stays
    /// [`Plain`](Registration::Plain) with every release, as [`Buffer::registration`] says. What can be is memory of `cuMemAlloc`, such as that of
    /// another library, as a slice of `CudaStream::upgrade_device_ptr`.
    ///
    /// Windows are made of the library's own memory: [`alloc`](Nccl::alloc).
    ///
    /// # Errors
    /// [`UsageError::Memory`](crate::UsageError) for memory of another GPU; [`Error::MissingFunction`](crate::Error) if the library is too old for it. The
    /// slice is dropped then.
    pub fn register<T: Element>(&self, slice: CudaSlice<T>) -> Result<Buffer<T>> {
        self.registered(slice)
    }
}

/// The version of the NCCL that is (or would be) loaded, as `major.minor.patch`.
///
/// # Errors
/// [`Error::LibraryNotFound`](crate::Error) with every place that was tried: a program can go on with one device.
pub fn version() -> Result<String> {
    Ok(version_text(crate::backend::nccl::library::load(Flavour::Nccl)?.version()))
}

/// Encrypts what NCCL sends over TCP sockets in this process, with a key of at least 32 bytes that all ranks have (TLS with a
/// pre-shared key; `ncclSetEncryption`, 2.32). Called before the process's first communicator is made.
///
/// NCCL has to be built with TLS, which the wheels of 2.32.3 are not: ranks over sockets then fail when they are connected.
/// What goes over NVLink, InfiniBand, or phalanx's own store is not encrypted by it.
///
/// # Errors
/// [`Error::MissingFunction`](crate::Error) if the library is too old; [`Error::Unsupported`](crate::Error) behind the first
/// communicator; NCCL's own for a short key.
pub fn encrypt_sockets(key: &str) -> Result<()> {
    let library = crate::backend::nccl::library::load(Flavour::Nccl)?;
    let name = "ncclSetEncryption";
    let set = library.need(library.ncclSetEncryption, name)?;
    let key = crate::backend::nccl::config::text("key", key)?;
    let config = ncclEncryptionConfig_t::new(NCCL_ENCRYPTION_MODE_PSK, key.as_ptr());
    // SAFETY: no thread is inside the library with a communicator, since there is none; the key is copied during the call.
    let result = before_the_first(|| unsafe { set(&raw const config) });
    match result {
        Some(ncclResult_t::Success) => Ok(()),
        Some(error) => Err(library.error(error, name).into()),
        None => Err(Error::from(UnsupportedError {
            what: "a key for NCCL's sockets".into(),
            why: "a communicator was made in this process before".into(),
            remedy: "call nccl::encrypt_sockets before phalanx::init".into(),
        })),
    }
}

/// A communicator for each of these GPUs, for one thread that drives them all (`ncclCommInitAll`), or for a thread each.
///
/// **On the thread that called this**, a rank that waits for another waits for itself. So what waits is refused there, at once, with
/// [`Error::Unsupported`](crate::Error): operations outside of a [`group`](crate::group) (those of all ranks go into one), and
/// `barrier`, `finalize` (drop the communicators), `split`, `shrink`, symmetric memory ([`Nccl::alloc`] gives registered memory instead),
/// `suspend` and `resume`, signals, and capturing a [`Graph`](super::Graph). A group that leaves a rank out, or started operations that
/// are waited for before all ranks have started theirs, end at the deadline.
///
/// **Moved to another thread** a communicator does all of this. Then all of them are to be moved, one to a thread:
/// several on one thread wait for each other there until the deadline, and one that stays behind is refused what the others wait for.
/// [`phalanx::run`](crate::run) makes ranks that have a thread each from the start.
///
/// `PHALANX_TIMEOUT` and `PHALANX_CHECK` hold as for [`init`](crate::init); but collectives are compared where each communicator has a thread of
/// its own, since that waits for the other ranks.
pub fn init_all(gpus: &[usize]) -> Result<Vec<Comm>> {
    Ok(start::gpu_ranks(gpus, Flavour::Nccl)?.into_iter().map(Comm::from).collect())
}
