//! Buffers and streams: nothing is freed, overwritten or read while an operation runs.

use crate::world::{
    BACKEND, are_emulated, both, done, elements, expect, must, stream, upload, value, values,
};
use libtest_mimic::Trial;
use phalanx::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUresult, CUstreamCaptureMode, cuLaunchHostFunc, cuStreamQuery,
};
use phalanx::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError};
use phalanx::nccl::{Buffer, Config, Graph, Registration};
use phalanx::{Comm, PreMulSum, ReduceOp, UsageError};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;
use std::sync::Arc;
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("other_stream", other_stream),
    Scenario::rank("dropped_at_once", dropped_at_once),
    Scenario::rank("overwritten_at_once", overwritten_at_once),
    Scenario::rank("many_streams", many_streams),
    Scenario::rank("own_context", own_context),
    Scenario::rank("second_stream_in_a_group", second_stream_in_a_group),
    Scenario::rank("kept_error", kept_error),
    Scenario::rank("read_on_two_streams", read_on_two_streams),
    Scenario::rank("read_elsewhere_and_dropped", read_elsewhere_and_dropped),
    Scenario::rank("read_elsewhere_and_written", read_elsewhere_and_written),
    Scenario::rank("reader_without_a_stream", reader_without_a_stream),
    Scenario::rank("captured_by_the_program", captured_by_the_program),
    Scenario::rank("zeroes_first", zeroes_first),
    Scenario::rank("current_device", current_device),
    Scenario::rank("synced", synced),
    Scenario::rank("graph", graph),
    Scenario::rank("stream_for_each_step", stream_for_each_step),
];

/// Large enough that an operation takes a while.
pub fn len() -> usize {
    elements(1 << 22)
}

pub fn trials(gpus: usize) -> Vec<Trial> {
    let mut trials: Vec<_> = SCENARIOS.iter().flat_map(|scenario| both(*scenario, 1, gpus, &[""])).collect();
    // Real GPUs would do at once what NCCL does not order.
    let apart = Trial::test("threads/graphs_apart", || Ok(graphs_apart()?));
    trials.push(apart.only_if(gpus >= 2 && are_emulated(), "it takes two emulated GPUs"));
    trials.push(
        Trial::test("wrong_memory", move || Ok(wrong_memory(gpus)?)).only_if(gpus >= 2, "it takes two GPUs"),
    );
    trials
}

pub fn sum(ranks: usize) -> impl Fn(usize) -> f32 {
    move |index| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32
}

/// Memory of one stream, operations on another: each waits for the other, without a word from the caller.
fn other_stream(comm: Comm, _: &[String]) -> Outcome {
    let compute = stream(&comm).clone();
    let communication = compute.context().new_stream().map_err(|e| e.to_string())?;
    let on = must("on", comm.on(&communication))?;
    for _ in 0..5 {
        let send = upload(&comm, &values::<f32>(comm.rank(), len()))?;
        let mut recv = compute.alloc_zeros::<f32>(len()).map_err(|e| e.to_string())?;
        must("all_reduce", on.all_reduce(&send, &mut recv, ReduceOp::Sum))?;
        let got = compute.clone_dtoh(&recv).map_err(|e| e.to_string())?;
        expect("read on the other stream", &got, sum(comm.world_size()))?;
    }
    must("sync", on.sync())?;
    done()
}

