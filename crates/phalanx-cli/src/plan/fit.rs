//! The time of each kind of work, from measured points.
//!
//! The sum of relative errors is made least: a median time of 2 µs counts as much as one of 2 ms, and a few points that other programs
//! disturbed count little. Times are never negative.

use super::terms::{TERMS, Term, Terms};
use anyhow::{Result, bail, ensure};

/// A point as the fit sees it.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    pub terms: Terms,
    /// Seconds.
    pub time: f64,
}

/// The time of each kind of work in seconds; `None` where no point has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fit {
    pub times: [Option<f64>; TERMS],
}

/// Least squares in a row, each with weights by the last one's errors, which makes their sum least and not that of their squares.
const ROUNDS: usize = 30;
/// Points for each kind of work, at least.
const OF_A_TERM: usize = 2;
/// Kinds of work, for which points are needed at least.
const FEWEST: usize = 3;
/// Relative errors below this have the same weight: they are noise.
const NOISE: f64 = 0.02;
/// Passes over the times in a least-squares problem, at most.
const PASSES: usize = 20_000;

impl Fit {
    pub fn new(samples: &[Sample]) -> Result<Fit> {
        let known: Vec<usize> =
            (0..TERMS).filter(|&term| samples.iter().any(|sample| sample.terms[term] > 0.0)).collect();
        let needed = known.len().max(FEWEST) * OF_A_TERM;
        ensure!(
            samples.len() >= needed,
            "{} different points are too few: at least {needed} are needed, from runs of more sizes, operations and numbers of ranks",
            samples.len(),
        );
        let mut times = [0.0; TERMS];
        let mut weights = vec![1.0; samples.len()];
        for _ in 0..ROUNDS {
            least_squares(samples, &weights, &known, &mut times);
            for (weight, sample) in weights.iter_mut().zip(samples) {
                let time: f64 = times.iter().zip(sample.terms).map(|(time, number)| time * number).sum();
                *weight = 1.0 / (time / sample.time - 1.0).abs().max(NOISE);
            }
        }
        Ok(Fit { times: std::array::from_fn(|term| known.contains(&term).then_some(times[term])) })
    }

    /// The same, in which the latency of ranks that share cores stands in for that of ranks that do not, and the reverse, where there is
    /// only one.
    pub fn with_substitutes(self) -> Fit {
        let time = |term: Term| self.times[term as usize];
        let substitute = |term: Term| term.substitute().and_then(time);
        Fit { times: Term::ALL.map(|term| time(term).or(substitute(term))) }
    }

    /// The time of each kind of work of an operation, in seconds.
    pub fn parts(&self, terms: &Terms) -> Result<Terms> {
        let mut parts = [0.0; TERMS];
        for term in Term::ALL.into_iter().filter(|term| terms[*term as usize] > 0.0) {
            let Some(time) = self.times[term as usize] else {
                bail!("no run has {}: their time is not known", term.words());
            };
            parts[term as usize] = terms[term as usize] * time;
        }
        Ok(parts)
    }

    /// The time of an operation, in seconds.
    pub fn time(&self, terms: &Terms) -> Result<f64> {
        Ok(self.parts(terms)?.iter().sum())
    }
}

