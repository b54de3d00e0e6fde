//! Broken rules: each ends the process with a line that names the function and the rule.

use super::child::{Settings, violates};
use super::nccl::{Config, nccl, ok};
use super::world::{Rank, at, begun, threads, unique_id};
use cudarc::driver::CudaSlice;
use libtest_mimic::Trial;
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::sync::Barrier;
use std::time::Duration;

/// A rule: the name of a scenario that breaks it, the scenario, settings, and what the message must say.
type Rule = (&'static str, fn(&[String]) -> Outcome, Settings, &'static [&'static str]);

const RULES: [Rule; 22] = [
    (
        "violations/destroy_after_abort",
        destroy_after_abort,
        &[],
        &["ncclCommDestroy", "ended by ncclCommAbort"],
    ),
    ("violations/abort_twice", abort_twice, &[], &["ncclCommAbort", "ended by ncclCommAbort"]),
    ("violations/use_after_destroy", use_after_destroy, &[], &["ncclCommCount", "ended by ncclCommDestroy"]),
    (
        "violations/use_in_progress",
        use_in_progress,
        &[("INIT", "hang")],
        &["ncclCommCount", "ncclInProgress"],
    ),
    (
        "violations/destroy_in_progress",
        destroy_in_progress,
        &[("INIT", "hang")],
        &["ncclCommDestroy", "ncclInProgress"],
    ),
    (
        "violations/destroy_failed",
        destroy_failed,
        &[("ASYNC_ERROR", "1:3")],
        &["ncclCommDestroy", "only ncclCommAbort"],
    ),
    ("violations/use_after_finalize", use_after_finalize, &[], &["ncclAllReduce", "finalized"]),
    ("violations/two_threads", two_threads, &[], &["one thread at a time"]),
    ("violations/freed_in_group", freed_in_group, &[], &["ncclAllReduce", "the send buffer", "was freed by"]),
    ("violations/aborted_in_group", aborted_in_group, &[], &["ncclGroupEnd", "a communicator was ended"]),
    ("violations/freed_in_flight", freed_in_flight, &[], &["ncclAllReduce", "was freed by"]),
    (
        "violations/written_in_flight",
        written_in_flight,
        &[],
        &["ncclAllReduce", "the send buffer was written to"],
    ),
    (
        "violations/result_overwritten",
        result_overwritten,
        &[],
        &["ncclAllReduce", "the receive buffer was written to"],
    ),
    (
        "violations/too_short",
        too_short,
        &[],
        &["ncclAllGather", "the receive buffer", "beyond its allocation"],
    ),
    ("violations/overlap", overlap, &[], &["ncclAllReduce", "overlap"]),
    ("violations/host_memory", host_memory, &[], &["ncclAllReduce", "is not memory of a device"]),
    ("violations/registered", registered, &[], &["ncclMemFree", "registered"]),
    ("violations/mismatch", mismatch, &[], &["ncclAllReduce", "calls"]),
    ("violations/operator", operator, &[], &["ncclAllReduce", "destroyed by ncclRedOpDestroy"]),
    ("violations/id_twice", id_twice, &[], &["unique id was used"]),
    (
        "violations/config",
        config,
        &[("NCCL_VERSION", "2.18.1")],
        &["ncclCommInitRankConfig", "version 22703"],
    ),
    ("violations/stream", stream, &[], &["ncclAllReduce", "ended by cuStreamDestroy_v2"]),
];

const fn scenario(rule: usize) -> Scenario {
    Scenario::process(RULES[rule].0, RULES[rule].1)
}

/// One scenario for each rule.
const ALL: [Scenario; RULES.len()] = {
    let mut all = [scenario(0); RULES.len()];
    let mut rule = 0;
    while rule < RULES.len() {
        all[rule] = scenario(rule);
        rule += 1;
    }
    all
};

pub const SCENARIOS: &[Scenario] = &ALL;

pub fn trials() -> Vec<Trial> {
    RULES.into_iter().map(|(name, _, settings, parts)| violates(name, settings, name, parts)).collect()
}

fn one() -> Result<Rank, String> {
    Rank::begin(unique_id(), 0, 1, true)
}

/// Rank 0 of two, of which the other one is there and does nothing.
fn stuck() -> Result<Rank, String> {
    let id = unique_id();
    let ranks = threads(2, |number| Rank::begin(id, number, 2, true))?;
    ranks.into_iter().next().ok_or_else(|| "no rank".into())
}

fn nothing_happened<T>(_: T) -> Outcome {
    // A stream may take its time to get there.
    std::thread::sleep(Duration::from_secs(10));
    Err("nothing happened".into())
}

fn all_reduce(rank: &Rank, send: u64, receive: u64, count: usize) -> i32 {
    nccl().all_reduce(send, receive, count, 7, 0, rank.comm, rank.queue())
}

fn destroy_after_abort(_: &[String]) -> Outcome {
    let rank = one()?;
    ok("abort", nccl().abort(rank.comm))?;
    nothing_happened(nccl().destroy(rank.comm))
}

fn abort_twice(_: &[String]) -> Outcome {
    let rank = one()?;
    ok("abort", nccl().abort(rank.comm))?;
    nothing_happened(nccl().abort(rank.comm))
}

fn use_after_destroy(_: &[String]) -> Outcome {
    let rank = one()?;
    rank.end()?;
    nothing_happened(nccl().count(rank.comm, &mut 0))
}

fn in_progress() -> Result<u64, String> {
    let _context = cudarc::driver::CudaContext::new(0).context(|| "context".into())?;
    let mut comm = 0;
    nccl().init_rank_config(&mut comm, 2, unique_id(), 0, &Config::new(false));
    Ok(comm)
}

fn use_in_progress(_: &[String]) -> Outcome {
    nothing_happened(nccl().count(in_progress()?, &mut 0))
}

fn destroy_in_progress(_: &[String]) -> Outcome {
    nothing_happened(nccl().destroy(in_progress()?))
}

fn destroy_failed(_: &[String]) -> Outcome {
    let rank = one()?;
    let slice = rank.upload(&[1f32]);
    ok("all_reduce", all_reduce(&rank, at(&slice), at(&slice), 1))?;
    while nccl().state(rank.comm) == 0 {
        std::thread::yield_now();
    }
    nothing_happened(nccl().destroy(rank.comm))
}

fn use_after_finalize(_: &[String]) -> Outcome {
    let rank = one()?;
    let slice = rank.upload(&[1f32]);
    ok("finalize", nccl().finalize(rank.comm))?;
    nothing_happened(all_reduce(&rank, at(&slice), at(&slice), 1))
}

fn two_threads(_: &[String]) -> Outcome {
    let (rank, other) = (one()?, one()?);
    // The other communicator is of the same device: that is as bad as the same one.
    std::thread::scope(|scope| {
        for comm in [rank.comm, other.comm] {
            scope.spawn(move || (0..100_000).for_each(|_| assert_eq!(nccl().state(comm), 0)));
        }
    });
    nothing_happened(())
}

fn freed_in_group(_: &[String]) -> Outcome {
    let rank = stuck()?;
    let (send, receive) = (rank.upload(&[1f32]), rank.upload(&[1f32]));
    ok("group start", nccl().group_start())?;
    ok("all_reduce", all_reduce(&rank, at(&send), at(&receive), 1))?;
    drop(send);
    nothing_happened(nccl().group_end())
}

fn aborted_in_group(_: &[String]) -> Outcome {
    let rank = stuck()?;
    let slice = rank.upload(&[1f32]);
    ok("group start", nccl().group_start())?;
    ok("all_reduce", all_reduce(&rank, at(&slice), at(&slice), 1))?;
    ok("abort", nccl().abort(rank.comm))?;
    nothing_happened(nccl().group_end())
}

/// Two ranks of which rank 0 does something to its buffers while the operation waits for rank 1.
fn in_flight(harm: impl Fn(&Rank, [CudaSlice<f32>; 2]) + Sync) -> Outcome {
    let id = unique_id();
    let done = Barrier::new(2);
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, true)?;
        let buffers = [rank.upload(&[1f32; 4]), rank.upload(&[2f32; 4])];
        rank.stream.synchronize().context(|| "synchronize".into())?;
        if number == 1 {
            done.wait();
        }
        ok("all_reduce", all_reduce(&rank, at(&buffers[0]), at(&buffers[1]), 4))?;
        if number == 0 {
            begun(&rank, &buffers[1])?;
            harm(&rank, buffers);
            done.wait();
        }
        rank.stream.synchronize().context(|| "synchronize".into())
    })?;
    nothing_happened(())
}

