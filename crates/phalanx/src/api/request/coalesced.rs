//! The started form of [`Comm::all_reduce_coalesced`].

use super::{Kept, MaybeDangling, Request};
use crate::api::coalesced::Together;
use crate::api::comm::Comm;
use crate::buffer::Owned;
use crate::buffer::stream::Stream;
use crate::contract::Operation;
use crate::types::error::Result;
use crate::types::op::Reduction;

impl Comm {
    /// Starts an [`all_reduce_coalesced`](Comm::all_reduce_coalesced). Short buffers are copied when it is called, and back in
    /// [`Request::wait`]. On NCCL every rank uses this form, since the plain one is a group there.
    pub fn start_all_reduce_coalesced<R: Owned>(
        &self,
        bufs: Vec<R>,
        op: impl Into<Reduction<R::Elem>>,
    ) -> Result<Request<Vec<R>>> {
        let (op, runs) = (op.into(), self.runs_of(&bufs)?);
        let mut buffers = MaybeDangling::new(bufs);
        let (mut kept, mut calls) = (Kept::default(), Vec::new());
        for run in runs {
            let bufs = &mut buffers.get_mut()[run.clone()];
            if Together::can_be(bufs, &self.stream)? {
                let together = Together::of(bufs, &self.stream)?;
                let mut packed = together.pack();
                calls.push(together.call(self, op, &mut packed)?);
                kept.packed.push((run, packed));
                continue;
            }
            for buf in bufs {
                let call = self.shape().whole(Operation::AllReduce, buf.len()).reducing(op);
                let call = call.of_type(buf.dtype())?;
                calls.push(call.inside(&buf.lend_mut(&self.stream)?, &self.stream, self.rank()));
            }
        }
        self.start_calls(&calls, buffers, MaybeDangling::new(kept), Some(|bufs, kept| unpack(bufs, kept)))
    }
}

/// Copies the results of buffers that travelled together back.
fn unpack<R: Owned>(bufs: &mut [R], kept: &Kept) -> Result<()> {
    for (run, packed) in &kept.packed {
        Together::of(&mut bufs[run.clone()], &Stream::host())?.unpack(packed);
    }
    Ok(())
}