/// `sync` waits for what is under way, on whatever stream the last call was.
fn synced(comm: Comm, _: &[String]) -> Outcome {
    let context = stream(&comm).context().clone();
    let new_stream = || context.new_stream().map_err(|e| e.to_string());
    let (busy, idle) = (new_stream()?, new_stream()?);
    let (on_busy, on_idle) = (must("on", comm.on(&busy))?, must("on", comm.on(&idle))?);
    let send = upload(&comm, &values::<f32>(comm.rank(), len()))?;
    let mut recv = upload(&comm, &vec![0.0f32; len()])?;
    let (some, mut small) = (upload(&comm, &[1.0f32])?, upload(&comm, &[0.0f32])?);
    let mut nothing = upload(&comm, &[0.0f32; 0])?;
    for round in 0..6 {
        must("all_reduce", on_busy.all_reduce(&send, &mut recv, ReduceOp::Sum))?;
        match (comm.world_size(), round % 2) {
            // Of several ranks the library orders it behind the first, on whose stream cudarc's events may
            // still follow.
            (2.., _) | (_, 0) => {
                must("of nothing", on_idle.all_reduce_in_place(&mut nothing, ReduceOp::Sum))?
            }
            _ => must("of some", on_idle.all_reduce(&some, &mut small, ReduceOp::Sum))?,
        }
        must("sync", comm.sync())?;
        // SAFETY: a stream that is alive; nothing but a question.
        let state = unsafe { cuStreamQuery(busy.cu_stream()) };
        assert_eq!(state, CUresult::CUDA_SUCCESS, "round {round}");
    }
    let error = comm.on(&context.per_thread_stream()).map(drop).unwrap_err();
    assert!(error.to_string().contains("new_stream"), "{error}");
    done()
}

/// Buffers are dropped while the operation is in flight, and their memory given to others.
fn dropped_at_once(comm: Comm, _: &[String]) -> Outcome {
    let compute = stream(&comm).clone();
    let communication = compute.context().new_stream().map_err(|e| e.to_string())?;
    let on = must("on", comm.on(&communication))?;
    let mut result = compute.alloc_zeros::<f32>(len()).map_err(|e| e.to_string())?;
    for _ in 0..10 {
        let send = upload(&comm, &values::<f32>(comm.rank(), len()))?;
        must("all_reduce", on.all_reduce(&send, &mut result, ReduceOp::Sum))?;
        drop(send);
        // The allocator may hand out the same memory again.
        let poison = compute.clone_htod(&vec![f32::NAN; len()]).map_err(|e| e.to_string())?;
        drop(poison);
        let got = compute.clone_dtoh(&result).map_err(|e| e.to_string())?;
        expect("after the drop", &got, sum(comm.world_size()))?;
    }
    done()
}

/// The send buffer is overwritten right after the call.
fn overwritten_at_once(comm: Comm, _: &[String]) -> Outcome {
    let compute = stream(&comm).clone();
    let communication = compute.context().new_stream().map_err(|e| e.to_string())?;
    let on = must("on", comm.on(&communication))?;
    let fresh = values::<f32>(comm.rank(), len());
    let mut send = upload(&comm, &fresh)?;
    let mut recv = compute.alloc_zeros::<f32>(len()).map_err(|e| e.to_string())?;
    for _ in 0..10 {
        must("all_reduce", on.all_reduce(&send, &mut recv, ReduceOp::Sum))?;
        compute.memset_zeros(&mut send).map_err(|e| e.to_string())?;
        let got = compute.clone_dtoh(&recv).map_err(|e| e.to_string())?;
        expect("not what was written later", &got, sum(comm.world_size()))?;
        compute.memcpy_htod(&fresh, &mut send).map_err(|e| e.to_string())?;
    }
    done()
}

/// One communicator, operations on three streams in turn, each on the result of the one before.
fn many_streams(comm: Comm, _: &[String]) -> Outcome {
    let context = stream(&comm).context().clone();
    let streams: Vec<_> =
        (0..3).map(|_| context.new_stream()).collect::<Result<_, _>>().map_err(|e| e.to_string())?;
    let mut buffer = upload(&comm, &vec![1.0f32; 100_000])?;
    for round in 0..9 {
        let on = must("on", comm.on(&streams[round % 3]))?;
        must("all_reduce", on.all_reduce_in_place(&mut buffer, ReduceOp::Max))?;
    }
    must("sync", comm.sync())?;
    let got = stream(&comm).clone_dtoh(&buffer).map_err(|e| e.to_string())?;
    expect("nine maxima", &got, |_| 1.0)?;
    done()
}

/// A program has a context of its own, of the same GPU: its other stream reads what the operation has
/// written.
fn own_context(comm: Comm, _: &[String]) -> Outcome {
    let context = CudaContext::new(stream(&comm).context().ordinal()).map_err(|e| e.to_string())?;
    let main = context.default_stream();
    let reader = context.new_stream().map_err(|e| e.to_string())?;
    for _ in 0..5 {
        let mut buffer = main.clone_htod(&values::<f32>(comm.rank(), len())).map_err(|e| e.to_string())?;
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        let got = reader.clone_dtoh(&buffer).map_err(|e| e.to_string())?;
        expect("read on the program's other stream", &got, sum(comm.world_size()))?;
    }
    must("sync", comm.sync())?;
    done()
}