fn freed_in_flight(_: &[String]) -> Outcome {
    in_flight(|rank, [send, _]| {
        // By a stream that waits for nothing; cuMemFree waits for the GPU.
        let Ok(hasty) = rank.context.new_stream() else { return };
        let address = send.leak();
        // SAFETY: the operation still needs the memory: that is the test.
        let _ = unsafe { cudarc::driver::result::free_async(address, hasty.cu_stream()) };
        let _ = hasty.synchronize();
    })
}

fn overwrite(rank: &Rank, address: u64) {
    // Another stream, which waits for nothing.
    let Ok(hasty) = rank.context.new_stream() else { return };
    // SAFETY: the operation still uses the memory: that is the test.
    let _ = unsafe { cudarc::driver::result::memset_d8_async(address, 1, 4, hasty.cu_stream()) };
    let _ = hasty.synchronize();
}

fn written_in_flight(_: &[String]) -> Outcome {
    in_flight(|rank, [send, _]| overwrite(rank, at(&send)))
}

fn result_overwritten(_: &[String]) -> Outcome {
    in_flight(|rank, [_, receive]| overwrite(rank, at(&receive)))
}

fn too_short(_: &[String]) -> Outcome {
    let rank = stuck()?;
    let (send, receive) = (rank.upload(&[1f32; 4]), rank.upload(&[1f32; 7]));
    nothing_happened(nccl().all_gather(at(&send), at(&receive), 4, 7, rank.comm, rank.queue()))
}

