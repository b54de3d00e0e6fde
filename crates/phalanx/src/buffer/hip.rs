//! HIP's device memory as buffers.

use super::Source;
use super::Target;
use crate::types::dtype::Element;
use crate::types::error::Result;
use crate::types::error::UsageError;
use crate::gpu::hip::HipSource;
use crate::gpu::hip::HipTarget;
use crate::gpu::hip::Slice;
use crate::gpu::hip::Stream;
use crate::gpu::hip::View;
use crate::gpu::hip::ViewMut;
use super::stream::Lane;
use super::stream::Lent;

/// The lane's stream, if it is one of HIP.
#[inline]
fn stream(lane: &Lane) -> Result<&Stream> {
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
            fn lend<'l>(&'l self, lane: &'l Lane) -> Result<Lent<'l>> {
                let lent = HipSource::on(self, stream(lane)?)?;
                Ok(Lent::device(lent.as_ptr() as u64, None))
            }
        }
    )*};
    (mut $($ty:ty),*) => {$(
        // SAFETY: as above, and `&mut self` is exclusive.
        unsafe impl<T: Element> Target for $ty {
            #[inline]
            fn lend_mut<'l>(&'l mut self, lane: &'l Lane) -> Result<Lent<'l>> {
                let lent = HipTarget::on_mut(self, stream(lane)?)?;
                Ok(Lent::device(lent.as_ptr() as u64, None))
            }
        }
    )*};
}

device_memory! { Slice<T>, View<'_, T>, ViewMut<'_, T> }
device_memory! { mut Slice<T>, ViewMut<'_, T> }
