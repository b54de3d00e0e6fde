//! Memory that NCCL knows.

use crate::world::{are_emulated, both, done, download, expect, must, stream, upload, value, values};
use libtest_mimic::{Failed, Trial};
use phalanx::cudarc::driver::{CudaSlice, result};
use phalanx::nccl::MemoryStatistic::{Persistent, Suspendable, Suspended, Total};
use phalanx::nccl::{Buffer, Graph, Registration};
use phalanx::{Comm, Error, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("registrations", registrations),
    Scenario::rank("registered", registered),
    Scenario::rank("registered_again", registered_again),
    Scenario::rank("put_into_what_was_dropped", put_into_what_was_dropped),
    Scenario::rank("outlives_its_communicator", outlives),
    Scenario::rank("exchanged_in_place", exchanged_in_place),
    Scenario::rank("scaled", scaled),
    Scenario::rank("scaled_together", scaled_together),
    Scenario::rank("newer_functions", newer_functions),
    Scenario::rank("large", large),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let mut trials: Vec<_> = SCENARIOS.iter().flat_map(|scenario| both(*scenario, 1, gpus, &[""])).collect();
    let one_thread = Trial::test("one_thread_allocates", move || one_thread(gpus));
    trials.push(one_thread.only_if(gpus >= 2, "it takes two GPUs"));
    trials
}

/// One thread that drives all ranks cannot make windows, for which they meet, and gets registered memory; of
/// what it asks for, it is told.
fn one_thread(gpus: usize) -> Result<(), Failed> {
    let comms = must("init_all", phalanx::nccl::init_all(0..gpus))?;
    let mut buffers = Vec::new();
    for comm in &comms {
        comm.set_timeout(Duration::from_secs(5));
        let nccl = comm.nccl().ok_or("NCCL")?;
        let buffer = must("alloc", nccl.alloc::<f32>(1000))?;
        // Without functions to register memory with there is no registration.
        assert_ne!(buffer.registration(), Registration::Symmetric);
        buffers.push(buffer);
        let capture = Graph::capture(comm, (), |_, ()| Ok(())).map(drop);
        for (what, result) in [
            ("alloc", nccl.alloc_as::<f32>(1000, Registration::Symmetric).map(drop)),
            ("suspend", nccl.suspend()),
            ("signal", nccl.signal(0)),
            ("CUDA graph", capture),
        ] {
            match result.expect_err(what) {
                Error::MissingFunction(_) => {}
                error @ Error::Unsupported(_) => {
                    let text = error.to_string();
                    assert!(text.contains(what) && text.contains("thread of its own"), "{text}");
                }
                error => return Err(format!("{what}: {error}").into()),
            }
        }
    }
    let sum = phalanx::group(|group| {
        let mut both = comms.iter().zip(&mut buffers);
        both.try_for_each(|(comm, buffer)| group.on(comm).all_reduce_in_place(buffer, ReduceOp::Sum))
    });
    must("group", sum)?;
    Ok(comms.iter().try_for_each(|comm| must("sync", comm.sync()))?)
}

fn registrations(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let nccl = comm.nccl().ok_or("NCCL")?;
    for wanted in [Registration::Plain, Registration::Local, Registration::Symmetric] {
        for len in [0, 1, 4099, 1 << 20] {
            let mut buffer = must("alloc", nccl.alloc_as::<f32>(len, wanted))?;
            let zeroes = stream(&comm).clone_dtoh(&buffer.view()).map_err(|e| e.to_string())?;
            expect("zero at first", &zeroes, |_| 0.0)?;
            stream(&comm)
                .memcpy_htod(&values::<f32>(rank, len), &mut buffer.view_mut())
                .map_err(|e| e.to_string())?;
            must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
            must("sync", comm.sync())?;
            let got = stream(&comm).clone_dtoh(&buffer.view()).map_err(|e| e.to_string())?;
            let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
            expect(format!("{buffer:?}"), &got, sum)?;
            // Dropped with the operation in flight.
            must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Max))?;
        }
    }
    let best = must("alloc", nccl.alloc::<f32>(1 << 20))?;
    Ok(format!("{:?}", best.registration()))
}

