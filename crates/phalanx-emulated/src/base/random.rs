//! Choices and delays from a seed (SplitMix64).

use super::settings::settings;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A sequence of random choices.
#[derive(Debug)]
pub struct Random(AtomicU64);

impl Random {
    /// The sequence with this number under `EMULATED_SEED`.
    pub fn new(number: u64) -> Random {
        Random(AtomicU64::new(mix(settings().seed ^ mix(number))))
    }

    /// The next 64 bits.
    pub fn next(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        mix(self.0.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP))
    }

    /// A number below `limit`.
    pub fn below(&self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// `true` with this probability.
    pub fn chance(&self, probability: f64) -> bool {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64 <= probability && probability > 0.0
    }

    /// Sleeps for a time in the range of `EMULATED_DELAY_US`. About half of the sleeps are the shortest, so
    /// that tests meet both outcomes of a race.
    pub fn delay(&self) {
        let (least, most) = settings().delay_us;
        let extra = if self.chance(0.5) { self.below((most - least) as usize + 1) as u64 } else { 0 };
        if least + extra > 0 {
            std::thread::sleep(Duration::from_micros(least + extra));
        }
    }
}

/// SplitMix64's mixing of 64 bits.
pub fn mix(bits: u64) -> u64 {
    let z = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The sequence of choices that belong to no object.
pub fn shared() -> &'static Random {
    static SHARED: std::sync::OnceLock<Random> = std::sync::OnceLock::new();
    SHARED.get_or_init(|| Random::new(u64::from(std::process::id())))
}
