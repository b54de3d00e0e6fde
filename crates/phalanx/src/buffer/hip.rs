//! HIP's device memory as buffers.

use super::stream::{Loan, Stream};
use super::{Source, Target};
use crate::gpu::hip::{HipSource, HipTarget, Slice, Stream as HipStream, View, ViewMut};
use crate::types::dtype::Element;
use crate::types::error::{Result, UsageError};

/// The lane's stream, if it is one of HIP.
#[inline]
fn stream(lane: &Stream) -> Result<&HipStream> {
    lane.hip_stream().ok_or_else(|| {
        UsageError::Memory {
            memory: "the memory of an AMD GPU".into(),
            wanted: if lane.is_host() { "host memory".into() } else { "the memory of an NVIDIA GPU".into() },
            remedy: "use a communicator of that GPU (Comm::gpu says which one it has), or copy the buffer",
        }
        .into()
    })
}

macro_rules! device_memory {
    ($($ty:ty),*) => {$(
        // SAFETY: device memory of `len` elements, borrowed until it is enqueued; the memory's next user is put behind
        // the lane's stream.
        unsafe impl<T: Element> Source for $ty {
            type Elem = T;
            #[inline]
            fn len(&self) -> usize {
                <$ty>::len(self)
            }
            #[inline]
            fn lend<'l>(&'l self, lane: &'l Stream) -> Result<Loan<'l>> {
                let lent = HipSource::on(self, stream(lane)?)?;
                Ok(Loan::device(lent.as_ptr() as u64, None))
            }
        }
    )*};
    (mut $($ty:ty),*) => {$(
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe impl<T: Element> Target for $ty {
            #[inline]
            fn lend_mut<'l>(&'l mut self, lane: &'l Stream) -> Result<Loan<'l>> {
                let lent = HipTarget::on_mut(self, stream(lane)?)?;
                Ok(Loan::device(lent.as_ptr() as u64, None))
            }
        }
    )*};
}

device_memory! { Slice<T>, View<'_, T>, ViewMut<'_, T> }
device_memory! { mut Slice<T>, ViewMut<'_, T> }