/// Memory of the program's own, while it is registered and afterwards.
fn registered(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let nccl = comm.nccl().ok_or("NCCL")?;
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
    // The driver's pools, which cudarc allocates from, have memory that cannot be registered.
    let mut pooled = must("register", nccl.register(upload(&comm, &[1.0f32; 10])?))?;
    assert_eq!(pooled.registration(), Registration::Plain);
    // Dropped with the operation in flight.
    must("all_reduce", comm.all_reduce_in_place(&mut pooled, ReduceOp::Max))?;
    drop(pooled);
    for len in [0, 1, 4099] {
        let own = upload_as_others(&comm, &values::<f32>(rank, len))?;
        let mut buffer = must("register", nccl.register(own))?;
        let known = if len == 0 { Registration::Plain } else { Registration::Local };
        assert_eq!((buffer.len(), buffer.registration()), (len, known), "{buffer:?}");
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        // Waits for the operation.
        let own = must("into_slice", buffer.into_slice())?;
        expect("the sum", &download(&comm, &own)?, sum)?;
        let mut again = must("register", nccl.register(own))?;
        must("all_reduce", comm.all_reduce_in_place(&mut again, ReduceOp::Max))?;
        let own = must("into_slice", again.into_slice())?;
        if len > 0 {
            free_as_others(own)?;
        }
    }
    let refused = must("alloc", nccl.alloc::<f32>(10))?.into_slice().unwrap_err();
    assert!(refused.to_string().contains("freed with its buffer"), "{refused}");
    let outliving = must("register", nccl.register(upload(&comm, &[1.0f32; 10])?))?;
    let stream = stream(&comm).clone();
    drop(comm);
    let own = must("into_slice", outliving.into_slice())?;
    expect("still there", &stream.clone_dtoh(&own).map_err(|e| e.to_string())?, |_| 1.0)?;
    done()
}

/// Blocks that go where they are sent from, by the library, in memory of each kind.
fn exchanged_in_place(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let nccl = comm.nccl().ok_or("NCCL")?;
    for kind in [Registration::Plain, Registration::Local, Registration::Symmetric] {
        // NCCL uses a registration from some length on.
        for len in [3, if are_emulated() { 1 << 14 } else { 1 << 22 }] {
            let mut buffer = must("alloc", nccl.alloc_as::<f32>(len * ranks, kind))?;
            let sent = values::<f32>(rank, len * ranks);
            stream(&comm).memcpy_htod(&sent, &mut buffer.view_mut()).map_err(|e| e.to_string())?;
            let by_nccl = comm.beside_computing();
            // There and back twice: what is sent from is what came.
            must("all_to_all", by_nccl.all_to_all_in_place(&mut buffer))?;
            let counts = vec![len; ranks];
            must("all_to_all_v", by_nccl.all_to_all_v_in_place(&mut buffer, &counts))?;
            must("group", by_nccl.group(|group| group.all_to_all_in_place(&mut buffer)))?;
            let got = stream(&comm).clone_dtoh(&buffer.view()).map_err(|e| e.to_string())?;
            for (from, block) in got.chunks(len).enumerate() {
                expect(format!("{kind:?}, from rank {from}"), block, |index| {
                    value(from, rank * len + index) as f32
                })?;
            }
        }
    }
    done()
}

/// The same memory with another registration is not what a graph has captured: the first is gone.
fn registered_again(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let own = upload_as_others(&comm, &values::<f32>(comm.rank(), 1000))?;
    let registered = must("register", nccl.register(own))?;
    assert_eq!(registered.registration(), Registration::Local);
    let mut graph = must(
        "capture",
        Graph::capture(&comm, Some(registered), |group, buffer| match buffer {
            Some(buffer) => group.all_reduce_in_place(buffer, ReduceOp::Max),
            None => Ok(()),
        }),
    )?;
    must("launch", graph.launch())?;
    must("sync", comm.sync())?;
    let own = must("into_slice", graph.buffers_mut().take().ok_or("the buffer")?.into_slice())?;
    *graph.buffers_mut() = Some(must("register", nccl.register(own))?);
    let refused = graph.launch().expect_err("another registration").to_string();
    assert!(refused.contains("capture again"), "{refused}");
    let own = must("into_slice", graph.into_buffers().ok_or("the buffer")?.into_slice())?;
    must("barrier", comm.barrier())?;
    free_as_others(own)?;
    done()
}

