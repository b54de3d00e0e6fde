//! Communicators: how they begin and beget others; their configuration; versions.

use super::child::succeeds;
use super::nccl::{Config, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, expect, nccl, ok};
use super::world::{Rank, at, own_rank, shared_id, threads, unique_id};
use cudarc::driver::CudaContext;
use cudarc::driver::result::ctx;
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::{ErrorContext, Outcome};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("communicators/in_progress", in_progress),
    Scenario::process("communicators/all", all),
    Scenario::process("communicators/scalable", scalable),
    Scenario::process("communicators/duplicate", duplicate),
    Scenario::process("communicators/split", split),
    Scenario::process("communicators/shrink", shrink),
    Scenario::process("communicators/grow", grow),
    Scenario::process("communicators/suspend", suspend),
    Scenario::process("communicators/device", device),
    Scenario::process("communicators/config", config),
    Scenario::process("communicators/old", old),
    Scenario::process("communicators/visible", visible),
];

const LATE: &[(&str, &str)] = &[("IN_PROGRESS", "1"), ("DELAY_US", "0..3000")];

pub fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> = [
        ("communicators/in_progress", LATE),
        ("communicators/all", &[]),
        ("communicators/scalable", &[]),
        ("communicators/duplicate", &[]),
        ("communicators/shrink", &[]),
        ("communicators/grow", LATE),
        ("communicators/suspend", &[]),
        ("communicators/device", &[]),
        ("communicators/config", &[]),
    ]
    .map(|(name, settings)| succeeds(name, settings, name, &[]))
    .into();
    for blocking in ["blocking", "late"] {
        trials.push(succeeds(
            &format!("communicators/split/{blocking}"),
            LATE,
            "communicators/split",
            &[blocking],
        ));
    }
    trials.push(Trial::test("communicators/old", old_version));
    // Both ranks use the first device that they see.
    trials.push(Trial::test("communicators/visible", || {
        let emulated = Emulated::new()?;
        let launch = Launch::new("communicators/visible", 2).arg(emulated.folder().display());
        let launch = launch.env_of(0, "CUDA_VISIBLE_DEVICES", Some("3")).env_of(
            1,
            "CUDA_VISIBLE_DEVICES",
            Some("1,0"),
        );
        Ok(emulated.launch(launch).reports().map(drop)?)
    }));
    trials
}

/// The sum of everybody's 1 on a communicator: how many ranks answer.
pub fn ranks_that_answer(rank: &Rank, comm: u64) -> Result<u32, String> {
    let slice = rank.upload(&[1u32]);
    let code = nccl().all_reduce(at(&slice), at(&slice), 1, 3, 0, comm, rank.queue());
    if code == IN_PROGRESS {
        ok("all_reduce", nccl().settle(comm))?;
    } else {
        ok("all_reduce", code)?;
    }
    Ok(rank.download(&slice)[0])
}

fn in_progress(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |rank| {
        let context = CudaContext::new(rank).context(|| "context".into())?;
        let stream = context.new_stream().context(|| "stream".into())?;
        let mut comm = 0;
        let code = nccl().init_rank_config(&mut comm, 2, id, rank as i32, &Config::new(false));
        expect("init", code, IN_PROGRESS)?;
        assert_ne!(comm, 0, "the communicator is there at once");
        ok("init", nccl().settle(comm))?;
        let rank = Rank { rank, ranks: 2, context, stream, comm, blocking: false };
        let slice = rank.upload(&[rank.rank as f64 + 1.0]);
        rank.stream.synchronize().context(|| "synchronize".into())?;
        let code = nccl().all_reduce(at(&slice), at(&slice), 1, 8, 0, comm, rank.queue());
        expect("all_reduce", code, IN_PROGRESS)?;
        ok("all_reduce", nccl().settle(comm))?;
        assert_eq!(rank.download(&slice), [3.0]);
        expect("finalize", nccl().finalize(comm), IN_PROGRESS)?;
        ok("finalize", nccl().settle(comm))?;
        ok("destroy", nccl().destroy(comm))
    })?;
    Ok(String::new())
}

