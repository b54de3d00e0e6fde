//! [`Nccl`]: NCCL's own features, for one communicator.

use super::surface::Surface;
use crate::api::comm::{Comm, View};
use crate::backend::nccl::collective_config::CollectiveConfig;
use crate::backend::nccl::device;
use crate::backend::nccl::init::before_the_first;
use crate::backend::nccl::memory::{Buffer, Registration};
use crate::start;
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UnsupportedError};
use cudarc::driver::{CudaContext, CudaSlice};
use phalanx_sys::nccl::{
    Flavour, NCCL_ENCRYPTION_MODE_PSK, ncclEncryptionConfig_t, ncclResult_t, version_text,
};
use std::ops::Range;
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

    /// This communicator with settings for its collectives (`ncclAllReduceConfig` and its like, NCCL 2.31):
    /// how many thread blocks, which algorithms. All ranks give an operation the same settings;
    /// [checked](crate::Builder::check), a difference is an error.
    ///
    /// The settings do not apply to messages, nor to collectives that consist of messages: `all_gather_v`,
    /// `gather_v`, `scatter_v`, `all_to_all_v`.
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
    /// [`Error::Unsupported`](crate::Error) if the library is too old. An invalid setting is the library's
    /// error in the next operation.
    pub fn configured(&self, config: &CollectiveConfig) -> Result<View<'a>> {
        let config = config.raw(self.comm.communicator.library)?;
        Ok(self.front.with_stream(self.stream.clone().configured(config)))
    }

    /// Returns cudarc's context of the GPU.
    pub fn context(&self) -> &'a Arc<CudaContext> {
        self.comm.communicator.device.cuda().expect("NCCL's GPUs are CUDA's")
    }

    /// Allocates `len` zeroed elements of the memory on which operations are fastest: a symmetric window if
    /// the library has them (not on a thread that drives [all ranks](init_all)), else registered memory.
    /// Collective: all ranks allocate the same number of bytes.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        self.best_buffer(len)
    }

    /// Allocates as [`alloc`](Nccl::alloc), with the given kind of registration. `ncclMemAlloc`,
    /// `ncclCommRegister`, `ncclCommWindowRegister`.
    ///
    /// # Errors
    /// [`Error::MissingFunction`](crate::Error) if the library is too old for it.
    #[doc(alias("ncclMemAlloc", "ncclCommWindowRegister"))]
    pub fn alloc_as<T: Element>(&self, len: usize, registration: Registration) -> Result<Buffer<T>> {
        self.buffer(len, registration)
    }

    /// Registers the program's own memory with the communicator (`ncclCommRegister`, 2.19), so that
    /// operations do not copy it through the library's memory. For one operation, all ranks register their
    /// buffers or none does. The returned buffer owns the slice; [`Buffer::into_slice`] gives it back. Not
    /// collective.
    ///
    /// Memory of `cuMemAlloc` can be registered: another library's, for example, as a slice of
    /// `CudaStream::upgrade_device_ptr`. Memory of CUDA's pools (`cuMemAllocAsync`), which cudarc's slices
    /// have, cannot from NCCL 2.30 on. With every release it stays [`Plain`](Registration::Plain); see
    /// [`Buffer::registration`].
    ///
    /// For a symmetric window, allocate the memory with [`alloc`](Nccl::alloc).
    ///
    /// # Errors
    /// [`UsageError::Memory`](crate::UsageError) for memory of another GPU;
    /// [`Error::MissingFunction`](crate::Error) if the library is too old for it. The slice is dropped then.
    #[doc(alias = "ncclCommRegister")]
    pub fn register<T: Element>(&self, slice: CudaSlice<T>) -> Result<Buffer<T>> {
        self.registered(slice)
    }
}

/// Returns the version of the NCCL that is (or would be) loaded, as `major.minor.patch`.
///
/// # Errors
/// [`Error::LibraryNotFound`](crate::Error) with every place that was tried: a program can go on with one
/// device.
pub fn version() -> Result<String> {
    Ok(version_text(crate::backend::nccl::library::load(Flavour::Nccl)?.version()))
}

