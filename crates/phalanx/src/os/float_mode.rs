//! The floating-point mode of a thread: rounding, and what becomes of numbers too small to be normal.
//!
//! Fast-math libraries set a thread to flush such numbers to zero. A rank in that mode would get other sums than its peers.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::arch::asm;

/// Runs `f` in the mode that Rust programs start in, IEEE 754's own, and then goes back to the thread's mode.
#[inline(always)]
pub(crate) fn in_standard_float_mode<R>(f: impl FnOnce() -> R) -> R {
    let mode = Mode::of_this_thread();
    let _restored = (!mode.is_standard()).then(|| {
        Mode::STANDARD.set();
        Restored(mode)
    });
    f()
}

/// Sets a mode when it is dropped.
struct Restored(Mode);

impl Drop for Restored {
    fn drop(&mut self) {
        self.0.set();
    }
}

/// The register that holds the mode: MXCSR of x86, FPCR of ARM. There is none to be known of elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mode(#[cfg(target_arch = "x86_64")] u32, #[cfg(target_arch = "aarch64")] u64);

#[cfg(target_arch = "x86_64")]
impl Mode {
    /// Every exception masked, to the nearest, nothing flushed.
    const STANDARD: Mode = Mode(0x1f80);

    /// Bits that operations set when they meet an exception.
    const FLAGS: u32 = 0x3f;

    #[inline(always)]
    fn of_this_thread() -> Mode {
        let mut mode = 0u32;
        // SAFETY: stores the register's four bytes in `mode`.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack, preserves_flags)) };
        Mode(mode)
    }

    #[inline(always)]
    fn is_standard(self) -> bool {
        self.0 & !Mode::FLAGS == Mode::STANDARD.0
    }

    #[cold]
    fn set(self) {
        // SAFETY: a value that the register had, or its value at the start of a program: no reserved bit is set.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const self.0, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
impl Mode {
    /// To the nearest, nothing flushed, no exception trapped.
    const STANDARD: Mode = Mode(0);

    #[inline(always)]
    fn of_this_thread() -> Mode {
        let mode: u64;
        // SAFETY: reads a register.
        unsafe { asm!("mrs {}, fpcr", out(reg) mode, options(nomem, nostack, preserves_flags)) };
        Mode(mode)
    }

    #[inline(always)]
    fn is_standard(self) -> bool {
        self == Mode::STANDARD
    }

    #[cold]
    fn set(self) {
        // SAFETY: a value that the register had, or its value at the start of a program. Memory is clobbered, so that no load or store of the
        // arithmetic moves past it.
        unsafe { asm!("msr fpcr, {}", in(reg) self.0, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
impl Mode {
    const STANDARD: Mode = Mode();

    fn of_this_thread() -> Mode {
        Mode()
    }

    fn is_standard(self) -> bool {
        true
    }

    fn set(self) {}
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// Flush to zero, denormals are zero, rounding up.
    const FAST: Mode = Mode(0x1f80 | 1 << 15 | 1 << 6 | 2 << 13);

    #[test]
    fn the_threads_mode_is_set_aside_and_comes_back() {
        let before = Mode::of_this_thread();
        FAST.set();
        let (tiny, inside) = in_standard_float_mode(|| {
            (std::hint::black_box(f32::MIN_POSITIVE) / std::hint::black_box(2.0), Mode::of_this_thread())
        });
        let after = Mode::of_this_thread();
        before.set();
        assert!(tiny > 0.0 && inside.is_standard());
        assert_eq!(after, FAST);
    }
}
