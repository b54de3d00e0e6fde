//! What only RCCL has: its own memory, its bias, its numbers; and what it shares with NCCL beyond the
//! operations.

use crate::world::{both, done, download, expect, must, stream, upload, value, values};
use libtest_mimic::Trial;
use phalanx::rccl::{MemoryStatistic, Registration};
use phalanx::{BackendKind, Comm, Error, PreMulSum, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("describes_itself", describes_itself),
    Scenario::rank("registrations", registrations),
    Scenario::rank("outlives_its_communicator", outlives),
    Scenario::rank("bias", bias),
    Scenario::rank("scaled", scaled),
    Scenario::rank("split_and_shared", split),
    Scenario::rank("newer_functions", newer_functions),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, 1, gpus, &[""])).collect()
}

fn sum(ranks: usize, index: usize) -> f32 {
    (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32
}

fn describes_itself(comm: Comm, _: &[String]) -> Outcome {
    assert_eq!((comm.backend(), comm.gpu()), (BackendKind::Rccl, Some(comm.rank())));
    assert!(comm.nccl().is_none());
    let refused = comm.cuda_stream().unwrap_err().to_string();
    assert!(refused.contains("of the backend rccl; take its `hip_stream`"), "{refused}");
    let rccl = comm.rccl().ok_or("the backend's own features")?;
    assert!(rccl.version().starts_with("2.") && !rccl.raw_handle().is_null());
    assert!(rccl.library().to_string_lossy().contains("rccl"), "{:?}", rccl.library());
    assert_eq!(must("device", rccl.device())?.ordinal(), comm.rank());
    must("async_error", rccl.async_error())?;
    must("barrier", comm.barrier())?;
    done()
}

fn registrations(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let rccl = comm.rccl().ok_or("RCCL")?;
    for wanted in [Registration::Plain, Registration::Local, Registration::Symmetric] {
        for len in [0, 1, 4099] {
            let mut buffer = must("alloc", rccl.alloc_as::<f32>(len, wanted))?;
            let zeroes = must("download", stream(&comm).clone_dtoh(&buffer.view()))?;
            expect("zero at first", &zeroes, |_| 0.0)?;
            must("upload", stream(&comm).memcpy_htod(&values::<f32>(rank, len), &mut buffer.view_mut()))?;
            must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
            must("sync", comm.sync())?;
            let got = must("download", stream(&comm).clone_dtoh(&buffer.view()))?;
            expect(format!("{buffer:?}"), &got, |index| sum(ranks, index))?;
            // Dropped with the operation in flight.
            must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Max))?;
        }
    }
    let mut own = must("register", rccl.register(upload(&comm, &values::<f32>(rank, 4099))?))?;
    assert_eq!(own.registration(), Registration::Local);
    must("all_reduce", comm.all_reduce_in_place(&mut own, ReduceOp::Sum))?;
    let own = must("into_slice", own.into_slice())?;
    expect("registered", &download(&comm, &own)?, |index| sum(ranks, index))?;
    let best = must("alloc", rccl.alloc::<f32>(1 << 16))?;
    Ok(format!("{:?}", best.registration()))
}

fn outlives(comm: Comm, _: &[String]) -> Outcome {
    let stream = stream(&comm).clone();
    let mut buffer = must("alloc", comm.rccl().ok_or("RCCL")?.alloc::<f32>(1000))?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    drop(comm);
    must("upload", stream.memcpy_htod(&[1.0f32; 1000], &mut buffer.view_mut()))?;
    expect("still there", &must("download", stream.clone_dtoh(&buffer.view()))?, |_| 1.0)?;
    done()
}

fn bias(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let rccl = comm.rccl().ok_or("RCCL")?;
    for len in [0, 1, 17, 70_001] {
        let send = upload(&comm, &values::<f32>(rank, len))?;
        let bias = upload(&comm, &vec![100.0f32; len])?;
        let mut recv = upload(&comm, &vec![7.0f32; len])?;
        must("with a bias", rccl.all_reduce_with_bias(&send, &mut recv, &bias, ReduceOp::Sum))?;
        // Reused at once: the operation is behind it.
        let got = download(&comm, &recv)?;
        expect("the sum and the bias", &got, |index| sum(ranks, index) + 100.0)?;
        must("max", rccl.all_reduce_with_bias(&send, &mut recv, &bias, ReduceOp::Max))?;
        drop((send, bias));
        expect("the bias is the largest", &download(&comm, &recv)?, |_| 100.0)?;
    }
    let send = upload(&comm, &[1.0f32; 4])?;
    let mut recv = upload(&comm, &[0.0f32; 4])?;
    let short = upload(&comm, &[0.0f32; 3])?;
    for refused in [
        rccl.all_reduce_with_bias(&send, &mut recv, &short, ReduceOp::Sum),
        rccl.all_reduce_with_bias(&send, &mut recv, &[0.0f32; 4], ReduceOp::Sum),
        rccl.all_reduce_with_bias(&send, &mut recv, &send, ReduceOp::Avg),
    ] {
        let error = refused.unwrap_err();
        assert!(!error.is_fatal(), "{error}");
    }
    must("barrier", comm.barrier())?;
    done()
}

