//! Picks between two algorithms: times both on the first calls of a communicator, and keeps the faster one for all lengths.

use crate::backend::host::tunables::TRIAL_STRETCH;
use std::time::Duration;

const TRIALS: u32 = 3 * TRIAL_STRETCH;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Candidate {
    Usual,
    Other,
}

/// Algorithm of the next operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TrialChoice {
    /// A trial: the caller passes its time to `took`.
    Try(Candidate),
    Keep(Candidate),
}

impl TrialChoice {
    pub fn candidate(self) -> Candidate {
        match self {
            TrialChoice::Try(candidate) | TrialChoice::Keep(candidate) => candidate,
        }
    }
}

/// A trial of two algorithms, and its result.
pub(crate) struct AlgorithmTrial {
    /// Part of the time that the other algorithm must save.
    saving: f64,
    tried: u32,
    /// The shortest time of each algorithm, in seconds per byte: the trials may have different lengths.
    best: [f64; 2],
    /// The usual algorithm is kept, whatever was measured.
    keeps_usual: bool,
}

impl AlgorithmTrial {
    pub const fn new(saving: f64) -> AlgorithmTrial {
        AlgorithmTrial { saving, tried: 0, best: [f64::INFINITY; 2], keeps_usual: false }
    }

    /// The algorithm of the next operation.
    pub fn next(&self) -> TrialChoice {
        let [usual, other] = self.best;
        if self.keeps_usual {
            TrialChoice::Keep(Candidate::Usual)
        } else if self.tried < TRIALS {
            let in_second_stretch = self.tried / TRIAL_STRETCH == 1;
            TrialChoice::Try(if in_second_stretch { Candidate::Other } else { Candidate::Usual })
        } else if other < usual * (1.0 - self.saving) {
            TrialChoice::Keep(Candidate::Other)
        } else {
            TrialChoice::Keep(Candidate::Usual)
        }
    }

    /// Notes the time of an operation on so many bytes.
    pub fn took(&mut self, len: usize, candidate: Candidate, time: Duration) {
        if self.tried < TRIALS {
            let best = &mut self.best[candidate as usize];
            *best = best.min(time.as_secs_f64() / len as f64);
            self.tried += 1;
        }
    }

    /// Keeps the usual algorithm from now on, since another rank has chosen it for all.
    pub fn keep_usual(&mut self) {
        self.keeps_usual = true;
    }

    pub fn keeps_usual(&self) -> bool {
        self.keeps_usual
    }

    #[cfg(all(test, target_os = "linux"))]
    pub fn has_tried_other(&self) -> bool {
        self.best[Candidate::Other as usize].is_finite()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Choices for operations of `len` bytes whose algorithms take so many nanoseconds per byte.
    fn choices(trial: &mut AlgorithmTrial, len: usize, times: [u64; 2], operations: u32) -> Vec<TrialChoice> {
        let mut run = || {
            let choice = trial.next();
            let time = Duration::from_nanos(times[choice.candidate() as usize] * len as u64);
            trial.took(len, choice.candidate(), time);
            choice
        };
        (0..operations).map(|_| run()).collect()
    }

    #[test]
    fn the_faster_algorithm_is_kept_for_all_lengths() {
        let tries = [Candidate::Usual, Candidate::Other, Candidate::Usual]
            .map(|candidate| [TrialChoice::Try(candidate); TRIAL_STRETCH as usize])
            .concat();
        for (times, faster) in [([90, 50], Candidate::Other), ([50, 90], Candidate::Usual)] {
            let mut trial = AlgorithmTrial::new(0.0);
            assert_eq!(choices(&mut trial, 1000, times, TRIALS), tries);
            let [usual, other] = times;
            for len in [1, 1000, 1 << 40] {
                assert_eq!(
                    choices(&mut trial, len, [other, usual], 2),
                    [TrialChoice::Keep(faster); 2],
                    "{len} bytes"
                );
            }
        }
    }

    #[test]
    fn trials_of_different_lengths_are_compared_by_their_time_per_byte() {
        let mut trial = AlgorithmTrial::new(0.0);
        let stretches = [1000, 8000, 1000].map(|len| choices(&mut trial, len, [90, 50], TRIAL_STRETCH));
        assert!(stretches.concat().iter().all(|choice| matches!(choice, TrialChoice::Try(_))));
        assert_eq!(
            trial.next(),
            TrialChoice::Keep(Candidate::Other),
            "although each of its operations took longer"
        );
    }

    #[test]
    fn the_other_algorithm_has_to_save_its_part() {
        for (other, kept) in [(87, Candidate::Other), (88, Candidate::Usual)] {
            let mut trial = AlgorithmTrial::new(1.0 / 8.0);
            choices(&mut trial, 1, [100, other], TRIALS);
            assert_eq!(trial.next(), TrialChoice::Keep(kept), "{other} of 100");
        }
    }
}
