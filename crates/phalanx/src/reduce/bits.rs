//! Operations on the bits of integers, and on their truth: whether they are 0.

use super::arithmetic::{Arithmetic, Combine, Number};
use std::marker::PhantomData;
use std::ops::{BitAnd, BitOr, BitXor};

/// An unsigned integer that stands for all elements of its size.
pub(crate) trait BitElement:
    Number + Arithmetic + From<bool> + BitAnd<Output = Self> + BitOr<Output = Self> + BitXor<Output = Self>
{
}

impl BitElement for u8 {}
impl BitElement for u16 {}
impl BitElement for u32 {}
impl BitElement for u64 {}

macro_rules! on_bits {
    ($($name:ident: $method:ident;)*) => {$(
        pub(crate) struct $name;
        impl<T: BitElement> Combine<T> for $name {
            type Acc = T;
            #[inline(always)]
            fn widen(x: T) -> T {
                x
            }
            #[inline(always)]
            fn combine(acc: T, x: T) -> T {
                acc.$method(x)
            }
            #[inline(always)]
            fn finish(acc: T, _ranks: usize) -> T {
                acc
            }
        }
    )*};
}
on_bits! { And: bitand; Or: bitor; Xor: bitxor; }

/// The same of truth: every element becomes 1 if it is not 0, so that the result is 0 or 1.
pub(crate) struct Truth<C>(PhantomData<C>);

impl<T: BitElement, C: Combine<T, Acc = T>> Combine<T> for Truth<C> {
    type Acc = T;
    #[inline(always)]
    fn widen(x: T) -> T {
        T::from(x != T::default())
    }
    #[inline(always)]
    fn combine(acc: T, x: T) -> T {
        C::combine(acc, x)
    }
    #[inline(always)]
    fn finish(acc: T, ranks: usize) -> T {
        C::finish(acc, ranks)
    }
}