/// A rank drops the window that its neighbour goes on to write to: its memory is given back at the
/// communicator's end.
fn put_into_what_was_dropped(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    if ranks == 1 {
        return done();
    }
    let free = || -> Result<usize, String> {
        stream(&comm).context().bind_to_thread().map_err(|e| e.to_string())?;
        Ok(result::mem_get_info().map_err(|e| e.to_string())?.0)
    };
    must("barrier", comm.barrier())?;
    let before = free()?;
    let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    let nccl = part.nccl().ok_or("NCCL")?;
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let source = must("alloc", nccl.alloc::<f32>(1 << 20))?;
    let mut target = Some(must("alloc", nccl.alloc::<f32>(1 << 20))?);
    let put = |target: &Buffer<f32>| nccl.put_signal(&source, 0..1000, right, target, 0);
    match put(target.as_ref().ok_or("the window")?) {
        Err(Error::MissingFunction(_)) => return Ok("the library has no put".into()),
        put => must("put_signal", put)?,
    }
    let has_come = || must("wait_signals", nccl.wait_signals(&[(left, 1)]).and_then(|()| part.sync()));
    has_come()?;
    if rank == 0 {
        target = None;
    }
    must("barrier", part.barrier())?;
    if let Some(target) = &target {
        must("put_signal", put(target))?;
    } else {
        must("signal", nccl.signal(right))?;
    }
    has_come()?;
    must("barrier", part.barrier())?;
    drop((target, source));
    must("finalize", part.finalize())?;
    // Threads that have done their work may not have come to their end.
    let since = Instant::now();
    // Communicators of the trials before give memory back meanwhile, too.
    while are_emulated() && free()? < before {
        assert!(since.elapsed() < Duration::from_secs(10), "{} bytes are left", before - free()?);
        std::thread::sleep(Duration::from_millis(10));
    }
    must("barrier", comm.barrier())?;
    done()
}

/// Memory of `cuMemAlloc`, as that of other libraries.
fn upload_as_others(comm: &Comm, values: &[f32]) -> Result<CudaSlice<f32>, String> {
    if values.is_empty() {
        return upload(comm, values);
    }
    stream(comm).context().bind_to_thread().map_err(|e| e.to_string())?;
    // SAFETY: so many bytes of this context, that the slice has for itself.
    let mut slice = unsafe {
        let start = result::malloc_sync(size_of_val(values)).map_err(|e| e.to_string())?;
        stream(comm).upgrade_device_ptr(start, values.len())
    };
    stream(comm).memcpy_htod(values, &mut slice).map_err(|e| e.to_string())?;
    Ok(slice)
}

fn free_as_others(slice: CudaSlice<f32>) -> Result<(), String> {
    // SAFETY: allocated above; nobody has the slice any more.
    unsafe { result::free_sync(slice.leak()) }.map_err(|e| e.to_string())
}

fn outlives(comm: Comm, _: &[String]) -> Outcome {
    let stream = stream(&comm).clone();
    let mut buffer = must("alloc", comm.nccl().ok_or("NCCL")?.alloc::<f32>(1000))?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    drop(comm);
    stream.memcpy_htod(&[1.0f32; 1000], &mut buffer.view_mut()).map_err(|e| e.to_string())?;
    expect("still there", &stream.clone_dtoh(&buffer.view()).map_err(|e| e.to_string())?, |_| 1.0)?;
    done()
}

