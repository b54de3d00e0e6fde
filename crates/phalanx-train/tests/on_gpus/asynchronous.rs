//! Nothing waits for the GPU but what says so.

use crate::same;
use phalanx::Comm;
use phalanx::cudarc::driver::CudaStream;
use phalanx::cudarc::driver::result::stream::launch_host_function;
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;
use phalanx_train::Result;
use phalanx_train::buckets::{GradientBuckets, Parameter, Settings};
use phalanx_train::device::{Device, Gpu};
use phalanx_train::optimizer::Sgd;
use phalanx_train::sharding::{FlatLayout, Reduction, ShardedGroup};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("asynchronous", |comm, _| {
        step_behind_blocked_work(&comm).map_err(|error| error.to_string())?
    }),
    Scenario::rank("computing_beside", |comm, _| computing_beside(&comm).map_err(|error| error.to_string())),
    Scenario::rank("page_locked_memory", |comm, _| {
        page_locked_memory(&comm).map_err(|error| error.to_string())
    }),
];

/// While rank 0's communication waits for the others, its computing goes on. They wait for its result before they take part.
fn computing_beside(comm: &Comm) -> Result<String> {
    let (gpu, ranks) = (same::gpu(comm)?, comm.world_size());
    let other = comm.split(Some(0), 0)?.expect("everybody is in it");
    let sgd = Sgd { learning_rate: 1.0, momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    let layout = FlatLayout::new(&[("w", [40, 10])], ranks)?;
    let zeros = vec![0.0f32; layout.len()];
    let group = || ShardedGroup::<Gpu, f32, f32>::new(comm, &gpu, layout.clone(), &zeros, &sgd);
    let mut groups = [group()?, group()?];
    let mut buckets =
        GradientBuckets::new(comm, &gpu, &[Parameter::new::<f32>("a", 400)], Settings::default())?;
    let gradient = gpu.upload(&vec![1.0f32; layout.len()])?;
    let mut computed = gpu.zeros::<f32>(1)?;
    for step in 0..4 {
        buckets.begin(comm, 1.0)?;
        comm.sync()?;
        if comm.rank() != 0 && step > 1 {
            other.barrier()?;
        }
        buckets.add(comm, "a", &gpu.view(&gradient, 0..400))?;
        for group in &mut groups {
            group.prefetch(comm)?;
            group.reduce_gradient(comm, &gpu.view(&gradient, 0..layout.len()), Reduction::Mean)?;
        }
        if comm.rank() == 0 && step > 1 {
            gpu.fill(&mut gpu.view_mut(&mut computed, 0..1), step as f64)?;
            assert_eq!(gpu.download(&gpu.view(&computed, 0..1))?, [step as f32]);
            other.barrier()?;
        }
        buckets.finish(comm)?;
        for group in &mut groups {
            group.step(&sgd, 1.0)?;
        }
    }
    for group in &mut groups {
        let parameters = gpu.download(&gpu.view(group.gather(comm)?, 0..400))?;
        assert_eq!(parameters, [-4.0; 400]);
    }
    Ok(String::new())
}

/// Memory that the driver reads late can be written when it was uploaded.
fn page_locked_memory(comm: &Comm) -> Result<String> {
    let (gpu, mut numbers) = (same::gpu(comm)?, comm.alloc::<f32>(100_000)?);
    numbers.fill(1.0);
    let uploaded = gpu.upload(&numbers)?;
    numbers.fill(2.0);
    let found = gpu.download(&gpu.view(&uploaded, 0..100_000))?;
    assert!(found.iter().all(|number| *number == 1.0));
    Ok(String::new())
}

/// Work of a stream that takes until this is dropped.
struct Blocked {
    _end: Sender<()>,
    has_given_up: Arc<AtomicBool>,
}

/// Of the work: what it waits for, and whether it has waited for too long.
type Waiting = (Receiver<()>, Arc<AtomicBool>);

unsafe extern "C" fn wait(data: *mut c_void) {
    // SAFETY: what `block` gave away, once.
    let (end, has_given_up) = *unsafe { Box::from_raw(data.cast::<Waiting>()) };
    // The end is that the other end is dropped.
    if end.recv_timeout(Duration::from_secs(20)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        has_given_up.store(true, Ordering::Release);
    }
}

fn block(stream: &CudaStream) -> Result<Blocked> {
    let ((sender, receiver), has_given_up) = (channel(), Arc::new(AtomicBool::new(false)));
    let waiting: Box<Waiting> = Box::new((receiver, has_given_up.clone()));
    // SAFETY: the function frees what it gets, and makes no call of CUDA.
    unsafe { launch_host_function(stream.cu_stream(), wait, Box::into_raw(waiting).cast()) }?;
    Ok(Blocked { _end: sender, has_given_up })
}

/// A step of training whose work is enqueued behind work that does not end. A call that waited for it would wait for ever.
fn step_behind_blocked_work(comm: &Comm) -> Result<Outcome> {
    let (gpu, ranks) = (same::gpu(comm)?, comm.world_size());
    let parameters = [Parameter::new::<f32>("a", 600), Parameter::new::<f32>("b", 700)];
    let settings = Settings { bucket_bytes: 2048, ..Settings::default() };
    let mut buckets = GradientBuckets::new(comm, &gpu, &parameters, settings)?;
    let layout = FlatLayout::new(&[("w", [40, 10])], ranks)?;
    let sgd = Sgd { learning_rate: 1.0, momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    let zeros = vec![0.0f32; layout.len()];
    let mut group = ShardedGroup::<Gpu, f32, f32>::new(comm, &gpu, layout.clone(), &zeros, &sgd)?;
    let own = comm.rank() as f32 + 1.0;
    let gradient = gpu.upload(&[own; 700])?;
    let sharded = gpu.upload(&vec![own; layout.len()])?;
    let mut step = || -> Result<()> {
        buckets.begin(comm, 1.0)?;
        buckets.add(comm, "b", &gpu.view(&gradient, 0..700))?;
        buckets.add(comm, "a", &gpu.view(&gradient, 0..600))?;
        buckets.finish(comm)?;
        group.prefetch(comm)?;
        group.gather(comm)?;
        group.reduce_gradient(comm, &gpu.view(&sharded, 0..layout.len()), Reduction::Mean)?;
        group.step(&sgd, 1.0)?;
        group.gather(comm)?;
        Ok(())
    };
    // The ranks agree on an order, the library connects, kernels are loaded.
    step()?;
    step()?;
    comm.sync()?;
    let blocked = block(gpu.stream())?;
    step()?;
    if blocked.has_given_up.load(Ordering::Acquire) {
        return Ok(Err("a call waited for the GPU".into()));
    }
    drop(blocked);
    let mean = (ranks as f32 + 1.0) / 2.0;
    let mut read = gpu.zeros::<f32>(700)?;
    buckets.read("b", &mut gpu.view_mut(&mut read, 0..700))?;
    assert_eq!(gpu.download(&gpu.view(&read, 0..700))?, [mean; 700]);
    let parameters = gpu.download(&gpu.view(group.gather(comm)?, 0..400))?;
    assert_eq!(parameters, [-3.0 * mean; 400]);
    Ok(Ok(String::new()))
}
