//! Failures that were asked for.

use super::child::succeeds;
use super::nccl::{Config, IN_PROGRESS, REMOTE_ERROR, SUCCESS, expect, nccl, ok};
use super::world::{Rank, at, threads, unique_id};
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, DriverError};
use libtest_mimic::Trial;
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("failures/init", init),
    Scenario::process("failures/nth", nth),
    Scenario::process("failures/rank", rank),
    Scenario::process("failures/asynchronous", asynchronous),
    Scenario::process("failures/abort", abort),
    Scenario::process("failures/mismatch", mismatch),
    Scenario::process("failures/override", overridden),
    Scenario::process("failures/device", device),
    Scenario::process("failures/late", late),
    Scenario::process("failures/group", group),
];

pub fn trials() -> Vec<Trial> {
    vec![
        succeeds("failures/init", &[("FAIL", "cuInit:*:100")], "failures/init", &[]),
        succeeds("failures/nth", &[("FAIL", "cuMemAllocAsync:2:2,ncclAllReduce:3:1")], "failures/nth", &[]),
        succeeds("failures/rank", &[("FAIL", "ncclBroadcast@1:2:3")], "failures/rank", &[]),
        succeeds("failures/asynchronous", &[("ASYNC_ERROR", "3:6@1")], "failures/asynchronous", &[]),
        succeeds("failures/abort", &[("ABORT", "hang")], "failures/abort", &[]),
        succeeds("failures/mismatch", &[("MISMATCH", "hang")], "failures/mismatch", &[]),
        succeeds("failures/device", &[("LEAVES_DEVICE", "1")], "failures/device", &[]),
        succeeds(
            "failures/late",
            &[
                ("IN_PROGRESS", "1"),
                ("FAIL_LATE", "ncclCommInitRankConfig:2:2,ncclCommSplit@0:1:3,ncclBroadcast:1:6"),
            ],
            "failures/late",
            &[],
        ),
        succeeds("failures/group", &[("FAIL", "ncclReduce:1:3,ncclGroupEnd:2:1")], "failures/group", &[]),
        succeeds("failures/override", &[("IN_PROGRESS", "1")], "failures/override", &[]),
    ]
}

fn init(_: &[String]) -> Outcome {
    match CudaContext::new(0) {
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(String::new()),
        other => Err(format!("{other:?}")),
    }
}

fn nth(_: &[String]) -> Outcome {
    let rank = Rank::begin(unique_id(), 0, 1, true)?;
    let slice = rank.upload(&[1f32]);
    match rank.stream.alloc_zeros::<f32>(1) {
        Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {}
        other => return Err(format!("{other:?}")),
    }
    rank.stream.alloc_zeros::<f32>(1).context(|| "the third one".into())?;
    for expected in [0, 0, 1, 0] {
        let code = nccl().all_reduce(at(&slice), at(&slice), 1, 7, 0, rank.comm, rank.queue());
        expect("all_reduce", code, expected)?;
    }
    rank.end()?;
    Ok(String::new())
}

fn rank(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, false)?;
        let slice = rank.upload(&[1f32]);
        for expected in [0, if number == 1 { 3 } else { 0 }] {
            let code = nccl().broadcast(at(&slice), at(&slice), 1, 7, 0, rank.comm, rank.queue());
            if expected == 0 {
                rank.done("broadcast", code)?;
            } else {
                expect("broadcast", code, expected)?;
            }
        }
        ok("abort", nccl().abort(rank.comm))
    })?;
    Ok(String::new())
}

fn asynchronous(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, false)?;
        let slice = rank.upload(&[1f32]);
        for _ in 0..3 {
            rank.done(
                "all_reduce",
                nccl().all_reduce(at(&slice), at(&slice), 1, 7, 0, rank.comm, rank.queue()),
            )?;
        }
        let event = rank.stream.record_event(None).context(|| "event".into())?;
        if number == 1 {
            while nccl().state(rank.comm) == SUCCESS {
                std::thread::sleep(Duration::from_millis(1));
            }
            expect("state", nccl().state(rank.comm), REMOTE_ERROR)?;
            let code = nccl().all_reduce(at(&slice), at(&slice), 1, 7, 0, rank.comm, rank.queue());
            expect("another operation", code, REMOTE_ERROR)?;
        }
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(event.try_is_complete(), Ok(false), "it never ends");
        ok("abort", nccl().abort(rank.comm))?;
        rank.stream.synchronize().context(|| "synchronize".into())
    })?;
    Ok(String::new())
}

