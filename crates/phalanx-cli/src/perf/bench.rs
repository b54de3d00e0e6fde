//! What one rank does: every type, reduction, root and size of the plan, measured and checked.
//!
//! All ranks go through the same loops; rank 0 alone has somebody to tell the rows to.

use super::buffer::{Buffer, MARGIN};
use super::case::Case;
use super::data::{Content, Flow, Patterns, Segment, Value, clip, with_value};
use super::layout::Layout;
use super::operation::Place;
use super::plan::Plan;
use super::reduction::RedOp;
use super::report::{Measurement, Row};
use super::stats::Stats;
use super::timing::{Bench, Times};
use anyhow::Result;
use phalanx::{Comm, PreMulSum, ReduceOp, Reduction};

/// Gets the rows as they come. Ranks other than 0 have one that does nothing.
pub trait Audience {
    /// This size is being measured now.
    fn starts(&mut self, row: usize, size: usize);
    /// A row is complete.
    fn row(&mut self, row: Row) -> Result<()>;
}

/// Carries out the plan as one rank. Answers with the number of wrong elements on all ranks.
pub fn run(comm: &Comm, plan: &Plan, cores: usize, audience: &mut dyn Audience) -> Result<u64> {
    let mut rank = Rank { comm, plan, cores, audience, calls: 0, rows: 0 };
    let mut wrong = 0;
    let mut cycle = 0;
    while plan.cycles.is_none_or(|cycles| cycle < cycles) {
        for &dtype in plan.dtypes.iter().filter(|dtype| plan.can(comm, **dtype)) {
            wrong += with_value!(dtype, T => rank.run_type::<T>())?;
        }
        cycle += 1;
    }
    Ok(wrong)
}

struct Rank<'a> {
    comm: &'a Comm,
    plan: &'a Plan,
    cores: usize,
    audience: &'a mut dyn Audience,
    /// Checked calls so far, the same on all ranks.
    calls: u64,
    /// Rows so far.
    rows: usize,
}

impl Rank<'_> {
    fn run_type<T: Value>(&mut self) -> Result<u64> {
        let (plan, comm) = (self.plan, self.comm);
        let layouts: Vec<Layout> = plan
            .sizes
            .iter()
            .filter_map(|&size| Layout::new(plan.operation, size, size_of::<T>(), comm.world_size()))
            .collect();
        let most = |length: fn(&Layout) -> usize| layouts.iter().map(length).max().unwrap_or(0);
        let mut send = Buffer::<T>::new(comm, most(|layout| layout.send), plan.registration)?;
        // In place, this is the one buffer for both.
        let mut recv = Buffer::<T>::new(comm, most(Layout::larger), plan.registration)?;

        let mut wrong = 0;
        for &redop in &plan.reductions {
            let op = redop.unwrap_or(RedOp::Sum);
            let patterns = Patterns::new(op, comm.world_size(), comm.rank());
            for root in plan.roots.of(comm.world_size()) {
                for &layout in &layouts {
                    let bytes = layout.larger() * size_of::<T>();
                    self.audience.starts(self.rows, bytes);
                    let mut row = Row {
                        size: bytes,
                        count: layout.count,
                        dtype: plan.operation.has_data().then(|| T::DTYPE.name().to_owned()),
                        redop,
                        root,
                        out_of_place: None,
                        in_place: None,
                    };
                    for &place in plan.operation.places() {
                        let root = root.unwrap_or(0);
                        let case = Case::new(comm, plan.operation, layout, reduction(op, comm.rank()), root);
                        let bench = Bench { case, send: &mut send, recv: &mut recv, place };
                        let measurement = self.measure(bench, &patterns)?;
                        wrong += measurement.wrong.unwrap_or(0);
                        match place {
                            Place::OutOfPlace => row.out_of_place = Some(measurement),
                            Place::InPlace => row.in_place = Some(measurement),
                        }
                    }
                    self.rows += 1;
                    self.audience.row(row)?;
                }
            }
        }
        Ok(wrong)
    }

    fn measure<T: Value>(&mut self, mut bench: Bench<'_, T>, patterns: &Patterns<T>) -> Result<Measurement> {
        let times = bench.measure(self.plan, self.cores)?;
        let mut wrong = (self.plan.checks > 0).then_some(0);
        for _ in 0..self.plan.checks {
            self.calls += 1;
            let mut found = [check(&mut bench, patterns, self.calls)?];
            self.comm.all_reduce_in_place(&mut found, ReduceOp::Sum)?;
            wrong = wrong.map(|wrong| wrong + found[0]);
        }
        let bytes = bench.case.layout.larger() * size_of::<T>();
        Ok(figures(self.plan, self.comm.world_size(), times, bytes, wrong))
    }
}