fn all(_: &[String]) -> Outcome {
    let contexts: Vec<_> =
        (0..3).map(CudaContext::new).collect::<Result<_, _>>().context(|| "contexts".into())?;
    let mut comms = [0; 3];
    ok("init all", nccl().init_all(comms.as_mut_ptr(), 3, [2, 0, 1].as_ptr()))?;
    let mut ranks = Vec::new();
    for (rank, device) in [2, 0, 1].into_iter().enumerate() {
        let (mut number, mut of, mut on) = (-1, -1, -1);
        ok("rank", nccl().rank(comms[rank], &mut number))?;
        ok("count", nccl().count(comms[rank], &mut of))?;
        ok("device", nccl().device(comms[rank], &mut on))?;
        assert_eq!((number, of, on), (rank as i32, 3, device as i32));
        let context = contexts[device].clone();
        let stream = context.new_stream().context(|| "stream".into())?;
        ranks.push(Rank { rank, ranks: 3, context, stream, comm: comms[rank], blocking: true });
    }
    let slices: Vec<_> = ranks.iter().map(|rank| rank.upload(&[rank.rank as i32])).collect();
    // One thread for all ranks: without a group the first call could wait for the others for ever.
    ok("group start", nccl().group_start())?;
    for (rank, slice) in ranks.iter().zip(&slices) {
        ok("all_reduce", nccl().all_reduce(at(slice), at(slice), 1, 2, 2, rank.comm, rank.queue()))?;
    }
    ok("group end", nccl().group_end())?;
    for (rank, slice) in ranks.iter().zip(&slices) {
        assert_eq!(rank.download(slice), [2]);
    }
    // As in NCCL's own examples: one after the other.
    comms.iter().try_for_each(|comm| ok("destroy", nccl().destroy(*comm)))?;
    expect("the same device twice", nccl().init_all(comms.as_mut_ptr(), 2, [1, 1].as_ptr()), INVALID_USAGE)?;
    expect("too many", nccl().init_all(comms.as_mut_ptr(), 9, std::ptr::null()), INVALID_ARGUMENT)?;
    Ok(String::new())
}

fn scalable(_: &[String]) -> Outcome {
    let ids = [unique_id(), unique_id()];
    threads(4, |rank| {
        let _context = CudaContext::new(rank).context(|| "context".into())?;
        let mut comm = 0;
        ok(
            "init",
            nccl().init_rank_scalable(&mut comm, 4, rank as i32, 2, ids.as_ptr(), &Config::new(true)),
        )?;
        ok("destroy", nccl().destroy(comm))
    })?;
    Ok(String::new())
}

fn duplicate(_: &[String]) -> Outcome {
    let id = unique_id();
    let _context = CudaContext::new(1).context(|| "context".into())?;
    let mut comms = [0; 2];
    ok("group start", nccl().group_start())?;
    for (rank, comm) in comms.iter_mut().enumerate() {
        ok("init", nccl().init_rank(comm, 2, id, rank as i32))?;
    }
    expect("group end", nccl().group_end(), INVALID_USAGE)?;
    assert_eq!(comms, [0; 2], "there are no communicators");
    assert!(nccl().last_error().contains("Multiple Ranks are using the same GPU"), "{}", nccl().last_error());
    Ok(String::new())
}

fn split(args: &[String]) -> Outcome {
    let id = unique_id();
    let blocking = args[0] == "blocking";
    threads(4, |number| {
        let rank = Rank::begin(id, number, 4, blocking)?;
        // Even ranks in reverse order; rank 1 alone; rank 3 has none.
        let (color, key) = [(0, 9), (1, 0), (0, 5), (-1, 0)][number];
        let cell = Box::leak(Box::new(77u64));
        let code = nccl().split(rank.comm, color, key, cell, std::ptr::null());
        rank.done("split", code)?;
        // SAFETY: written by another thread, before the parent's state changed.
        let child = unsafe { std::ptr::read_volatile(cell) };
        if number == 3 {
            assert_eq!(child, 0, "no color, no communicator");
            return rank.end();
        }
        let (mut place, mut of) = (-1, -1);
        ok("rank", nccl().rank(child, &mut place))?;
        ok("count", nccl().count(child, &mut of))?;
        assert_eq!((place, of), [(1, 2), (0, 1), (0, 2)][number]);
        assert_eq!(ranks_that_answer(&rank, child)?, of as u32);
        ok("destroy", nccl().destroy(child))?;
        rank.end()
    })?;
    Ok(String::new())
}

