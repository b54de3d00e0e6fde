//! What one rank does: measures and checks every type, reduction, root and size of the plan.
//!
//! All ranks go through the same loops.

use super::buffer::{Buffer, MARGIN};
use super::case::Case;
use super::data::{Content, Flow, Patterns, Segment, patterns};
use super::figures::figures;
use super::layout::BufferLengths;
use super::observer::Observer;
use super::operation::Place;
use super::plan::Plan;
use super::reduction::RedOp;
use super::report::{Measurement, Row};
use super::timing::Bench;
use anyhow::Result;
use phalanx::{Comm, DType, ReduceOp};

/// Carries out the plan as one rank. Returns the number of wrong elements on all ranks.
pub fn run(comm: &Comm, plan: &Plan, cores: usize, observer: &mut dyn Observer) -> Result<u64> {
    let mut rank = Rank { comm, plan, cores, observer, checks: 0, rows: 0 };
    let mut wrong = 0;
    let mut cycle = 0;
    while plan.cycles.is_none_or(|cycles| cycle < cycles) {
        for &dtype in plan.dtypes.iter().filter(|dtype| plan.can(comm, **dtype)) {
            wrong += rank.run_type(dtype)?;
        }
        cycle += 1;
    }
    Ok(wrong)
}

struct Rank<'a> {
    comm: &'a Comm,
    plan: &'a Plan,
    cores: usize,
    observer: &'a mut dyn Observer,
    /// Checked calls so far, the same on all ranks.
    checks: u64,
    /// Rows so far.
    rows: usize,
}

/// The send and receive buffer of all sizes of a type. In place, `recv` is the buffer for both.
struct Buffers {
    send: Buffer,
    recv: Buffer,
}

impl Rank<'_> {
    fn run_type(&mut self, dtype: DType) -> Result<u64> {
        let (plan, comm) = (self.plan, self.comm);
        let layouts = plan.layouts(dtype, comm.world_size());
        let most = |length: fn(&BufferLengths) -> usize| layouts.iter().map(length).max().unwrap_or(0);
        let buffer = |len| Buffer::new(comm, len, dtype.size(), plan.registration);
        let (send, recv) = (buffer(most(|layout| layout.send))?, buffer(most(BufferLengths::larger))?);
        let mut buffers = Buffers { send, recv };

        let mut wrong = 0;
        for &redop in &plan.reductions {
            let patterns = patterns(dtype, redop.unwrap_or(RedOp::Sum), comm.world_size(), comm.rank());
            for root in plan.roots.of(comm.world_size()) {
                for &layout in &layouts {
                    let row = self.run_row(layout, dtype, redop, root, &mut buffers, &*patterns)?;
                    wrong += row.measurements().filter_map(|measurement| measurement.wrong).sum::<u64>();
                    self.rows += 1;
                    self.observer.row_complete(row)?;
                }
            }
        }
        Ok(wrong)
    }

    fn run_row(
        &mut self,
        layout: BufferLengths,
        dtype: DType,
        redop: Option<RedOp>,
        root: Option<usize>,
        buffers: &mut Buffers,
        patterns: &dyn Patterns,
    ) -> Result<Row> {
        let (operation, bytes) = (self.plan.operation, layout.larger() * dtype.size());
        self.observer.row_begins(self.rows, bytes);
        let mut row = Row {
            size: bytes,
            count: layout.count,
            dtype: operation.has_data().then(|| dtype.name().to_owned()),
            redop,
            root,
            out_of_place: None,
            in_place: None,
        };
        for &place in operation.places() {
            let op = redop.unwrap_or(RedOp::Sum);
            let case = Case::new(self.comm, operation, layout, dtype, op, root.unwrap_or(0));
            let bench = Bench { case, send: &mut buffers.send, recv: &mut buffers.recv, place };
            let measurement = Some(self.measure(bench, patterns)?);
            match place {
                Place::OutOfPlace => row.out_of_place = measurement,
                Place::InPlace => row.in_place = measurement,
            }
        }
        Ok(row)
    }

    fn measure(&mut self, mut bench: Bench<'_>, patterns: &dyn Patterns) -> Result<Measurement> {
        let times = bench.measure(self.plan, self.cores)?;
        let mut wrong = (self.plan.checks > 0).then_some(0);
        for _ in 0..self.plan.checks {
            self.checks += 1;
            let mut found = [check(&mut bench, patterns, self.checks)?];
            self.comm.all_reduce_in_place(&mut found, ReduceOp::Sum)?;
            wrong = wrong.map(|wrong| wrong + found[0]);
        }
        let bytes = bench.case.layout.larger() * bench.case.dtype.size();
        Ok(figures(self.plan, self.comm.world_size(), times, bytes, wrong))
    }
}

/// Performs one call on known data. Returns this rank's number of wrong elements: results, changed inputs,
/// and anything written behind the end of the output.
fn check(bench: &mut Bench<'_>, patterns: &dyn Patterns, call: u64) -> Result<u64> {
    let comm = bench.case.comm();
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

    bench.recv.write(end + MARGIN, &mut |start, piece| {
        patterns.spoil(piece, start, &outputs, call);
        if in_place {
            // The inputs replace a part of the spoiled elements.
            patterns.fill(piece, start, &inputs, call);
        }
    })?;
    let input = bench.read_len();
    bench.send.write(input, &mut |start, piece| patterns.fill(piece, start, &inputs, call))?;
    bench.perform(0)?;
    comm.sync()?;

    let mut wrong = 0;
    let mut count = |segments: &[Segment], start: usize, piece: &[u8]| {
        wrong += patterns.count_wrong(piece, start, segments, call);
    };
    bench.recv.read(end + MARGIN, &mut |start, piece| count(&outputs, start, piece))?;
    bench.send.read(input, &mut |start, piece| count(&inputs, start, piece))?;
    Ok(wrong)
}