/// A factor in GPU memory, read when the operation is carried out.
fn scaled(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let nccl = comm.nccl().ok_or("NCCL")?;
    let upload = |values: &[f32]| stream(&comm).clone_htod(values).map_err(|e| e.to_string());
    let factor = upload(&[(rank + 1) as f32])?;
    let send = upload(&vec![2.0; 4096])?;
    let mut recv = upload(&vec![0.0; 4096])?;
    must("all_reduce_scaled", nccl.all_reduce_scaled(&send, &mut recv, &factor))?;
    must("sync", comm.sync())?;
    let got = stream(&comm).clone_dtoh(&recv).map_err(|e| e.to_string())?;
    let scaled = (1..=ranks).sum::<usize>() as f32 * 2.0;
    expect("factor × 2, summed", &got, |_| scaled)?;
    for root in 0..ranks {
        let mut recv = upload(&vec![7.0; if rank == root { 4096 } else { 0 }])?;
        if rank == root {
            must("reduce_scaled", nccl.reduce_scaled(&send, &mut recv, &factor, root))?;
        } else {
            must("reduce_scaled", nccl.reduce_scaled(&send, &mut [], &factor, root))?;
        }
        must("sync", comm.sync())?;
        let got = stream(&comm).clone_dtoh(&recv).map_err(|e| e.to_string())?;
        expect("factor × 2, summed at the root", &got, |_| scaled)?;
    }
    let blocks: Vec<f32> = (0..4096 * ranks).map(|index| (index / 4096) as f32).collect();
    let blocks = upload(&blocks)?;
    must("reduce_scatter_scaled", nccl.reduce_scatter_scaled(&blocks, &mut recv, &factor))?;
    must("sync", comm.sync())?;
    let got = stream(&comm).clone_dtoh(&recv).map_err(|e| e.to_string())?;
    expect("factor × rank, summed", &got, |_| scaled / 2.0 * rank as f32)?;
    let refused = nccl.reduce_scatter_scaled(&blocks, &mut vec![0.0f32; 4096][..], &factor).unwrap_err();
    assert!(refused.to_string().contains("GPU memory"), "{refused}");
    let refused = nccl.reduce_scaled(&send, &mut recv, &factor, ranks).unwrap_err();
    assert!(refused.to_string().contains("root"), "{refused}");
    if ranks == 1 {
        // NCCL's kernel for one rank would leave the last one out.
        let send = upload(&vec![2.0; 4097])?;
        let mut recv = upload(&vec![0.0; 4097])?;
        let refused = nccl.all_reduce_scaled(&send, &mut recv, &factor).unwrap_err();
        assert!(refused.to_string().contains("4097"), "{refused}");
    }
    let refused = nccl.all_reduce_scaled(&send, &mut recv, &[1.0f32]).unwrap_err();
    assert!(refused.to_string().contains("GPU memory"), "{refused}");
    let refused = nccl.all_reduce_scaled(&send, &mut recv, &send).unwrap_err();
    assert!(refused.to_string().contains("one factor"), "{refused}");
    done()
}

