//! [`Loan`]: a buffer's memory for the time that an operation uses it.

#[cfg(feature = "cuda")]
use super::cuda::Order;
use crate::types::memory::Span;
use std::marker::PhantomData;
#[cfg(feature = "cuda")]
use std::mem::ManuallyDrop;
#[cfg(feature = "_gpu")]
use std::num::NonZeroU64;

/// A buffer's memory, borrowed for one operation.
///
/// It is dropped when the operation has been enqueued. Later uses of the buffer, on any stream, are then ordered behind
/// the operation. [`Source::lend`](crate::Source::lend) and [`Target::lend_mut`](crate::Target::lend_mut) make it.
#[derive(Debug)]
pub struct Loan<'a> {
    span: Span,
    /// Number of the memory's registration with a communicator, if there is one.
    #[cfg(feature = "_gpu")]
    registration: Option<NonZeroU64>,
    #[cfg(feature = "cuda")]
    order: ManuallyDrop<Option<Order<'a>>>,
    buffer: PhantomData<&'a ()>,
}

#[cfg(feature = "cuda")]
impl Drop for Loan<'_> {
    // Inlined, so that the compiler sees that host memory has no order.
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
        Loan::of(Span::host(start))
    }

    #[inline(always)]
    fn of(span: Span) -> Loan<'a> {
        Loan {
            span,
            #[cfg(feature = "_gpu")]
            registration: None,
            #[cfg(feature = "cuda")]
            order: ManuallyDrop::new(None),
            buffer: PhantomData,
        }
    }

    /// Memory of a GPU.
    #[cfg(feature = "_gpu")]
    #[inline(always)]
    pub(crate) fn device(address: u64) -> Loan<'a> {
        Loan::of(Span::device(address))
    }

    /// This loan, which orders later users when it is dropped.
    #[cfg(feature = "cuda")]
    #[inline(always)]
    pub(crate) fn ordered(mut self, order: Option<Order<'a>>) -> Loan<'a> {
        *self.order = order;
        self
    }

    /// This loan with the number of the memory's registration.
    #[cfg(feature = "_gpu")]
    #[inline(always)]
    pub(crate) fn registered(mut self, number: Option<NonZeroU64>) -> Loan<'a> {
        self.registration = number;
        self
    }

    #[cfg(feature = "_gpu")]
    pub(crate) fn registration(&self) -> Option<NonZeroU64> {
        self.registration
    }

    /// The memory from so many bytes on.
    #[inline]
    pub(super) fn at(mut self, bytes: usize) -> Loan<'a> {
        self.span = self.span.at(bytes);
        self
    }

    #[inline]
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// Ends the loan of a complete operation: later uses need no ordering.
    #[cfg(feature = "cuda")]
    #[inline]
    pub(crate) fn give_back(mut self) {
        if let Some(order) = &mut *self.order {
            order.lift();
        }
    }
}