/// A group's buffers were lent when their context had one stream.
fn second_stream_in_a_group(comm: Comm, _: &[String]) -> Outcome {
    for _ in 0..5 {
        let context = CudaContext::new(stream(&comm).context().ordinal()).map_err(|e| e.to_string())?;
        let main = context.default_stream();
        let fresh = values::<f32>(comm.rank(), len());
        let (mut buffer, mut reader) = (main.clone_htod(&fresh).map_err(|e| e.to_string())?, None);
        must(
            "group",
            comm.group(|g| {
                g.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
                reader = Some(context.new_stream()?);
                Ok(())
            }),
        )?;
        let got = reader.ok_or("made above")?.clone_dtoh(&buffer).map_err(|e| e.to_string())?;
        expect("read on the second stream", &got, sum(comm.world_size()))?;
    }
    must("sync", comm.sync())?;
    done()
}

/// cudarc does nothing in a context that keeps an error of something else; the next user is behind the
/// operation all the same.
fn kept_error(comm: Comm, _: &[String]) -> Outcome {
    let context = CudaContext::new(stream(&comm).context().ordinal()).map_err(|e| e.to_string())?;
    let [main, reader] = [(); 2].map(|()| context.new_stream().unwrap());
    for _ in 0..5 {
        let fresh = values::<f32>(comm.rank(), len());
        let mut buffer = main.clone_htod(&fresh).map_err(|e| e.to_string())?;
        must(
            "group",
            comm.group(|g| {
                g.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
                context.record_err::<()>(Err(DriverError(CUresult::CUDA_ERROR_NOT_FOUND)));
                Ok(())
            }),
        )?;
        let kept = context.check_err().unwrap_err();
        assert_eq!(kept.0, CUresult::CUDA_ERROR_NOT_FOUND);
        let got = reader.clone_dtoh(&buffer).map_err(|e| e.to_string())?;
        expect("read on the other stream", &got, sum(comm.world_size()))?;
    }
    must("sync", comm.sync())?;
    done()
}

/// Who writes to a buffer waits for the operation that read it, and for who read it before, on another
/// stream.
fn read_on_two_streams(comm: Comm, _: &[String]) -> Outcome {
    let compute = stream(&comm).clone();
    let [first, second] = [(); 2].map(|()| compute.context().new_stream().unwrap());
    let on = must("on", comm.on(&second))?;
    let fresh = values::<f32>(comm.rank(), len());
    let mut read = upload(&comm, &fresh)?;
    let [mut copy, mut sums] = [(); 2].map(|()| compute.alloc_zeros::<f32>(len()).unwrap());
    for _ in 0..5 {
        first.memcpy_dtod(&read, &mut copy).map_err(|e| e.to_string())?;
        must("all_reduce", on.all_reduce(&read, &mut sums, ReduceOp::Sum))?;
        compute.memset_zeros(&mut read).map_err(|e| e.to_string())?;
        let got = compute.clone_dtoh(&copy).map_err(|e| e.to_string())?;
        expect("what was copied first", &got, |index| fresh[index])?;
        expect("the sum", &compute.clone_dtoh(&sums).map_err(|e| e.to_string())?, sum(comm.world_size()))?;
        compute.memcpy_htod(&fresh, &mut read).map_err(|e| e.to_string())?;
    }
    must("sync", on.sync())?;
    done()
}

/// What is enqueued on the stream next is held up for a while.
pub fn hold_up(stream: &CudaStream) -> Result<(), String> {
    unsafe extern "C" fn sleep(_: *mut std::ffi::c_void) {
        std::thread::sleep(Duration::from_millis(if are_emulated() { 20 } else { 50 }));
    }
    stream.context().bind_to_thread().map_err(|e| e.to_string())?;
    // SAFETY: a stream that is alive, and a function that needs no argument.
    unsafe { cuLaunchHostFunc(stream.cu_stream(), Some(sleep), std::ptr::null_mut()) }
        .result()
        .map_err(|e| e.to_string())
}