/// Factors in GPU memory in groups, and in CUDA graphs, which read them at each launch.
fn scaled_together(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks, len) = (comm.rank(), comm.world_size(), 4096);
    let scale = |round: usize| (1..=ranks).map(|rank| (rank + round) as f32).sum::<f32>();
    let buffers = (
        upload(&comm, &vec![2.0f32; len])?,
        upload(&comm, &vec![0.0f32; len])?,
        upload(&comm, &vec![0.0f32; len])?,
        upload(&comm, &(0..len * ranks).map(|index| (index / len) as f32).collect::<Vec<_>>())?,
        upload(&comm, &vec![0.0f32; len])?,
        upload(&comm, &[(rank + 1) as f32])?,
    );
    let (send, mut sum, mut at_root, blocks, mut block, mut factor) = buffers;
    let together = comm.group(|group| {
        group.all_reduce_scaled(&send, &mut sum, &factor)?;
        group.reduce_scaled(&send, &mut at_root, &factor, ranks - 1)?;
        group.reduce_scatter_scaled(&blocks, &mut block, &factor)
    });
    must("the group", together)?;
    expect("all_reduce_scaled", &download(&comm, &sum)?, |_| scale(0) * 2.0)?;
    if rank == ranks - 1 {
        expect("reduce_scaled", &download(&comm, &at_root)?, |_| scale(0) * 2.0)?;
    }
    expect("reduce_scatter_scaled", &download(&comm, &block)?, |_| scale(0) * rank as f32)?;

    let mut shorter = at_root.slice_mut(1..);
    let wrong = [
        ("one factor", comm.group(|group| group.all_reduce_scaled(&send, &mut sum, &send))),
        ("GPU memory", comm.group(|group| group.all_reduce_scaled(&send, &mut sum, &[1.0f32]))),
        ("root", comm.group(|group| group.reduce_scaled(&send, &mut sum, &factor, ranks))),
        ("send", comm.group(|group| group.reduce_scatter_scaled(&blocks, &mut shorter, &factor))),
    ];
    for (part, refused) in wrong {
        let text = refused.expect_err(part).to_string();
        assert!(text.contains(part), "{text}");
    }

    stream(&comm).memset_zeros(&mut factor).map_err(|e| e.to_string())?;
    let mut graph = must(
        "capture",
        Graph::capture(
            &comm,
            (send, sum, factor, block, blocks),
            |group, (send, sum, factor, block, blocks)| {
                group.all_reduce_scaled(send, sum, factor)?;
                group.reduce_scatter_scaled(blocks, block, factor)
            },
        ),
    )?;
    for round in 0..4 {
        let (_, _, factor, ..) = graph.buffers_mut();
        stream(&comm).memcpy_htod(&[(rank + 1 + round) as f32], factor).map_err(|e| e.to_string())?;
        must("launch", graph.launch())?;
        let (_, sum, _, block, _) = graph.buffers();
        expect("the sum, launched", &download(&comm, sum)?, |_| scale(round) * 2.0)?;
        expect("the block, launched", &download(&comm, block)?, |_| scale(round) * rank as f32)?;
    }
    // A factor elsewhere is not what was captured.
    graph.buffers_mut().2 = upload(&comm, &[1.0f32])?;
    let refused = graph.launch().expect_err("another factor").to_string();
    assert!(refused.contains("capture again"), "{refused}");
    let host = must("host", Comm::builder().backend(phalanx::BackendKind::Host).run(1, |comm| comm))?;
    let mut on_host = [0.0f32];
    let refused = host[0].group(|group| group.all_reduce_scaled(&[1.0f32], &mut on_host, &[1.0f32]));
    let refused = refused.expect_err("on the host").to_string();
    assert!(refused.contains("all_reduce_scaled") && refused.contains("PreMulSum"), "{refused}");
    must("afterwards", comm.barrier())?;
    done()
}

