//! Numbers as bytes, and back.

use crate::device::Number;
use phalanx::DType;
use safetensors::Dtype;

#[cfg(target_endian = "big")]
compile_error!("files of checkpoints are little-endian, and numbers are written as they are in memory");

/// The name of a type in files.
pub(super) fn dtype<T: Number>() -> Dtype {
    match T::DTYPE {
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
        _ => Dtype::F32,
    }
}

/// Bytes of an element.
pub(super) fn size(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// Numbers of any type, to be written.
pub(super) trait Bytes: Send {
    fn bytes(&self) -> &[u8];
}

impl<T: Number> Bytes for Vec<T> {
    fn bytes(&self) -> &[u8] {
        // SAFETY: an `Element` has no padding: all bytes of the vector are initialised.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), std::mem::size_of_val(&self[..])) }
    }
}

/// The bytes of numbers, for writing.
pub(crate) fn bytes_mut<T: Number>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: an `Element` has no padding, and every bit pattern of one is valid.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), std::mem::size_of_val(numbers)) }
}
