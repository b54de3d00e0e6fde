//! The error of a fit on points that it has not seen.

use super::fit::{Fit, Sample};
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

/// The errors of points that are left out part by part: those with one `part` are predicted from all others. Points with work that no
/// other has are not counted. `None` if that leaves none.
pub fn held_out<P: PartialEq + Copy>(samples: &[Sample], part: impl Fn(usize) -> P) -> Option<HeldOut> {
    let mut parts: Vec<P> = Vec::new();
    for part in (0..samples.len()).map(&part) {
        if !parts.contains(&part) {
            parts.push(part);
        }
    }
    let mut errors = Vec::new();
    for out in parts {
        let (left, seen): (Vec<usize>, Vec<usize>) =
            (0..samples.len()).partition(|&index| part(index) == out);
        let seen: Vec<Sample> = seen.into_iter().map(|index| samples[index]).collect();
        let Ok(fit) = Fit::new(&seen) else { continue };
        for sample in left.into_iter().map(|index| samples[index]) {
            if let Ok(planned) = fit.time(&sample.terms) {
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
    errors.sort_by(f64::total_cmp);
    let within =
        |part: f64| errors[((errors.len() as f64 * part).ceil() as usize).clamp(1, errors.len()) - 1];
    Some(HeldOut { points: errors.len(), median: within(0.5), p90: within(0.9) })
}

#[cfg(test)]
mod tests {
    use super::super::terms::{TERMS, Term};
    use super::*;

    /// Points of one kind of work, each a second.
    fn samples(times: &[f64]) -> Vec<Sample> {
        let mut terms = [0.0; TERMS];
        terms[Term::Call as usize] = 1.0;
        times.iter().map(|&time| Sample { terms, time }).collect()
    }

    #[test]
    fn errors_are_those_that_a_hand_finds() {
        // Seven points of 1 s and one of 2 s. Without the latter, all others say 1 s: half of it. With it, the median is still 1 s.
        let times = [1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0];
        let found = held_out(&samples(&times), |index| index).unwrap();
        assert_eq!(found.points, 8);
        assert!(found.median < 0.02, "{found:?}");
        assert!((found.p90 - 0.5).abs() < 0.02, "{found:?}");
        // In two parts: 1 s is predicted for the second, and 2 s for the first.
        let halves = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0];
        let found = held_out(&samples(&halves), |index| index / 6).unwrap();
        assert_eq!(found.points, 12);
        assert!((found.median - 0.5).abs() < 1e-6 && (found.p90 - 1.0).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn points_that_the_others_say_nothing_of_are_not_counted() {
        let mut samples = samples(&[1.0; 12]);
        for sample in &mut samples[6..] {
            sample.terms[Term::HostTurn as usize] = 1.0;
        }
        let found = held_out(&samples, |index| index / 6).unwrap();
        assert_eq!(found.points, 6, "the points with a turn are not predicted from those without");
        assert_eq!(held_out(&samples[..4], |index| index), None);
    }
}
