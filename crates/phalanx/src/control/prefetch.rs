//! Prefetching the second cache line of a stamped pair.

use super::flags::StampedPair;
use crate::os::{LINE, prefetch};

/// Prefetches the second line of a pair. Polling the first line does not bring the second.
#[inline(always)]
pub(crate) fn second_of(pair: &StampedPair) {
    prefetch(second_line(pair));
}

/// An address in the second line of a pair.
#[inline(always)]
pub(crate) fn second_line(pair: &StampedPair) -> *const u8 {
    pair.payload().wrapping_add(LINE)
}
