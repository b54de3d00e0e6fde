//! How a time is taken.
//!
//! Before each timed iteration a rank rewrites its buffers and all meet in a barrier, both untimed;
//! an iteration's time is the slowest rank's.

use super::buffer::{Buffer, rewrite};
use super::case::Case;
use super::data::Value;
use super::operation::Place;
use super::plan::Plan;
use phalanx::{ReduceOp, Result};
use std::time::{Duration, Instant};

/// How long one measurement may take when the number of iterations is not given.
const BUDGET: Duration = Duration::from_millis(750);
/// Iterations that tell how long one takes.
const PILOT: usize = 3;
/// However slow an iteration is, a percentile needs a few.
const FEWEST: usize = 10;

/// What was measured: seconds, the same on every rank.
#[derive(Debug, Clone)]
pub struct Times {
    /// The time of each iteration on its slowest rank.
    pub iterations: Vec<f64>,
    /// The average over a loop without barriers, if it was asked for.
    pub loop_average: Option<f64>,
}

/// A case and the buffers it is measured on.
pub struct Bench<'a, T: Value> {
    pub case: Case<'a, T>,
    pub send: &'a mut Buffer<T>,
    pub recv: &'a mut Buffer<T>,
    pub place: Place,
}

impl<T: Value> Bench<'_, T> {
    /// Measures. Collective.
    pub fn measure(&mut self, plan: &Plan, cores: usize) -> Result<Times> {
        // Values that no reduction changes however often it is repeated in place: nothing overflows,
        // and no denormal numbers, which some processors are slow with, come up.
        let steady = T::from_i64(0);
        self.input().fill(steady);
        self.output().fill(steady);

        let (iterations, warmup) = self.counts(plan, cores)?;
        self.iterate(warmup, plan.aggregate)?;
        let mut times = self.iterate(iterations, plan.aggregate)?;
        let loop_average =
            if plan.loop_average { Some(self.unbroken_loop(iterations, plan.aggregate)?) } else { None };
        self.case.comm.all_reduce_in_place(&mut times, ReduceOp::Max)?;

        let share = self.case.operation.time_share();
        times.iter_mut().for_each(|time| *time *= share);
        Ok(Times { iterations: times, loop_average: loop_average.map(|time| time * share) })
    }

    /// Performs the case once on the buffers as they are.
    pub fn perform(&mut self) -> Result<()> {
        let layout = self.case.layout;
        let (send, recv) = match self.place {
            Place::OutOfPlace => (layout.send, layout.recv),
            Place::InPlace => (0, layout.larger()),
        };
        self.case.perform(self.place, self.send.first(send), self.recv.first_mut(recv))
    }

    /// The buffer that the operation reads; in place, that is the one it writes.
    pub fn input(&mut self) -> &mut [T] {
        let layout = self.case.layout;
        match self.place {
            Place::OutOfPlace => self.send.first_mut(layout.send),
            Place::InPlace => self.recv.first_mut(layout.larger()),
        }
    }

    /// The buffer that the operation writes.
    pub fn output(&mut self) -> &mut [T] {
        let layout = self.case.layout;
        match self.place {
            Place::OutOfPlace => self.recv.first_mut(layout.recv),
            Place::InPlace => self.recv.first_mut(layout.larger()),
        }
    }

    /// How often to iterate, timed and before that to warm up; the same on every rank.
    fn counts(&mut self, plan: &Plan, cores: usize) -> Result<(usize, usize)> {
        let iterations = match plan.iterations {
            Some(iterations) => iterations,
            None => {
                let start = Instant::now();
                self.iterate(PILOT, plan.aggregate)?;
                let mut cost = [start.elapsed().as_secs_f64() / PILOT as f64];
                self.case.comm.all_reduce_in_place(&mut cost, ReduceOp::Max)?;
                let bytes = self.case.layout.larger() * size_of::<T>();
                let usual = usual_iterations(bytes, self.case.comm.world_size(), cores);
                usual.min((BUDGET.as_secs_f64() / cost[0]) as usize).max(FEWEST)
            }
        };
        Ok((iterations, plan.warmup.unwrap_or(iterations / 5 + 5)))
    }

    /// This rank's time of each of `count` iterations.
    fn iterate(&mut self, count: usize, aggregate: usize) -> Result<Vec<f64>> {
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            if self.place == Place::OutOfPlace {
                rewrite(self.input());
            }
            rewrite(self.output());
            self.case.comm.barrier()?;
            let start = Instant::now();
            for _ in 0..aggregate {
                self.perform()?;
            }
            times.push(start.elapsed().as_secs_f64() / aggregate as f64);
        }
        Ok(times)
    }

    /// The average time on the slowest rank in a loop with nothing in between.
    fn unbroken_loop(&mut self, iterations: usize, aggregate: usize) -> Result<f64> {
        let count = iterations * aggregate;
        self.case.comm.barrier()?;
        let start = Instant::now();
        for _ in 0..count {
            self.perform()?;
        }
        let mut average = [start.elapsed().as_secs_f64() / count as f64];
        self.case.comm.all_reduce_in_place(&mut average, ReduceOp::Max)?;
        Ok(average[0])
    }
}

/// Enough iterations for a steady median: many of a short operation, few of a long one. A tenth of
/// them when ranks have to share cores, or are so many that each iteration takes long.
fn usual_iterations(bytes: usize, ranks: usize, cores: usize) -> usize {
    let iterations = match bytes {
        0..=0x1_0000 => 20_000,
        0x1_0001..=0x10_0000 => 3_000,
        0x10_0001..=0x100_0000 => 200,
        _ => 60,
    };
    if ranks > 2 || ranks > cores { (iterations / 10).max(30) } else { iterations }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_operations_are_repeated_less() {
        assert_eq!(usual_iterations(64 << 10, 2, 2), 20_000);
        assert_eq!(usual_iterations(1 << 20, 2, 2), 3_000);
        assert_eq!(usual_iterations(16 << 20, 2, 2), 200);
        assert_eq!(usual_iterations(64 << 20, 2, 2), 60);
    }

    #[test]
    fn ranks_that_share_cores_iterate_less() {
        assert_eq!(usual_iterations(4, 4, 16), 2_000);
        assert_eq!(usual_iterations(4, 2, 1), 2_000);
        assert_eq!(usual_iterations(64 << 20, 4, 2), 30);
    }
}
