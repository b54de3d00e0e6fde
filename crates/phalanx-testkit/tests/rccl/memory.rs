//! HIP's memory and streams: nothing is freed, overwritten or read while an operation runs.

use crate::world::{both, done, download, elements, expect, must, stream, upload, value, values};
use libtest_mimic::Trial;
use phalanx::{Comm, ReduceOp, UsageError, hip};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("other_stream", other_stream),
    Scenario::rank("dropped_at_once", dropped_at_once),
    Scenario::rank("overwritten_at_once", overwritten_at_once),
    Scenario::rank("many_streams", many_streams),
    Scenario::rank("grouped_on_streams", grouped_on_streams),
    Scenario::rank("views", views),
    Scenario::rank("copies", copies),
    Scenario::rank("foreign", foreign),
    Scenario::rank("portable_events", portable_events),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let mut trials: Vec<_> = SCENARIOS.iter().flat_map(|scenario| both(*scenario, 1, gpus, &[""])).collect();
    trials.push(Trial::test("wrong_memory", || Ok(wrong_memory()?)).only_if(gpus >= 2, "it takes two GPUs"));
    trials
}

/// Large enough that an operation takes a while.
fn len() -> usize {
    elements(1 << 22)
}

fn sum(ranks: usize) -> impl Fn(usize) -> f32 {
    move |index| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32
}

fn new_stream(comm: &Comm) -> Result<hip::Stream, String> {
    must("new_stream", must("device", comm.rccl().ok_or("RCCL")?.device())?.new_stream())
}

/// Memory of one stream, operations on another: each waits for the other, without a word from the caller.
fn other_stream(comm: Comm, _: &[String]) -> Outcome {
    let (compute, communication) = (stream(&comm).clone(), new_stream(&comm)?);
    let on = must("on", comm.on(&communication))?;
    for _ in 0..5 {
        let send = upload(&comm, &values::<f32>(comm.rank(), len()))?;
        let mut recv = must("alloc", compute.alloc_zeros::<f32>(len()))?;
        must("all_reduce", on.all_reduce(&send, &mut recv, ReduceOp::Sum))?;
        let got = must("download", compute.clone_dtoh(&recv))?;
        expect("read on the other stream", &got, sum(comm.world_size()))?;
    }
    must("sync", on.sync())?;
    done()
}

/// Buffers are dropped while the operation is in flight, and their memory given to others.
fn dropped_at_once(comm: Comm, _: &[String]) -> Outcome {
    let (compute, communication) = (stream(&comm).clone(), new_stream(&comm)?);
    let on = must("on", comm.on(&communication))?;
    let mut result = must("alloc", compute.alloc_zeros::<f32>(len()))?;
    for _ in 0..10 {
        let send = upload(&comm, &values::<f32>(comm.rank(), len()))?;
        must("all_reduce", on.all_reduce(&send, &mut result, ReduceOp::Sum))?;
        drop(send);
        // The allocator may hand out the same memory again.
        drop(must("poison", compute.clone_htod(&vec![f32::NAN; len()]))?);
        let got = must("download", compute.clone_dtoh(&result))?;
        expect("after the drop", &got, sum(comm.world_size()))?;
    }
    done()
}

/// The send buffer is overwritten right after the call.
fn overwritten_at_once(comm: Comm, _: &[String]) -> Outcome {
    let (compute, communication) = (stream(&comm).clone(), new_stream(&comm)?);
    let on = must("on", comm.on(&communication))?;
    let fresh = values::<f32>(comm.rank(), len());
    let mut send = upload(&comm, &fresh)?;
    let mut recv = must("alloc", compute.alloc_zeros::<f32>(len()))?;
    for _ in 0..10 {
        must("all_reduce", on.all_reduce(&send, &mut recv, ReduceOp::Sum))?;
        must("memset", compute.memset_zeros(&mut send))?;
        let got = must("download", compute.clone_dtoh(&recv))?;
        expect("not what was written later", &got, sum(comm.world_size()))?;
        must("upload", compute.memcpy_htod(&fresh, &mut send))?;
    }
    done()
}

