//! [`Rccl`]: RCCL's own features, for one communicator.

use super::surface::Surface;
use crate::api::comm::Comm;
use crate::backend::nccl::check_on_device;
use crate::backend::nccl::collective::Needs;
use crate::backend::nccl::memory::{Buffer, Registration};
use crate::buffer::{Source, Target};
use crate::gpu::hip;
use crate::start;
use crate::types::dtype::{Element, Reducible};
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::op::ReduceOp;
use phalanx_sys::nccl::{Flavour, version_text};
use std::ops::Range;

/// RCCL's own features, for one communicator: those that it shares with NCCL ([`Surface`]), HIP's side of
/// them, and what NCCL has not.
#[derive(Debug, Clone, Copy)]
pub struct Rccl<'a>(Surface<'a>);

impl<'a> std::ops::Deref for Rccl<'a> {
    type Target = Surface<'a>;

    fn deref(&self) -> &Surface<'a> {
        &self.0
    }
}

/// The version of the RCCL that is (or would be) loaded, as `major.minor.patch`.
///
/// # Errors
/// [`Error::LibraryNotFound`] with every place that was tried.
pub fn version() -> Result<String> {
    Ok(version_text(crate::backend::nccl::library::load(Flavour::Rccl)?.version()))
}

/// The numbers of the GPUs that this process sees (`hipGetDeviceCount`): all of them, for [`init_all`].
///
/// # Errors
/// [`Error::LibraryNotFound`] with every place that was tried, if there is no HIP; [`Error::Library`] if it does
/// not start.
pub fn gpus() -> Result<Range<usize>> {
    Ok(0..hip::device_count()?)
}

/// A communicator for each of these GPUs, for one thread that drives them all (`ncclCommInitAll`), or for a
/// thread each: what the thread that called this can do with them is the same as [NCCL's](super::init_all).
#[doc(alias = "ncclCommInitAll")]
pub fn init_all(gpus: impl IntoIterator<Item = usize>) -> Result<Vec<Comm>> {
    let gpus: Vec<usize> = gpus.into_iter().collect();
    Ok(start::gpu_ranks(&gpus, Flavour::Rccl)?.into_iter().map(Comm::from).collect())
}

impl<'a> Rccl<'a> {
    pub(crate) fn new(surface: Surface<'a>) -> Rccl<'a> {
        Rccl(surface)
    }

    /// The GPU.
    pub fn device(&self) -> Result<hip::Device> {
        hip::Device::new(self.comm.gpu())
    }

    /// Memory that operations of this communicator are fastest on: a symmetric window if the library has them
    /// (not on a thread that drives [all ranks](init_all)), else registered, else as it is. `len` elements,
    /// zero. Collective: every rank allocates as many bytes.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T, hip::Slice<T>>> {
        self.best_buffer(len)
    }

    /// [`alloc`](Rccl::alloc) with a choice. `ncclMemAlloc` (2.20), `ncclCommRegister`,
    /// `ncclCommWindowRegister`.
    ///
    /// # Errors
    /// [`Error::MissingFunction`] if the library is too old for it.
    pub fn alloc_as<T: Element>(
        &self,
        len: usize,
        registration: Registration,
    ) -> Result<Buffer<T, hip::Slice<T>>> {
        self.buffer(len, registration)
    }

    /// Registers memory that the program has with the communicator (`ncclCommRegister`), as
    /// [NCCL's](super::Nccl::register).
    ///
    /// # Errors
    /// [`UsageError::Memory`] for memory of another GPU; [`Error::MissingFunction`] if the library is too old
    /// for it. The slice is dropped then.
    pub fn register<T: Element>(&self, slice: hip::Slice<T>) -> Result<Buffer<T, hip::Slice<T>>> {
        self.registered(slice)
    }

    /// Reduces the ranks' buffers and adds a bias to the result with the same reduction
    /// (`ncclAllReduceWithBias`). `send`, `recv` and `bias` are GPU memory of one length; the bias is the
    /// same on every rank.
    ///
    /// # Errors
    /// [`Error::MissingFunction`] if the library has it not (it came with 2.22); [`Error::Unsupported`] for
    /// an average, of which nothing says whether the bias counts as a rank.
    pub fn all_reduce_with_bias<S, R, B>(&self, send: &S, recv: &mut R, bias: &B, op: ReduceOp) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        B: Source<Elem = S::Elem> + ?Sized,
        S::Elem: Reducible,
    {
        let (operation, buffer) = ("all_reduce_with_bias", "bias");
        if bias.len() != send.len() {
            let (actual, expected, rule) = (bias.len(), send.len(), "as many as the send buffer");
            return Err(UsageError::Length { operation, buffer, actual, expected, rule }.into());
        }
        if op == ReduceOp::Avg {
            return Err(Error::from(UnsupportedError {
                what: "an average with a bias".into(),
                why: "RCCL does not say whether the bias is divided, too".into(),
                remedy: "use a sum, and divide".into(),
            }));
        }
        let communicator = &self.comm.communicator;
        let library = communicator.library;
        library.need(library.ncclAllReduceWithBias, "ncclAllReduceWithBias")?;
        let call = self.comm.shape().all_reduce(send.len(), recv.len())?.reducing::<S::Elem>(op);
        let call = call.of_types(send.dtype(), recv.dtype())?;
        let (send, recv) = (send.lend(self.stream)?, recv.lend_mut(self.stream)?);
        let bias = bias.lend(self.stream)?;
        let call = call.between(&send, &recv, self.stream);
        let [send_space, recv_space] = call.spaces;
        check_on_device(
            &[bias.span().space, send_space, recv_space],
            "GPU memory, for the buffers and the bias",
            "copy them to the GPU (hip::Stream::clone_htod)",
        )?;
        // SAFETY: the buffers are lent for the call; one thread at a time makes collective calls.
        unsafe { self.prepare_collective(&call) }?;
        let needs = Needs::with_bias(bias.span().start.cast_const().cast());
        // SAFETY: the buffers and the bias are lent until the operation is enqueued; this is the one thread
        // inside.
        unsafe { crate::backend::nccl::operation::collective_with(communicator, &call, None, needs) }
    }
}