/// Times, none negative, for which the weighted squares of the relative errors are least: one time after the other is set to its best
/// value, until none moves.
fn least_squares(samples: &[Sample], weights: &[f64], known: &[usize], times: &mut Terms) {
    let mut products = [[0.0; TERMS]; TERMS];
    let mut targets = [0.0; TERMS];
    for (sample, weight) in samples.iter().zip(weights) {
        let relative = sample.terms.map(|number| number / sample.time);
        for &i in known {
            targets[i] += weight * relative[i];
            for &j in known {
                products[i][j] += weight * relative[i] * relative[j];
            }
        }
    }
    // Columns are scaled to one length: bytes are millions, waits are few.
    let length: Terms = std::array::from_fn(|i| products[i][i].sqrt());
    let mut scaled: Terms = std::array::from_fn(|i| times[i] * length[i]);
    for _ in 0..PASSES {
        let mut moved: f64 = 0.0;
        for &i in known {
            let others = known.iter().filter(|&&j| j != i);
            let pull: f64 = others.map(|&j| products[i][j] / (length[i] * length[j]) * scaled[j]).sum();
            let best = (targets[i] / length[i] - pull).max(0.0);
            moved = moved.max((best - scaled[i]).abs());
            scaled[i] = best;
        }
        if moved < 1e-10 {
            break;
        }
    }
    known.iter().for_each(|&i| times[i] = scaled[i] / length[i]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Points of which each has some of these kinds of work, with these times.
    pub fn synthetic(times: &[(Term, f64)]) -> Vec<Sample> {
        let sample = |seed: usize| {
            let mut terms = [0.0; TERMS];
            for (place, (term, _)) in times.iter().enumerate() {
                // Numbers without a pattern, from 0 to 96, and bytes in thousands.
                let number = (seed * 37 + place * 53 + seed * seed * (place + 3)) % 97;
                terms[*term as usize] =
                    (number * if (*term as usize).is_multiple_of(2) { 1 } else { 1000 }) as f64;
            }
            terms[Term::Call as usize] = 1.0;
            let time = times.iter().map(|(term, time)| terms[*term as usize] * time).sum();
            Sample { terms, time }
        };
        (1..60).map(sample).collect()
    }

    const TIMES: [(Term, f64); 5] = [
        (Term::Call, 2e-7),
        (Term::Copied, 1e-10),
        (Term::HostWait, 3e-7),
        (Term::HostByte, 2e-10),
        (Term::SwitchMessage, 6e-6),
    ];

    #[test]
    fn the_constants_of_synthetic_points_come_back() {
        let fit = Fit::new(&synthetic(&TIMES)).unwrap();
        for term in Term::ALL {
            let known = TIMES.iter().find(|(known, _)| *known == term).map(|(_, time)| *time);
            let found = fit.times[term as usize];
            match known {
                None => assert_eq!(found, None, "{term:?}"),
                Some(time) => {
                    assert!((found.unwrap() / time - 1.0).abs() < 1e-3, "{term:?}: {found:?}, not {time}")
                }
            }
        }
    }

    #[test]
    fn a_few_disturbed_points_do_not_move_the_others() {
        let undisturbed = synthetic(&TIMES);
        let mut samples = undisturbed.clone();
        for disturbed in [3, 20, 41] {
            samples[disturbed].time *= 50.0;
        }
        let fit = Fit::new(&samples).unwrap();
        for sample in undisturbed {
            let ratio = fit.time(&sample.terms).unwrap() / sample.time;
            assert!((ratio - 1.0).abs() < 0.05, "{ratio}: {sample:?}");
        }
    }

    #[test]
    fn too_few_points_are_refused_with_the_number_needed() {
        let error = Fit::new(&synthetic(&TIMES)[..9]).unwrap_err().to_string();
        assert!(error.contains("9 different points") && error.contains("at least 10"), "{error}");
        assert!(Fit::new(&[]).unwrap_err().to_string().contains("at least 6"));
    }

    #[test]
    fn work_that_no_run_has_is_named() {
        let fit = Fit::new(&synthetic(&TIMES)).unwrap();
        let mut terms = [0.0; TERMS];
        terms[Term::SwitchByte as usize] = 1.0;
        let error = fit.time(&terms).unwrap_err().to_string();
        assert_eq!(error, "no run has bytes between hosts: their time is not known");
        // A latency stands in for the other one.
        terms = [0.0; TERMS];
        terms[Term::HostTurn as usize] = 2.0;
        assert!(fit.time(&terms).is_err());
        let found = fit.with_substitutes().time(&terms).unwrap();
        assert!((found / 6e-7 - 1.0).abs() < 1e-3, "{found}");
    }
}
