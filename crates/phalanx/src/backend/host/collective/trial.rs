//! Picks between two algorithms by timing both on the first calls of each size class and keeping the faster.

use crate::backend::host::tunables::{TRIAL_CLASSES, TRIAL_STRETCH};
use std::time::Duration;

const TRIALS: u32 = 3 * TRIAL_STRETCH;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Candidate {
    Usual,
    Other,
}

/// Algorithm of the next operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// A trial: its time is to be passed to `took`.
    Try(Candidate),
    Keep(Candidate),
}

impl Choice {
    pub fn candidate(self) -> Candidate {
        match self {
            Choice::Try(candidate) | Choice::Keep(candidate) => candidate,
        }
    }
}

/// Times of two algorithms, by size class.
pub(crate) struct AlgorithmTrial {
    shortest: usize,
    /// The other algorithm must save more than one part of the time in so many.
    parts: u32,
    classes: [Trials; TRIAL_CLASSES],
}

#[derive(Default, Clone, Copy)]
struct Trials {
    tried: u32,
    /// The shortest time of each algorithm.
    best: [Option<Duration>; 2],
    /// The usual algorithm is kept, whatever was measured.
    settled: bool,
}

impl AlgorithmTrial {
    /// For lengths from `shortest` on.
    pub const fn new(shortest: usize, parts: u32) -> AlgorithmTrial {
        const NONE: Trials = Trials { tried: 0, best: [None; 2], settled: false };
        AlgorithmTrial { shortest, parts, classes: [NONE; TRIAL_CLASSES] }
    }

    fn class(&self, len: usize) -> usize {
        ((len / self.shortest).max(1).ilog2() as usize).min(TRIAL_CLASSES - 1)
    }

    /// The algorithm of the next operation of this length.
    pub fn next(&self, len: usize) -> Choice {
        match self.classes[self.class(len)] {
            Trials { settled: true, .. } => Choice::Keep(Candidate::Usual),
            Trials { tried, .. } if tried < TRIALS => {
                Choice::Try([Candidate::Usual, Candidate::Other][usize::from(tried / TRIAL_STRETCH == 1)])
            }
            Trials { best: [Some(usual), Some(other)], .. } if other + usual / self.parts < usual => {
                Choice::Keep(Candidate::Other)
            }
            _ => Choice::Keep(Candidate::Usual),
        }
    }

    /// Notes the time of an operation.
    pub fn took(&mut self, len: usize, candidate: Candidate, time: Duration) {
        let Trials { tried, best, .. } = &mut self.classes[self.class(len)];
        if *tried < TRIALS {
            let best = &mut best[candidate as usize];
            *best = Some(best.map_or(time, |best| best.min(time)));
            *tried += 1;
        }
    }

    /// Keeps to the usual algorithm, since another rank has chosen it for all.
    pub fn settle(&mut self, len: usize) {
        self.classes[self.class(len)].settled = true;
    }

    pub fn is_settled(&self, len: usize) -> bool {
        self.classes[self.class(len)].settled
    }

    #[cfg(all(test, target_os = "linux"))]
    pub fn has_tried_other(&self, len: usize) -> bool {
        self.classes[self.class(len)].best[Candidate::Other as usize].is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Choices for operations of `len` that take so many microseconds by either algorithm.
    fn choices(trial: &mut AlgorithmTrial, len: usize, times: [u64; 2]) -> Vec<Choice> {
        let mut run = || {
            let choice = trial.next(len);
            trial.took(len, choice.candidate(), Duration::from_micros(times[choice.candidate() as usize]));
            choice
        };
        (0..TRIALS + 2).map(|_| run()).collect()
    }

    #[test]
    fn the_faster_algorithm_is_kept_for_each_length() {
        const SHORTEST: usize = 1000;
        let mut trial = AlgorithmTrial::new(SHORTEST, u32::MAX);
        let tries = [Candidate::Usual, Candidate::Other, Candidate::Usual]
            .map(|way| [Choice::Try(way); TRIAL_STRETCH as usize])
            .concat();
        let kept = |way| [&tries[..], &[Choice::Keep(way); 2]].concat();
        assert_eq!(choices(&mut trial, SHORTEST, [90, 50]), kept(Candidate::Other));
        assert_eq!(choices(&mut trial, 2 * SHORTEST, [50, 90]), kept(Candidate::Usual));
        let tried = choices(&mut trial, 2 * SHORTEST - 1, [50, 90]);
        assert_eq!(tried, [Choice::Keep(Candidate::Other); TRIALS as usize + 2], "of a class that was tried");
        assert_eq!(choices(&mut trial, usize::MAX, [9, 5]), kept(Candidate::Other));
    }

    #[test]
    fn the_other_algorithm_has_to_save_its_part() {
        for (other, way) in [(87, Candidate::Other), (88, Candidate::Usual)] {
            let mut trial = AlgorithmTrial::new(1, 8);
            assert_eq!(
                choices(&mut trial, 1, [100, other]).last(),
                Some(&Choice::Keep(way)),
                "{other} of 100"
            );
        }
    }
}
