//! [`Loan`]: a buffer's memory for the time that an operation uses it.

#[cfg(feature = "cuda")]
use super::cuda::Order;
use crate::types::memory::Span;
use std::marker::PhantomData;
#[cfg(feature = "cuda")]
use std::mem::ManuallyDrop;
#[cfg(feature = "cuda")]
use std::num::NonZeroU64;

/// A buffer's memory, lent to an operation. When it is dropped, the operation has been enqueued: whoever uses
/// the buffer afterwards is ordered behind it.
#[derive(Debug)]
pub struct Loan<'a> {
    span: Span,
    /// Number of the memory's registration with a communicator, if it has one.
    #[cfg(feature = "cuda")]
    registration: Option<NonZeroU64>,
    #[cfg(feature = "cuda")]
    order: ManuallyDrop<Option<Order<'a>>>,
    buffer: PhantomData<&'a ()>,
}

#[cfg(feature = "cuda")]
impl Drop for Loan<'_> {
    // Host memory has none, and what says so is seen where this is inlined.
    #[inline(always)]
    fn drop(&mut self) {
        if self.order.is_some() {
            // SAFETY: it is not used again.
            unsafe { ManuallyDrop::drop(&mut self.order) };
        }
    }
}

impl<'a> Loan<'a> {
    /// Host memory.
    #[inline]
    pub fn host(start: *mut u8) -> Loan<'a> {
        Loan {
            span: Span::host(start),
            #[cfg(feature = "cuda")]
            registration: None,
            #[cfg(feature = "cuda")]
            order: ManuallyDrop::new(None),
            buffer: PhantomData,
        }
    }

    #[cfg(feature = "cuda")]
    #[inline(always)]
    pub(crate) fn device(address: u64, order: Option<Order<'a>>) -> Loan<'a> {
        Loan {
            span: Span::device(address),
            registration: None,
            order: ManuallyDrop::new(order),
            buffer: PhantomData,
        }
    }

    /// The same memory, which a communicator knows by this number.
    #[cfg(feature = "cuda")]
    #[inline(always)]
    pub(crate) fn registered(mut self, number: Option<NonZeroU64>) -> Loan<'a> {
        self.registration = number;
        self
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn registration(&self) -> Option<NonZeroU64> {
        self.registration
    }

    #[inline]
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// The operation is complete: nobody has to be ordered behind it.
    #[cfg(feature = "cuda")]
    #[inline]
    pub(crate) fn give_back(mut self) {
        if let Some(order) = &mut *self.order {
            order.lift();
        }
    }
}
