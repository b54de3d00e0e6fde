//! NVSHMEM's operations: every rank reaches into the memory of the next.
//!
//! They are no operations of a communicator, and their memory borrows NVSHMEM's context, so they have a loop of
//! their own over types and sizes; times are taken, and results checked, as for all other operations on GPUs.

use super::bench::{Audience, figures};
use super::buffer::MARGIN;
use super::data::{Content, Flow, Patterns, Segment, Value, clip, with_value};
use super::device::{STAGE, pieces};
use super::enqueued::{Enqueued, wait};
use super::layout::Layout;
use super::operation::{Operation, Place};
use super::plan::Plan;
use super::reduction::RedOp;
use super::report::{Measurement, Row};
use crate::size;
use anyhow::{Result, ensure};
use phalanx::nvshmem::{Compare, Context, SignalOp, Symmetric};
use phalanx::{Comm, ReduceOp};

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
    // SAFETY: all memory of this context is allocated, used and freed on NVSHMEM's stream, so its order is all the order
    // there has to be.
    unsafe { nvshmem.cuda_context().disable_event_tracking() };
    Ok(nvshmem)
}

/// Carries out the plan as one rank. Answers with the number of wrong elements on all ranks.
pub fn run(comm: &Comm, nvshmem: &Context, plan: &Plan, audience: &mut dyn Audience) -> Result<u64> {
    let mut rank = Rank { comm, nvshmem, plan, audience, checked: 0, rows: 0 };
    let mut wrong = 0;
    let mut cycle = 0;
    while plan.cycles.is_none_or(|cycles| cycle < cycles) {
        for &dtype in &plan.dtypes {
            wrong += with_value!(dtype, T => rank.run_type::<T>())?;
        }
        cycle += 1;
    }
    Ok(wrong)
}

struct Rank<'a> {
    comm: &'a Comm,
    nvshmem: &'a Context,
    plan: &'a Plan,
    audience: &'a mut dyn Audience,
    /// Checked calls so far, the same on all ranks.
    checked: u64,
    /// Rows so far.
    rows: usize,
}

impl Rank<'_> {
    fn run_type<T: Value>(&mut self) -> Result<u64> {
        let (plan, ranks) = (self.plan, self.comm.world_size());
        let sizes = plan.sizes.iter();
        let layouts: Vec<Layout> =
            sizes.filter_map(|&size| Layout::new(plan.operation, size, size_of::<T>(), ranks)).collect();
        let longest = layouts.iter().map(Layout::larger).max().unwrap_or(0);
        let mut bench = Bench::<T>::new(self.comm, self.nvshmem, plan.operation, longest)?;
        let patterns = Patterns::new(RedOp::Sum, ranks, self.comm.rank());
        let mut total = 0;
        for &layout in &layouts {
            let bytes = layout.larger() * size_of::<T>();
            self.audience.starts(self.rows, bytes);
            let measurement = self.measure(&mut bench, layout, &patterns)?;
            total += measurement.wrong.unwrap_or(0);
            self.rows += 1;
            self.audience.row(Row {
                size: bytes,
                count: layout.count,
                dtype: Some(T::DTYPE.name().to_owned()),
                redop: None,
                root: None,
                out_of_place: Some(measurement),
                in_place: None,
            })?;
        }
        bench.free()?;
        Ok(total)
    }

    fn measure<T: Value>(
        &mut self,
        bench: &mut Bench<'_, T>,
        layout: Layout,
        patterns: &Patterns<T>,
    ) -> Result<Measurement> {
        let (comm, nvshmem, plan) = (self.comm, self.nvshmem, self.plan);
        let len = layout.count;
        let parts = (bench.send.len() - MARGIN) / len;
        let sync = || {
            nvshmem.quiet_on_stream(nvshmem.stream())?;
            wait(comm, nvshmem.stream())
        };
        let mut call = |number: usize| bench.perform(number % parts * len, len);
        let mut enqueued = Enqueued { comm, stream: nvshmem.stream(), call: &mut call, sync: &sync };
        let mut times = enqueued.measure(plan)?;
        comm.all_reduce_in_place(&mut times.iterations, ReduceOp::Max)?;

        let mut wrong = (plan.checks > 0).then_some(0);
        for _ in 0..plan.checks {
            self.checked += 1;
            let mut found = [bench.check(layout, patterns, self.checked)?];
            comm.all_reduce_in_place(&mut found, ReduceOp::Sum)?;
            wrong = wrong.map(|wrong| wrong + found[0]);
        }
        Ok(figures(plan, comm.world_size(), times, len * size_of::<T>(), wrong))
    }
}

