//! Messages between two ranks, with gradients.

use crate::error::{failed, usage};
use crate::memory;
use crate::ranks::Ranks;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, Var};

struct Send {
    ranks: Ranks,
    to: usize,
}

struct Recv {
    ranks: Ranks,
    from: usize,
    shape: Shape,
}

impl CustomOp1 for Send {
    fn name(&self) -> &'static str {
        "send"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let elements = memory::source("send", storage, layout)?;
        self.ranks.comm().send(&elements, self.to).map_err(failed)?;
        Ok((memory::like(storage, 1)?, ().into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let elements = memory::cuda::source("send", storage, layout)?;
        self.ranks.comm().send(&elements, self.to).map_err(failed)?;
        let mut receipt = memory::cuda::like(storage, 1)?;
        memory::cuda::zero(&mut receipt)?;
        Ok((receipt, ().into()))
    }

    fn bwd(&self, arg: &Tensor, _result: &Tensor, _gradient: &Tensor) -> Result<Option<Tensor>> {
        self.ranks.recv(arg.shape(), arg.dtype(), self.to).map(Some)
    }
}

impl CustomOp1 for Recv {
    fn name(&self) -> &'static str {
        "recv"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut received = memory::like(storage, self.shape.elem_count())?;
        let mut elements = memory::target("recv", &mut received, &Layout::contiguous(&self.shape))?;
        self.ranks.comm().recv(&mut elements, self.from).map_err(failed)?;
        Ok((received, self.shape.clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, _layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let mut received = memory::cuda::like(storage, self.shape.elem_count())?;
        let mut elements = memory::cuda::target("recv", &mut received, &Layout::contiguous(&self.shape))?;
        self.ranks.comm().recv(&mut elements, self.from).map_err(failed)?;
        Ok((received, self.shape.clone()))
    }

    fn bwd(&self, _arg: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.ranks.send(gradient, self.from)?;
        Ok(None)
    }
}

/// # Messages
///
/// Of two ranks that both send first, each may wait for the other: one of them receives first.
impl Ranks {
    /// Sends a tensor to another rank. The result is a zero: add it to this rank's loss, so that `backward` waits here for the gradient that
    /// the other rank sends back.
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<Tensor> {
        self.check_other("send", to)?;
        tensor.contiguous()?.apply_op1(Send { ranks: self.clone(), to })
    }

    /// Receives a tensor of this shape and type. `backward` sends its gradient back, if the tensor was used.
    pub fn recv(&self, shape: impl Into<Shape>, dtype: DType, from: usize) -> Result<Tensor> {
        self.check_other("recv", from)?;
        // A variable, since candle goes back only where there is one.
        let origin = Var::zeros((), dtype, self.device())?;
        origin.apply_op1(Recv { ranks: self.clone(), from, shape: shape.into() })
    }

    fn check_other(&self, operation: &str, peer: usize) -> Result<()> {
        self.check_rank(operation, "peer", peer)?;
        if peer == self.rank() {
            return Err(usage(format!("{operation}: rank {peer} is this rank; use the tensor itself")));
        }
        Ok(())
    }
}
