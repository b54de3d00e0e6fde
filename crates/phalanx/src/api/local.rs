//! A reduction without communication.

use super::checks::same_len;
use crate::contract::{Call, Operation};
use crate::reduce::{Reducer, Targets};
use crate::types::dtype::Plain;
use crate::types::error::Result;
use crate::types::op::Reduction;

/// Combines two buffers of this rank, as a reduction over two ranks would: `b[i] = a[i] ∘ b[i]`. `MPI_Reduce_local`.
///
/// `a.len() == b.len()`. [`PreMulSum`](crate::PreMulSum) multiplies both by its factor.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// let (a, mut b) = ([1.5f32, -1.0], [2.0, 3.0]);
/// phalanx::reduce_local(&a, &mut b, phalanx::ReduceOp::Max)?;
/// assert_eq!(b, [2.0, 3.0]);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "MPI_Reduce_local")]
pub fn reduce_local<T: Plain>(a: &[T], b: &mut [T], op: impl Into<Reduction<T>>) -> Result<()> {
    same_len("reduce_local", "a", a.len(), b.len(), "as long as b")?;
    let call = Call::empty(Operation::AllReduce).reducing(op).of_type(T::dtype())?;
    let (source, target) = (a.as_ptr().cast::<u8>(), b.as_mut_ptr().cast::<u8>());
    let factors = [call.reduction.factor; 2];
    // SAFETY: both have `b.len()` elements of the call's type, and overlap only where the target is a source.
    unsafe { Reducer::of(&call).run(Targets::new(&[target], false), &[source, target], &factors, b.len()) };
    Ok(())
}
