//! Symmetric memory as a buffer of the front: NCCL's collectives, beside NVSHMEM.

use crate::world::{barrier, context, done, expect, must, read, upload, value, values};
use phalanx::{BackendKind, Comm, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;

pub const SCENARIOS: &[Scenario] = &[Scenario::process("front/nccl", nccl)];

/// A communicator of NCCL's from which the PEs come: its GPU is theirs.
fn nccl(_: &[String]) -> Outcome {
    let comm: Comm = must("init", Comm::builder().backend(BackendKind::Nccl).init())?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let context = context(&comm)?;
    assert_eq!(comm.gpu(), Some(context.cuda_context().ordinal()));
    let mut memory = upload(&context, &values::<f32>(rank, 10_000))?;
    let mut sums = must("alloc", context.alloc::<f32>(10_000))?;
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
    must("all_reduce", comm.all_reduce(&memory, &mut sums, ReduceOp::Sum))?;
    must("sync", comm.sync())?;
    expect("symmetric memory reduced by NCCL", &read(&sums)?, sum)?;
    // What NCCL made is put on NVSHMEM's stream: cudarc's order holds between the two.
    must("all_reduce", comm.all_reduce_in_place(&mut memory, ReduceOp::Max))?;
    must("put", context.put_on_stream(&sums, &memory, (rank + 1) % ranks, context.stream()))?;
    barrier(&context)?;
    let most = |index: usize| (0..ranks).map(|rank| value(rank, index)).max().unwrap_or(0) as f32;
    expect("NCCL's result, put", &read(&sums)?, most)?;
    barrier(&context)?;
    must("free", memory.free())?;
    must("free", sums.free())?;
    must("finalize", context.finalize())?;
    must("barrier", comm.barrier())?;
    done()
}
