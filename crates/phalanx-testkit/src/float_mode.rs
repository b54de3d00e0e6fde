//! The floating-point mode of a thread: MXCSR of x86, FPCR of ARM.

use std::arch::asm;

/// Numbers too small to be normal are flushed to zero, in and out.
#[cfg(target_arch = "x86_64")]
pub const FAST: u64 = 0x1f80 | 1 << 15 | 1 << 6;
/// Numbers too small to be normal are flushed to zero, in and out.
#[cfg(target_arch = "aarch64")]
pub const FAST: u64 = 1 << 24;

/// This thread's mode, without what operations note in it.
#[must_use]
#[cfg(target_arch = "x86_64")]
pub fn mode() -> u64 {
    let mut mode = 0u32;
    // SAFETY: stores the register's four bytes in `mode`.
    unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack)) };
    u64::from(mode & !0x3f)
}

/// Sets this thread's mode, to one from [`mode`] or [`FAST`].
#[cfg(target_arch = "x86_64")]
pub fn set_mode(mode: u64) {
    let mode = mode as u32;
    // SAFETY: no reserved bit is set.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack)) };
}

/// This thread's mode.
#[must_use]
#[cfg(target_arch = "aarch64")]
pub fn mode() -> u64 {
    let mode: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, fpcr", out(reg) mode, options(nostack)) };
    mode
}

/// Sets this thread's mode, to one from [`mode`] or [`FAST`].
#[cfg(target_arch = "aarch64")]
pub fn set_mode(mode: u64) {
    // SAFETY: no reserved bit is set.
    unsafe { asm!("msr fpcr, {}", in(reg) mode, options(nostack)) };
}
