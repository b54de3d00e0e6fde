//! The time of each kind of work, from measured points.
//!
//! The sum of relative errors is made least: a median time of 2 µs counts as much as one of 2 ms, and a few points that other programs
//! disturbed count little. Times are never negative. What the points of one algorithm take more or less than that is its factor.

use super::terms::{TERMS, Term, Terms};
use anyhow::{Result, bail, ensure};
use std::collections::BTreeMap;

/// A point as the fit sees it.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    pub terms: Terms,
    pub algorithm: &'static str,
    /// Seconds.
    pub time: f64,
}

/// The fitted times.
#[derive(Debug, Clone)]
pub struct Fit {
    /// Seconds; `None` where no point has this work.
    pub times: [Option<f64>; TERMS],
    /// The measured time of an algorithm divided by that of its work.
    pub factors: BTreeMap<&'static str, f64>,
}

/// Fits in a row, each with the last one's factors and weights.
const ROUNDS: usize = 30;
/// Points of an algorithm, at least, from which it gets a factor.
const OF_AN_ALGORITHM: usize = 4;
/// Points for each kind of work, at least.
const OF_A_TERM: usize = 2;
/// Relative errors below this have the same weight: they are noise.
const NOISE: f64 = 0.02;

impl Fit {
    pub fn new(samples: &[Sample]) -> Result<Fit> {
        let known: Vec<usize> =
            (0..TERMS).filter(|&term| samples.iter().any(|sample| sample.terms[term] > 0.0)).collect();
        let needed = known.len().max(3) * OF_A_TERM;
        ensure!(
            samples.len() >= needed,
            "{} points are too few for {} constants: save runs of more sizes, operations and numbers of ranks, at least {needed} points",
            samples.len(),
            known.len()
        );
        let mut times = [0.0; TERMS];
        let mut factors = BTreeMap::new();
        let mut weights = vec![1.0; samples.len()];
        for round in 0..ROUNDS {
            least_squares(samples, &factors, &weights, &known, &mut times);
            let ratios: Vec<f64> = samples.iter().map(|sample| sample.time / sum(&times, &sample.terms)).collect();
            // The first rounds find times that hold for all algorithms.
            if round >= ROUNDS / 3 {
                factors = factors_of(samples, &ratios);
            }
            for ((weight, ratio), sample) in weights.iter_mut().zip(&ratios).zip(samples) {
                let error = (factor(&factors, sample.algorithm) / ratio - 1.0).abs();
                *weight = 1.0 / error.max(NOISE);
            }
        }
        let times = std::array::from_fn(|term| known.contains(&term).then_some(times[term]));
        Ok(Fit { times, factors })
    }

    /// The time of each kind of work of an operation, in seconds.
    pub fn parts(&self, terms: &Terms, algorithm: &str) -> Result<Terms> {
        let mut parts = [0.0; TERMS];
        for (index, term) in Term::ALL.into_iter().enumerate().filter(|(index, _)| terms[*index] > 0.0) {
            let substitute = term.substitute().and_then(|other| self.times[other as usize]);
            let Some(time) = self.times[index].or(substitute) else {
                bail!("no run has {}: their time is not known", term.words());
            };
            parts[index] = terms[index] * time * factor(&self.factors, algorithm);
        }
        Ok(parts)
    }

    /// The time of an operation, in seconds.
    pub fn time(&self, terms: &Terms, algorithm: &str) -> Result<f64> {
        Ok(self.parts(terms, algorithm)?.iter().sum())
    }
}

fn factor(factors: &BTreeMap<&'static str, f64>, algorithm: &str) -> f64 {
    factors.get(algorithm).copied().unwrap_or(1.0)
}

fn sum(times: &Terms, terms: &Terms) -> f64 {
    let sum: f64 = times.iter().zip(terms).map(|(time, number)| time * number).sum();
    sum.max(f64::MIN_POSITIVE)
}

fn factors_of(samples: &[Sample], ratios: &[f64]) -> BTreeMap<&'static str, f64> {
    let mut of: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    for (sample, ratio) in samples.iter().zip(ratios) {
        of.entry(sample.algorithm).or_default().push(*ratio);
    }
    of.retain(|_, ratios| ratios.len() >= OF_AN_ALGORITHM);
    of.into_iter().map(|(algorithm, mut ratios)| (algorithm, quantile(&mut ratios, 0.5))).collect()
}

/// The least value that so large a part of the values does not exceed.
pub fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len() as f64 * part).ceil() as usize;
    values[at.clamp(1, values.len()) - 1]
}

/// Times, none negative, for which the weighted squares of the relative errors are least: one time after the other is set to its best
/// value, until none moves.
fn least_squares(
    samples: &[Sample],
    factors: &BTreeMap<&'static str, f64>,
    weights: &[f64],
    known: &[usize],
    times: &mut Terms,
) {
    // The normal equations, of columns scaled to the same length: bytes are millions, waits are few.
    let mut products = [[0.0; TERMS]; TERMS];
    let mut targets = [0.0; TERMS];
    for (sample, weight) in samples.iter().zip(weights) {
        let scale = factor(factors, sample.algorithm) / sample.time;
        for &i in known {
            let row = sample.terms[i] * scale;
            targets[i] += weight * row;
            for &j in known {
                products[i][j] += weight * row * sample.terms[j] * scale;
            }
        }
    }
    let length: Terms = std::array::from_fn(|i| products[i][i].sqrt());
    let mut scaled: Terms = std::array::from_fn(|i| times[i] * length[i]);
    for _ in 0..20_000 {
        let mut moved: f64 = 0.0;
        for &i in known {
            let pull: f64 = known
                .iter()
                .filter(|&&j| j != i)
                .map(|&j| products[i][j] / (length[i] * length[j]) * scaled[j])
                .sum();
            let best = (targets[i] / length[i] - pull).max(0.0);
            moved = moved.max((best - scaled[i]).abs());
            scaled[i] = best;
        }
        if moved < 1e-10 {
            break;
        }
    }
    for &i in known {
        times[i] = scaled[i] / length[i];
    }
}
