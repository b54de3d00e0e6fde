//! all_reduce of several buffers in one operation.

use super::checks::same_type;
use super::comm::Comm;
use crate::buffer::Target;
use crate::buffer::loan::Loan;
use crate::contract::Operation;
use crate::types::error::Result;
use crate::types::memory::Space;
use crate::types::op::Reduction;
use std::ops::Range;

/// Bytes up to which buffers travel together. From there on, a latency more costs less than the copies.
const TOGETHER: usize = 64 << 10;

impl Comm {
    /// [`all_reduce_in_place`](Comm::all_reduce_in_place) of several buffers, in about the time of one. torch's `all_reduce_coalesced`.
    ///
    /// As many buffers, of the same lengths, on every rank. In host memory, neighbors of up to 64 KiB together are copied into one
    /// buffer and back; longer ones are reduced where they are. On GPUs it is a [`group`](Comm::group). Elements are combined as in
    /// `all_reduce_in_place`.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// phalanx::run(2, |comm| -> phalanx::Result<()> {
    ///     let mut gradients = [vec![1.0f32; 3], vec![2.0; 5], vec![]];
    ///     comm.all_reduce_coalesced(&mut gradients, phalanx::ReduceOp::Sum)?;
    ///     assert_eq!(gradients, [vec![2.0; 3], vec![4.0; 5], vec![]]);
    ///     Ok(())
    /// })?
    /// .into_iter()
    /// .collect()
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for `all_reduce_in_place`. A [`MismatchError`](crate::MismatchError) also if the lengths of buffers that travel together differ, on
    /// backends that compare calls.
    pub fn all_reduce_coalesced<R: Target>(
        &self,
        bufs: &mut [R],
        op: impl Into<Reduction<R::Elem>>,
    ) -> Result<()> {
        let op = op.into();
        if self.backend.is_stream_ordered() {
            return self
                .group(|group| bufs.iter_mut().try_for_each(|buf| group.all_reduce_in_place(buf, op)));
        }
        let Some(dtype) = bufs.first().map(|buf| buf.dtype()) else { return Ok(()) };
        bufs.iter().try_for_each(|buf| same_type("all_reduce_coalesced", dtype, buf.dtype()))?;
        let lens: Vec<usize> = bufs.iter().map(|buf| buf.len()).collect();
        let mut packed: Vec<u8> = Vec::new();
        for run in runs(&lens, TOGETHER / dtype.size()) {
            let (bufs, lens) = (&mut bufs[run.clone()], &lens[run]);
            let loans = bufs.iter_mut().map(|buf| buf.lend_mut(&self.stream)).collect::<Result<Vec<_>>>()?;
            if loans.len() == 1 || loans.iter().any(|loan| loan.span().space == Space::Device) {
                drop(loans);
                bufs.iter_mut().try_for_each(|buf| self.all_reduce_in_place(buf, op))?;
                continue;
            }
            let bytes = |index: usize| lens[index] * dtype.size();
            packed.clear();
            for (index, loan) in loans.iter().enumerate() {
                // SAFETY: a loan of host memory is the address of the buffer's elements, which are initialised and have no padding.
                packed.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(loan.span().start, bytes(index))
                });
            }
            let call = self.shape().whole(Operation::AllReduce, lens.iter().sum());
            let call = call.reducing(op).of_type(dtype)?.of_parts(lens);
            self.run_call(&call.inside(&Loan::host(packed.as_mut_ptr()), &self.stream, self.rank()))?;
            let mut results = &packed[..];
            for (index, loan) in loans.iter().enumerate() {
                let (result, rest) = results.split_at(bytes(index));
                // SAFETY: as above; the loan is one for writing, and the results are elements.
                unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), loan.span().start, result.len()) };
                results = rest;
            }
        }
        Ok(())
    }
}

/// Neighbors that have at most so many elements together, in order; longer ones are alone.
fn runs(lens: &[usize], most: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut room = 0;
    for (index, len) in lens.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if *len <= room => run.end = index + 1,
            _ => {
                runs.push(index..index + 1);
                room = most;
            }
        }
        room = room.saturating_sub(*len);
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn long_buffers_are_alone_and_short_ones_together() {
        assert_eq!(runs(&[], 10), []);
        assert_eq!(runs(&[3, 7, 1, 0], 10), [0..2, 2..4]);
        assert_eq!(runs(&[3, 30, 4, 5], 10), [0..1, 1..2, 2..4]);
        assert_eq!(runs(&[0, 0, 11], 10), [0..2, 2..3]);
    }
}