/// An operation is the first to read memory of the library's, and something else the last, which is sooner
/// done.
fn read_elsewhere_and_dropped(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("a communicator of NCCL")?;
    let compute = stream(&comm).clone();
    let [first, second] = [(); 2].map(|()| compute.context().new_stream().unwrap());
    let on = must("on", comm.on(&first))?;
    let fresh = values::<f32>(comm.rank(), 1000);
    let [mut copy, mut sums] = [(); 2].map(|()| compute.alloc_zeros::<f32>(1000).unwrap());
    for registration in [Registration::Plain, Registration::Local, Registration::Symmetric] {
        let mut read = must("alloc", nccl.alloc_as::<f32>(1000, registration))?;
        compute.memcpy_htod(&fresh, &mut read.view_mut()).map_err(|e| e.to_string())?;
        hold_up(&first)?;
        must("all_reduce", on.all_reduce(&read, &mut sums, ReduceOp::Sum))?;
        second.memcpy_dtod(&read.view(), &mut copy).map_err(|e| e.to_string())?;
        drop(read);
        expect("the sum", &compute.clone_dtoh(&sums).map_err(|e| e.to_string())?, sum(comm.world_size()))?;
        let got = compute.clone_dtoh(&copy).map_err(|e| e.to_string())?;
        expect("what was copied", &got, |index| fresh[index])?;
    }
    must("sync", on.sync())?;
    done()
}

/// The same, and then it is written: by something else, and by an operation on another stream.
fn read_elsewhere_and_written(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("a communicator of NCCL")?;
    let compute = stream(&comm).clone();
    let [first, second, third] = [(); 3].map(|()| compute.context().new_stream().unwrap());
    let on = must("on", comm.on(&first))?;
    // Operations of one communicator are in order anyway.
    let other = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    let on_third = must("on", other.on(&third))?;
    let fresh = values::<f32>(comm.rank(), 1000);
    let mut read = must("alloc", nccl.alloc::<f32>(1000))?;
    let [mut copy, mut sums] = [(); 2].map(|()| compute.alloc_zeros::<f32>(1000).unwrap());
    type Write<'a> = (&'static str, &'a dyn Fn(&mut Buffer<f32>) -> Result<(), String>);
    let writes: [Write<'_>; 3] = [
        ("view_mut", &|read| third.memset_zeros(&mut read.view_mut()).map_err(|e| e.to_string())),
        ("slice_mut", &|read| third.memset_zeros(&mut read.slice_mut(..)).map_err(|e| e.to_string())),
        ("an operation", &|read| must("broadcast", on_third.broadcast_in_place(read, 0))),
    ];
    for (name, write) in writes {
        compute.memcpy_htod(&fresh, &mut read.view_mut()).map_err(|e| e.to_string())?;
        must("barrier", comm.barrier())?;
        hold_up(&first)?;
        must("all_reduce", on.all_reduce(&read, &mut sums, ReduceOp::Sum))?;
        second.memcpy_dtod(&read.view(), &mut copy).map_err(|e| e.to_string())?;
        write(&mut read)?;
        let got = compute.clone_dtoh(&sums).map_err(|e| e.to_string())?;
        expect(format!("the sum, before {name}"), &got, sum(comm.world_size()))?;
    }
    must("sync", comm.sync())?;
    must("sync", on_third.sync())?;
    done()
}

