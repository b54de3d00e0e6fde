//! NVSHMEM's operations: every rank reads or writes the memory of the next.
//!
//! They are no operations of a communicator, and their memory borrows NVSHMEM's context, so they have their
//! own loops over types and sizes. Times and checks are the same as for other operations on GPUs.

use super::buffer::{AlignedBytes, MARGIN};
use super::data::{Content, Flow, Patterns, Segment, patterns};
use super::device::{STAGE, pieces};
use super::enqueued::{Enqueued, wait};
use super::figures::figures;
use super::layout::BufferLengths;
use super::observer::Observer;
use super::operation::{Operation, Place};
use super::plan::Plan;
use super::reduction::RedOp;
use super::report::{Measurement, Row};
use crate::size;
use anyhow::{Result, ensure};
use phalanx::nvshmem::{Compare, Context, SignalOp, Symmetric};
use phalanx::{Comm, DType, ReduceOp};

/// Makes this rank a PE, on the GPU with its number on the host.
pub fn context(comm: &Comm, plan: &Plan) -> Result<Context> {
    let nvshmem = Context::init(comm)?;
    let (free, _) = nvshmem.cuda_context().mem_get_info()?;
    let needed = plan.largest().saturating_mul(2);
    ensure!(
        needed <= free,
        "two buffers of {} need {}, and {} of the GPU are free: lower --maxbytes",
        size::format(plan.largest() as u64),
        size::format(needed as u64),
        size::format(free as u64)
    );
    // SAFETY: all memory of this context is allocated, used and freed on NVSHMEM's stream: its order
    // suffices.
    unsafe { nvshmem.cuda_context().disable_event_tracking() };
    Ok(nvshmem)
}

/// Carries out the plan as one rank. Returns the number of wrong elements on all ranks.
pub fn run(comm: &Comm, nvshmem: &Context, plan: &Plan, observer: &mut dyn Observer) -> Result<u64> {
    let mut rank = Rank { comm, nvshmem, plan, observer, checks: 0, rows: 0 };
    let mut wrong = 0;
    let mut cycle = 0;
    while plan.cycles.is_none_or(|cycles| cycle < cycles) {
        for &dtype in &plan.dtypes {
            wrong += rank.run_type(dtype)?;
        }
        cycle += 1;
    }
    Ok(wrong)
}

struct Rank<'a> {
    comm: &'a Comm,
    nvshmem: &'a Context,
    plan: &'a Plan,
    observer: &'a mut dyn Observer,
    /// Checked calls so far, the same on all ranks.
    checks: u64,
    /// Rows so far.
    rows: usize,
}

impl Rank<'_> {
    fn run_type(&mut self, dtype: DType) -> Result<u64> {
        let (plan, ranks) = (self.plan, self.comm.world_size());
        let layouts = plan.layouts(dtype, ranks);
        let longest = layouts.iter().map(BufferLengths::larger).max().unwrap_or(0);
        let mut bench = Bench::new(self.comm, self.nvshmem, plan.operation, longest, dtype.size())?;
        let patterns = patterns(dtype, RedOp::Sum, ranks, self.comm.rank());
        let mut total = 0;
        for &layout in &layouts {
            let bytes = layout.larger() * dtype.size();
            self.observer.row_begins(self.rows, bytes);
            let measurement = self.measure(&mut bench, layout, &*patterns)?;
            total += measurement.wrong.unwrap_or(0);
            self.rows += 1;
            self.observer.row_complete(Row {
                size: bytes,
                count: layout.count,
                dtype: Some(dtype.name().to_owned()),
                redop: None,
                root: None,
                out_of_place: Some(measurement),
                in_place: None,
            })?;
        }
        bench.free()?;
        Ok(total)
    }

    fn measure(
        &mut self,
        bench: &mut Bench<'_>,
        layout: BufferLengths,
        patterns: &dyn Patterns,
    ) -> Result<Measurement> {
        let (comm, nvshmem, plan) = (self.comm, self.nvshmem, self.plan);
        let (len, bytes) = (layout.count, layout.count * bench.element);
        // Each iteration uses another part, so that no cache holds its data.
        let parts = (bench.send.len() / bench.element - MARGIN) / len;
        let sync = || {
            nvshmem.quiet_on_stream(nvshmem.stream())?;
            wait(comm, nvshmem.stream())
        };
        let mut call = |number: usize| bench.perform(number % parts * bytes, bytes);
        let mut enqueued = Enqueued { comm, stream: nvshmem.stream(), call: &mut call, sync: &sync };
        let mut times = enqueued.measure(plan)?;
        comm.all_reduce_in_place(&mut times.iterations, ReduceOp::Max)?;

        let mut wrong = (plan.checks > 0).then_some(0);
        for _ in 0..plan.checks {
            self.checks += 1;
            let mut found = [bench.check(layout, patterns, self.checks)?];
            comm.all_reduce_in_place(&mut found, ReduceOp::Sum)?;
            wrong = wrong.map(|wrong| wrong + found[0]);
        }
        Ok(figures(plan, comm.world_size(), times, bytes, wrong))
    }
}

