//! [`Located`]: a value and its place; [`Locate`]: which of them a reduction looks for.

use super::dtype::Element;
use bytemuck::{AnyBitPattern, NoUninit, Zeroable};
use std::fmt;

/// A value and the place where it is: a rank, an index, or what else the program numbers. For [`Locate`].
///
/// `size_of::<T>() + 8` bytes, without padding.
#[derive(Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub struct Located<T> {
    /// The value.
    pub value: T,
    /// As bytes, so that no type needs padding.
    place: [u8; 8],
}

impl<T> Located<T> {
    /// A value at a place.
    pub const fn new(value: T, place: u64) -> Located<T> {
        Located { value, place: place.to_ne_bytes() }
    }

    /// The place.
    pub const fn place(&self) -> u64 {
        u64::from_ne_bytes(self.place)
    }
}

// SAFETY: zeros are valid for both fields.
unsafe impl<T: Element> Zeroable for Located<T> {}
// SAFETY: any bytes are valid for both fields, and an `Element` is `'static`.
unsafe impl<T: Element> AnyBitPattern for Located<T> {}
// SAFETY: both fields have none. The size of an `Element` is 1, 2, 4 or 8 bytes and a multiple of its alignment, so 8 bytes follow it
// and end the struct without padding.
unsafe impl<T: Element> NoUninit for Located<T> {}

const _: () = assert!(size_of::<Located<u8>>() == 9 && size_of::<Located<f32>>() == 12);

impl<T: fmt::Debug> fmt::Debug for Located<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {}", self.value, self.place())
    }
}

/// The smallest or largest of [`Located`] values, with its place. `MPI_MINLOC`, `MPI_MAXLOC`.
///
/// Equal values: the one with the lowest place. A NaN is the result wherever there is one, as in [`ReduceOp::Min`](crate::ReduceOp::Min)
/// and `Max`: the one with the lowest place. Host memory only, on every backend; MPI gathers the contributions, as for a closure.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::{Locate, Located};
///
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     let loss = [0.3, 0.9, 0.5][comm.rank()];
///     let worst = comm.all_reduce_value(Located::new(loss, comm.rank() as u64), Locate::Max)?;
///     assert_eq!((worst.value, worst.place()), (0.9, 1));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Locate {
    /// The smallest.
    Min,
    /// The largest.
    Max,
}
