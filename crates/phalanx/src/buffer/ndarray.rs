//! Arrays and views of ndarray as buffers: their elements in logical order, without a copy.

use super::loan::Loan;
use super::stream::Stream;
use super::{Owned, Source, Target};
use crate::types::dtype::{DType, Plain};
use crate::types::error::{Error, Result, UsageError};
use ndarray::{Array, ArrayBase, Data, DataMut, Dimension};

/// An array or a view in standard layout (row-major, without gaps).
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use ndarray::{Array2, s};
///
/// phalanx::run(2, |comm| -> phalanx::Result<()> {
///     let mut table = Array2::<f32>::zeros((4, 3));
///     // Each rank fills its rows; then all have all.
///     let own = Array2::from_elem((2, 3), comm.rank() as f32);
///     comm.all_gather(&own, &mut table)?;
///     assert_eq!(table[[3, 0]], 1.0);
///     comm.broadcast_in_place(&mut table.slice_mut(s![1..3, ..]), 0)?;
///     let column = comm.send(&table.column(0), 1 - comm.rank());
///     assert!(column.unwrap_err().to_string().contains("as_standard_layout"));
///     Ok(())
/// })?
/// .into_iter()
/// .collect()
/// # }
/// ```
///
/// # Errors
/// Of an operation: [`UsageError::Setting`] for a view with gaps or in another order, such as a column or a transposed array.
/// `as_standard_layout` copies it.
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
    let expected = "standard layout: row-major, without gaps; `as_standard_layout` makes a copy in it".into();
    UsageError::Setting { name: "the layout of an array".into(), value, expected }.into()
}