/// A factor in GPU memory, read when the operation is carried out; and one known on the host.
fn scaled(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let factor = upload(&comm, &[(rank + 1) as f32])?;
    let send = upload(&comm, &vec![2.0f32; 4096])?;
    let mut recv = upload(&comm, &vec![0.0f32; 4096])?;
    let rccl = comm.rccl().ok_or("RCCL")?;
    must("all_reduce_scaled", rccl.all_reduce_scaled(&send, &mut recv, &factor))?;
    let scaled = (1..=ranks).sum::<usize>() as f32 * 2.0;
    expect("factor × 2, summed", &download(&comm, &recv)?, |_| scaled)?;
    must("reduce_scaled", rccl.reduce_scaled(&send, &mut recv, &factor, 0))?;
    if rank == 0 {
        expect("factor × 2, summed at the root", &download(&comm, &recv)?, |_| scaled)?;
    }
    let blocks = upload(&comm, &vec![3.0f32; 4096 * ranks])?;
    must("reduce_scatter_scaled", rccl.reduce_scatter_scaled(&blocks, &mut recv, &factor))?;
    expect("factor × 3, summed", &download(&comm, &recv)?, |_| scaled * 1.5)?;
    must("PreMulSum", comm.all_reduce(&send, &mut recv, PreMulSum(3.0)))?;
    expect("3 × 2, summed", &download(&comm, &recv)?, |_| 6.0 * ranks as f32)?;
    done()
}

fn split(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let part = must("split", comm.split(Some((rank % 2) as u32), -(rank as i64)))?.ok_or("a part")?;
    let members: Vec<usize> = (0..ranks).filter(|other| other % 2 == rank % 2).collect();
    assert_eq!(part.world_size(), members.len());
    let mut buffer = upload(&part, &[rank as f32; 100])?;
    must("all_reduce", part.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    let expected = members.iter().sum::<usize>() as f32;
    expect("the sum of the part", &download(&part, &buffer)?, |_| expected)?;
    drop(part);
    let alone = must("split", comm.split((rank == 0).then_some(0), 0))?;
    assert_eq!(alone.is_some(), rank == 0);
    must("barrier", comm.barrier())?;
    done()
}

/// Each works, or is missing with the function's name, the library's version and its path.
fn newer_functions(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let rccl = comm.rccl().ok_or("RCCL")?;
    let missing = |name: &str, error: Error| match error {
        Error::MissingFunction(missing) if missing.function == name && missing.library == "RCCL" => Ok(()),
        other => Err(format!("{name}: {other}")),
    };
    match rccl.memory(MemoryStatistic::Total) {
        Ok(bytes) => assert!(bytes > 0),
        Err(error) => missing("ncclCommMemStats", error)?,
    }
    match rccl.suspend() {
        Ok(()) => must("resume", rccl.resume())?,
        Err(error) => missing("ncclCommSuspend", error)?,
    }
    let target = must("alloc", rccl.alloc::<f32>(1024))?;
    let mut source = must("alloc", rccl.alloc::<f32>(512))?;
    must("upload", stream(&comm).memcpy_htod(&[rank as f32; 512], &mut source.view_mut()))?;
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    if ranks > 1 {
        match rccl.put_signal(&source, 0..512, right, &target, 512) {
            Ok(()) => {
                must("wait_signals", rccl.wait_signals(&[(left, 1)]))?;
                must("sync", comm.sync())?;
                let got = must("download", stream(&comm).clone_dtoh(&target.view()))?;
                let expected = |index: usize| if index < 512 { 0.0 } else { left as f32 };
                expect("what the left neighbour put", &got, expected)?;
            }
            Err(error) => missing("ncclPutSignal", error)?,
        }
    }
    must("barrier", comm.barrier())?;
    done()
}