/// One communicator, operations on three streams in turn, each on the result of the one before.
fn many_streams(comm: Comm, _: &[String]) -> Outcome {
    let streams = [new_stream(&comm)?, new_stream(&comm)?, new_stream(&comm)?];
    let mut buffer = upload(&comm, &vec![1.0f32; 100_000])?;
    for round in 0..9 {
        let on = must("on", comm.on(&streams[round % 3]))?;
        must("all_reduce", on.all_reduce_in_place(&mut buffer, ReduceOp::Max))?;
    }
    expect("nine maxima", &download(&comm, &buffer)?, |_| 1.0)?;
    done()
}

/// One buffer is read, and two parts of another are written, by operations of a group that starts them
/// together; then all are dropped at once.
fn grouped_on_streams(comm: Comm, _: &[String]) -> Outcome {
    let communication = new_stream(&comm)?;
    let on = must("on", comm.on(&communication))?;
    let half = len() / 2;
    for _ in 0..3 {
        let send = upload(&comm, &values::<f32>(comm.rank(), half))?;
        let mut recv = must("alloc", stream(&comm).alloc_zeros::<f32>(2 * half))?;
        {
            let (mut first, mut second) = recv.split_at_mut(half);
            must(
                "group",
                on.group(|g| {
                    g.all_reduce(&send, &mut first, ReduceOp::Sum)?;
                    g.all_reduce(&send, &mut second, ReduceOp::Max)
                }),
            )?;
        }
        drop(send);
        let got = must("download", stream(&comm).clone_dtoh(&recv))?;
        expect("the first part", &got[..half], sum(comm.world_size()))?;
        let ranks = comm.world_size();
        let most = |index| (0..ranks).map(|rank| value(rank, index)).max().unwrap_or(0) as f32;
        expect("the second part", &got[half..], most)?;
    }
    done()
}

/// Parts of a slice are buffers, and what is around them stays.
fn views(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut buffer = upload(&comm, &vec![7.0f32; 3000])?;
    let send = upload(&comm, &values::<f32>(rank, 3000))?;
    must(
        "all_reduce",
        comm.all_reduce(&send.slice(1000..2000), &mut buffer.slice_mut(500..1500), ReduceOp::Sum),
    )?;
    let got = download(&comm, &buffer)?;
    let expected = |index: usize| {
        if (500..1500).contains(&index) { sum(ranks)(index + 500) } else { 7.0 }
    };
    expect("a part", &got, expected)?;
    let empty = send.slice(3000..);
    assert!(empty.is_empty());
    let outside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| send.slice(2999..3001).len()));
    assert!(outside.is_err(), "a view beyond the end");
    must("barrier", comm.barrier())?;
    done()
}

/// Between host and GPU and within the GPU; wrong lengths are refused.
fn copies(comm: Comm, _: &[String]) -> Outcome {
    let (own, other) = (stream(&comm).clone(), new_stream(&comm)?);
    let numbers: Vec<u32> = (0..10_000).collect();
    let first = must("upload", own.clone_htod(&numbers))?;
    let mut second = must("alloc", other.alloc_zeros::<u32>(numbers.len()))?;
    must("copy", other.memcpy_dtod(&first, &mut second))?;
    drop(first);
    let mut back = vec![0; numbers.len()];
    must("download", own.memcpy_dtoh(&second, &mut back))?;
    assert_eq!(back, numbers);
    must("memset", own.memset_zeros(&mut second.slice_mut(5000..)))?;
    let got = must("download", other.clone_dtoh(&second.slice(4999..5001)))?;
    assert_eq!(got, [4999, 0]);
    let refused = own.memcpy_htod(&[1u32], &mut second).unwrap_err();
    assert!(
        matches!(&refused, phalanx::Error::Usage(usage) if matches!(**usage, UsageError::Length { .. })),
        "{refused}"
    );
    assert!(own.alloc_zeros::<u64>(usize::MAX).is_err());
    let empty = must("empty", own.clone_htod::<f64>(&[]))?;
    assert!(must("download", own.clone_dtoh(&empty))?.is_empty());
    must("wait_for", own.wait_for(&other))?;
    must("synchronize", own.synchronize())?;
    assert!(must("is_idle", own.is_idle())?);
    let properties = must("properties", must("device", comm.rccl().ok_or("RCCL")?.device())?.properties())?;
    assert!(!properties.name.is_empty() && properties.architecture.starts_with("gfx"), "{properties:?}");
    assert!(properties.memory > 1 << 30, "{properties:?}");
    done()
}

