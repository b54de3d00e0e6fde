//! Computing and communicating at the same time: while a part of the gradients is summed over the ranks, the next part is
//! computed. `StreamSyncOps` orders the two streams; events on the GPU prove that they ran at once.
//!
//! ```text
//! cargo run --release -p phalanx --example overlap -- 2
//! phalanx launch -n 2 -- target/release/examples/overlap
//! ```

#[path = "shared/blas.rs"]
mod blas;
#[path = "shared/gpu.rs"]
mod gpu;
#[path = "shared/timeline.rs"]
mod timeline;

use blas::{Blas, Matrix};
use cudarc::driver::{CudaEvent, CudaStream, DevicePtr};
use gpu::Result;
use phalanx::{Comm, DType, ReduceOp};
use phalanx::{RawCommunicator, StreamSyncOps};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use timeline::{Timeline, mark};

/// Rows and columns of a part.
const SIZE: usize = 4096;
const PARTS: usize = 8;

fn main() -> ExitCode {
    gpu::on_ranks("overlap", one_rank)
}

struct Rank {
    communicator: Arc<dyn RawCommunicator>,
    /// Where gradients are computed.
    compute: Arc<CudaStream>,
    /// Where nothing happens but waiting for the communicator's stream, to know its times.
    clock: Arc<CudaStream>,
    blas: Blas,
    left: Matrix,
    right: Matrix,
    parts: Vec<Matrix>,
}

fn one_rank(comm: Comm) -> Result<()> {
    let context = comm.cuda_stream()?.context().clone();
    let (compute, clock) = (context.new_stream()?, context.new_stream()?);
    // The communicator has to know the streams that it is ordered with.
    drop(comm.on(&compute)?);
    drop(comm.on(&clock)?);
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut world = Rank {
        blas: Blas::new(&compute)?,
        left: Matrix::new(&compute, (SIZE, SIZE), |_, _| (rank + 1) as f32)?,
        right: Matrix::new(&compute, (SIZE, SIZE), |_, _| 1.0)?,
        parts: (0..PARTS).map(|_| Matrix::zeros(&compute, (SIZE, SIZE))).collect::<Result<_>>()?,
        communicator: comm.into_raw_communicator(),
        compute,
        clock,
    };
    // Connections are made and kernels loaded by the first round.
    world.round(false)?;
    let (one_after_the_other, serial) = world.round(false)?;
    let (at_once, timeline) = world.round(true)?;
    world.check(ranks)?;

    let overlap = timeline.overlap("computing", "communicating")?;
    let before = serial.overlap("computing", "communicating")?;
    if rank == 0 {
        println!("one after the other: {:.2} ms", 1e3 * one_after_the_other.as_secs_f64());
        serial.print(&["computing", "communicating"])?;
        println!("at once: {:.2} ms", 1e3 * at_once.as_secs_f64());
        timeline.print(&["computing", "communicating"])?;
        println!("rank 0's GPU did both for {overlap:.2} ms, and {before:.2} ms one after the other");
    }
    if ranks > 1 && overlap <= 0.0 {
        return Err(format!("rank {rank} never computed while it communicated").into());
    }
    Ok(())
}

impl Rank {
    /// Computes and sums all parts. `at_once`: the next part need not wait for the sum of the one before.
    fn round(&mut self, at_once: bool) -> Result<(Duration, Timeline)> {
        let ops = self.communicator.as_stream_sync().ok_or("a backend with streams")?;
        self.communicator.barrier()?;
        let began = Instant::now();
        let mut timeline = Timeline::start(&self.compute)?;
        let ready = ops.create_event()?;
        for part in &mut self.parts {
            let begin = mark(&self.compute)?;
            self.blas.multiply(&self.left, &self.right, part)?;
            timeline.add("computing", begin, mark(&self.compute)?);

            ops.record_on_stream(ready, self.compute.cu_stream() as u64)?;
            ops.comm_stream_wait_event(ready)?;
            let begin = communicator_is_at(ops, &self.clock, ready)?;
            let (address, _order) = part.elements.device_ptr(&self.compute);
            // SAFETY: SIZE² f32 that live longer than the round; the compute stream waits below before it uses them.
            unsafe { self.communicator.all_reduce(address, SIZE * SIZE, DType::F32, ReduceOp::Sum) }?;
            timeline.add("communicating", begin, communicator_is_at(ops, &self.clock, ready)?);
            if !at_once {
                ops.stream_wait_event(self.compute.cu_stream() as u64, ready)?;
            }
        }
        ops.stream_wait_event(self.compute.cu_stream() as u64, ready)?;
        self.communicator.sync()?;
        self.compute.synchronize()?;
        self.clock.synchronize()?;
        ops.destroy_event(ready)?;
        Ok((began.elapsed(), timeline))
    }

    /// Every element is the sum over the ranks.
    fn check(&self, ranks: usize) -> Result<()> {
        let expected = (SIZE * ranks * (ranks + 1) / 2) as f32;
        for (number, part) in self.parts.iter().enumerate() {
            let elements = self.compute.clone_dtoh(&part.elements)?;
            if let Some(wrong) = elements.iter().find(|element| **element != expected) {
                return Err(format!("part {number} has an element {wrong}, expected {expected}").into());
            }
        }
        Ok(())
    }
}

/// An event with the time at which the communicator's stream has come to where it is now.
fn communicator_is_at(ops: &dyn StreamSyncOps, clock: &CudaStream, event: u64) -> Result<CudaEvent> {
    ops.record_on_comm_stream(event)?;
    ops.stream_wait_event(clock.cu_stream() as u64, event)?;
    mark(clock)
}