/// An operation and its buffers, which have the same length on every rank.
struct Bench<'c> {
    comm: &'c Comm,
    nvshmem: &'c Context,
    operation: Operation,
    /// Bytes of an element.
    element: usize,
    send: Symmetric<'c, u8>,
    recv: Symmetric<'c, u8>,
    signal: Symmetric<'c, u64>,
    /// Calls so far, each of which adds 1 to a signal.
    calls: u64,
}

impl<'c> Bench<'c> {
    fn new(
        comm: &'c Comm,
        nvshmem: &'c Context,
        operation: Operation,
        len: usize,
        element: usize,
    ) -> Result<Bench<'c>> {
        let bytes = (len + MARGIN) * element;
        let (send, recv) = (nvshmem.alloc(bytes)?, nvshmem.alloc(bytes)?);
        Ok(Bench { comm, nvshmem, operation, element, send, recv, signal: nvshmem.alloc(1)?, calls: 0 })
    }

    /// Enqueues the operation on these bytes of the buffers.
    fn perform(&mut self, start: usize, len: usize) -> Result<()> {
        let (nvshmem, stream) = (self.nvshmem, self.nvshmem.stream());
        let next = (nvshmem.my_pe() + 1) % nvshmem.n_pes();
        let range = start..start + len;
        let send = self.send.slice(range.clone());
        match self.operation {
            Operation::Put => nvshmem.put_on_stream(&self.recv.slice(range), &send, next, stream)?,
            Operation::Get => nvshmem.get_on_stream(&mut self.recv.slice_mut(range), &send, next, stream)?,
            _ => {
                self.calls += 1;
                let (signal, to) = (self.signal.signal(0)?, self.recv.slice(range));
                nvshmem.put_signal_on_stream(&to, &send, &signal, 1, SignalOp::Add, next, stream)?;
                nvshmem.signal_wait_until_on_stream(&signal, Compare::Ge, self.calls, stream)?;
            }
        }
        Ok(())
    }

    /// Performs one call on known data. Returns this rank's number of wrong elements: results, changed
    /// inputs, and anything written behind the end of the output.
    fn check(&mut self, layout: BufferLengths, patterns: &dyn Patterns, call: u64) -> Result<u64> {
        let (comm, element, len) = (self.comm, self.element, layout.count);
        let flow = Flow {
            operation: self.operation,
            place: Place::OutOfPlace,
            layout,
            rank: comm.rank(),
            ranks: comm.world_size(),
            root: 0,
        };
        let (inputs, mut outputs) = (flow.inputs(), flow.outputs());
        outputs.push(Segment { range: len..len + MARGIN, first: len, content: Content::Untouched });
        let (input, output) = (len * element, (len + MARGIN) * element);
        write(self.nvshmem, &mut self.recv, output, &mut |start, piece| {
            patterns.spoil(piece, start / element, &outputs, call);
        })?;
        write(self.nvshmem, &mut self.send, input, &mut |start, piece| {
            patterns.fill(piece, start / element, &inputs, call);
        })?;
        // The neighbours' memory must be ready before the call, and their writes complete after it.
        comm.barrier()?;
        self.perform(0, input)?;
        self.nvshmem.world().barrier_on_stream(self.nvshmem.stream())?;
        self.nvshmem.sync(self.nvshmem.stream())?;

        let mut wrong = 0;
        let mut count = |segments: &[Segment], start: usize, piece: &[u8]| {
            wrong += patterns.count_wrong(piece, start / element, segments, call);
        };
        read(self.nvshmem, &self.recv, output, &mut |start, piece| count(&outputs, start, piece))?;
        read(self.nvshmem, &self.send, input, &mut |start, piece| count(&inputs, start, piece))?;
        Ok(wrong)
    }

    fn free(self) -> Result<()> {
        self.send.free()?;
        self.recv.free()?;
        Ok(self.signal.free()?)
    }
}

/// Calls `write` with each piece of the first `len` bytes: its place and the bytes to set.
fn write(
    nvshmem: &Context,
    memory: &mut Symmetric<'_, u8>,
    len: usize,
    write: &mut dyn FnMut(usize, &mut [u8]),
) -> Result<()> {
    let mut stage = AlignedBytes::zeroed(len.min(STAGE));
    for piece in pieces(len, stage.len()) {
        let stage = &mut stage[..piece.len()];
        write(piece.start, stage);
        nvshmem.stream().memcpy_htod(&*stage, &mut memory.slice_mut(piece).view_mut())?;
        // The stage is used again.
        nvshmem.sync(nvshmem.stream())?;
    }
    Ok(())
}

/// Calls `read` with each piece of the first `len` bytes.
fn read(
    nvshmem: &Context,
    memory: &Symmetric<'_, u8>,
    len: usize,
    read: &mut dyn FnMut(usize, &[u8]),
) -> Result<()> {
    let mut stage = AlignedBytes::zeroed(len.min(STAGE));
    for piece in pieces(len, stage.len()) {
        let stage = &mut stage[..piece.len()];
        nvshmem.stream().memcpy_dtoh(memory.slice(piece.clone()).view(), stage)?;
        nvshmem.sync(nvshmem.stream())?;
        read(piece.start, stage);
    }
    Ok(())
}
