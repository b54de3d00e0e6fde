//! Symmetric memory as kernels of this PE can load and store it: a peer's part, or all parts of a team at
//! once.

use super::memory::bounds;
#[cfg(feature = "jit")]
use crate::jit::Argument;
use crate::types::dtype::Element;
use cudarc::driver::sys::CUdeviceptr;
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;

macro_rules! view {
    ($(#[$text:meta])* $name:ident) => {
        $(#[$text])*
        #[derive(Clone, Copy)]
        pub struct $name<'a, T: Element> {
            start: CUdeviceptr,
            len: usize,
            memory: PhantomData<&'a T>,
        }

        impl<'a, T: Element> $name<'a, T> {
            pub(crate) fn new(start: CUdeviceptr, len: usize) -> Self {
                $name { start, len, memory: PhantomData }
            }

            /// Number of elements.
            pub fn len(&self) -> usize {
                self.len
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// The address in this process, for kernels. It is no symmetric one.
            pub fn device_ptr(&self) -> CUdeviceptr {
                self.start
            }

            /// A part of it. As with slices of Rust, a range that is out of bounds is a panic.
            pub fn slice(&self, range: impl RangeBounds<usize>) -> $name<'a, T> {
                let (from, to) = bounds(range, self.len);
                $name::new(self.start + (from * size_of::<T>()) as u64, to - from)
            }
        }

        #[cfg(feature = "jit")]
        impl<'l, T: Element> From<&'l $name<'_, T>> for Argument<'l> {
            /// The address, as the kernel's parameter. It implies no order: other users of the memory are not
            /// known here.
            fn from(view: &'l $name<'_, T>) -> Argument<'l> {
                crate::jit::value(&view.start)
            }
        }

        impl<T: Element> fmt::Debug for $name<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(concat!("nvshmem::", stringify!($name)))
                    .field("dtype", &T::DTYPE)
                    .field("len", &self.len)
                    .field("start", &format_args!("{:#x}", self.start))
                    .finish()
            }
        }
    };
}

view! {
    /// Another PE's part of symmetric memory, which kernels of this PE can load from and store to.
    ///
    /// It lives no longer than the memory:
    /// ```compile_fail,E0505
    /// # fn f(memory: phalanx::nvshmem::Symmetric<'_, f32>) -> phalanx::Result<()> {
    /// let peer = memory.peer(1)?.expect("reached");
    /// memory.free()?;
    /// println!("{}", peer.len());
    /// # Ok(())
    /// # }
    /// ```
    Peer
}

view! {
    /// All parts of symmetric memory that a team's PEs have, at one address (NVLink multicast): what kernels
    /// store there (`multimem.st`) comes to all of them, and what they load (`multimem.ld_reduce`) is
    /// combined from all of them. It lives no longer than the memory.
    Multicast
}
