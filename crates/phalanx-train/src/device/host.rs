//! Memory of the host.

use super::{Device, Number, Overlap};
use crate::Result;
use phalanx::{Comm, DType, Reduction, Request};
use std::ops::Range;

/// Memory and processor of the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Host;

/// Whether numbers of this type are computed with in f64.
pub(crate) fn in_double<T: Number>() -> bool {
    T::DTYPE == DType::F64
}

impl Device for Host {
    type Buffer<T: Number> = Vec<T>;
    type View<'a, T: Number> = &'a [T];
    type ViewMut<'a, T: Number> = &'a mut [T];

    fn zeros<T: Number>(&self, len: usize) -> Result<Vec<T>> {
        Ok(vec![T::default(); len])
    }

    fn upload<T: Number>(&self, numbers: &[T]) -> Result<Vec<T>> {
        Ok(numbers.to_vec())
    }

    fn download<T: Number>(&self, from: &&[T]) -> Result<Vec<T>> {
        Ok(from.to_vec())
    }

    fn view<'a, T: Number>(&self, buffer: &'a Vec<T>, range: Range<usize>) -> &'a [T] {
        &buffer[range]
    }

    fn view_mut<'a, T: Number>(&self, buffer: &'a mut Vec<T>, range: Range<usize>) -> &'a mut [T] {
        &mut buffer[range]
    }

    fn reborrow<'a, T: Number>(view: &'a &mut [T]) -> &'a [T] {
        view
    }

    fn convert<A: Number, B: Number>(&self, from: &&[A], to: &mut &mut [B]) -> Result<()> {
        for (to, from) in to.iter_mut().zip(*from) {
            *to = if in_double::<A>() { B::from_f64(from.to_f64()) } else { B::from_f32(from.to_f32()) };
        }
        Ok(())
    }

    fn add<A: Number, B: Number>(&self, factor: f64, from: &&[A], to: &mut &mut [B]) -> Result<()> {
        for (to, from) in to.iter_mut().zip(*from) {
            *to = if in_double::<A>() || in_double::<B>() {
                B::from_f64(to.to_f64() + factor * from.to_f64())
            } else {
                B::from_f32(to.to_f32() + factor as f32 * from.to_f32())
            };
        }
        Ok(())
    }

    fn scale<T: Number>(&self, data: &mut &mut [T], factor: f64) -> Result<()> {
        for x in data.iter_mut() {
            *x = if in_double::<T>() {
                T::from_f64(x.to_f64() * factor)
            } else {
                T::from_f32(x.to_f32() * factor as f32)
            };
        }
        Ok(())
    }

    fn fill<T: Number>(&self, data: &mut &mut [T], value: f64) -> Result<()> {
        data.fill(T::from_f64(value));
        Ok(())
    }
}

impl Overlap for Host {
    type Pending<A: Number> = Request<Vec<A>>;
    type Gathering<A: Number> = Request<(Vec<A>, Vec<A>)>;

    fn start_sum<A: Number>(&self, comm: &Comm, values: Vec<A>, op: Reduction<A>) -> Result<Request<Vec<A>>> {
        Ok(comm.start_all_reduce(values, op)?)
    }

    fn finish_sum<A: Number>(&self, pending: Request<Vec<A>>) -> Result<Vec<A>> {
        Ok(pending.wait()?)
    }

    fn start_gather<M: Number, A: Number>(
        &self,
        comm: &Comm,
        own: &&[M],
        all: Vec<A>,
    ) -> Result<Request<(Vec<A>, Vec<A>)>> {
        let mut rounded = self.alloc::<A>(own.len())?;
        self.convert(own, &mut &mut rounded[..])?;
        Ok(comm.start_all_gather(rounded, all)?)
    }

    fn finish_gather<A: Number>(&self, gathering: Request<(Vec<A>, Vec<A>)>) -> Result<Vec<A>> {
        Ok(gathering.wait()?.1)
    }
}
