//! The time of a step, on all ranks.

use crate::Result;
use phalanx::Comm;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::{Duration, Instant};

/// Measures one step of this rank.
///
/// What is not [communicating](StepTimer::communicating) counts as computing. Communication that goes on while the rank computes costs no time and
/// is not measured: give `communicating` the calls that wait, such as [`finish`](crate::buckets::GradientBuckets::finish).
#[derive(Debug, Clone, Copy)]
pub struct StepTimer {
    begun: Instant,
    communicating: Duration,
}

impl StepTimer {
    /// Begins a step now.
    pub fn begin() -> StepTimer {
        StepTimer { begun: Instant::now(), communicating: Duration::ZERO }
    }

    /// Counts the time of `wait` as exposed communication.
    pub fn communicating<R>(&mut self, wait: impl FnOnce() -> R) -> R {
        let begun = Instant::now();
        let result = wait();
        self.communicating += begun.elapsed();
        result
    }

    /// Ends the step, and tells all ranks the times of all. `samples` are those of this rank. Collective: 24 bytes of each rank.
    ///
    /// # Errors
    /// Errors of `comm`.
    pub fn end(self, comm: &Comm, step: u64, samples: u64) -> Result<StepReport> {
        let computing = self.begun.elapsed() - self.communicating;
        let own = [computing.as_nanos() as u64, self.communicating.as_nanos() as u64, samples];
        let mut all = vec![0; 3 * comm.world_size()];
        comm.all_gather(&own, &mut all)?;
        let seconds = |nanos: u64| Duration::from_nanos(nanos).as_secs_f64();
        let ranks = all.as_chunks::<3>().0.iter().map(|[computing, communicating, samples]| RankStep {
            computing_seconds: seconds(*computing),
            communicating_seconds: seconds(*communicating),
            samples: *samples,
        });
        Ok(StepReport::new(step, ranks.collect()))
    }
}

/// The step of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RankStep {
    /// Time that the rank did not wait for communication.
    pub computing_seconds: f64,
    /// Exposed communication: time that it waited. With it is the time in which others were still computing.
    pub communicating_seconds: f64,
    /// Samples of this rank.
    pub samples: u64,
}

/// The rank that computes longest, for which the others wait.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Straggler {
    /// The rank.
    pub rank: usize,
    /// How much longer it computed than the median rank.
    pub behind_median_seconds: f64,
}

/// A step of all ranks. Text by `Display`, JSON by serde.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// The step's number.
    pub step: u64,
    /// Time of the slowest rank.
    pub seconds: f64,
    /// Samples of all ranks.
    pub samples: u64,
    /// Samples of all ranks in a second.
    pub samples_per_second: f64,
    /// Time of computing, the mean over ranks.
    pub computing_seconds: f64,
    /// Exposed communication of the straggler: nobody computed longer, so it waited for data, not for others.
    pub communicating_seconds: f64,
    /// Time that ranks waited beyond that, the mean over ranks: for the straggler.
    pub waiting_seconds: f64,
    /// The rank that computed longest.
    pub straggler: Straggler,
    /// Each rank's step.
    pub ranks: Vec<RankStep>,
}

impl StepReport {
    /// From the steps of all ranks, in their order.
    ///
    /// # Panics
    /// If there are none.
    pub fn new(step: u64, ranks: Vec<RankStep>) -> StepReport {
        let mut order: Vec<usize> = (0..ranks.len()).collect();
        order.sort_by(|a, b| ranks[*a].computing_seconds.total_cmp(&ranks[*b].computing_seconds));
        let rank = *order.last().expect("a rank at least");
        // With an even number of ranks, the lower of the two in the middle: with two ranks, the other one.
        let median = ranks[order[(ranks.len() - 1) / 2]].computing_seconds;
        let mean = |of: &dyn Fn(&RankStep) -> f64| ranks.iter().map(of).sum::<f64>() / ranks.len() as f64;
        let seconds = ranks.iter().map(|rank| rank.computing_seconds + rank.communicating_seconds);
        let seconds = seconds.fold(0.0, f64::max);
        let samples = ranks.iter().map(|rank| rank.samples).sum();
        let communicating_seconds = ranks[rank].communicating_seconds;
        StepReport {
            step,
            seconds,
            samples,
            samples_per_second: if seconds > 0.0 { samples as f64 / seconds } else { 0.0 },
            computing_seconds: mean(&|rank| rank.computing_seconds),
            communicating_seconds,
            waiting_seconds: mean(&|rank| (rank.communicating_seconds - communicating_seconds).max(0.0)),
            straggler: Straggler { rank, behind_median_seconds: ranks[rank].computing_seconds - median },
            ranks,
        }
    }

    /// Sets the gauges `phalanx_train_step_seconds`, `…_computing_seconds`, `…_communicating_seconds`, `…_waiting_seconds`,
    /// `…_straggler_rank` and `…_samples_per_second` of the program's recorder, and adds to the counters `phalanx_train_steps_total` and
    /// `phalanx_train_samples_total`. Call it on one rank, or all have the same numbers.
    #[cfg(feature = "metrics")]
    pub fn publish(&self) {
        metrics::gauge!("phalanx_train_step_seconds").set(self.seconds);
        metrics::gauge!("phalanx_train_computing_seconds").set(self.computing_seconds);
        metrics::gauge!("phalanx_train_communicating_seconds").set(self.communicating_seconds);
        metrics::gauge!("phalanx_train_waiting_seconds").set(self.waiting_seconds);
        metrics::gauge!("phalanx_train_straggler_rank").set(self.straggler.rank as f64);
        metrics::gauge!("phalanx_train_samples_per_second").set(self.samples_per_second);
        metrics::counter!("phalanx_train_steps_total").increment(1);
        metrics::counter!("phalanx_train_samples_total").increment(self.samples);
    }
}

impl fmt::Display for StepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        write!(
            f,
            "step {}: {}, {:.0} samples/s, computing {}, communicating {}, waiting {}, straggler rank {} (+{})",
            self.step,
            millis(self.seconds),
            self.samples_per_second,
            millis(self.computing_seconds),
            millis(self.communicating_seconds),
            millis(self.waiting_seconds),
            self.straggler.rank,
            millis(self.straggler.behind_median_seconds),
        )
    }
}