/// An operation and its buffers, which are as long on every rank.
struct Bench<'c, T: Value> {
    comm: &'c Comm,
    nvshmem: &'c Context,
    operation: Operation,
    send: Symmetric<'c, T>,
    recv: Symmetric<'c, T>,
    arrived: Symmetric<'c, u64>,
    /// Calls so far, each of which adds 1 to a signal.
    calls: u64,
}

impl<'c, T: Value> Bench<'c, T> {
    fn new(comm: &'c Comm, nvshmem: &'c Context, operation: Operation, len: usize) -> Result<Bench<'c, T>> {
        let (send, recv) = (nvshmem.alloc(len + MARGIN)?, nvshmem.alloc(len + MARGIN)?);
        Ok(Bench { comm, nvshmem, operation, send, recv, arrived: nvshmem.alloc(1)?, calls: 0 })
    }

    /// Enqueues the operation on a part of the buffers.
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
                let (signal, to) = (self.arrived.signal(0)?, self.recv.slice(range));
                nvshmem.put_signal_on_stream(&to, &send, &signal, 1, SignalOp::Add, next, stream)?;
                nvshmem.signal_wait_until_on_stream(&signal, Compare::Ge, self.calls, stream)?;
            }
        }
        Ok(())
    }

    /// Performs one call on known data; the number of elements that are wrong on this rank: results, inputs that were
    /// changed, and anything behind the end of the output.
    fn check(&mut self, layout: Layout, patterns: &Patterns<T>, call: u64) -> Result<u64> {
        let (comm, len) = (self.comm, layout.count);
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
        let here = |segments: &[Segment], start: usize, len: usize| clip(segments, &(start..start + len));
        write(self.nvshmem, &mut self.recv, len + MARGIN, |start, piece| {
            patterns.spoil(piece, &here(&outputs, start, piece.len()), call);
        })?;
        write(self.nvshmem, &mut self.send, len, |start, piece| {
            patterns.fill(piece, &here(&inputs, start, piece.len()), call);
        })?;
        // Nobody puts before it is expected, and nobody looks before it has come.
        comm.barrier()?;
        self.perform(0, len)?;
        self.nvshmem.world().barrier_on_stream(self.nvshmem.stream())?;
        self.nvshmem.sync(self.nvshmem.stream())?;

        let mut wrong = 0;
        let mut count = |segments: &[Segment], start: usize, piece: &[T]| {
            wrong += patterns.count_wrong(piece, &here(segments, start, piece.len()), call);
        };
        read(self.nvshmem, &self.recv, len + MARGIN, |start, piece| count(&outputs, start, piece))?;
        read(self.nvshmem, &self.send, len, |start, piece| count(&inputs, start, piece))?;
        Ok(wrong)
    }

    fn free(self) -> Result<()> {
        self.send.free()?;
        self.recv.free()?;
        Ok(self.arrived.free()?)
    }
}

/// Has the first `len` elements written, piece by piece.
fn write<T: Value>(
    nvshmem: &Context,
    memory: &mut Symmetric<'_, T>,
    len: usize,
    mut write: impl FnMut(usize, &mut [T]),
) -> Result<()> {
    let mut stage = vec![T::from_i64(0); len.min(STAGE / size_of::<T>())];
    for piece in pieces(len, stage.len()) {
        let stage = &mut stage[..piece.len()];
        write(piece.start, stage);
        nvshmem.stream().memcpy_htod(&*stage, &mut memory.slice_mut(piece).view_mut())?;
        // The stage is free again.
        nvshmem.sync(nvshmem.stream())?;
    }
    Ok(())
}

/// Has the first `len` elements read, piece by piece.
fn read<T: Value>(
    nvshmem: &Context,
    memory: &Symmetric<'_, T>,
    len: usize,
    mut read: impl FnMut(usize, &[T]),
) -> Result<()> {
    let mut stage = vec![T::from_i64(0); len.min(STAGE / size_of::<T>())];
    for piece in pieces(len, stage.len()) {
        let stage = &mut stage[..piece.len()];
        nvshmem.stream().memcpy_dtoh(memory.slice(piece.clone()).view(), stage)?;
        nvshmem.sync(nvshmem.stream())?;
        read(piece.start, stage);
    }
    Ok(())
}
