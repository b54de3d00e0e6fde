//! Times an operation.
//!
//! Calls that are complete when they return: before each timed iteration every rank rewrites its buffers, and
//! the ranks wait to begin together (`start.rs`). The time of an iteration is that of its slowest rank. Work
//! on a GPU: see `enqueued.rs`.

use super::buffer::Buffer;
use super::case::Case;
use super::enqueued::Enqueued;
use super::figures::Times;
use super::operation::Place;
use super::plan::Plan;
use super::report::Average;
use super::start::Start;
use super::view::{View, ViewMut};
use anyhow::Result;
use phalanx::ReduceOp;
use std::time::{Duration, Instant};

/// Time for one measurement if the number of iterations is not given.
const BUDGET: Duration = Duration::from_millis(750);
/// Iterations before that, to estimate the time of one.
const PILOT: usize = 3;
/// The fewest iterations, however slow: percentiles need a few.
const FEWEST: usize = 10;

/// A case and its buffers.
pub struct Bench<'a> {
    pub case: Case<'a>,
    pub send: &'a mut Buffer,
    pub recv: &'a mut Buffer,
    pub place: Place,
}

impl Bench<'_> {
    /// Measures the case. Collective.
    pub fn measure(&mut self, plan: &Plan, cores: usize) -> Result<Times> {
        // No reduction changes zeros, however often it is repeated in place: nothing overflows, and there are
        // no denormal numbers, with which some processors are slow.
        let enqueued = self.case.is_enqueued();
        let (read, written) = (self.read_len(), self.written_len());
        self.send.zero(if enqueued { self.send.len() } else { read })?;
        self.recv.zero(if enqueued { self.recv.len() } else { written })?;
        let mut times =
            if enqueued { self.measure_enqueued(plan)? } else { self.measure_calls(plan, cores)? };
        self.case.comm().all_reduce_in_place(&mut times.iterations, ReduceOp::Max)?;

        let share = self.case.operation.time_share();
        times.iterations.iter_mut().chain(&mut times.loop_average).for_each(|time| *time *= share);
        Ok(times)
    }

    /// Performs the case once, or enqueues it, on part number `part` of the buffers.
    pub fn perform(&mut self, part: usize) -> phalanx::Result<()> {
        let (case, place, send, mut recv) = self.prepared(part);
        case.perform(place, &send, &mut recv)
    }

    /// The arguments of a call. They are made before the clock starts: that takes 10 ns, and a short
    /// operation 200 ns.
    fn prepared(&mut self, part: usize) -> (&Case<'_>, Place, View<'_>, ViewMut<'_>) {
        let range = |len: usize| len * part..len * (part + 1);
        let (send, recv) = (range(self.read_len()), range(self.written_len()));
        (&self.case, self.place, self.send.view(send), self.recv.view_mut(recv))
    }

    /// The number of parts of this size in the buffers, which are long enough for the largest size.
    fn parts(&self) -> usize {
        let parts = |len: usize, of: usize| of.checked_div(len).unwrap_or(usize::MAX);
        parts(self.read_len(), self.send.len()).min(parts(self.written_len(), self.recv.len()))
    }

    /// Elements of the send buffer that the case reads.
    pub fn read_len(&self) -> usize {
        match self.place {
            Place::OutOfPlace => self.case.layout.send,
            Place::InPlace => 0,
        }
    }

    /// Elements of the receive buffer that the case writes.
    pub fn written_len(&self) -> usize {
        match self.place {
            Place::OutOfPlace => self.case.layout.recv,
            Place::InPlace => self.case.layout.larger(),
        }
    }

    fn measure_enqueued(&mut self, plan: &Plan) -> Result<Times> {
        let comm = self.case.comm();
        let stream = comm.cuda_stream()?;
        // Each iteration uses another part, so that no cache holds its data.
        let parts = self.parts();
        let mut call = |number| Ok(self.perform(number % parts)?);
        Enqueued { comm, stream, call: &mut call, sync: &|| Ok(comm.sync()?) }.measure(plan)
    }

    fn measure_calls(&mut self, plan: &Plan, cores: usize) -> Result<Times> {
        let start = Start::of(self.case.comm(), cores);
        let (iterations, warmup) = self.counts(plan, cores, start)?;
        self.iterate(warmup, plan.aggregate, start)?;
        let times = self.iterate(iterations, plan.aggregate, start)?;
        let loop_average = match plan.loop_average {
            Some(_) => Some(self.unbroken_loop(iterations, plan.aggregate, plan.average())?),
            None => None,
        };
        Ok(Times { iterations: times, loop_average, enqueue: None })
    }

    /// The numbers of timed and of warm-up iterations, the same on every rank.
    fn counts(&mut self, plan: &Plan, cores: usize, start: Start) -> Result<(usize, usize)> {
        let iterations = match plan.iterations {
            Some(iterations) => iterations,
            None => {
                let begun = Instant::now();
                self.iterate(PILOT, plan.aggregate, start)?;
                let mut cost = [begun.elapsed().as_secs_f64() / PILOT as f64];
                self.case.comm().all_reduce_in_place(&mut cost, ReduceOp::Max)?;
                let bytes = self.case.layout.larger() * self.case.dtype.size();
                let usual = usual_iterations(bytes, self.case.comm().world_size(), cores);
                usual.min((BUDGET.as_secs_f64() / cost[0]) as usize).max(FEWEST)
            }
        };
        Ok((iterations, plan.warmup.unwrap_or(iterations / 5 + 5)))
    }

    /// This rank's time of each of `count` iterations.
    fn iterate(&mut self, count: usize, aggregate: usize, start: Start) -> Result<Vec<f64>> {
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            self.send.rewrite(self.read_len());
            self.recv.rewrite(self.written_len());
            let (case, place, send, mut recv) = self.prepared(0);
            let begun = start.wait(case.comm())?;
            for _ in 0..aggregate {
                case.perform(place, &send, &mut recv)?;
            }
            times.push(begun.elapsed().as_secs_f64() / aggregate as f64);
        }
        Ok(times)
    }

    /// The average time of an operation in a loop without barriers.
    fn unbroken_loop(&mut self, iterations: usize, aggregate: usize, whose: Average) -> Result<f64> {
        let count = iterations * aggregate;
        let (case, place, send, mut recv) = self.prepared(0);
        case.comm().barrier()?;
        let start = Instant::now();
        for _ in 0..count {
            case.perform(place, &send, &mut recv)?;
        }
        let mut average = [start.elapsed().as_secs_f64() / count as f64];
        whose.of_ranks(case.comm(), &mut average)?;
        Ok(average[0])
    }
}

/// Iterations for a steady median: many of a short operation, few of a long one. A tenth of them if ranks
/// share cores, or are so many that an iteration takes long.
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