/// Encrypts what NCCL sends over TCP sockets in this process, with a key of at least 32 bytes that all ranks
/// have (TLS with a pre-shared key; `ncclSetEncryption`, 2.32). Called before the process's first
/// communicator is made.
///
/// NCCL must be built with TLS; the wheels of 2.32.3 are not, and their ranks fail when they connect over
/// sockets. Traffic over NVLink, InfiniBand or phalanx's own store is not encrypted by this.
///
/// # Errors
/// [`Error::MissingFunction`](crate::Error) if the library is too old; [`Error::Unsupported`](crate::Error)
/// behind the first communicator; NCCL's own for a short key.
pub fn encrypt_sockets(key: &str) -> Result<()> {
    let library = crate::backend::nccl::library::load(Flavour::Nccl)?;
    let name = "ncclSetEncryption";
    let set = library.need(library.ncclSetEncryption, name)?;
    let key = crate::backend::nccl::config::text("key", key)?;
    let config = ncclEncryptionConfig_t::new(NCCL_ENCRYPTION_MODE_PSK, key.as_ptr());
    // SAFETY: no thread is inside the library with a communicator, since there is none; the key is copied
    // during the call.
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

/// The numbers of the GPUs that this process sees (`cuDeviceGetCount`): all of them, for [`init_all`] and
/// [`Builder::gpu`](crate::Builder::gpu).
///
/// # Errors
/// [`Error::LibraryNotFound`](crate::Error) with every place that was tried, if there is no CUDA driver;
/// [`Error::Library`](crate::Error) if it does not start.
pub fn gpus() -> Result<Range<usize>> {
    Ok(0..device::count(Flavour::Nccl)?)
}

/// Creates a communicator for each of these GPUs (`ncclCommInitAll`): one thread drives them all, or each
/// gets a thread. The ranks are in the order of the GPUs.
///
/// ```no_run
/// use phalanx::{ReduceOp, nccl};
///
/// # fn main() -> phalanx::Result<()> {
/// let comms = nccl::init_all(nccl::gpus()?)?; // or some of them: init_all([0, 1])
/// let zeros = |comm: &phalanx::Comm| Ok(comm.cuda_stream()?.alloc_zeros::<f32>(1000)?);
/// let mut buffers = comms.iter().map(zeros).collect::<phalanx::Result<Vec<_>>>()?;
/// phalanx::group(|group| {
///     let mut all = comms.iter().zip(&mut buffers);
///     all.try_for_each(|(comm, buffer)| group.on(comm).all_reduce_in_place(buffer, ReduceOp::Sum))
/// })?;
/// comms.iter().try_for_each(|comm| comm.sync())
/// # }
/// ```
///
/// **On the calling thread**, a rank that waited for another would wait forever. So everything that waits for
/// other ranks returns [`Error::Unsupported`](crate::Error) there: operations outside of a
/// [`group`](crate::group) (put those of all ranks into one group), and `barrier`, `finalize` (drop the
/// communicators), `split`, `shrink`, symmetric memory ([`Nccl::alloc`] gives registered memory instead),
/// `suspend` and `resume`, signals, and capturing a [`Graph`](super::Graph). A group that leaves a rank out,
/// or started operations that are waited for before all ranks have started theirs, end at the deadline.
///
/// There, also call [`sync`](Comm::sync) on every communicator before a buffer is dropped: cudarc frees the memory of a default stream on that of
/// the GPU that the thread used last, which does not wait for the other GPUs.
///
/// **Moved to another thread**, a communicator supports all of this. Then move all of them, one to each
/// thread: several on one thread wait for each other until the deadline, and one that stays behind is refused
/// the calls that the others wait for. [`phalanx::run`](crate::run) makes ranks that have a thread each from
/// the start.
///
/// `PHALANX_TIMEOUT` and `PHALANX_CHECK` apply as for [`init`](crate::init). Collectives are only compared if
/// each communicator has its own thread, since the comparison waits for other ranks.
///
/// # Errors
/// [`UsageError::WorldSize`](crate::UsageError::WorldSize) for no GPU; [`Error::LibraryNotFound`](crate::Error)
/// without a driver or NCCL; NCCL's own for a GPU that is named twice, or is not there.
#[doc(alias = "ncclCommInitAll")]
pub fn init_all(gpus: impl IntoIterator<Item = usize>) -> Result<Vec<Comm>> {
    let gpus: Vec<usize> = gpus.into_iter().collect();
    Ok(start::gpu_ranks(&gpus, Flavour::Nccl)?.into_iter().map(Comm::from).collect())
}
