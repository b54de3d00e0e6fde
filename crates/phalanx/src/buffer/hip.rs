//! HIP's device memory as buffers.

use super::loan::Loan;
use super::stream::Stream;
use super::{Source, Target};
use crate::gpu::hip::{HipSource, HipTarget, Slice, Stream as HipStream, View, ViewMut};
use crate::types::dtype::{DType, Element};
use crate::types::error::{Result, UsageError};

/// The HIP stream of `stream`, or the error for another kind.
#[inline]
fn hip_stream(stream: &Stream) -> Result<&HipStream> {
    stream.hip_stream().ok_or_else(|| {
        UsageError::Memory {
            memory: "the memory of an AMD GPU".into(),
            wanted: if stream.is_host() {
                "host memory".into()
            } else {
                "the memory of an NVIDIA GPU".into()
            },
            remedy: "use a communicator of that GPU (Comm::gpu says which one it has), or copy the buffer",
        }
        .into()
    })
}

macro_rules! device_memory {
    ($($ty:ty),*) => {$(
        // SAFETY: device memory of `len` elements, borrowed until it is enqueued; the memory's next user waits for
        // the stream.
        unsafe impl<T: Element> Source for $ty {
            type Elem = T;
            #[inline]
            fn dtype(&self) -> DType {
                T::DTYPE
            }
            #[inline]
            fn len(&self) -> usize {
                <$ty>::len(self)
            }
            #[inline]
            fn lend<'l>(&'l self, stream: &'l Stream) -> Result<Loan<'l>> {
                let memory = HipSource::on(self, hip_stream(stream)?)?;
                Ok(Loan::device(memory.as_ptr() as u64))
            }
        }
    )*};
    (mut $($ty:ty),*) => {$(
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe impl<T: Element> Target for $ty {
            #[inline]
            fn lend_mut<'l>(&'l mut self, stream: &'l Stream) -> Result<Loan<'l>> {
                let memory = HipTarget::on_mut(self, hip_stream(stream)?)?;
                Ok(Loan::device(memory.as_ptr() as u64))
            }
        }
    )*};
}

device_memory! { Slice<T>, View<'_, T>, ViewMut<'_, T> }
device_memory! { mut Slice<T>, ViewMut<'_, T> }
