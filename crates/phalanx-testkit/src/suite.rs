//! Runs the trials of a suite: a sample of them, or all with `PHALANX_TEST_FULL=1`.
//!
//! For example, a suite that asks for one trial in four of `threads/all_reduce/f32`, `…/f64`, `…/f16` and so
//! on gets every fourth data type. Trials are counted within a family: the name without its last part, here
//! `threads/all_reduce`. Families start at different trials, so that together they cover what they vary.
//!
//! A sample is the same in every run. `PHALANX_TEST_SAMPLE=1` runs the next one: a suite that asks for one
//! trial in four has four samples, which together are all its trials. A trial that is left out is reported as
//! ignored. A filter on the command line turns sampling off.

use libtest_mimic::{Arguments, Failed, Trial};
use std::collections::HashMap;
use std::process::ExitCode;

/// `1` runs every trial of every suite.
const FULL: &str = "PHALANX_TEST_FULL";
/// The number of the sample, 0 unless set.
const SAMPLE: &str = "PHALANX_TEST_SAMPLE";
/// What a trial outside of the sample is reported with.
const SAMPLED_OUT: &str = "sampled out: PHALANX_TEST_FULL=1 runs it";

/// Whether all trials run, at full length.
pub fn is_full() -> bool {
    std::env::var(FULL).is_ok_and(|value| !value.is_empty() && value != "0")
}

/// Which sample runs.
pub fn sample() -> usize {
    std::env::var(SAMPLE).ok().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Part of a name, and of how many trials with it one is in a sample.
pub type Share = (&'static str, usize);

/// Runs trials. The first of the shares that fits a trial's name counts for it; a trial without one always
/// runs.
pub fn run(args: &Arguments, trials: Vec<Trial>, shares: &[Share]) -> ExitCode {
    let trials = if is_full() || args.filter.is_some() { trials } else { sampled(trials, sample(), shares) };
    libtest_mimic::run(args, trials).exit_code()
}

/// Whether this is a CI machine, on which everything that the tests need is installed.
pub fn is_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true")
}

/// A trial that cannot run because something is not installed: ignored, or on a CI machine a failure.
pub fn missing(name: impl Into<String>, reason: impl Into<String>) -> Trial {
    let trial = ignored(name, reason);
    if is_ci() { trial.with_ignored_flag(false) } else { trial }
}

/// A trial that cannot run here. Forced by `--include-ignored`, it fails with the reason.
pub fn ignored(name: impl Into<String>, reason: impl Into<String>) -> Trial {
    let reason = reason.into();
    let kind = kind(&reason);
    Trial::test(name, move || Err(Failed::from(reason))).with_ignored_flag(true).with_kind(kind)
}

/// Trials with a condition.
pub trait Condition {
    /// The trial as it is if `possible`, or ignored for this reason.
    #[must_use]
    fn only_if(self, possible: bool, reason: &str) -> Self;
}

impl Condition for Trial {
    fn only_if(self, possible: bool, reason: &str) -> Trial {
        if possible { self } else { self.with_ignored_flag(true).with_kind(kind(reason)) }
    }
}

/// A reason in one line that leaves the other trials' names readable.
fn kind(reason: &str) -> String {
    const MOST: usize = 100;
    let line = reason.replace('\n', " ");
    match line.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

fn sampled(trials: Vec<Trial>, sample: usize, shares: &[Share]) -> Vec<Trial> {
    let mut counts = HashMap::new();
    let is_out = |trial: &Trial| {
        // What cannot run keeps its reason, and takes no place in a sample.
        if trial.has_ignored_flag() {
            return false;
        }
        let Some((part, one_in)) = shares.iter().find(|(part, _)| trial.name().contains(part)) else {
            return false;
        };
        let family = trial.name().rsplit_once('/').map_or("", |(family, _)| family);
        let place = counts.entry((*part, family.to_owned())).or_insert_with(|| start(family));
        *place += 1;
        !(*place + sample).is_multiple_of(*one_in)
    };
    let out: Vec<bool> = trials.iter().map(is_out).collect();
    let mark = |(trial, out): (Trial, bool)| trial.only_if(!out, SAMPLED_OUT);
    trials.into_iter().zip(out).map(mark).collect()
}

/// Where a family's count begins: some number that follows from its name.
fn start(family: &str) -> usize {
    family.bytes().fold(0, |sum, byte| (sum * 31 + usize::from(byte)) % 9973)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trials() -> Vec<Trial> {
        let names = (0..2).flat_map(|family| (0..7).map(move |trial| format!("family_{family}/{trial}")));
        names.map(|name| Trial::test(name, || Ok(()))).collect()
    }

    fn is_out(trial: &Trial) -> bool {
        trial.has_ignored_flag() && trial.kind() == SAMPLED_OUT
    }

    #[test]
    fn samples_together_are_all_trials_and_each_trial_is_in_one() {
        let samples: Vec<_> = (0..3).map(|sample| sampled(trials(), sample, &[("", 3)])).collect();
        for trial in 0..trials().len() {
            assert_eq!(samples.iter().filter(|sample| !is_out(&sample[trial])).count(), 1, "{trial}");
        }
        assert!(samples.iter().all(|sample| sample.len() == trials().len()));
    }

    #[test]
    fn a_sample_has_a_trial_of_every_family() {
        let sample = sampled(trials(), 0, &[("", 7)]);
        for family in ["family_0/", "family_1/"] {
            let of_it = sample.iter().filter(|trial| trial.name().starts_with(family));
            assert_eq!(of_it.filter(|trial| !is_out(trial)).count(), 1);
        }
    }

    #[test]
    fn what_cannot_run_keeps_its_reason() {
        let sample = sampled(vec![ignored("family/trial", "no GPU")], 0, &[("", 1000)]);
        assert_eq!(sample[0].kind(), "no GPU");
    }
}
