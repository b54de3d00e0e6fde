//! The smallest and the largest element with its place.

use super::arithmetic::Number;
use super::custom::Custom;
use crate::types::dtype::{Element, with_element};
use crate::types::locate::{Locate, Located};
use crate::types::op::{CombineInOrder, Reduction, ReductionCode, element_bits, element_from_bits};
use std::cmp::Ordering;
use std::marker::PhantomData;

/// Combines `Located<T>`; `LARGEST` or smallest.
struct Extremum<T, const LARGEST: bool>(PhantomData<fn(T)>);

impl<T: Element, const LARGEST: bool> CombineInOrder for Extremum<T, LARGEST> {
    unsafe fn combine(&self, targets: [&[*mut u8]; 2], sources: &[*const u8], count: usize) {
        // SAFETY: the caller's contract.
        unsafe { Custom::new(chosen::<T, LARGEST>).combine(targets, sources, count) }
    }
}

/// The one of two that stays. A NaN wins over numbers, as in `ReduceOp::Min`; of equals, the one with the lower place.
#[inline(always)]
fn chosen<T: Element, const LARGEST: bool>(a: &Located<T>, b: &Located<T>) -> Located<T> {
    let order = match compare(a.value, b.value) {
        Some(order) if LARGEST => order.reverse(),
        Some(order) => order,
        None => is_nan(b.value).cmp(&is_nan(a.value)),
    };
    if order.then(a.place().cmp(&b.place())) == Ordering::Greater { *b } else { *a }
}

/// As accumulators are compared: to the crate of 8-bit floats, some NaN are numbers.
#[inline(always)]
fn compare<T: Element>(a: T, b: T) -> Option<Ordering> {
    with_element!(T::DTYPE, N => {
        let [a, b] = [a, b].map(|value| element_from_bits::<N>(element_bits(value)).acc());
        a.partial_cmp(&b)
    })
}

#[inline(always)]
fn is_nan<T: Element>(value: T) -> bool {
    compare(value, value).is_none()
}

impl<T: Element> From<Locate> for Reduction<Located<T>> {
    fn from(locate: Locate) -> Self {
        match locate {
            Locate::Min => Reduction::by(ReductionCode::LocateMin, &Extremum::<T, false>(PhantomData)),
            Locate::Max => Reduction::by(ReductionCode::LocateMax, &Extremum::<T, true>(PhantomData)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::dtype::{F8E4M3, F8E5M2, bf16, f16};

    fn check<T: Element>([nan, zero, minus_zero, one]: [T; 4]) {
        let found = |a, b| {
            let (smallest, largest) = (chosen::<T, false>(&a, &b), chosen::<T, true>(&a, &b));
            [smallest.place(), largest.place()]
        };
        let at = Located::new;
        for (a, b, expected) in [
            (at(zero, 5), at(one, 3), [5, 3]),
            (at(one, 5), at(zero, 3), [3, 5]),
            (at(one, 5), at(one, 3), [3, 3]),
            (at(zero, 3), at(minus_zero, 5), [3, 3]),
            (at(minus_zero, 3), at(zero, 5), [3, 3]),
            (at(nan, 5), at(one, 3), [5, 5]),
            (at(one, 3), at(nan, 5), [5, 5]),
            (at(nan, 5), at(nan, 3), [3, 3]),
        ] {
            assert_eq!(found(a, b), expected, "{}: {a:?}, {b:?}", T::DTYPE);
        }
    }

    #[test]
    fn a_nan_wins_and_then_the_lowest_place() {
        check([f32::NAN, 0.0, -0.0, 1.0]);
        check([f64::NAN, 0.0, -0.0, 1.0]);
        check([f16::NAN, f16::ZERO, f16::NEG_ZERO, f16::ONE]);
        check([bf16::NAN, bf16::ZERO, bf16::NEG_ZERO, bf16::ONE]);
        check([0x7f, 0, 0x80, 0x38].map(F8E4M3::from_bits));
        for nan in [0x7d, 0x7e, 0x7f, 0xff] {
            check([nan, 0, 0x80, 0x3c].map(F8E5M2::from_bits));
        }
    }
}