/// What reads memory of the library's is on the only stream that was made in the context, which is dropped
/// meanwhile.
fn reader_without_a_stream(comm: Comm, _: &[String]) -> Outcome {
    let context = CudaContext::new(stream(&comm).context().ordinal()).map_err(|e| e.to_string())?;
    let main = context.default_stream();
    let on = must("on", comm.on(&main))?;
    let nccl = on.nccl().ok_or("a communicator of NCCL")?;
    let fresh = values::<f32>(comm.rank(), 1000);
    for _ in 0..3 {
        let only = context.new_stream().map_err(|e| e.to_string())?;
        let mut copy = only.alloc_zeros::<f32>(1000).map_err(|e| e.to_string())?;
        let mut read = must("alloc", nccl.alloc_as::<f32>(1000, Registration::Plain))?;
        main.memcpy_htod(&fresh, &mut read.view_mut()).map_err(|e| e.to_string())?;
        hold_up(&only)?;
        only.memcpy_dtod(&read.view(), &mut copy).map_err(|e| e.to_string())?;
        // The slice would keep the stream.
        let start = copy.leak();
        drop(only);
        assert!(!context.is_in_multi_stream_mode());
        drop(read);
        context.synchronize().map_err(|e| e.to_string())?;
        // SAFETY: what was leaked above, whose work is complete.
        let copy = unsafe { main.upgrade_device_ptr::<f32>(start, 1000) };
        let got = main.clone_dtoh(&copy).map_err(|e| e.to_string())?;
        expect("what was copied", &got, |index| fresh[index])?;
    }
    done()
}

/// On a stream that the program captures what cannot be captured is refused, and harms neither the capture
/// nor the communicator.
fn captured_by_the_program(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let main = stream(&comm).clone();
    // Slices of the device's context are tracked from now on.
    let _second = main.context().new_stream().map_err(|e| e.to_string())?;
    let own = CudaContext::new(main.context().ordinal()).map_err(|e| e.to_string())?;
    // SAFETY: every slice of this context is used on the one stream.
    unsafe { own.disable_event_tracking() };
    let capturing = own.new_stream().map_err(|e| e.to_string())?;
    let on = must("on", comm.on(&capturing))?;
    let fresh = values::<f32>(rank, 1000);
    let mut untracked = capturing.clone_htod(&fresh).map_err(|e| e.to_string())?;
    let [mut tracked, mut other] = [(); 2].map(|()| upload(&comm, &fresh).unwrap());
    // The driver does not open GPUs to each other in a capture. And one of the slices was read elsewhere.
    must("all_reduce", on.all_reduce_in_place(&mut untracked, ReduceOp::Sum))?;
    must("all_reduce", comm.all_reduce(&tracked, &mut other, ReduceOp::Max))?;
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    must("sync", on.sync())?;
    capturing.memcpy_htod(&fresh, &mut untracked).map_err(|e| e.to_string())?;
    must("barrier", comm.barrier())?;
    capturing.synchronize().map_err(|e| e.to_string())?;

    capturing
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .map_err(|e| e.to_string())?;
    let refuses = |what: &str, result: phalanx::Result<()>| {
        let error = result.expect_err(what);
        let text = error.to_string();
        let is_told = text.contains("captured") && text.contains("nccl::Graph");
        assert!(matches!(error, phalanx::Error::Usage(_)) && is_told, "{what}: {error:?}");
    };
    let mut host = vec![1.0f32; 1000];
    refuses("a slice that is written", on.all_reduce_in_place(&mut tracked, ReduceOp::Sum));
    refuses("a slice that is read", on.all_reduce(&tracked, &mut untracked, ReduceOp::Sum));
    refuses("a group", on.group(|group| group.all_reduce_in_place(&mut tracked, ReduceOp::Sum)));
    refuses("host memory", on.all_reduce_in_place(&mut host, ReduceOp::Sum));
    let message = [1.0f32; 10];
    refuses("messages of the host", on.send_recv(&message, right, &mut host[..10], left));
    let mixed = phalanx::group(|g| {
        g.on(&on).send(&untracked, right)?;
        g.on(&comm).recv(&mut other, left)
    });
    refuses("a group with a stream that is not captured", mixed);
    must("what can be captured", on.all_reduce_in_place(&mut untracked, ReduceOp::Sum))?;
    refuses("sync", on.sync());
    refuses("barrier", on.barrier());
    let graph = capturing.end_capture(CUgraphInstantiate_flags(0)).map_err(|e| e.to_string())?;
    let graph = graph.ok_or("a graph")?;
    graph.launch().map_err(|e| e.to_string())?;
    must("sync", on.sync())?;
    let got = capturing.clone_dtoh(&untracked).map_err(|e| e.to_string())?;
    expect("the sum, launched", &got, sum(ranks))?;
    drop(graph);

    must("afterwards", comm.all_reduce_in_place(&mut tracked, ReduceOp::Sum))?;
    expect("the sum", &main.clone_dtoh(&tracked).map_err(|e| e.to_string())?, sum(ranks))?;
    must("host memory", on.all_reduce_in_place(&mut host, ReduceOp::Sum))?;
    expect("the host's sum", &host, |_| ranks as f32)?;
    must("barrier", comm.barrier())?;
    done()
}

