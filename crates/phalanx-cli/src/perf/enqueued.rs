//! How work on a GPU is timed: as the reference benchmark does, and by events.
//!
//! The time of an operation is the average of a loop that enqueues many and then waits for the stream: the mean of all
//! ranks', or whose `-a` says. In a second loop events between the operations say how long each took on the GPU, for the percentiles.
//! Each turn uses the next part of the buffers, so that no cache holds the data of the turn before.

use super::data::Value;
use super::plan::Plan;
use super::timing::{Bench, Times};
use anyhow::{Context, Result, bail};
use phalanx::Comm;
use phalanx::cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use phalanx::cudarc::driver::{CudaGraph, CudaStream};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Timed iterations and those before, as in the reference benchmark.
pub const ITERATIONS: usize = 20;
pub const WARMUP: usize = 5;

/// What is enqueued in one turn.
enum Turn {
    /// The calls of an iteration.
    Calls,
    /// A graph of the calls of all iterations.
    Graph(CudaGraph),
}

impl<T: Value> Bench<'_, T> {
    /// Measures work that is enqueued on the communicator's stream. Collective.
    pub fn measure_enqueued(&mut self, plan: &Plan) -> Result<Times> {
        let comm = self.case.comm;
        let stream = comm.cuda_stream().expect("an operation on a GPU has a stream");
        let parts = self.parts();
        let mut call = |number| Ok(self.perform(number % parts)?);
        Enqueued { comm, stream, call: &mut call, sync: &|| Ok(comm.sync()?) }.measure(plan)
    }
}

/// An operation that is enqueued.
pub struct Enqueued<'a> {
    /// For barriers, and to combine the ranks' times.
    pub comm: &'a Comm,
    pub stream: &'a Arc<CudaStream>,
    /// Enqueues the call of an iteration.
    pub call: &'a mut dyn FnMut(usize) -> Result<()>,
    /// Waits until what was called is complete, with a deadline.
    pub sync: &'a dyn Fn() -> Result<()>,
}

impl Enqueued<'_> {
    /// Measures. Collective.
    pub fn measure(&mut self, plan: &Plan) -> Result<Times> {
        let (comm, stream) = (self.comm, self.stream);
        let iterations = plan.iterations.unwrap_or(ITERATIONS);
        self.calls(0..plan.warmup.unwrap_or(WARMUP), plan.aggregate)?;
        (self.sync)()?;
        // Before the comm can end: NCCL waits for graphs that captured it.
        let (turn, turns, operations) = match plan.graph_launches {
            0 => (Turn::Calls, iterations, plan.aggregate),
            launches => {
                let graph = self.capture(stream, iterations, plan.aggregate)?;
                (Turn::Graph(graph), launches, iterations * plan.aggregate)
            }
        };

        comm.barrier()?;
        let start = Instant::now();
        for number in 0..turns {
            self.enqueue(&turn, number, plan.aggregate)?;
            if plan.blocking {
                self.wait(&turn)?;
            }
        }
        let enqueued = start.elapsed();
        self.wait(&turn)?;
        let count = turns as f64 * operations as f64;
        let mut averages = [start.elapsed(), enqueued].map(|time| time.as_secs_f64() / count);
        plan.average().of_ranks(comm, &mut averages)?;

        let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let events = (0..=turns).map(|_| event()).collect::<Result<Vec<_>, _>>()?;
        comm.barrier()?;
        events[0].record(stream)?;
        for number in 0..turns {
            self.enqueue(&turn, number, plan.aggregate)?;
            events[number + 1].record(stream)?;
            if plan.blocking {
                self.wait(&turn)?;
            }
        }
        self.wait(&turn)?;
        let seconds = |milliseconds: f32| f64::from(milliseconds) / 1e3 / operations as f64;
        let times: Result<Vec<f64>> =
            events.windows(2).map(|pair| Ok(seconds(pair[0].elapsed_ms(&pair[1])?))).collect();
        let [loop_average, enqueue] = averages.map(Some);
        Ok(Times { iterations: times?, loop_average, enqueue })
    }

    fn enqueue(&mut self, turn: &Turn, number: usize, aggregate: usize) -> Result<()> {
        match turn {
            Turn::Calls => self.calls(number..number + 1, aggregate),
            Turn::Graph(graph) => Ok(graph.launch()?),
        }
    }

    /// The calls of some iterations.
    fn calls(&mut self, iterations: Range<usize>, aggregate: usize) -> Result<()> {
        for iteration in iterations {
            for _ in 0..aggregate {
                (self.call)(iteration)?;
            }
        }
        Ok(())
    }

    /// A graph of the calls of all iterations.
    fn capture(
        &mut self,
        stream: &Arc<CudaStream>,
        iterations: usize,
        aggregate: usize,
    ) -> Result<CudaGraph> {
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let called = self.calls(0..iterations, aggregate);
        // Ended also if a call failed: nothing else could be done with the stream.
        let captured = stream.end_capture(CUgraphInstantiate_flags(0));
        called?;
        let graph = captured?.context("-G: the operation enqueues nothing that a CUDA graph could hold")?;
        graph.upload()?;
        Ok(graph)
    }

    /// Waits for the stream, with the communicator's deadline.
    fn wait(&self, turn: &Turn) -> Result<()> {
        match turn {
            Turn::Calls => (self.sync)(),
            // The communicator has not seen what a graph's launches enqueued.
            Turn::Graph(_) => wait(self.comm, self.stream),
        }
    }
}

/// Waits for a stream, with the communicator's deadline.
pub fn wait(comm: &Comm, stream: &Arc<CudaStream>) -> Result<()> {
    let end = stream.record_event(None)?;
    let start = Instant::now();
    while !end.try_is_complete()? {
        if start.elapsed() > comm.timeout() {
            bail!("the work on the GPU of rank {} has not ended after {:?}", comm.rank(), comm.timeout());
        }
        std::thread::yield_now();
    }
    Ok(())
}