fn shrink(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(4, |number| {
        let rank = Rank::begin(id, number, 4, true)?;
        if number == 1 || number == 2 {
            ok("abort", nccl().abort(rank.comm))?;
            return Ok(());
        }
        // An operation that will never end, since two ranks are gone.
        let slice = rank.upload(&[1u32]);
        ok("all_reduce", nccl().all_reduce(at(&slice), at(&slice), 1, 3, 0, rank.comm, rank.queue()))?;
        let mut excluded = [2, 1];
        let mut comm = 0;
        ok("shrink", nccl().shrink(rank.comm, excluded.as_mut_ptr(), 2, &mut comm, std::ptr::null(), 1))?;
        assert_eq!(excluded, [1, 2], "NCCL sorts the caller's list");
        rank.stream.synchronize().context(|| "the stream is free again".into())?;
        assert_eq!(ranks_that_answer(&rank, comm)?, 2);
        let code = nccl().shrink(comm, excluded.as_mut_ptr(), 0, &mut 0, std::ptr::null(), 0);
        expect("shrink by nobody", code, INVALID_ARGUMENT)?;
        ok("destroy", nccl().destroy(comm))?;
        ok("abort", nccl().abort(rank.comm))
    })?;
    Ok(String::new())
}

fn grow(_: &[String]) -> Outcome {
    let id = unique_id();
    let (sender, receiver) = std::sync::mpsc::channel();
    let receiver = std::sync::Mutex::new(receiver);
    threads(3, |number| {
        let mut comm = 0;
        if number == 2 {
            let context = CudaContext::new(2).context(|| "context".into())?;
            let stream = context.new_stream().context(|| "stream".into())?;
            let id = receiver.lock().map_err(|e| e.to_string())?.recv().context(|| "the id".into())?;
            let code = nccl().grow(0, 3, &id, 2, &mut comm, &Config::new(false));
            expect("grow", code, IN_PROGRESS)?;
            ok("grow", nccl().settle(comm))?;
            let rank = Rank { rank: 2, ranks: 3, context, stream, comm, blocking: false };
            assert_eq!(ranks_that_answer(&rank, comm)?, 3);
            return rank.end();
        }
        let rank = Rank::begin(id, number, 2, false)?;
        let mut own = super::nccl::UniqueId([0; 128]);
        let mut given = std::ptr::null();
        if number == 0 {
            ok("unique id", nccl().comm_unique_id(rank.comm, &mut own))?;
            sender.send(own).context(|| "the id".into())?;
            given = &own;
        }
        let cell = Box::leak(Box::new(0));
        expect("grow", nccl().grow(rank.comm, 3, given, -1, cell, std::ptr::null()), IN_PROGRESS)?;
        ok("grow", nccl().settle(rank.comm))?;
        // SAFETY: written by another thread, before the parent's state changed.
        let grown = unsafe { std::ptr::read_volatile(cell) };
        assert_eq!(ranks_that_answer(&rank, grown)?, 3);
        let grown = Rank { comm: grown, ranks: 3, ..rank };
        let parent = rank.comm;
        grown.end()?;
        ok("destroy", nccl().destroy(parent))
    })?;
    Ok(String::new())
}