/// Memory of the library's own is zeroed before the first operation on it, on whatever stream.
fn zeroes_first(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("a communicator of NCCL")?;
    let other = stream(&comm).context().new_stream().map_err(|e| e.to_string())?;
    let on = must("on", comm.on(&other))?;
    let send = upload(&comm, &values::<f32>(comm.rank(), len()))?;
    for _ in 0..5 {
        let mut recv = must("alloc", nccl.alloc::<f32>(len()))?;
        must("all_reduce", on.all_reduce(&send, &mut recv, ReduceOp::Sum))?;
        let got = other.clone_dtoh(&recv.view()).map_err(|e| e.to_string())?;
        expect("not zeroed afterwards", &got, sum(comm.world_size()))?;
    }
    must("sync", on.sync())?;
    done()
}

/// The device that was current is current afterwards, whichever GPU the communicator has.
fn current_device(comm: Comm, _: &[String]) -> Outcome {
    use phalanx::cudarc::driver::sys::cuCtxGetCurrent;
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: an out-pointer on the stack, written during the call.
        unsafe { cuCtxGetCurrent(&raw mut context) };
        context as usize
    };
    let first = CudaContext::new(0).map_err(|e| e.to_string())?;
    let ranks = comm.world_size();
    let (right, left) = ((comm.rank() + 1) % ranks, (comm.rank() + ranks - 1) % ranks);
    let one = upload(&comm, &values::<f32>(comm.rank(), 100))?;
    let all = upload(&comm, &vec![0f32; 100 * ranks])?;
    first.bind_to_thread().map_err(|e| e.to_string())?;
    let before = current();
    type Buffers = (CudaSlice<f32>, CudaSlice<f32>);
    type Step<'a> = (&'static str, &'a dyn Fn(&Comm, &mut Buffers) -> phalanx::Result<()>);
    let steps: [Step<'_>; 9] = [
        ("all_reduce", &|comm, (one, _)| comm.all_reduce_in_place(one, ReduceOp::Max)),
        ("a pre-multiplied sum", &|comm, (one, _)| comm.all_reduce_in_place(one, PreMulSum(0.5))),
        ("broadcast", &|comm, (one, _)| comm.broadcast_in_place(one, ranks - 1)),
        ("all_gather", &|comm, (one, all)| comm.all_gather(one, all)),
        ("reduce_scatter", &|comm, (one, all)| comm.reduce_scatter(all, one, ReduceOp::Sum)),
        ("scatter", &|comm, (one, all)| comm.scatter(all, one, 0)),
        ("gather", &|comm, (one, all)| comm.gather(one, all, 0)),
        ("messages", &|comm, (one, all)| comm.send_recv(one, right, &mut all.slice_mut(0..100), left)),
        ("sync", &|comm, _| comm.sync()),
    ];
    let mut buffers = (one, all);
    for (name, step) in steps {
        must(name, step(&comm, &mut buffers))?;
        assert_eq!(current(), before, "after {name}");
    }
    let mut host = vec![1.0f32; 1000];
    must("all_reduce", comm.all_reduce_in_place(&mut host, ReduceOp::Sum))?;
    assert_eq!(current(), before, "after an operation");
    must("barrier", comm.barrier())?;
    let buffer = must("alloc", comm.nccl().ok_or("NCCL")?.alloc::<f32>(1000))?;
    assert_eq!(current(), before, "after making memory");
    drop(buffer);
    let other = stream(&comm).context().new_stream().map_err(|e| e.to_string())?;
    let mut slice = other.alloc_zeros::<f32>(1000).map_err(|e| e.to_string())?;
    first.bind_to_thread().map_err(|e| e.to_string())?;
    must("all_reduce", comm.all_reduce_in_place(&mut slice, ReduceOp::Sum))?;
    assert_eq!(current(), before, "after an operation on another stream's slice");
    drop((slice, other));
    first.bind_to_thread().map_err(|e| e.to_string())?;
    let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    assert_eq!(current(), before, "after splitting");
    if comm.rank() == 0 {
        part.abort();
    } else {
        let enqueued = part.all_reduce_in_place(&mut buffers.0, ReduceOp::Sum);
        enqueued.and_then(|()| part.sync()).unwrap_err();
        assert_eq!(current(), before, "after an operation that failed");
        drop(part);
    }
    assert_eq!(current(), before, "after an abort");
    // The driver makes the GPU of what it frees current.
    drop(buffers);
    first.bind_to_thread().map_err(|e| e.to_string())?;
    drop(comm);
    assert_eq!(current(), before, "after the end");
    done()
}