/// A stream and memory that somebody else made.
fn foreign(comm: Comm, _: &[String]) -> Outcome {
    let theirs = new_stream(&comm)?;
    // SAFETY: `theirs` lives to the end of this function, after the communicator's last operation.
    let borrowed = unsafe { hip::Stream::from_raw(theirs.as_raw(), theirs.device()) };
    let mut owner = must("alloc", theirs.alloc_zeros::<f32>(1000))?;
    {
        let start = must("on", owner.on_mut(&theirs))?.as_ptr();
        // SAFETY: the owner's elements, zeroed; the owner is not used before the work on it is done.
        let mut slice = unsafe { hip::Slice::<f32>::from_raw(start.cast(), 1000, &borrowed) };
        must("upload", borrowed.memcpy_htod(&[1.0; 1000], &mut slice))?;
        must("all_reduce", must("on", comm.on(&borrowed))?.all_reduce_in_place(&mut slice, ReduceOp::Sum))?;
        must("sync", comm.sync())?;
    }
    let got = must("download", theirs.clone_dtoh(&owner))?;
    expect("in the owner", &got, |_| comm.world_size() as f32)?;
    must("barrier", comm.barrier())?;
    drop(comm);
    done()
}

/// The portable trait's events between its stream and the application's.
fn portable_events(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let compute = stream(&comm).clone();
    let mut buffer = must("upload", compute.clone_htod(&values::<f32>(rank, 4096)))?;
    let address = must("on", buffer.on_mut(&compute))?.as_ptr() as u64;
    let portable = comm.into_raw_communicator();
    let ops = portable.as_stream_sync().ok_or("events")?;
    let (ready, summed) = (must("create", ops.create_event())?, must("create", ops.create_event())?);
    must("record", ops.record_on_stream(ready, compute.as_raw() as u64))?;
    must("wait", ops.comm_stream_wait_event(ready))?;
    // SAFETY: the buffer's address and length; it lives until the communicator has ended.
    unsafe { portable.all_reduce(address, 4096, phalanx::DType::F32, ReduceOp::Sum) }
        .map_err(|error| error.to_string())?;
    must("record", ops.record_on_comm_stream(summed))?;
    must("wait", ops.stream_wait_event(compute.as_raw() as u64, summed))?;
    let got = must("download", compute.clone_dtoh(&buffer))?;
    expect("summed", &got, sum(ranks))?;
    must("destroy", ops.destroy_event(ready))?;
    assert!(ops.record_on_comm_stream(ready).is_err(), "a destroyed event");
    assert!(ops.record_on_stream(summed, 77).is_err(), "an unknown stream");
    drop(portable);
    done()
}

/// Memory of another GPU, or of the wrong kind, is refused before anything is enqueued.
fn wrong_memory() -> Result<(), String> {
    let comms = must("init_all", phalanx::rccl::init_all([0, 1]))?;
    let mut foreign = upload(&comms[1], &[1.0f32; 10])?;
    let refused = comms[0].all_reduce_in_place(&mut foreign, ReduceOp::Sum).unwrap_err();
    assert!(
        matches!(&refused, phalanx::Error::Usage(usage) if matches!(**usage, UsageError::Memory { .. })),
        "{refused}"
    );
    assert!(refused.to_string().contains("GPU 1"), "{refused}");
    assert!(comms[0].on(stream(&comms[1])).is_err());
    let host = must("host", Comm::builder().backend(phalanx::BackendKind::Host).run(1, |comm| comm))?;
    let refused = host[0].all_reduce_in_place(&mut foreign, ReduceOp::Sum).unwrap_err();
    assert!(refused.to_string().contains("host memory"), "{refused}");
    assert!(comms[0].nccl().is_none() && comms[0].cuda_stream().is_err() && host[0].rccl().is_none());
    Ok(())
}
