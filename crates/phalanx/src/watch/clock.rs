//! Timestamps of flight records: the processor's time stamp counter where it is reliable, else the system's
//! clock. Reading the counter takes a third of the time of reading the clock.
//!
//! Ticks are converted to nanoseconds of the monotonic clock when a record is written to a file, by linear
//! interpolation between two moments at which both were read.

/// A timestamp in ticks of this process's [`Clock`].
pub(crate) type Ticks = u64;

/// The source of timestamps on this machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    counter: bool,
}

/// A moment in ticks and in nanoseconds of the monotonic clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    pub ticks: Ticks,
    nanos: u64,
}

impl Clock {
    pub fn new() -> Clock {
        Clock { counter: counter::is_steady() }
    }

    #[inline(always)]
    pub fn now(self) -> Ticks {
        if self.counter { counter::read() } else { crate::os::monotonic_nanos() }
    }

    pub fn moment(self) -> Moment {
        if !self.counter {
            let nanos = crate::os::monotonic_nanos();
            return Moment { ticks: nanos, nanos };
        }
        // Take the narrowest of five tries: an interruption between the readings would shift all times.
        let tries = (0..5).map(|_| {
            let before = counter::read();
            let nanos = crate::os::monotonic_nanos();
            let after = counter::read();
            (after.wrapping_sub(before), Moment { ticks: before + after.wrapping_sub(before) / 2, nanos })
        });
        tries.min_by_key(|(width, _)| *width).expect("there are tries").1
    }
}

/// Converts ticks to nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    first: Moment,
    nanos_per_tick: f64,
}

impl Scale {
    pub fn between(first: Moment, last: Moment) -> Scale {
        let ticks = last.ticks.saturating_sub(first.ticks);
        let nanos = last.nanos.saturating_sub(first.nanos);
        let nanos_per_tick = if ticks == 0 { 1.0 } else { nanos as f64 / ticks as f64 };
        Scale { first, nanos_per_tick }
    }

    /// Length of a tick.
    #[cfg(feature = "metrics")]
    pub fn nanos_per_tick(&self) -> f64 {
        self.nanos_per_tick
    }

    /// Converts ticks to nanoseconds of the monotonic clock.
    pub fn nanos(&self, ticks: Ticks) -> u64 {
        let since = ticks as i128 - self.first.ticks as i128;
        let nanos = self.first.nanos as f64 + since as f64 * self.nanos_per_tick;
        nanos.max(0.0) as u64
    }
}

#[cfg(target_arch = "x86_64")]
mod counter {
    use std::arch::x86_64::{__cpuid, _rdtsc};

    /// Whether the counter has a constant rate ("invariant TSC"). Linux then uses it for its own clock too.
    pub fn is_steady() -> bool {
        const POWER: u32 = 0x8000_0007;
        #[allow(
            unused_unsafe,
            reason = "a safe function in newer compilers than the oldest that is supported"
        )]
        // SAFETY: every x86-64 processor has the instruction.
        let cpuid = |leaf| unsafe { __cpuid(leaf) };
        cpuid(0x8000_0000).eax >= POWER && cpuid(POWER).edx & (1 << 8) != 0
    }

    #[inline(always)]
    pub fn read() -> u64 {
        // SAFETY: every x86-64 processor has the instruction, and user programs may use it.
        unsafe { _rdtsc() }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod counter {
    pub fn is_steady() -> bool {
        false
    }

    pub fn read() -> u64 {
        unreachable!("not steady, so never read")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_the_time_that_has_passed() {
        let clock = Clock::new();
        let first = clock.moment();
        let (start, began) = (clock.now(), crate::os::monotonic_nanos());
        std::thread::sleep(std::time::Duration::from_millis(30));
        let (end, ended) = (clock.now(), crate::os::monotonic_nanos());
        let scale = Scale::between(first, clock.moment());
        assert!(scale.nanos(start).abs_diff(began) < 1_000_000);
        assert!(scale.nanos(end).abs_diff(ended) < 1_000_000);
    }
}
