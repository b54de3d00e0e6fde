//! all_reduce of several buffers in one operation.

use super::checks::same_type;
use super::comm::Comm;
use super::group::CommGroup;
use crate::buffer::Target;
use crate::buffer::loan::Loan;
use crate::buffer::stream::Stream;
use crate::contract::{Call, Operation};
use crate::types::dtype::{DType, ElementType};
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
    /// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
    ///     let mut gradients = [vec![1.0f32; 3], vec![2.0; 5], vec![]];
    ///     comm.all_reduce_coalesced(&mut gradients, phalanx::ReduceOp::Sum)?;
    ///     assert_eq!(gradients, [vec![2.0; 3], vec![4.0; 5], vec![]]);
    ///     Ok(())
    /// })?;
    /// # Ok(())
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
        for run in self.runs_of(bufs)? {
            let bufs = &mut bufs[run];
            if !Together::can_be(bufs, &self.stream)? {
                bufs.iter_mut().try_for_each(|buf| self.all_reduce_in_place(buf, op))?;
                continue;
            }
            let together = Together::of(bufs, &self.stream)?;
            let mut packed = together.pack();
            self.run_call(&together.call(self, op, &mut packed)?)?;
            together.unpack(&packed);
        }
        Ok(())
    }

    /// Which neighbors travel together; all have one type.
    pub(super) fn runs_of<R: Target>(&self, bufs: &[R]) -> Result<Vec<Range<usize>>> {
        let Some(dtype) = bufs.first().map(|buf| buf.dtype()) else { return Ok(Vec::new()) };
        bufs.iter().try_for_each(|buf| same_type("all_reduce_coalesced", dtype, buf.dtype()))?;
        if self.backend.is_stream_ordered() {
            return Ok((0..bufs.len()).map(|index| index..index + 1).collect());
        }
        let lens: Vec<usize> = bufs.iter().map(|buf| buf.len()).collect();
        Ok(runs(&lens, TOGETHER / dtype.size()))
    }
}

impl<'env> CommGroup<'_, 'env> {
    /// See [`Comm::all_reduce_coalesced`]. Short buffers are copied when it is called, and back at the group's end.
    pub fn all_reduce_coalesced<R: Target>(
        &mut self,
        bufs: &'env mut [R],
        op: impl Into<Reduction<R::Elem>>,
    ) -> Result<()> {
        let (op, comm) = (op.into(), self.comm());
        let mut rest = bufs;
        for run in comm.runs_of(rest)? {
            let bufs = rest.split_off_mut(..run.len()).expect("the runs are made of all buffers");
            if !Together::can_be(bufs, &comm.stream)? {
                bufs.iter_mut().try_for_each(|buf| self.all_reduce_in_place(buf, op))?;
                continue;
            }
            let together = Together::of(bufs, &comm.stream)?;
            let mut packed = together.pack();
            self.push_packed(together.call(comm, op, &mut packed)?, together, packed);
        }
        Ok(())
    }
}

/// Buffers of host memory and one type that travel together, in memory into which they are packed one behind the other.
pub(super) struct Together<'a> {
    loans: Vec<Loan<'a>>,
    /// Elements of each.
    lens: Vec<usize>,
    dtype: DType,
}

impl<'a> Together<'a> {
    /// Whether there are several buffers, and all are in host memory.
    pub fn can_be<R: Target>(bufs: &mut [R], stream: &Stream) -> Result<bool> {
        let is_on_host = |buf: &mut R| Ok(buf.lend_mut(stream)?.span().space == Space::Host);
        let are_on_host = bufs.iter_mut().map(is_on_host).collect::<Result<Vec<bool>>>()?;
        Ok(bufs.len() > 1 && are_on_host.iter().all(|is_on_host| *is_on_host))
    }

    /// Buffers that [can be](Self::can_be) together.
    pub fn of<R: Target>(bufs: &'a mut [R], stream: &'a Stream) -> Result<Together<'a>> {
        let (dtype, lens) = (bufs[0].dtype(), bufs.iter().map(|buf| buf.len()).collect());
        let loans = bufs.iter_mut().map(|buf| buf.lend_mut(stream)).collect::<Result<Vec<_>>>()?;
        assert!(loans.iter().all(|loan| loan.span().space == Space::Host), "for host memory");
        Ok(Together { loans, lens, dtype })
    }

    /// Address and bytes of each buffer.
    fn places(&self) -> impl Iterator<Item = (*mut u8, usize)> {
        let bytes = self.lens.iter().map(|len| len * self.dtype.size());
        self.loans.iter().map(|loan| loan.span().start).zip(bytes)
    }

    /// A copy of their elements.
    pub fn pack(&self) -> Vec<u8> {
        let mut packed = Vec::with_capacity(self.places().map(|(_, bytes)| bytes).sum());
        for (start, bytes) in self.places() {
            // SAFETY: a loan of host memory is the address of the buffer's elements, which are initialised and have no padding.
            packed.extend_from_slice(unsafe { std::slice::from_raw_parts(start, bytes) });
        }
        packed
    }

    /// The call that reduces them where they are packed.
    pub fn call<'c, T: ElementType>(
        &self,
        comm: &Comm,
        op: Reduction<T>,
        packed: &mut [u8],
    ) -> Result<Call<'c>> {
        let call = comm.shape().whole(Operation::AllReduce, self.lens.iter().sum());
        let call = call.reducing(op).of_type(self.dtype)?.of_parts(&self.lens);
        Ok(call.inside(&Loan::host(packed.as_mut_ptr()), &comm.stream, comm.rank()))
    }

    /// Copies the results back.
    pub fn unpack(&self, mut packed: &[u8]) {
        for (start, bytes) in self.places() {
            let (result, rest) = packed.split_at(bytes);
            // SAFETY: the loans are for writing, of so many bytes, and the results are elements.
            unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), start, bytes) };
            packed = rest;
        }
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
