//! Arrays and views of ndarray as buffers: their elements in logical order, without a copy.

use super::loan::Loan;
use super::stream::Stream;
use super::{Owned, Source, Target};
use crate::types::dtype::{DType, Plain};
use crate::types::error::{Error, Result, UsageError};
use ndarray::{Array, ArrayBase, ArrayViewMut, Data, DataMut, Dimension};

/// An array or a view in standard layout (row-major, without gaps).
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use ndarray::{Array2, s};
///
/// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
///     let mut table = Array2::<f32>::zeros((4, 3));
///     // Each rank fills its rows; then all have all.
///     let own = Array2::from_elem((2, 3), comm.rank() as f32);
///     comm.all_gather(&own, &mut table)?;
///     assert_eq!(table[[3, 0]], 1.0);
///     comm.broadcast_in_place(&mut table.slice_mut(s![1..3, ..]), 0)?;
///     let column = comm.send(&table.column(0), 1 - comm.rank());
///     assert!(column.unwrap_err().to_string().contains("as_standard_layout"));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Of an operation: [`UsageError::Setting`] for a view with gaps or in another order, such as a column or a transposed array: nothing is
/// copied unasked. [`Strided`] copies it there and back; `as_standard_layout` copies what is only sent.
// SAFETY: the slice of an array in standard layout has all its elements; they are initialised and do not move while it is borrowed.
unsafe impl<T: Plain, S: Data<Elem = T>, D: Dimension> Source for ArrayBase<S, D> {
    type Elem = T;
    #[inline]
    fn dtype(&self) -> DType {
        T::dtype()
    }
    #[inline]
    fn len(&self) -> usize {
        ArrayBase::len(self)
    }
    #[inline]
    fn lend<'a>(&'a self, _stream: &'a Stream) -> Result<Loan<'a>> {
        let elements = self.as_slice().ok_or_else(|| not_standard(self))?;
        Ok(Loan::host(elements.as_ptr().cast_mut().cast()))
    }
}

// SAFETY: as above, and `&mut self` is exclusive.
unsafe impl<T: Plain, S: DataMut<Elem = T>, D: Dimension> Target for ArrayBase<S, D> {
    #[inline]
    fn lend_mut<'a>(&'a mut self, _stream: &'a Stream) -> Result<Loan<'a>> {
        match self.as_slice_mut() {
            Some(elements) => Ok(Loan::host(elements.as_mut_ptr().cast())),
            None => Err(not_standard(self)),
        }
    }
}

// SAFETY: the elements are on the heap.
unsafe impl<T: Plain, D: Dimension + Send + 'static> Owned for Array<T, D> {}

#[cold]
fn not_standard<S: Data, D: Dimension>(array: &ArrayBase<S, D>) -> Error {
    let value = format!("shape {:?} with strides {:?}", array.shape(), array.strides());
    let expected =
        "standard layout: row-major, without gaps; `phalanx::Strided` and `as_standard_layout` copy into it"
            .into();
    UsageError::Setting { name: "the layout of an array".into(), value, expected }.into()
}

/// A view with gaps or in another order, such as a column or a transposed array, as a buffer.
///
/// Its elements are copied into memory of its own in logical order when this is made, and back when it is dropped; after an operation
/// that failed they are unspecified. Operations use the copy. A view in standard layout is used as it is, and nothing is copied.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use ndarray::Array2;
/// use phalanx::Strided;
///
/// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
///     let mut table = Array2::from_elem((3, 4), comm.rank() as f32);
///     if comm.rank() == 0 {
///         comm.send(&table.column(1).as_standard_layout(), 1)?;
///     } else {
///         comm.recv(&mut Strided::new(table.column_mut(2)), 0)?;
///         assert_eq!((table[[2, 2]], table[[2, 1]]), (0.0, 1.0));
///     }
///     comm.all_reduce_in_place(&mut Strided::new(table.view_mut().reversed_axes()), phalanx::ReduceOp::Sum)?;
///     assert_eq!(table[[0, 0]], 1.0);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[doc(alias("MPI_Type_vector", "MPI_Type_indexed"))]
pub struct Strided<'v, T: Plain, D: Dimension> {
    view: ArrayViewMut<'v, T, D>,
    /// The copy, unless the view can be used.
    packed: Option<Array<T, D>>,
}

impl<'v, T: Plain, D: Dimension> Strided<'v, T, D> {
    /// Makes a buffer of a view.
    pub fn new(view: ArrayViewMut<'v, T, D>) -> Strided<'v, T, D> {
        let packed = (!view.is_standard_layout()).then(|| view.as_standard_layout().into_owned());
        Strided { view, packed }
    }
}

impl<T: Plain, D: Dimension> Drop for Strided<'_, T, D> {
    fn drop(&mut self) {
        if let Some(packed) = &self.packed {
            self.view.assign(packed);
        }
    }
}

// SAFETY: an array in standard layout.
unsafe impl<T: Plain, D: Dimension> Source for Strided<'_, T, D> {
    type Elem = T;
    fn dtype(&self) -> DType {
        T::dtype()
    }
    fn len(&self) -> usize {
        self.view.len()
    }
    fn lend<'a>(&'a self, stream: &'a Stream) -> Result<Loan<'a>> {
        match &self.packed {
            Some(packed) => packed.lend(stream),
            None => self.view.lend(stream),
        }
    }
}

// SAFETY: as above, and `&mut self` is exclusive.
unsafe impl<T: Plain, D: Dimension> Target for Strided<'_, T, D> {
    fn lend_mut<'a>(&'a mut self, stream: &'a Stream) -> Result<Loan<'a>> {
        match &mut self.packed {
            Some(packed) => packed.lend_mut(stream),
            None => self.view.lend_mut(stream),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Comm, ReduceOp};
    use ndarray::{Array3, s};

    #[test]
    fn elements_of_strided_views_travel_in_logical_order_and_others_stay() {
        let of_threads = Comm::builder().backend(crate::BackendKind::Host).run(2, |comm| {
            let cell = |(i, j, k): (usize, usize, usize)| (100 * i + 10 * j + k) as i64;
            let mut array = Array3::from_shape_fn((4, 3, 5), cell);
            let before = array.clone();
            // Every other plane, backwards, and with its axes in another order.
            let part = s![..;2, 1.., ..;-2];
            let view = array.slice_mut(part).permuted_axes([2, 0, 1]);
            comm.all_reduce_in_place(&mut Strided::new(view), ReduceOp::Sum).unwrap();
            let mut expected = before.clone();
            expected.slice_mut(part).mapv_inplace(|cell| 2 * cell);
            assert_eq!(array, expected);

            // The peer's plane, into a column of planes.
            let sent = before.slice(s![.., 0, ..]).reversed_axes().as_standard_layout().into_owned();
            let mut received = Array3::<i64>::zeros((2, 4, 5));
            let mut plane = Strided::new(received.slice_mut(s![1, .., ..]).reversed_axes());
            comm.group(|group| {
                group.send(&sent, 1 - comm.rank())?;
                group.recv(&mut plane, 1 - comm.rank())
            })
            .unwrap();
            drop(plane);
            assert_eq!(received.slice(s![1, .., ..]), before.slice(s![.., 0, ..]));
            assert!(received.slice(s![0, .., ..]).iter().all(|cell| *cell == 0));

            // Nothing is copied where nothing needs to be.
            assert!(Strided::new(array.slice_mut(s![1..3, .., ..])).packed.is_none());
        });
        of_threads.unwrap();
    }
}