fn abort(_: &[String]) -> Outcome {
    let rank = Rank::begin(unique_id(), 0, 1, true)?;
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(nccl().abort(rank.comm)));
    match receiver.recv_timeout(Duration::from_millis(200)) {
        Err(_) => Ok(String::new()),
        Ok(code) => Err(format!("abort answered {code}")),
    }
}

fn mismatch(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, false)?;
        let slice = rank.upload(&[1f32; 2]);
        let code = nccl().all_reduce(at(&slice), at(&slice), number + 1, 7, 0, rank.comm, rank.queue());
        rank.done("all_reduce", code)?;
        let event = rank.stream.record_event(None).context(|| "event".into())?;
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(event.try_is_complete(), Ok(false), "it hangs");
        ok("abort", nccl().abort(rank.comm))
    })?;
    Ok(String::new())
}

fn device(_: &[String]) -> Outcome {
    let rank = Rank::begin(unique_id(), 0, 1, true)?;
    let other = CudaContext::new(1).context(|| "context".into())?;
    let slice = rank.upload(&[1u32]);
    let address = at(&slice);
    other.bind_to_thread().context(|| "bind".into())?;
    ok("all_reduce", nccl().all_reduce(address, address, 1, 3, 0, rank.comm, rank.queue()))?;
    assert_ne!(
        cudarc::driver::result::ctx::get_current(),
        Ok(Some(other.cu_ctx())),
        "another device is current"
    );
    Ok(String::new())
}

fn late(_: &[String]) -> Outcome {
    let rank = Rank::begin(unique_id(), 0, 1, false)?;
    let mut other = 0;
    expect("init", nccl().init_rank_config(&mut other, 1, unique_id(), 0, &Config::new(false)), IN_PROGRESS)?;
    expect("the second init", nccl().settle(other), 2)?;
    ok("abort", nccl().abort(other))?;
    let again = Rank::begin(unique_id(), 0, 1, false)?;
    let cell = Box::leak(Box::new(0));
    expect("split", nccl().split(rank.comm, 0, 0, cell, std::ptr::null()), IN_PROGRESS)?;
    expect("split", nccl().settle(rank.comm), 3)?;
    ok("abort", nccl().abort(rank.comm))?;
    let slice = again.upload(&[1f32]);
    let code = nccl().broadcast(at(&slice), at(&slice), 1, 7, 0, again.comm, again.queue());
    expect("broadcast", code, IN_PROGRESS)?;
    expect("broadcast", nccl().settle(again.comm), REMOTE_ERROR)?;
    ok("abort", nccl().abort(again.comm))?;
    Ok(String::new())
}

fn group(_: &[String]) -> Outcome {
    let ranks = {
        let id = unique_id();
        threads(2, |number| Rank::begin(id, number, 2, true))?
    };
    // What is never launched waits for nobody: rank 0 is alone in this.
    let rank = &ranks[0];
    let slice = rank.upload(&[1f32]);
    let broadcast = || nccl().broadcast(at(&slice), at(&slice), 1, 7, 0, rank.comm, rank.queue());
    ok("group start", nccl().group_start())?;
    ok("broadcast", broadcast())?;
    let reduce = nccl().reduce(at(&slice), at(&slice), 1, 7, 0, 0, rank.comm, rank.queue());
    expect("reduce", reduce, 3)?;
    expect("the end of a group with an error", nccl().group_end(), 3)?;
    ok("group start", nccl().group_start())?;
    ok("broadcast", broadcast())?;
    expect("an end that fails", nccl().group_end(), 1)?;
    expect("the group is over", nccl().group_end(), 5)?;
    rank.stream.synchronize().context(|| "nothing was launched".into())?;
    Ok(String::new())
}

/// `NCCL_COMM_BLOCKING` makes a communicator that is configured as blocking answer InProgress.
fn overridden(_: &[String]) -> Outcome {
    // SAFETY: nothing else runs in this process yet.
    unsafe { std::env::set_var("NCCL_COMM_BLOCKING", "0") };
    let _context = CudaContext::new(0).context(|| "context".into())?;
    let mut comm = 0;
    expect("init", nccl().init_rank_config(&mut comm, 1, unique_id(), 0, &Config::new(true)), IN_PROGRESS)?;
    ok("init", nccl().settle(comm))?;
    Ok(String::new())
}