/// Memory of another GPU, or of the wrong kind, is refused before anything is enqueued.
fn wrong_memory(gpus: usize) -> Result<(), String> {
    let mut comms = must("init_all", phalanx::nccl::init_all([0, 1]))?;
    assert!(gpus >= 2);
    let mut foreign = upload(&comms[1], &[1.0f32; 10])?;
    let refused = comms[0].all_reduce_in_place(&mut foreign, ReduceOp::Sum).unwrap_err();
    assert!(
        matches!(&refused, phalanx::Error::Usage(usage) if matches!(**usage, UsageError::Memory { .. })),
        "{refused}"
    );
    assert!(comms[0].on(stream(&comms[1])).is_err());
    let host = must("host", Comm::builder().backend(phalanx::BackendKind::Host).run(1, |comm| comm))?;
    let refused = host[0].all_reduce_in_place(&mut foreign, ReduceOp::Sum).unwrap_err();
    assert!(refused.to_string().contains("host memory"), "{refused}");
    comms.clear();
    Ok(())
}

/// A stream that is made for a step, and dropped after it, lives as long as it has something to do.
fn stream_for_each_step(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let context = stream(&comm).context().clone();
    let new_stream = || context.new_stream().map_err(|e| e.to_string());
    let mut buffer = upload(&comm, &[1i32; 1000])?;
    let alive = || Arc::strong_count(&context);
    let before = alive();
    for step in 1..=100 {
        // Dropped with the operation in flight.
        must(
            "all_reduce",
            must("on", comm.on(&new_stream()?))?.all_reduce_in_place(&mut buffer, ReduceOp::Max),
        )?;
        if step % 10 == 0 {
            // And before its messages are carried out.
            let step_of = |rank| vec![(step * 100 + rank) as i32; 10];
            let (received, sent) = {
                let on = new_stream()?;
                let on = must("on", comm.on(&on))?;
                (on.start_recv(vec![0; 10], left), on.start_send(step_of(rank), right))
            };
            for _ in 0..3 {
                must("on", comm.on(&new_stream()?))?;
            }
            must("send", must("start_send", sent)?.wait())?;
            expect("the message", &must("recv", must("start_recv", received)?.wait())?, |_| {
                step_of(left)[0]
            })?;
        }
        if step % 20 == 0 {
            must("sync", comm.sync())?;
        }
    }
    must("sync", comm.sync())?;
    context.synchronize().map_err(|e| e.to_string())?;
    let last = new_stream()?;
    let on = must("on", comm.on(&last))?;
    must("all_reduce", on.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    must("sync", comm.sync())?;
    expect("the sum", &stream(&comm).clone_dtoh(&buffer).map_err(|e| e.to_string())?, |_| ranks as i32)?;
    // This one, and the one before.
    assert!(alive() <= before + 2, "{} streams are left", alive() - before);
    done()
}

/// Where the library was told that there are no graphs among other operations it does not order them, and
/// `sync` waits for each.
fn graphs_apart() -> Result<(), String> {
    let mut config = Config::default();
    config.graph_usage_mode = Some(1);
    let ranks = Comm::builder().backend(BACKEND).nccl(config).run(2, |comm| -> Result<(), String> {
        let busy = stream(&comm).context().new_stream().map_err(|e| e.to_string())?;
        let on_busy = must("on", comm.on(&busy))?;
        let mut long = upload(&comm, &vec![1.0f32; 1 << 20])?;
        let short = upload(&comm, &[1.0f32; 1])?;
        let mut graph = must(
            "capture",
            Graph::capture(&comm, short, |group, short| group.all_reduce_in_place(short, ReduceOp::Max)),
        )?;
        must("sync", comm.sync())?;
        for round in 0..5 {
            must("all_reduce", on_busy.all_reduce_in_place(&mut long, ReduceOp::Max))?;
            must("launch", graph.launch())?;
            must("sync", comm.sync())?;
            // SAFETY: a stream that is alive; nothing but a question.
            let state = unsafe { cuStreamQuery(busy.cu_stream()) };
            assert_eq!(state, CUresult::CUDA_SUCCESS, "round {round}");
        }
        Ok(())
    });
    must("ranks", ranks)?.into_iter().collect()
}

/// Operations of a graph, launched several times with other data, between other users of the buffers.
fn graph(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let len = 1000;
    let buffers = (upload(&comm, &vec![0i32; len])?, upload(&comm, &vec![0i32; len * ranks])?);
    // Messages that were posted before are no part of it.
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let received = must("start_recv", comm.start_recv(vec![7i32; len], left))?;
    let sent = must("start_send", comm.start_send(values::<i32>(rank, len), right))?;
    let mut graph = must(
        "capture",
        Graph::capture(&comm, buffers, |group, (sum, all)| {
            // In two operations, of which one reads what the other has written.
            group.all_reduce_in_place(sum, ReduceOp::Sum)?;
            group.broadcast_in_place(all, 0)
        }),
    )?;
    must("wait", sent.wait())?;
    expect("the message", &must("wait", received.wait())?, |index| value(left, index))?;
    for round in 0..5usize {
        let (sum, all) = graph.buffers_mut();
        let mine = |rank: usize| -> Vec<i32> { (0..len).map(|index| value(rank, index + round)).collect() };
        stream(&comm).memcpy_htod(&mine(rank), sum).map_err(|e| e.to_string())?;
        let roots = vec![(round * 10 + rank) as i32; len * ranks];
        stream(&comm).memcpy_htod(&roots, all).map_err(|e| e.to_string())?;
        must("launch", graph.launch())?;
        // Ordered behind the launch by cudarc alone.
        let (sum, all) = graph.buffers();
        let sum = stream(&comm).clone_dtoh(sum).map_err(|e| e.to_string())?;
        let all = stream(&comm).clone_dtoh(all).map_err(|e| e.to_string())?;
        expect("sum", &sum, |index| (0..ranks).map(|rank| mine(rank)[index]).sum())?;
        expect("broadcast", &all, |_| (round * 10) as i32)?;
    }
    must("sync", comm.sync())?;
    // Other memory of the same length is not what was captured.
    graph.buffers_mut().0 = upload(&comm, &vec![0i32; len])?;
    let error = graph.launch().unwrap_err();
    assert!(error.to_string().contains("capture again"), "{error}");
    drop(graph.into_buffers());
    // The lengths of the blocks are what was captured, too: also if their sum and this rank's stay the same.
    if ranks > 2 {
        let counts: Vec<_> = (0..ranks).map(|rank| len - rank).collect();
        let (send, recv) = (vec![0i32; counts[rank]], vec![0i32; counts.iter().sum()]);
        let buffers = (upload(&comm, &send)?, upload(&comm, &recv)?, counts);
        let mut graph = must(
            "capture",
            Graph::capture(&comm, buffers, |group, (send, recv, counts)| {
                group.all_gather_v(&*send, recv, counts)
            }),
        )?;
        must("launch", graph.launch())?;
        must("sync", comm.sync())?;
        graph.buffers_mut().2.swap((rank + 1) % ranks, (rank + 2) % ranks);
        let error = graph.launch().unwrap_err();
        assert!(error.to_string().contains("capture again"), "{error}");
    }
    let host = Graph::capture(&comm, vec![0i32; len], |group, buffer| {
        group.all_reduce_in_place(buffer, ReduceOp::Sum)
    });
    let error = host.map(drop).unwrap_err();
    assert!(error.to_string().contains("host memory"), "{error}");
    must("afterwards", comm.barrier())?;
    done()
}
