//! Communication on the side stream.
//!
//! Operations are enqueued there behind the work that wrote their buffers, and the buffers' next users behind them: both by
//! cudarc's events. So nothing waits on the host, and what does not use the buffers goes on.

use super::Gpu;
use crate::Result;
use crate::device::{Number, Overlap};
use cudarc::driver::CudaSlice;
use phalanx::{Comm, Reduction, Request};

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

    fn start_exchange(&self, comm: &Comm, own: f64) -> Result<Request<(Vec<f64>, Vec<f64>)>> {
        // On the communicator's own stream it would wait for the work that is enqueued there.
        Ok(comm.on(&self.side)?.start_all_gather(vec![own], vec![0.0; comm.world_size()])?)
    }
}
