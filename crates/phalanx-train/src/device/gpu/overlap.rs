//! Communication on the side stream.
//!
//! Operations are enqueued there behind the work that wrote their buffers, and the buffers' next users behind them: both by
//! cudarc's events. So nothing waits on the host, and what does not use the buffers goes on.

use super::Gpu;
use crate::Result;
use crate::device::{Device, Number, Overlap};
use cudarc::driver::{CudaSlice, CudaViewMut};
use phalanx::{Comm, ReduceOp, Reduction, Request};

impl Gpu {
    /// The same, with its work on the side stream.
    fn aside(&self) -> Gpu {
        Gpu { stream: self.side.clone(), ..self.clone() }
    }

    /// A buffer that is freed on the side stream. Work there that is enqueued later waits for what is enqueued here.
    fn give_to_side<A>(&self, buffer: CudaSlice<A>) -> Result<CudaSlice<A>> {
        let len = buffer.len();
        let address = buffer.leak();
        self.side.join(&self.stream)?;
        // SAFETY: the memory of a buffer that has let go of it, of this length; the side stream waits for its users.
        Ok(unsafe { self.side.upgrade_device_ptr(address, len) })
    }
}

impl Overlap for Gpu {
    type Pending<A: Number> = CudaSlice<A>;
    /// What is sent, and what it is gathered to. The first is freed when work may wait for the gathering.
    type Gathering<A: Number> = (CudaSlice<A>, CudaSlice<A>);

    fn start_sum<A: Number>(
        &self,
        comm: &Comm,
        mut values: CudaSlice<A>,
        op: Reduction<A>,
    ) -> Result<CudaSlice<A>> {
        comm.on(&self.side)?.all_reduce_in_place(&mut values, op)?;
        Ok(values)
    }

    fn finish_sum<A: Number>(&self, pending: CudaSlice<A>) -> Result<CudaSlice<A>> {
        Ok(pending)
    }

    fn start_gather<A: Number>(
        &self,
        comm: &Comm,
        own: CudaSlice<A>,
        mut all: CudaSlice<A>,
    ) -> Result<(CudaSlice<A>, CudaSlice<A>)> {
        comm.on(&self.side)?.all_gather(&own, &mut all)?;
        Ok((own, all))
    }

    fn finish_gather<A: Number>(&self, (_, all): (CudaSlice<A>, CudaSlice<A>)) -> Result<CudaSlice<A>> {
        Ok(all)
    }

    fn add_reduced<A: Number>(
        &self,
        comm: &Comm,
        replicas: Option<&Comm>,
        values: CudaSlice<A>,
        factor: f64,
        to: &mut CudaViewMut<'_, A>,
    ) -> Result<()> {
        let (aside, len) = (self.aside(), to.len());
        // Made and freed on the side stream: there nothing else waits for the sum.
        let (values, mut own) = (self.give_to_side(values)?, aside.alloc::<A>(len)?);
        comm.on(&self.side)?.reduce_scatter(&values, &mut own, ReduceOp::Sum)?;
        if let Some(replicas) = replicas {
            replicas.on(&self.side)?.all_reduce_in_place(&mut own, ReduceOp::Sum)?;
        }
        aside.add(factor, &aside.view(&own, 0..len), to)
    }

    fn start_exchange(&self, comm: &Comm, own: f64) -> Result<Request<(Vec<f64>, Vec<f64>)>> {
        // On the communicator's own stream it would wait for the work that is enqueued there.
        Ok(comm.on(&self.side)?.start_all_gather(vec![own], vec![0.0; comm.world_size()])?)
    }
}