/// Each works, or is missing with the function's name, the library's version and its path.
fn newer_functions(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let nccl = comm.nccl().ok_or("NCCL")?;
    let missing = |name: &str, error: Error| match error {
        Error::MissingFunction(missing) if missing.function == name => Ok(()),
        other => Err(format!("{name}: {other}")),
    };
    let mut ones = stream(&comm).clone_htod(&[1.0f32; 4096]).map_err(|e| e.to_string())?;
    must("all_reduce", comm.all_reduce_in_place(&mut ones, ReduceOp::Sum))?;
    must("sync", comm.sync())?;
    let mut held = String::new();
    let statistics = [Total, Persistent, Suspendable, Suspended];
    match statistics.map(|statistic| nccl.memory(statistic)) {
        [Ok(total), Ok(persistent), Ok(suspendable), Ok(suspended)] => {
            assert!(total > 0);
            held = format!(
                "{total} bytes, {persistent} persistent, {suspendable} suspendable, {suspended} suspended"
            );
        }
        [Err(error), ..] => missing("ncclCommMemStats", error)?,
        other => return Err(format!("memory: {other:?}")),
    }
    match nccl.suspend() {
        Ok(()) => {
            let suspended = must("memory", nccl.memory(Suspended))?;
            held += &format!("; {suspended} while suspended");
            let refused = [
                comm.all_reduce_in_place(&mut ones, ReduceOp::Sum).err(),
                comm.group(|group| group.broadcast_in_place(&mut ones, 0)).err(),
                nccl.signal((rank + 1) % ranks).err(),
                nccl.alloc::<f32>(10).err(),
                nccl.suspend().err(),
            ];
            for error in refused {
                let text = error.ok_or("an operation of a suspended communicator")?.to_string();
                assert!(text.contains("suspended") && text.contains("resume"), "{text}");
            }
            must("resume", nccl.resume())?;
        }
        Err(error) => missing("ncclCommSuspend", error)?,
    }
    must("all_reduce", comm.all_reduce_in_place(&mut ones, ReduceOp::Sum))?;
    let got = stream(&comm).clone_dtoh(&ones).map_err(|e| e.to_string())?;
    expect("after resume", &got, |_| (ranks * ranks) as f32)?;
    let target = must("alloc", nccl.alloc::<f32>(1024))?;
    let mut source = must("alloc", nccl.alloc::<f32>(513))?;
    stream(&comm).memcpy_htod(&[rank as f32; 512], &mut source.slice_mut(1..)).map_err(|e| e.to_string())?;
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    if ranks > 1 {
        match nccl.put_signal(&source, 1..513, right, &target, 512) {
            Ok(()) => {
                must("wait_signals", nccl.wait_signals(&[(left, 1)]))?;
                must("sync", comm.sync())?;
                let got = stream(&comm).clone_dtoh(&target.view()).map_err(|e| e.to_string())?;
                let expected = |index: usize| if index < 512 { 0.0 } else { left as f32 };
                expect("what the left neighbour put", &got, expected)?;
                must("signal", nccl.signal(left))?;
                must("signal", nccl.signal(left))?;
                must("wait_signals", nccl.wait_signals(&[(right, 2)]))?;
                must("sync", comm.sync())?;
                must("waiting for none", nccl.wait_signals(&[(right, 0)]))?;
                must("nothing", nccl.put_signal(&source, 513..513, right, &target, 1024))?;
                must("wait_signals", nccl.wait_signals(&[(left, 1)]))?;
                must("sync", comm.sync())?;
                let refused = |range, peer, offset| {
                    nccl.put_signal(&source, range, peer, &target, offset).unwrap_err().to_string()
                };
                for (error, wanted) in [
                    (refused(1..513, right, 513), "target"),
                    (refused(1..514, right, 0), "source"),
                    (refused(0..1, ranks, 0), "peer"),
                    (refused(0..1, right, usize::MAX), "target"),
                    (refused(std::ops::Range { start: 2, end: 1 }, right, 0), "range"),
                ] {
                    assert!(error.contains(wanted), "{error}");
                }
                let plain = must("alloc", nccl.alloc_as::<f32>(8, Registration::Plain))?;
                let refused = nccl.put_signal(&plain, 0..8, right, &target, 0).unwrap_err();
                assert!(refused.to_string().contains("Plain"), "{refused}");
                let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
                let other = must("alloc", part.nccl().ok_or("NCCL")?.alloc::<f32>(8))?;
                let refused = nccl.put_signal(&source, 0..8, right, &other, 0).unwrap_err();
                assert!(refused.to_string().contains("another communicator"), "{refused}");
            }
            Err(error) => missing("ncclPutSignal", error)?,
        }
    }
    must("barrier", comm.barrier())?;
    Ok(held)
}

/// More than 2³¹ bytes in one operation, where the GPU is large enough for it.
fn large(comm: Comm, _: &[String]) -> Outcome {
    let len = (1usize << 31) + 4099;
    let stream = stream(&comm);
    let Ok(mut buffer) = stream.alloc_zeros::<u8>(len) else {
        return Ok("not enough memory".into());
    };
    let one = stream.clone_htod(&[1u8]).map_err(|e| e.to_string())?;
    let mut last = buffer.slice_mut(len - 1..);
    stream.memcpy_dtod(&one, &mut last).map_err(|e| e.to_string())?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    must("sync", comm.sync())?;
    let end = stream.clone_dtoh(&buffer.slice(len - 2..)).map_err(|e| e.to_string())?;
    expect("the end of 2 GiB", &end, |index| if index == 1 { comm.world_size() as u8 } else { 0 })?;
    done()
}