fn overlap(_: &[String]) -> Outcome {
    let rank = stuck()?;
    let slice = rank.upload(&[1f32; 8]);
    nothing_happened(all_reduce(&rank, at(&slice), at(&slice) + 4, 4))
}

fn host_memory(_: &[String]) -> Outcome {
    let rank = stuck()?;
    let host = [1f32; 8];
    let address = host.as_ptr() as u64;
    nothing_happened(all_reduce(&rank, address, address, 8))
}

fn registered(_: &[String]) -> Outcome {
    let rank = one()?;
    let mut address = 0;
    ok("memory", nccl().mem_alloc(&mut address, 4096))?;
    ok("register", nccl().register(rank.comm, address, 4096, &mut 0))?;
    nothing_happened(nccl().mem_free(address))
}

fn mismatch(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, true)?;
        let slice = rank.upload(&[1f32; 2]);
        ok("all_reduce", all_reduce(&rank, at(&slice), at(&slice), number + 1))?;
        rank.stream.synchronize().context(|| "synchronize".into())
    })?;
    nothing_happened(())
}

fn operator(_: &[String]) -> Outcome {
    let rank = one()?;
    let slice = rank.upload(&[1f32; 2]);
    let mut op = 0;
    ok("operator", nccl().pre_mul_sum(&mut op, [2f32].as_ptr() as u64, 7, 1, rank.comm))?;
    ok("destroy", nccl().destroy_op(op, rank.comm))?;
    nothing_happened(nccl().all_reduce(at(&slice), at(&slice), 2, 7, op, rank.comm, rank.queue()))
}

fn id_twice(_: &[String]) -> Outcome {
    let id = unique_id();
    let first = Rank::begin(id, 0, 1, true)?;
    first.end()?;
    nothing_happened(Rank::begin(id, 0, 1, true).map(drop))
}

fn config(_: &[String]) -> Outcome {
    let _context = cudarc::driver::CudaContext::new(0).context(|| "context".into())?;
    let newer = Config { version: 22703, size: 72, ..Config::new(true) };
    nothing_happened(nccl().init_rank_config(&mut 0, 1, unique_id(), 0, &newer))
}

fn stream(_: &[String]) -> Outcome {
    let rank = one()?;
    let slice = rank.upload(&[1f32; 2]);
    let queue = {
        let gone = rank.context.new_stream().context(|| "stream".into())?;
        gone.cu_stream() as u64
    };
    nothing_happened(nccl().all_reduce(at(&slice), at(&slice), 2, 7, 0, rank.comm, queue))
}
