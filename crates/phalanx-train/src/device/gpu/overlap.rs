//! Communication on the side stream.
//!
//! Operations are enqueued there behind the work that wrote their buffers, and the buffers' next users behind them: both by
//! cudarc's events. So nothing waits on the host, and what does not use the buffers goes on.

use super::Gpu;
use crate::Result;
use crate::device::{Device, Number, Overlap};
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use phalanx::{Comm, ReduceOp, Reduction, Request};
use std::sync::PoisonError;

/// Reductions that may be under way while the stream goes on. Each holds memory that was allocated on the stream and is freed
/// on the side stream: without a limit, as much memory as the host enqueues ahead of the GPU.
const UNDER_WAY: usize = 2;

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

    /// The stream waits for all reductions but the last ones, so that its next allocations get the memory that those have freed.
    fn limit_reductions(&self) -> Result<()> {
        let mut reductions = self.reductions.lock().unwrap_or_else(PoisonError::into_inner);
        reductions.push_back(self.side.record_event(None)?);
        if reductions.len() > UNDER_WAY
            && let Some(earlier) = reductions.pop_front()
        {
            self.stream.wait(&earlier)?;
        }
        Ok(())
    }
}

impl Overlap for Gpu {
    type Pending<A: Number> = CudaSlice<A>;
    type Gathering<A: Number> = CudaSlice<A>;

    fn start_sum<A: Number>(
        &self,
        comm: &Comm,
        mut values: CudaSlice<A>,
        op: Reduction<A>,
    ) -> Result<CudaSlice<A>> {
        comm.on(&self.side)?.beside_computing().all_reduce_in_place(&mut values, op)?;
        Ok(values)
    }

    fn finish_sum<A: Number>(&self, pending: CudaSlice<A>) -> Result<CudaSlice<A>> {
        Ok(pending)
    }

    fn start_gather<M: Number, A: Number>(
        &self,
        comm: &Comm,
        own: &CudaView<'_, M>,
        mut all: CudaSlice<A>,
    ) -> Result<CudaSlice<A>> {
        // Made, rounded and freed on the side stream: there nothing else waits for it.
        let (aside, len) = (self.aside(), own.len());
        let mut rounded = aside.alloc::<A>(len)?;
        aside.convert(own, &mut aside.view_mut(&mut rounded, 0..len))?;
        comm.on(&self.side)?.beside_computing().all_gather(&rounded, &mut all)?;
        Ok(all)
    }

    fn finish_gather<A: Number>(&self, gathering: CudaSlice<A>) -> Result<CudaSlice<A>> {
        Ok(gathering)
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
        comm.on(&self.side)?.beside_computing().reduce_scatter(&values, &mut own, ReduceOp::Sum)?;
        drop(values);
        if let Some(replicas) = replicas {
            replicas.on(&self.side)?.beside_computing().all_reduce_in_place(&mut own, ReduceOp::Sum)?;
        }
        aside.add(factor, &aside.view(&own, 0..len), to)?;
        self.limit_reductions()
    }

    fn start_exchange(&self, comm: &Comm, own: f64) -> Result<Request<(Vec<f64>, Vec<f64>)>> {
        // On the communicator's own stream it would wait for the work that is enqueued there.
        Ok(comm.on(&self.side)?.start_all_gather(vec![own], vec![0.0; comm.world_size()])?)
    }
}
