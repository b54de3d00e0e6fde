//! Launches of kernels, with buffers and values as arguments.

use super::module::{Kernel, check};
use crate::buffer::loan::Loan;
use crate::buffer::stream::{GpuStream, Stream};
use crate::buffer::{Source, Target};
use crate::types::error::Result;
use crate::types::memory::Space;
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaStream, DeviceRepr, LaunchConfig};
use std::ffi::c_void;
use std::sync::Arc;

/// An argument of a launch.
pub struct Argument<'a>(Kind<'a>);

enum Kind<'a> {
    Reads(&'a dyn Lends),
    Writes(&'a mut dyn LendsMut),
    Value { start: *const c_void, bytes: usize },
    Handle(&'a dyn DeviceHandle),
}

/// A buffer that the kernel reads: its address is passed.
pub fn reads<'a, B: Source>(buffer: &'a B) -> Argument<'a> {
    Argument(Kind::Reads(buffer))
}

/// A buffer that the kernel writes, and may read: its address is passed.
pub fn writes<'a, B: Target>(buffer: &'a mut B) -> Argument<'a> {
    Argument(Kind::Writes(buffer))
}

/// A value: a number, an address as `u64`, or a structure that the kernel sees in the same way.
pub fn value<T: DeviceRepr>(value: &T) -> Argument<'_> {
    Argument(Kind::Value { start: std::ptr::from_ref(value).cast(), bytes: size_of::<T>() })
}

/// NCCL's communicator for kernels, as `ncclDevComm`. It is not given back before the kernel has ended.
pub fn device_comm(comm: &impl DeviceHandle) -> Argument<'_> {
    Argument(Kind::Handle(comm))
}

/// The way to the other ranks' kernels, as `phalanx::Peers` of `<phalanx.cuh>`.
pub fn peers(peers: &impl DeviceHandle) -> Argument<'_> {
    Argument(Kind::Handle(peers))
}

/// A handle that a kernel takes by value and uses until it ends:
/// [`nccl::DeviceComm`](crate::nccl::DeviceComm), [`nccl::Peers`](crate::nccl::Peers). Sealed.
pub trait DeviceHandle: sealed::Sealed {
    /// The bytes that are passed to the kernel.
    fn as_bytes(&self) -> &[u8];
    /// Called before a kernel with this value is launched on a stream.
    fn launched_on(&self, stream: &GpuStream) -> Result<()>;
}

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// A [`Source`] of any type.
trait Lends {
    fn lend<'a>(&'a self, on: &'a Stream) -> Result<Loan<'a>>;
}

impl<B: Source> Lends for B {
    fn lend<'a>(&'a self, on: &'a Stream) -> Result<Loan<'a>> {
        Source::lend(self, on)
    }
}

/// A [`Target`] of any type.
trait LendsMut {
    fn lend_mut<'a>(&'a mut self, on: &'a Stream) -> Result<Loan<'a>>;
}

impl<B: Target> LendsMut for B {
    fn lend_mut<'a>(&'a mut self, on: &'a Stream) -> Result<Loan<'a>> {
        Target::lend_mut(self, on)
    }
}

/// An argument in the form that the driver takes.
enum Passed<'a> {
    Buffer { address: *mut u8, _loan: Loan<'a> },
    Value(*const c_void),
}

impl Passed<'_> {
    /// Where the argument's bytes are.
    fn start(&mut self) -> *mut c_void {
        match self {
            Passed::Buffer { address, .. } => std::ptr::from_mut(address).cast(),
            Passed::Value(start) => start.cast_mut(),
        }
    }
}

impl Argument<'_> {
    fn bytes(&self) -> usize {
        match &self.0 {
            Kind::Value { bytes, .. } => *bytes,
            Kind::Handle(comm) => comm.as_bytes().len(),
            Kind::Reads(_) | Kind::Writes(_) => size_of::<u64>(),
        }
    }

    /// Lends a buffer; `None` if it is not on a GPU.
    fn pass<'l>(&'l mut self, on: &'l Stream) -> Result<Option<Passed<'l>>> {
        let loan = match &mut self.0 {
            Kind::Value { start, .. } => return Ok(Some(Passed::Value(*start))),
            Kind::Handle(comm) => {
                if let Some(stream) = on.gpu_stream() {
                    comm.launched_on(stream)?;
                }
                return Ok(Some(Passed::Value(comm.as_bytes().as_ptr().cast())));
            }
            Kind::Reads(buffer) => buffer.lend(on)?,
            Kind::Writes(buffer) => buffer.lend_mut(on)?,
        };
        let span = loan.span();
        Ok((span.space == Space::Device).then_some(Passed::Buffer { address: span.start, _loan: loan }))
    }
}

