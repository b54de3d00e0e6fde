//! Pre-multiplied sums whose factor is in GPU memory, as single operations and in groups and CUDA graphs.

use super::surface::Surface;
use crate::api::comm::Comm;
use crate::api::group::CommGroup;
use crate::backend::nccl::{NcclComm, check_on_device};
use crate::buffer::Source;
use crate::buffer::Target;
use crate::buffer::loan::Loan;
use crate::contract::{Call, Operation};
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::memory::Space;
use crate::types::op::{RawReduction, ReductionCode};

/// A call, and the loans of its buffers until it is enqueued.
struct Scaled<'a> {
    call: Call<'a>,
    loans: [Loan<'a>; 3],
}

impl<'a> Scaled<'a> {
    fn new<S, R, F>(
        comm: &'a Comm,
        operation: &'static str,
        call: Call<'a>,
        (send, recv, factor): (&'a S, &'a mut R, &'a F),
    ) -> Result<Scaled<'a>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        F: Source<Elem = S::Elem> + ?Sized,
    {
        if NcclComm::of(&*comm.backend).is_none() {
            return Err(Error::from(UnsupportedError {
                what: format!("{operation}, with a factor in GPU memory"),
                why: format!("the communicator is the {} backend's", comm.backend()),
                remedy: "use PreMulSum, or a communicator on GPUs (BackendKind::Nccl)".into(),
            }));
        }
        if factor.len() != 1 {
            let (actual, expected) = (factor.len(), 1);
            let (buffer, rule) = ("factor", "one factor");
            return Err(UsageError::Length { operation, buffer, actual, expected, rule }.into());
        }
        let call = call.of_types(send.dtype(), recv.dtype())?;
        let stream = &comm.stream;
        let (send, recv, factor) = (send.lend(stream)?, recv.lend_mut(stream)?, factor.lend(stream)?);
        let call = call.between(&send, &recv, stream).configured(stream);
        let gets_nothing = call.operation == Operation::Reduce && call.root != comm.rank();
        let [send_space, recv_space] = call.spaces;
        check_on_device(
            &[factor.span().space, send_space, if gets_nothing { send_space } else { recv_space }],
            "GPU memory, for the buffers and the factor",
            "use PreMulSum for a factor on the host",
        )?;
        let address = factor.span().start.addr() as u64;
        let reduction = RawReduction { code: ReductionCode::PreMulSum, factor: address };
        let call = Call { reduction, factor_space: Space::Device, ..call };
        Ok(Scaled { call, loans: [send, recv, factor] })
    }
}

impl Surface<'_> {
    /// Sums the ranks' buffers, each multiplied by its rank's factor (`ncclRedOpCreatePreMulSum` with
    /// `ncclScalarDevice`). The factor is one element in GPU memory, read when the operation runs; for a
    /// factor on the host use [`PreMulSum`](crate::PreMulSum). All buffers must be in GPU memory. In a group:
    /// [`CommGroup::all_reduce_scaled`].
    ///
    /// # Errors
    /// As [`Comm::all_reduce`] with [`PreMulSum`](crate::PreMulSum); [`UsageError::Length`] for more or less
    /// than one factor; [`UsageError::Memory`] for host memory.
    pub fn all_reduce_scaled<S, R, F>(&self, send: &S, recv: &mut R, factor: &F) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        F: Source<Elem = S::Elem> + ?Sized,
    {
        let call = self.front.shape().all_reduce(send.len(), recv.len())?;
        self.run(&Scaled::new(self.front, "all_reduce_scaled", call, (send, recv, factor))?)
    }

    /// Sums the buffers as [`all_reduce_scaled`](Surface::all_reduce_scaled), with the result on the root
    /// only. As in [`Comm::reduce`], other ranks' `recv` is not used.
    pub fn reduce_scaled<S, R, F>(&self, send: &S, recv: &mut R, factor: &F, root: usize) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        F: Source<Elem = S::Elem> + ?Sized,
    {
        let call = self.front.shape().reduce(send.len(), recv.len(), root)?;
        self.run(&Scaled::new(self.front, "reduce_scaled", call, (send, recv, factor))?)
    }

    /// Sums the buffers as [`all_reduce_scaled`](Surface::all_reduce_scaled), and gives each rank its block
    /// of the result. As in [`Comm::reduce_scatter`], `send` has `world_size` times the elements of `recv`.
    pub fn reduce_scatter_scaled<S, R, F>(&self, send: &S, recv: &mut R, factor: &F) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        F: Source<Elem = S::Elem> + ?Sized,
    {
        let call = self.front.shape().reduce_scatter(send.len(), recv.len())?;
        self.run(&Scaled::new(self.front, "reduce_scatter_scaled", call, (send, recv, factor))?)
    }

    /// Enqueues the operation. Its loans end afterwards.
    fn run(&self, scaled: &Scaled<'_>) -> Result<()> {
        self.front.run_call(&scaled.call)
    }
}

impl<'env> CommGroup<'_, 'env> {
    /// See [`Surface::all_reduce_scaled`](super::Surface::all_reduce_scaled). In a [CUDA graph](super::Graph)
    /// the factor is read again by each launch.
    ///
    /// # Errors
    /// As there; [`Error::Unsupported`] on a communicator that is neither NCCL's nor RCCL's.
    pub fn all_reduce_scaled<S, R, F>(
        &mut self,
        send: &'env S,
        recv: &'env mut R,
        factor: &'env F,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        F: Source<Elem = S::Elem> + ?Sized,
    {
        let comm = self.comm();
        let call = comm.shape().all_reduce(send.len(), recv.len())?;
        self.take(Scaled::new(comm, "all_reduce_scaled", call, (send, recv, factor))?);
        Ok(())
    }

    /// See [`Surface::reduce_scaled`](super::Surface::reduce_scaled).
    ///
    /// # Errors
    /// As [`all_reduce_scaled`](CommGroup::all_reduce_scaled).
    pub fn reduce_scaled<S, R, F>(
        &mut self,
        send: &'env S,
        recv: &'env mut R,
        factor: &'env F,
        root: usize,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        F: Source<Elem = S::Elem> + ?Sized,
    {
        let comm = self.comm();
        let call = comm.shape().reduce(send.len(), recv.len(), root)?;
        self.take(Scaled::new(comm, "reduce_scaled", call, (send, recv, factor))?);
        Ok(())
    }

    /// See [`Surface::reduce_scatter_scaled`](super::Surface::reduce_scatter_scaled).
    ///
    /// # Errors
    /// As [`all_reduce_scaled`](CommGroup::all_reduce_scaled).
    pub fn reduce_scatter_scaled<S, R, F>(
        &mut self,
        send: &'env S,
        recv: &'env mut R,
        factor: &'env F,
    ) -> Result<()>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        F: Source<Elem = S::Elem> + ?Sized,
    {
        let comm = self.comm();
        let call = comm.shape().reduce_scatter(send.len(), recv.len())?;
        self.take(Scaled::new(comm, "reduce_scatter_scaled", call, (send, recv, factor))?);
        Ok(())
    }

    fn take(&mut self, Scaled { call, loans }: Scaled<'env>) {
        self.push(call, loans);
    }
}
