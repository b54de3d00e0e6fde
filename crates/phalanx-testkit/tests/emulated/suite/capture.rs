//! Graphs: what is captured is done at each launch, and what it needs must live as long.

use super::child::{succeeds, violates};
use super::nccl::{Config, expect, nccl, ok};
use super::world::{Rank, at, threads, unique_id};
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUresult, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, DriverError};
use libtest_mimic::Trial;
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("capture/replay", replay),
    Scenario::process("capture/errors", errors),
    Scenario::process("capture/fork", fork),
    Scenario::process("capture/kept", kept),
    Scenario::process("capture/collective", collective),
    Scenario::process("capture/destroy_waits", destroy_waits),
    Scenario::process("capture/freed", freed),
    Scenario::process("capture/init", init),
];

pub fn trials() -> Vec<Trial> {
    vec![
        succeeds("capture/replay", &[], "capture/replay", &[]),
        succeeds("capture/errors", &[], "capture/errors", &[]),
        succeeds("capture/fork", &[], "capture/fork", &[]),
        succeeds("capture/kept", &[], "capture/kept", &[]),
        succeeds("capture/collective", &[], "capture/collective", &[]),
        succeeds("capture/destroy_waits", &[], "capture/destroy_waits", &[]),
        violates("capture/freed", &[], "capture/freed", &["cuMemcpyDtoDAsync_v2", "was freed by cuMemFree"]),
        violates("capture/init", &[], "capture/init", &["ncclCommInitRankConfig", "captured"]),
    ]
}

fn context(device: usize) -> Result<Arc<CudaContext>, String> {
    let context = CudaContext::new(device).context(|| "a context".into())?;
    // SAFETY: every slice here is used on one stream, or the streams are ordered by hand.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

/// Captures what `work` enqueues.
fn capture(stream: &Arc<CudaStream>, work: impl FnOnce() -> Result<(), String>) -> Result<CudaGraph, String> {
    stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).context(|| "begin".into())?;
    work()?;
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).context(|| "end".into())?;
    graph.ok_or_else(|| "no graph".to_owned())
}

fn replay(_: &[String]) -> Outcome {
    let stream = context(0)?.new_stream().context(|| "stream".into())?;
    let mut a = stream.clone_htod(&[5u32; 20]).context(|| "memory".into())?;
    let mut b = stream.clone_htod(&[0u32; 20]).context(|| "memory".into())?;
    let graph = capture(&stream, || {
        stream.memcpy_dtod(&a, &mut b).context(|| "copy".into())?;
        stream.memset_zeros(&mut a).context(|| "fill".into())
    })?;
    let seen = stream.clone_dtoh(&b).context(|| "read".into())?;
    assert_eq!(seen, [0; 20], "nothing was done while it was captured");
    for round in 1..10 {
        stream.memcpy_htod(&[round; 20], &mut a).context(|| "write".into())?;
        graph.launch().context(|| "launch".into())?;
        assert_eq!(stream.clone_dtoh(&b), Ok(vec![round; 20]));
        assert_eq!(stream.clone_dtoh(&a), Ok(vec![0; 20]));
    }
    Ok(String::new())
}

fn refused<T>(result: Result<T, DriverError>, code: CUresult) -> Result<(), String> {
    match result {
        Err(DriverError(answer)) if answer == code => Ok(()),
        Err(error) => Err(format!("{error} and not {code:?}")),
        Ok(_) => Err(format!("no {code:?}")),
    }
}

