//! Runs the trials of a suite. Those that take long are sampled.
//!
//! A suite names its long trials in shares: `("threads/reduce/", 7)` says that of the trials with this in their
//! names, CI runs one in seven. Which trials run:
//!
//! - By default, what a contributor waits for: of the long trials in CI's sample 0, those whose name has a word that no other running
//!   trial has, numbers aside. What a suite calls slow is left to CI. For example, `threads/reduce/f32` and `processes/reduce/4` do without `processes/reduce/1`.
//! - With `PHALANX_TEST_SAMPLE=1`, CI's sample of that number. Trials are counted within a family: the name without
//!   its last part. Families start at different trials, so that together they cover what they vary. A share of one
//!   trial in four has four samples, which together are all its trials; a share of one in one runs.
//! - With `PHALANX_TEST_FULL=1`, or a filter on the command line: all.
//!
//! A sample is the same in every run. A trial that is left out is reported as ignored.

use libtest_mimic::{Arguments, Failed, Trial};
use std::collections::{HashMap, HashSet};
use std::process::ExitCode;

/// `1` runs every trial of every suite.
const FULL: &str = "PHALANX_TEST_FULL";
/// The number of CI's sample.
const SAMPLE: &str = "PHALANX_TEST_SAMPLE";
/// What a trial outside of the sample is reported with.
const SAMPLED_OUT: &str = "sampled out: PHALANX_TEST_FULL=1 runs it";

/// Part of the names of trials that take long, and of how many of them CI runs one.
pub type Share = (&'static str, usize);

/// Runs trials. The first of the shares that fits a trial's name counts for it; a trial without one always
/// runs, but by default those with a name that has one of the parts in `slow`: they wait for a deadline, or compute for seconds.
pub fn run(args: &Arguments, trials: Vec<Trial>, shares: &[Share], slow: &[&str]) -> ExitCode {
    let trials = if is_full() || args.filter.is_some() {
        trials
    } else if let Some(number) = sample() {
        let out = out_of_sample(&trials, number, shares);
        without(trials, out)
    } else {
        let out = out_by_default(&trials, shares, slow);
        without(trials, out)
    };
    libtest_mimic::run(args, trials).exit_code()
}

fn is_full() -> bool {
    std::env::var(FULL).is_ok_and(|value| !value.is_empty() && value != "0")
}

/// The number of CI's sample, if that is to run.
fn sample() -> Option<usize> {
    let number = std::env::var(SAMPLE).ok().filter(|number| !number.is_empty())?;
    Some(number.parse().unwrap_or_else(|_| panic!("{SAMPLE}={number:?} is not a number")))
}

/// How many of `all` random cases run: a quarter by default, and all in CI.
pub fn cases(all: usize) -> usize {
    if is_full() || sample().is_some() { all } else { all.div_ceil(4) }
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

/// Which trials are left out of a sample of CI.
fn out_of_sample(trials: &[Trial], sample: usize, shares: &[Share]) -> Vec<bool> {
    let mut counts = HashMap::new();
    let is_out = |trial: &Trial| {
        // What cannot run keeps its reason, and takes no place in a sample.
        if trial.has_ignored_flag() {
            return false;
        }
        let Some((part, one_in)) = share(trial, shares) else {
            return false;
        };
        let family = trial.name().rsplit_once('/').map_or("", |(family, _)| family);
        let place = counts.entry((*part, family.to_owned())).or_insert_with(|| hash(family));
        *place += 1;
        !(*place + sample).is_multiple_of(*one_in)
    };
    trials.iter().map(is_out).collect()
}

/// Which trials are left out by default.
fn out_by_default(trials: &[Trial], shares: &[Share], slow: &[&str]) -> Vec<bool> {
    // Of what CI runs by halves, all is there to choose from: one half may have no trial of some scenario.
    let shares: Vec<Share> =
        shares.iter().map(|(part, one_in)| (*part, if *one_in == 2 { 1 } else { *one_in })).collect();
    let shares = &shares[..];
    let mut out = out_of_sample(trials, 0, shares);
    for (out, trial) in out.iter_mut().zip(trials) {
        *out |= !trial.has_ignored_flag() && slow.iter().any(|part| trial.name().contains(part));
    }
    let able = trials.iter().enumerate().filter(|(place, trial)| !trial.has_ignored_flag() && !out[*place]);
    let (mut long, short): (Vec<_>, Vec<_>) = able.partition(|(_, trial)| share(trial, shares).is_some());
    let mut covered: HashSet<&str> = short.iter().flat_map(|(_, trial)| words(trial)).collect();
    let mut trials_with = HashMap::new();
    for word in long.iter().flat_map(|(_, trial)| words(trial)) {
        *trials_with.entry(word).or_insert(0) += 1;
    }
    let rarest_missing = |trial, covered: &HashSet<&str>| {
        words(trial).filter(|word| !covered.contains(word)).map(|word| trials_with[word]).min()
    };
    // The rarest words first: the trials that have them cover common ones, too. The hash mixes the families.
    long.sort_by_key(|(_, trial)| {
        (rarest_missing(trial, &covered).unwrap_or(usize::MAX), hash(trial.name()))
    });
    for (place, trial) in long {
        out[place] = rarest_missing(trial, &covered).is_none();
        if !out[place] {
            covered.extend(words(trial));
        }
    }
    out
}

fn share<'a>(trial: &Trial, shares: &'a [Share]) -> Option<&'a Share> {
    shares.iter().find(|(part, _)| trial.name().contains(part))
}

