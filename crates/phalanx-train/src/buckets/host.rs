//! Sums that go on in the background on the host.

use super::Overlap;
use crate::Result;
use crate::device::{Host, Number};
use phalanx::{Comm, Request};

impl Overlap for Host {
    type Pending<A: Number> = Request<Vec<A>>;

    fn start_sum<A: Number>(
        &self,
        comm: &Comm,
        values: Vec<A>,
        op: phalanx::Reduction<A>,
    ) -> Result<Request<Vec<A>>> {
        Ok(comm.start_all_reduce(values, op)?)
    }

    fn finish_sum<A: Number>(&self, pending: Request<Vec<A>>) -> Result<Vec<A>> {
        Ok(pending.wait()?)
    }
}