fn errors(_: &[String]) -> Outcome {
    let context = context(0)?;
    let (stream, other) = (context.new_stream(), context.new_stream());
    let (stream, other) = (stream.context(|| "stream".into())?, other.context(|| "stream".into())?);
    let mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let none = CUgraphInstantiate_flags(0);
    let invalidated = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    // Waiting for the stream.
    stream.begin_capture(mode).context(|| "begin".into())?;
    refused(stream.synchronize(), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
    refused(stream.end_capture(none), invalidated)?;
    // Depending on what was not captured.
    let event = other.record_event(None).context(|| "event".into())?;
    stream.begin_capture(mode).context(|| "begin".into())?;
    refused(stream.wait(&event), CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION)?;
    refused(stream.end_capture(none), invalidated)?;
    // Asking an event that was captured.
    stream.begin_capture(mode).context(|| "begin".into())?;
    event.record(&stream).context(|| "record".into())?;
    refused(event.try_is_complete(), CUresult::CUDA_ERROR_CAPTURED_EVENT)?;
    refused(stream.end_capture(none), invalidated)?;
    // A stream that joined and was not joined again.
    stream.begin_capture(mode).context(|| "begin".into())?;
    other.join(&stream).context(|| "join".into())?;
    let mut slice = context.default_stream().alloc_zeros::<u8>(10);
    if let Ok(slice) = &mut slice {
        other.memset_zeros(slice).context(|| "fill".into())?;
    }
    refused(stream.end_capture(none), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED)?;
    stream.synchronize().context(|| "it works afterwards".into())?;
    Ok(String::new())
}

fn fork(_: &[String]) -> Outcome {
    let context = context(0)?;
    let (stream, other) = (context.new_stream(), context.new_stream());
    let (stream, other) = (stream.context(|| "stream".into())?, other.context(|| "stream".into())?);
    let mut a = stream.clone_htod(&[0u32; 20]).context(|| "memory".into())?;
    let mut b = stream.clone_htod(&[0u32; 20]).context(|| "memory".into())?;
    let source = stream.clone_htod(&[3u32; 20]).context(|| "memory".into())?;
    stream.synchronize().context(|| "synchronize".into())?;
    let graph = capture(&stream, || {
        stream.memcpy_dtod(&source, &mut a).context(|| "copy".into())?;
        other.join(&stream).context(|| "join".into())?;
        other.memcpy_dtod(&a, &mut b).context(|| "copy".into())?;
        stream.join(&other).context(|| "join".into())?;
        stream.memset_zeros(&mut a).context(|| "fill".into())
    })?;
    for _ in 0..10 {
        stream.memset_zeros(&mut b).context(|| "fill".into())?;
        graph.launch().context(|| "launch".into())?;
        assert_eq!(stream.clone_dtoh(&b), Ok(vec![3; 20]));
    }
    Ok(String::new())
}

static ENDED: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn count_end(_: *mut std::ffi::c_void) {
    ENDED.fetch_add(1, Ordering::SeqCst);
}

fn kept(_: &[String]) -> Outcome {
    let stream = context(0)?.new_stream().context(|| "stream".into())?;
    let mut slice = stream.clone_htod(&[5u32; 20]).context(|| "memory".into())?;
    let graph = capture(&stream, || stream.memset_zeros(&mut slice).context(|| "fill".into()))?;
    let mut object = std::ptr::null_mut();
    // SAFETY: the destructor does not use its argument.
    unsafe {
        let made = sys::cuUserObjectCreate(&mut object, 8 as _, Some(count_end), 1, 1);
        made.result().context(|| "object".into())?;
        // CU_GRAPH_USER_OBJECT_MOVE.
        sys::cuGraphRetainUserObject(graph.cu_graph(), object, 1, 1).result().context(|| "retain".into())?;
    }
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(ENDED.load(Ordering::SeqCst), 0, "the graph keeps it");
    drop(graph);
    let since = Instant::now();
    while ENDED.load(Ordering::SeqCst) == 0 && since.elapsed() < Duration::from_secs(10) {
        std::thread::yield_now();
    }
    assert_eq!(ENDED.load(Ordering::SeqCst), 1, "it ends with the graph");
    Ok(String::new())
}

/// A rank whose slices are not tracked by events, as captures need it.
fn rank(id: super::nccl::UniqueId, rank: usize, ranks: usize) -> Result<Rank, String> {
    let _context = context(rank)?;
    let rank = Rank::begin(id, rank, ranks, true)?;
    // SAFETY: every slice is used on one stream.
    unsafe { rank.context.disable_event_tracking() };
    Ok(rank)
}

fn collective(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(3, |number| {
        let rank = rank(id, number, 3)?;
        let mut slice = rank.upload(&[0f32; 10]);
        let (comm, queue) = (rank.comm, rank.queue());
        let address = at(&slice);
        // Ranks of one process cannot be connected by what is captured.
        ok("all_reduce", nccl().all_reduce(address, address, 10, 7, 0, comm, queue))?;
        assert_eq!(rank.download(&slice), [0.0; 10]);
        let graph = capture(&rank.stream, || {
            ok("all_reduce", nccl().all_reduce(address, address, 10, 7, 0, comm, queue))?;
            ok("all_reduce", nccl().all_reduce(address, address, 10, 7, 2, comm, queue))
        })?;
        for round in 0..5 {
            rank.stream
                .memcpy_htod(&[(number * 10 + round) as f32; 10], &mut slice)
                .context(|| "write".into())?;
            graph.launch().context(|| "launch".into())?;
            assert_eq!(rank.download(&slice), [(30 + 3 * round) as f32; 10]);
            // Operations of no graph between those of one.
            ok("all_reduce", nccl().all_reduce(address, address, 10, 7, 0, comm, queue))?;
            assert_eq!(rank.download(&slice), [(90 + 9 * round) as f32; 10]);
        }
        drop(graph);
        rank.end()
    })?;
    Ok(String::new())
}

fn destroy_waits(_: &[String]) -> Outcome {
    let rank = rank(unique_id(), 0, 1)?;
    let slice = rank.upload(&[0f32; 10]);
    let (comm, queue, address) = (rank.comm, rank.queue(), at(&slice));
    let graph = capture(&rank.stream, || {
        ok("all_reduce", nccl().all_reduce(address, address, 10, 7, 0, comm, queue))
    })?;
    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            nccl().destroy(comm);
            ended.store(1, Ordering::SeqCst);
        });
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(ended.load(Ordering::SeqCst), 0, "destroy waits for the graph");
        drop(graph);
    });
    Ok(String::new())
}

fn freed(_: &[String]) -> Outcome {
    let stream = context(0)?.new_stream().context(|| "stream".into())?;
    let a = stream.clone_htod(&[5u32; 20]).context(|| "memory".into())?;
    let mut b = stream.clone_htod(&[0u32; 20]).context(|| "memory".into())?;
    let graph = capture(&stream, || stream.memcpy_dtod(&a, &mut b).context(|| "copy".into()))?;
    drop(a);
    graph.launch().context(|| "launch".into())?;
    stream.synchronize().context(|| "synchronize".into())?;
    Err("freed memory was copied".into())
}

fn init(_: &[String]) -> Outcome {
    let stream = context(0)?.new_stream().context(|| "stream".into())?;
    stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED).context(|| "begin".into())?;
    let mut comm = 0;
    let code = nccl().init_rank_config(&mut comm, 1, unique_id(), 0, &Config::new(true));
    expect("init", code, 0)?;
    Err("a communicator began".into())
}
