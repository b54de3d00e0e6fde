//! [`Unchecked`]: the bytes of a type for which not all bytes are valid.

use super::error::Result;
use super::object_error::ObjectError;
use bytemuck::{CheckedBitPattern, NoUninit, Pod, Zeroable};
use std::any::type_name;
use std::fmt;
use std::mem::MaybeUninit;

/// The bytes of a `bool`, a `char`, or an enum without fields: not all bytes are one of these, so what arrives is checked before it is
/// used. [`Plain`](crate::Plain), as long as `T`.
///
/// For any type that is `bytemuck::NoUninit` and `bytemuck::CheckedBitPattern`, which can be derived. It is `bytemuck::Pod`: a struct with a
/// flag has it as a field.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::Unchecked;
///
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     let own = [comm.rank() == 1, true];
///     let mut all = [Unchecked::new(false); 6];
///     comm.all_gather(Unchecked::of(&own), &mut all)?;
///     assert_eq!(Unchecked::check(&all)?, [false, true, true, true, false, true]);
///
///     let letter = comm.broadcast_value(Unchecked::new('ä'), 0)?.get()?;
///     assert_eq!(letter, 'ä');
///
///     #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
///     #[repr(C)]
///     struct Task {
///         number: u8,
///         is_last: Unchecked<bool>,
///     }
///     let task = comm.broadcast_value(Task { number: 7, is_last: true.into() }, 0)?;
///     assert!(task.is_last.get()?);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Unchecked<T: Copy>(
    /// Always initialised, but perhaps no valid `T`.
    MaybeUninit<T>,
);

// SAFETY: zeros are bytes.
unsafe impl<T: CheckedBitPattern> Zeroable for Unchecked<T> {}
// SAFETY: any bytes are valid, since none is read as a `T` before it was checked. They are all initialised, and without interior
// mutability: the layout is that of `T`, which is `NoUninit`, and there is a value or bytes from the beginning.
unsafe impl<T: CheckedBitPattern + NoUninit + 'static> Pod for Unchecked<T> {}

impl<T: CheckedBitPattern + NoUninit + 'static> Unchecked<T> {
    /// The bytes of a value.
    pub const fn new(value: T) -> Unchecked<T> {
        Unchecked(MaybeUninit::new(value))
    }

    /// The bytes of values, without a copy.
    pub fn of(values: &[T]) -> &[Unchecked<T>] {
        bytemuck::cast_slice(values)
    }

    /// The value.
    ///
    /// # Errors
    /// [`ObjectError::Bytes`] if the bytes are no `T`.
    pub fn get(self) -> Result<T> {
        Unchecked::check(&[self]).map(|values| values[0])
    }

    /// The values, without a copy.
    ///
    /// # Errors
    /// [`ObjectError::Bytes`] if the bytes of an element are no `T`. It names the first one.
    pub fn check(all: &[Unchecked<T>]) -> Result<&[T]> {
        bytemuck::checked::try_cast_slice(all).map_err(|_| {
            let is_invalid = |element: &Unchecked<T>| !element.is_valid();
            let index = all.iter().position(is_invalid).unwrap_or(0);
            let bytes = bytemuck::bytes_of(&all[index]).to_vec();
            ObjectError::Bytes { type_name: type_name::<T>(), index, bytes }.into()
        })
    }

    fn is_valid(&self) -> bool {
        bytemuck::checked::try_pod_read_unaligned::<T>(bytemuck::bytes_of(self)).is_ok()
    }
}

impl<T: CheckedBitPattern + NoUninit + 'static> From<T> for Unchecked<T> {
    fn from(value: T) -> Unchecked<T> {
        Unchecked::new(value)
    }
}

impl<T: CheckedBitPattern + NoUninit + fmt::Debug + 'static> fmt::Debug for Unchecked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.get() {
            Ok(value) => value.fmt(f),
            Err(_) => write!(f, "{:02x?}", bytemuck::bytes_of(self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_value_are_an_error_that_names_them() {
        let bytes: &[Unchecked<bool>] = bytemuck::cast_slice(&[1u8, 0, 2]);
        assert_eq!(Unchecked::check(&bytes[..2]).unwrap(), [true, false]);
        let error = Unchecked::check(bytes).unwrap_err().to_string();
        assert_eq!(error, "element 2 is no bool: its bytes are [02]");
        assert_eq!(format!("{bytes:?}"), "[true, false, [02]]");

        let surrogate: Unchecked<char> = bytemuck::cast(0xd800u32);
        assert!(surrogate.get().unwrap_err().to_string().contains("no char"));
        assert_eq!(Unchecked::new('ß').get().unwrap(), 'ß');
    }
}