impl Kernel<'_> {
    /// Launches it on a stream: `cuLaunchKernel`. It runs behind the work on the stream and behind earlier
    /// uses of the buffers. Later uses of the buffers run behind it.
    ///
    /// # Errors
    /// [`UsageError::Kernel`](crate::UsageError::Kernel) if number or sizes of the arguments are not those of
    /// the kernel's parameters, or a buffer is in host memory; [`Error::Library`](crate::Error::Library) if
    /// the driver refuses.
    ///
    /// # Safety
    /// The arguments have the types of the kernel's parameters. The kernel stays within the buffers, writes
    /// only to those that it [`writes`], and is free of data races with everything else on the GPU and on
    /// others. What an address that is passed as a value points to is valid until the kernel has ended. If
    /// the stream is being captured, kernel and buffers live as long as the graph.
    pub unsafe fn launch<const N: usize>(
        &self,
        stream: &Arc<CudaStream>,
        config: LaunchConfig,
        arguments: [Argument<'_>; N],
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.start(stream, config, arguments, false) }
    }

    /// Launches it so that all its blocks run at the same time: `cuLaunchCooperativeKernel`. Kernels need it
    /// whose blocks wait for each other or, with NVSHMEM, for other ranks.
    ///
    /// # Errors
    /// As for [`launch`](Kernel::launch); and [`UsageError::Kernel`](crate::UsageError::Kernel) if there are
    /// more than [`cooperative_blocks`](Kernel::cooperative_blocks).
    ///
    /// # Safety
    /// As for [`launch`](Kernel::launch).
    pub unsafe fn launch_cooperative<const N: usize>(
        &self,
        stream: &Arc<CudaStream>,
        config: LaunchConfig,
        arguments: [Argument<'_>; N],
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.start(stream, config, arguments, true) }
    }

    /// # Safety
    /// As for [`launch`](Kernel::launch).
    unsafe fn start<const N: usize>(
        &self,
        stream: &Arc<CudaStream>,
        config: LaunchConfig,
        mut arguments: [Argument<'_>; N],
        cooperative: bool,
    ) -> Result<()> {
        self.check(stream, &arguments)?;
        stream.context().bind_to_thread()?;
        self.module.used_on(stream);
        let on = Stream::gpu(GpuStream::Cuda(stream.clone()));
        let mut passed: [Option<Passed<'_>>; N] = [const { None }; N];
        for (index, argument) in arguments.iter_mut().enumerate() {
            passed[index] = argument.pass(&on)?;
            if passed[index].is_none() {
                let problem = format!("argument {index} is a buffer in host memory");
                return Err(self.refused(problem, "copy it to the GPU, or pass a value"));
            }
        }
        let mut starts =
            passed.each_mut().map(|one| one.as_mut().map_or(std::ptr::null_mut(), Passed::start));
        let (grid, block, shared) = (config.grid_dim, config.block_dim, config.shared_mem_bytes);
        let (stream, list) = (stream.cu_stream(), starts.as_mut_ptr());
        // SAFETY: a function of a module that lives, on a stream of its GPU, with pointers to as many
        // arguments as it has parameters, each as large (checked where the driver tells); the rest is the
        // caller's contract.
        let result = unsafe {
            if cooperative {
                sys::cuLaunchCooperativeKernel(
                    self.function,
                    grid.0,
                    grid.1,
                    grid.2,
                    block.0,
                    block.1,
                    block.2,
                    shared,
                    stream,
                    list,
                )
            } else {
                sys::cuLaunchKernel(
                    self.function,
                    grid.0,
                    grid.1,
                    grid.2,
                    block.0,
                    block.1,
                    block.2,
                    shared,
                    stream,
                    list,
                    std::ptr::null_mut(),
                )
            }
        };
        if result == CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE {
            return Err(self.too_large(config)?);
        }
        check(if cooperative { "cuLaunchCooperativeKernel" } else { "cuLaunchKernel" }, result)
    }

    fn check(&self, stream: &Arc<CudaStream>, arguments: &[Argument<'_>]) -> Result<()> {
        let ours = self.module.gpu();
        if ours.cu_ctx() != stream.context().cu_ctx() {
            let (is, on) = (ours.ordinal(), stream.context().ordinal());
            let problem = format!("it is on GPU {is}, the stream is of GPU {on}, or of another context");
            return Err(self.refused(problem, "load the module for the stream's context"));
        }
        let Some(parameters) = &self.parameters else { return Ok(()) };
        let sizes = || arguments.iter().map(Argument::bytes);
        if parameters.iter().copied().eq(sizes()) {
            return Ok(());
        }
        let given: Vec<usize> = sizes().collect();
        let problem = format!(
            "its {} parameters have {parameters:?} bytes, the {} arguments {given:?}",
            parameters.len(),
            given.len()
        );
        Err(self.refused(problem, "pass one argument for each parameter, of the same type"))
    }

    #[cold]
    fn too_large(&self, config: LaunchConfig) -> Result<crate::types::error::Error> {
        let (blocks, threads) = (volume(config.grid_dim), volume(config.block_dim));
        let each = u32::try_from(threads).unwrap_or(u32::MAX);
        let limit = self.cooperative_blocks(each, config.shared_mem_bytes as usize)?;
        let problem = format!(
            "{blocks} blocks of {threads} threads cannot be on the GPU at the same time, the limit is {limit}"
        );
        Ok(self.refused(problem, "launch fewer blocks (Kernel::cooperative_blocks), each doing more"))
    }
}

fn volume((x, y, z): (u32, u32, u32)) -> u64 {
    (u64::from(x) * u64::from(y)).saturating_mul(z.into())
}

#[cfg(test)]
mod tests {
    #[test]
    fn grids_of_every_size_have_a_volume() {
        assert_eq!(super::volume((2, 3, 4)), 24);
        assert_eq!(super::volume((1 << 31, 1 << 16, 2)), 1 << 48);
        assert_eq!(super::volume((u32::MAX, u32::MAX, u32::MAX)), u64::MAX);
    }
}
