//! Fetching lines while the first of them is awaited, so that the others need not be asked for one after the other.

use super::protocol::{LINE, StampedPair};

/// Has a line fetched. It may be any address.
#[inline(always)]
pub(super) fn prefetch(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch touches nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch(line.cast(), _MM_HINT_T0);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Has the second line of a pair fetched: who polls the first is not sent it for that.
#[inline(always)]
pub(super) fn second_of(pair: &StampedPair) {
    prefetch(pair.payload().wrapping_add(LINE));
}