fn suspend(_: &[String]) -> Outcome {
    let rank = Rank::begin(unique_id(), 0, 1, true)?;
    let stat = |which| {
        let mut value = 0;
        ok("stats", nccl().mem_stats(rank.comm, which, &mut value)).map(|()| value)
    };
    assert_eq!(stat(0)? + stat(2)?, stat(3)?);
    ok("suspend", nccl().suspend(rank.comm, 1))?;
    assert_eq!(stat(1)?, 1);
    let slice = rank.upload(&[1u32]);
    let code = nccl().all_reduce(at(&slice), at(&slice), 1, 3, 0, rank.comm, rank.queue());
    expect("an operation while suspended", code, INVALID_USAGE)?;
    ok("resume", nccl().resume(rank.comm))?;
    assert_eq!(ranks_that_answer(&rank, rank.comm)?, 1);
    rank.end()?;
    Ok(String::new())
}

fn device(_: &[String]) -> Outcome {
    let rank = Rank::begin(unique_id(), 0, 1, true)?;
    let other = CudaContext::new(1).context(|| "context".into())?;
    other.bind_to_thread().context(|| "bind".into())?;
    let slice = rank.upload(&[1u32]);
    let address = at(&slice);
    other.bind_to_thread().context(|| "bind".into())?;
    ok("all_reduce", nccl().all_reduce(address, address, 1, 3, 0, rank.comm, rank.queue()))?;
    assert_eq!(ctx::get_current(), Ok(Some(other.cu_ctx())), "the context that was current is current");
    rank.end()?;
    Ok(String::new())
}

fn config(_: &[String]) -> Outcome {
    let _context = CudaContext::new(0).context(|| "context".into())?;
    let mut comm = 0;
    let id = unique_id();
    for wrong in [
        Config { magic: 0, ..Config::new(true) },
        Config { blocking: 2, ..Config::new(true) },
        Config { least_ctas: 5, most_ctas: 4, ..Config::new(true) },
        Config { split_share: 3, ..Config::new(true) },
    ] {
        expect("init", nccl().init_rank_config(&mut comm, 1, id, 0, &wrong), INVALID_ARGUMENT)?;
    }
    expect("rank", nccl().init_rank(&mut comm, 1, id, 1), INVALID_ARGUMENT)?;
    expect("no id", nccl().init_rank(&mut comm, 1, super::nccl::UniqueId([0; 128]), 0), INVALID_ARGUMENT)?;
    Ok(String::new())
}

fn old_version() -> Result<(), Failed> {
    let emulated = Emulated::nccl("2.18.1")?;
    Ok(emulated.launch(Launch::alone("communicators/old")).reports().map(drop)?)
}

fn old(_: &[String]) -> Outcome {
    let mut version = 0;
    ok("version", nccl().get_version(&mut version))?;
    assert_eq!(version, 21801);
    for missing in ["ncclMemAlloc", "ncclAlltoAll", "ncclCommShrink", "ncclSignal", "ncclCommSuspend"] {
        assert!(!nccl().has(missing), "{missing} is there");
    }
    for there in ["ncclCommSplit", "ncclAllReduce", "ncclSend", "ncclCommFinalize", "cuInit"] {
        assert!(nccl().has(there), "{there} is missing");
    }
    let rank = Rank::begin(unique_id(), 0, 1, true)?;
    assert_eq!(ranks_that_answer(&rank, rank.comm)?, 1);
    let slice = rank.upload(&[1u8]);
    let fp8 = nccl().all_reduce(at(&slice), at(&slice), 1, 10, 0, rank.comm, rank.queue());
    expect("a type of a later version", fp8, INVALID_ARGUMENT)?;
    rank.end()?;
    Ok(String::new())
}

fn visible(args: &[String]) -> Outcome {
    let number = own_rank();
    assert_eq!(CudaContext::device_count(), Ok(1 + number as i32));
    let context = CudaContext::new(0).context(|| "context".into())?;
    let stream = context.new_stream().context(|| "stream".into())?;
    let mut comm = 0;
    ok("init", nccl().init_rank(&mut comm, 2, shared_id(&args[0], "id", number)?, number as i32))?;
    let rank = Rank { rank: number, ranks: 2, context, stream, comm, blocking: true };
    assert_eq!(ranks_that_answer(&rank, comm)?, 2);
    rank.end()?;
    Ok(String::new())
}