/// What is reported of the times of a size.
pub fn figures(plan: &Plan, ranks: usize, times: Times, bytes: usize, wrong: Option<u64>) -> Measurement {
    const MICROSECONDS: f64 = 1e6;
    let operation = plan.operation;
    let stats = Stats::new(&times.iterations);
    let time = times.loop_average.unwrap_or(stats.p50);
    let algbw = operation.algorithm_bandwidth(bytes, ranks, time);
    let in_microseconds = |time: &f64| time * MICROSECONDS;
    Measurement {
        time: time * MICROSECONDS,
        algbw,
        busbw: algbw.map(|algbw| algbw * operation.bus_factor(ranks)),
        wrong,
        iterations: times.iterations.len(),
        p50: stats.p50 * MICROSECONDS,
        p95: stats.p95 * MICROSECONDS,
        p99: stats.p99 * MICROSECONDS,
        min: stats.min * MICROSECONDS,
        max: stats.max * MICROSECONDS,
        mean: stats.mean * MICROSECONDS,
        variation: stats.variation,
        loop_average: times.loop_average.as_ref().map(in_microseconds),
        enqueue: times.enqueue.as_ref().map(in_microseconds),
        times: (plan.per_iteration).then(|| times.iterations.iter().map(in_microseconds).collect()),
    }
}

/// Performs one call on known data; the number of elements that are wrong on this rank: results,
/// inputs that were changed, and anything behind the end of the output.
fn check<T: Value>(bench: &mut Bench<'_, T>, patterns: &Patterns<T>, call: u64) -> Result<u64> {
    let comm = bench.case.comm;
    let flow = Flow {
        operation: bench.case.operation,
        place: bench.place,
        layout: bench.case.layout,
        rank: comm.rank(),
        ranks: comm.world_size(),
        root: bench.case.root,
    };
    let (inputs, mut outputs) = (flow.inputs(), flow.outputs());
    let (end, in_place) = (bench.written_len(), bench.place == Place::InPlace);
    outputs.push(Segment { range: end..end + MARGIN, first: end, content: Content::Untouched });

    bench.recv.write(end + MARGIN, |start, piece| {
        let window = start..start + piece.len();
        patterns.spoil(piece, &clip(&outputs, &window), call);
        if in_place {
            // The inputs overwrite a part of what was spoiled.
            patterns.fill(piece, &clip(&inputs, &window), call);
        }
    })?;
    let input = bench.read_len();
    bench.send.write(input, |start, piece| {
        patterns.fill(piece, &clip(&inputs, &(start..start + piece.len())), call);
    })?;
    bench.perform(0)?;
    comm.sync()?;

    let mut wrong = 0;
    let mut count = |segments: &[Segment], start: usize, piece: &[T]| {
        wrong += patterns.count_wrong(piece, &clip(segments, &(start..start + piece.len())), call);
    };
    bench.recv.read(end + MARGIN, |start, piece| count(&outputs, start, piece))?;
    bench.send.read(input, |start, piece| count(&inputs, start, piece))?;
    Ok(wrong)
}

/// The library's name for a reduction, with this rank's factor where there is one.
fn reduction<T: Value>(op: RedOp, rank: usize) -> Reduction<T> {
    match op {
        RedOp::Sum => ReduceOp::Sum.into(),
        RedOp::Prod => ReduceOp::Prod.into(),
        RedOp::Min => ReduceOp::Min.into(),
        RedOp::Max => ReduceOp::Max.into(),
        RedOp::Avg => ReduceOp::Avg.into(),
        RedOp::MulSum => PreMulSum(T::from_i64(RedOp::factor(rank))).into(),
    }
}
