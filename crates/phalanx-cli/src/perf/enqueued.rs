//! Times work on a GPU: as the reference benchmark does, and with events.
//!
//! The time of an operation is the average of a loop that enqueues many and then waits for the stream: the
//! mean of all ranks, or what `-a` selects. In a second loop, events between the operations measure each on
//! the GPU, for the percentiles.

use super::figures::Times;
use super::plan::Plan;
use anyhow::{Context, Result, bail};
use phalanx::Comm;
use phalanx::cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use phalanx::cudarc::driver::{CudaGraph, CudaStream};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Timed iterations and warm-up iterations of the reference benchmark.
pub const ITERATIONS: usize = 20;
pub const WARMUP: usize = 5;

/// An operation that is enqueued.
pub struct Enqueued<'a> {
    /// For barriers, and to combine the ranks' times.
    pub comm: &'a Comm,
    pub stream: &'a Arc<CudaStream>,
    /// Enqueues the call of an iteration.
    pub call: &'a mut dyn FnMut(usize) -> Result<()>,
    /// Waits for the completion of all calls, with a deadline.
    pub sync: &'a dyn Fn() -> Result<()>,
}

/// What is enqueued between two events, and how often.
struct Work {
    /// A graph of the calls of all iterations; without one, the calls of an iteration are enqueued.
    graph: Option<CudaGraph>,
    repeats: usize,
    /// Operations of one repeat.
    operations: usize,
}

impl Enqueued<'_> {
    /// Measures the operation. Collective.
    pub fn measure(&mut self, plan: &Plan) -> Result<Times> {
        let iterations = plan.iterations.unwrap_or(ITERATIONS);
        self.calls(0..plan.warmup.unwrap_or(WARMUP), plan.aggregate)?;
        (self.sync)()?;
        // A graph is dropped with this function's end: NCCL's communicator waits for graphs that captured it.
        let work = match plan.graph_launches {
            0 => Work { graph: None, repeats: iterations, operations: plan.aggregate },
            launches => Work {
                graph: Some(self.capture(self.stream, iterations, plan.aggregate)?),
                repeats: launches,
                operations: iterations * plan.aggregate,
            },
        };
        let [loop_average, enqueue] = self.time_loop(&work, plan)?.map(Some);
        let iterations = self.time_with_events(&work, plan)?;
        Ok(Times { iterations, loop_average, enqueue })
    }

    /// The average time of an operation, and of the call that enqueues it, in seconds.
    fn time_loop(&mut self, work: &Work, plan: &Plan) -> Result<[f64; 2]> {
        self.comm.barrier()?;
        let start = Instant::now();
        for number in 0..work.repeats {
            self.enqueue(work, number, plan.aggregate)?;
            if plan.blocking {
                self.wait(work)?;
            }
        }
        let enqueued = start.elapsed();
        self.wait(work)?;
        let count = work.repeats as f64 * work.operations as f64;
        let mut averages = [start.elapsed(), enqueued].map(|time| time.as_secs_f64() / count);
        plan.average().of_ranks(self.comm, &mut averages)?;
        Ok(averages)
    }

    /// The time of an operation in each repeat, in seconds, between events on this rank's stream.
    fn time_with_events(&mut self, work: &Work, plan: &Plan) -> Result<Vec<f64>> {
        let event = || self.stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let events = (0..=work.repeats).map(|_| event()).collect::<Result<Vec<_>, _>>()?;
        self.comm.barrier()?;
        events[0].record(self.stream)?;
        for number in 0..work.repeats {
            self.enqueue(work, number, plan.aggregate)?;
            events[number + 1].record(self.stream)?;
            if plan.blocking {
                self.wait(work)?;
            }
        }
        self.wait(work)?;
        let seconds = |milliseconds: f32| f64::from(milliseconds) / 1e3 / work.operations as f64;
        events.windows(2).map(|pair| Ok(seconds(pair[0].elapsed_ms(&pair[1])?))).collect()
    }

    /// Enqueues repeat number `number`.
    fn enqueue(&mut self, work: &Work, number: usize, aggregate: usize) -> Result<()> {
        match &work.graph {
            None => self.calls(number..number + 1, aggregate),
            Some(graph) => Ok(graph.launch()?),
        }
    }

    /// Enqueues the calls of some iterations.
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
        // Also if a call failed: a stream that is captured can do nothing else.
        let captured = stream.end_capture(CUgraphInstantiate_flags(0));
        called?;
        let graph = captured?.context("-G: the operation enqueues nothing that a CUDA graph could hold")?;
        graph.upload()?;
        Ok(graph)
    }

    /// Waits for the stream, with the communicator's deadline.
    fn wait(&self, work: &Work) -> Result<()> {
        match work.graph {
            None => (self.sync)(),
            // The communicator does not know of a graph's launches.
            Some(_) => wait(self.comm, self.stream),
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
