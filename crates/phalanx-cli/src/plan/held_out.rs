//! The error of a fit on points that it has not seen.

use super::fit::{Fit, Sample, quantile};
use serde::Serialize;

/// Relative errors: |planned − measured| / measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HeldOut {
    /// Points that were predicted.
    pub points: usize,
    pub median: f64,
    /// Nine of ten points are within this.
    pub p90: f64,
}

/// Parts of the points, of which each in turn is left out.
pub const PARTS: usize = 5;

/// The errors of points that are left out part by part: those whose `part` is the same are predicted from all others. `None` if that
/// leaves too few.
pub fn held_out<P: PartialEq + Copy>(samples: &[Sample], part: impl Fn(usize) -> P) -> Option<HeldOut> {
    let mut parts: Vec<P> = Vec::new();
    for part in (0..samples.len()).map(&part) {
        if !parts.contains(&part) {
            parts.push(part);
        }
    }
    let mut errors = Vec::new();
    for out in parts {
        let (left, seen): (Vec<usize>, Vec<usize>) = (0..samples.len()).partition(|&index| part(index) == out);
        let seen: Vec<Sample> = seen.into_iter().map(|index| samples[index]).collect();
        let Ok(fit) = Fit::new(&seen) else { continue };
        for sample in left.into_iter().map(|index| samples[index]) {
            if let Ok(planned) = fit.time(&sample.terms, sample.algorithm) {
                errors.push((planned / sample.time - 1.0).abs());
            }
        }
    }
    summary(&mut errors)
}

fn summary(errors: &mut [f64]) -> Option<HeldOut> {
    if errors.is_empty() {
        return None;
    }
    Some(HeldOut { points: errors.len(), median: quantile(errors, 0.5), p90: quantile(errors, 0.9) })
}