/// The parts of a name, which say what the trial tests, and on what. Sizes and numbers of ranks are left out.
fn words(trial: &Trial) -> impl Iterator<Item = &str> {
    trial.name().split(['/', ':']).filter(|word| word.parse::<usize>().is_err())
}

/// The trials, of which some are left out.
fn without(trials: Vec<Trial>, out: Vec<bool>) -> Vec<Trial> {
    let mark = |(trial, out): (Trial, bool)| trial.only_if(!out, SAMPLED_OUT);
    trials.into_iter().zip(out).map(mark).collect()
}

/// Some number that follows from a name.
fn hash(name: &str) -> usize {
    name.bytes().fold(0, |sum, byte| (sum * 31 + usize::from(byte)) % 9973)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trials() -> Vec<Trial> {
        let names = (0..2).flat_map(|family| (0..7).map(move |trial| format!("family_{family}/{trial}")));
        names.map(|name| Trial::test(name, || Ok(()))).collect()
    }

    /// Names of trials that run, of those with these names.
    fn running<'a>(names: &[&'a str], shares: &[Share]) -> Vec<&'a str> {
        let trials: Vec<_> = names.iter().map(|name| Trial::test(*name, || Ok(()))).collect();
        let out = out_by_default(&trials, shares, &[]);
        names.iter().zip(out).filter(|(_, out)| !out).map(|(name, _)| *name).collect()
    }

    #[test]
    fn samples_together_are_all_trials_and_each_trial_is_in_one() {
        let samples = [0, 1, 2].map(|sample| out_of_sample(&trials(), sample, &[("", 3)]));
        for trial in 0..trials().len() {
            assert_eq!(samples.iter().filter(|out| !out[trial]).count(), 1, "{trial}");
        }
    }

    #[test]
    fn a_sample_has_a_trial_of_every_family() {
        let out = out_of_sample(&trials(), 0, &[("", 7)]);
        for family in out.chunks(7) {
            assert_eq!(family.iter().filter(|out| !**out).count(), 1);
        }
    }

    #[test]
    fn by_default_each_word_of_the_sample_is_tested() {
        let (backends, faults) = (["mpi", "nccl", "threads"], ["kill", "stop", "leave"]);
        let names: Vec<_> =
            backends.iter().flat_map(|on| faults.map(|fault| format!("{on}/{fault}"))).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let running = running(&names, &[("", 1)]);
        for word in backends.into_iter().chain(faults) {
            assert!(
                running.iter().any(|name| name.split('/').any(|other| other == word)),
                "{word}: {running:?}"
            );
        }
        assert!(running.len() < names.len(), "{running:?}");
    }

    #[test]
    fn by_default_a_long_trial_is_left_out_if_others_have_its_words() {
        let names = ["short/a", "short/b", "long/a", "long/b", "long/only"];
        assert_eq!(running(&names, &[("long/", 1)]), ["short/a", "short/b", "long/only"]);
    }

    #[test]
    fn by_default_what_is_slow_is_left_out() {
        let trials: Vec<_> = ["long/a", "short/slow"].map(|name| Trial::test(name, || Ok(()))).into();
        assert_eq!(out_by_default(&trials, &[("long/", 1)], &["slow"]), [false, true]);
    }

    #[test]
    fn by_default_nothing_runs_that_sample_0_leaves_out() {
        let names = ["long/a", "long/b", "long/c", "long/d", "long/e", "long/f"];
        assert_eq!(running(&names, &[("long/", 3)]).len(), 2);
    }

    #[test]
    fn what_cannot_run_keeps_its_reason() {
        let shares = [("", 1000)];
        let trials = || vec![ignored("family/trial", "no GPU")];
        for out in [out_of_sample(&trials(), 0, &shares), out_by_default(&trials(), &shares, &["family"])] {
            assert_eq!(without(trials(), out)[0].kind(), "no GPU");
        }
    }
}
