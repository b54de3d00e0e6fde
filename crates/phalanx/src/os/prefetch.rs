//! Prefetching cache lines, so that several are loaded at once.

use super::LINE;

/// Bytes to prefetch explicitly; the processor's own prefetcher loads the rest.
const MOST: usize = 8 * LINE;

/// Prefetches a cache line. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch touches nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch(line.cast(), _MM_HINT_T0);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Prefetches the first lines of `len` bytes.
#[inline(always)]
pub(crate) fn first_lines(bytes: *const u8, len: usize) {
    (0..len.min(MOST)).step_by(LINE).for_each(|at| prefetch(bytes.wrapping_add(at)));
}
