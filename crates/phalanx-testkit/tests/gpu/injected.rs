//! Calls of the libraries that fail: each is a typed error with the function's name and the library's words,
//! on the rank where it happened; the others do not hang; nothing is freed that is in use (the emulated
//! libraries would say so).

use crate::world::{done, download, expect, launch, must, upload, value, values};
use crate::{device_comm, exits, failures, messages, streams};
use libtest_mimic::{Failed, Trial};
use phalanx::cudarc::driver::DriverError;
use phalanx::nccl::{MemoryStatistic, Registration};
use phalanx::{Comm, Error, PreMulSum, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite;
use phalanx_testkit::suite::Condition;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("everything", everything),
    Scenario::rank("null_handles", null_handles),
    Scenario::process("init_hangs", init_hangs),
    Scenario::process("lost_in_abort", lost_in_abort),
    Scenario::process("unknown_result", unknown_result),
];

/// The ranks' deadline.
const TIMEOUT: Duration = Duration::from_secs(6);

/// A result of no release so far.
const UNKNOWN: i32 = 4242;

/// Functions whose failure is the caller's error, at their first call.
const FATAL: [&str; 22] = [
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommGetAsyncError",
    "ncclAllReduce",
    "ncclBroadcast",
    "ncclReduce",
    "ncclAllGather",
    "ncclReduceScatter",
    "ncclAlltoAll",
    "ncclGather",
    "ncclScatter",
    "ncclSend",
    "ncclRecv",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclRedOpCreatePreMulSum",
    "ncclMemAlloc",
    "ncclCommRegister",
    "ncclCommWindowRegister",
    "ncclDevCommCreate",
    "ncclCommSplit",
    "cuStreamQuery",
];

/// Functions that give something back: whoever calls them has what it wanted already, and finds a line in the
/// log.
const HARMLESS: [&str; 8] = [
    "ncclRedOpDestroy",
    "ncclMemFree",
    "ncclCommDeregister",
    "ncclCommWindowDeregister",
    "ncclDevCommDestroy",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclCommAbort",
];

/// What non-blocking communicators find out afterwards.
const LATE: [&str; 6] = [
    "ncclCommInitRankConfig",
    "ncclCommSplit",
    "ncclAllReduce",
    "ncclGroupEnd",
    "ncclCommWindowRegister",
    "ncclDevCommCreate",
];

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for function in FATAL {
        // On both ranks, on one, and later on.
        trials.push(fails(function, "at_once", format!("{function}:1:2"), false));
    }
    for function in ["ncclAllReduce", "ncclSend", "ncclDevCommCreate", "ncclCommSplit"] {
        trials.push(fails(function, "at_once_on_one_rank", format!("{function}@1:1:3"), true));
    }
    for function in HARMLESS {
        let title = format!("injected/{function}/harmless");
        trials.push(Trial::test(title, move || harmless(&[("FAIL", &format!("{function}:1:2"))])));
    }
    for function in LATE {
        trials.push(Trial::test(format!("injected/{function}/late"), move || {
            let settings = [("IN_PROGRESS", "1"), ("FAIL_LATE", &format!("{function}:1:6"))];
            fatal("ncclCommGetAsyncError", &settings, "0", false)
        }));
    }
    trials.push(Trial::test("injected/cuMemAllocAsync/at_once", || {
        fatal("out of memory", &[("FAIL", "cuMemAllocAsync:1:2")], "1", false)
    }));
    trials.push(Trial::test("injected/asynchronous_error", || {
        fatal("answered 6 (remote process exited", &[("ASYNC_ERROR", "2:6@1")], "1", true)
    }));
    for blocking in ["0", "1"] {
        for (name, settings) in PECULIAR {
            let title = format!("injected/{name}/blocking_{blocking}");
            trials.push(Trial::test(title, move || peculiar(settings, blocking)));
        }
    }
    trials.push(Trial::test("injected/null_handles", || {
        let emulated = Emulated::new()?.set("REGISTER", "null").set("WINDOWS", "null");
        Ok(emulated.launch(launch(SCENARIOS[1], 2, "")).reports().map(drop)?)
    }));
    trials.push(Trial::test("injected/init_hangs", || {
        let emulated = Emulated::new()?.set("INIT", "hang");
        Ok(emulated.launch(impatient(SCENARIOS[2])).reports().map(drop)?)
    }));
    trials.push(Trial::test("injected/abort_hangs", || {
        // Everything ends in time also if the library does not come back; what it may use is leaked.
        let settings = [("ABORT", "hang"), ("FAIL", "ncclBroadcast@0:1:3")];
        fatal("ncclBroadcast", &settings, "1", true)
    }));
    trials.push(Trial::test("injected/lost_in_abort", || {
        let emulated = Emulated::new()?.set("ABORT", "hang");
        Ok(emulated.launch(launch(SCENARIOS[3], 1, "")).reports().map(drop)?)
    }));
    trials.push(Trial::test("injected/unknown_result", || {
        let failures = format!("ncclCommMemStats:1:{UNKNOWN},ncclAllReduce@1:2:{UNKNOWN}");
        Ok(with(&[("FAIL", &failures)])?.launch(impatient(SCENARIOS[4])).reports().map(drop)?)
    }));
    trials.push(Trial::test("injected/unknown_result/asynchronous", || {
        fatal(&format!("answered {UNKNOWN} ("), &[("ASYNC_ERROR", &format!("2:{UNKNOWN}@1"))], "1", true)
    }));
    for function in ["ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommSplit", "ncclGroupEnd"] {
        trials.push(Trial::test(format!("injected/unknown_result/{function}"), move || {
            fatal(
                &format!("{function} answered {UNKNOWN} ("),
                &[("FAIL", &format!("{function}:1:{UNKNOWN}"))],
                "1",
                false,
            )
        }));
    }
    for function in ["ncclCommDestroy", "ncclCommFinalize", "ncclMemFree"] {
        trials.push(Trial::test(format!("injected/unknown_result/{function}"), move || {
            harmless(&[("FAIL", &format!("{function}:1:{UNKNOWN}"))])
        }));
    }
    trials.push(Trial::test("injected/exit_crashes", || {
        let emulated = Emulated::new()?.set("EXIT", "crash");
        exits::well(2, |launch| emulated.launch(launch))?;
        exits::failed(2, |launch| emulated.launch(launch))
    }));
    trials.push(Trial::test("injected/exit_while_held_inside", || {
        // In the second operation.
        let emulated = Emulated::new()?.set("EXIT", "crash").set("HANG_INSIDE", "2");
        let launch = |launch: Launch| {
            let timeout = TIMEOUT.as_secs().to_string();
            emulated.launch(launch).env("PHALANX_TIMEOUT", &timeout).env("NCCL_COMM_BLOCKING", "1")
        };
        exits::while_held(2, launch)
    }));
    trials.push(Trial::test("injected/peer_death_is_an_error", || {
        let emulated = Emulated::new()?.set("PEER_DEATH", "error");
        failures::killed(2, |launch| emulated.launch(launch))
    }));
    for trial in &mut trials {
        if let Some((_, why)) = OPEN.iter().find(|(name, _)| trial.name() == format!("injected/{name}")) {
            *trial = std::mem::replace(trial, suite::ignored("", "")).only_if(false, why);
        }
    }
    trials
}

/// What fails, and why. NCCL restores the device: the trials `current_device` see it on real GPUs, and a look
/// at every call would cost.
const OPEN: [(&str, &str); 2] = [
    ("leaves_device/blocking_0", "the library is taken to restore the device that was current"),
    ("leaves_device/blocking_1", "the library is taken to restore the device that was current"),
];

/// Ways of the libraries that change nothing for the caller.
const PECULIAR: [(&str, &[(&str, &str)]); 5] = [
    ("always_in_progress", &[("IN_PROGRESS", "1")]),
    ("never_in_progress", &[("IN_PROGRESS", "0")]),
    ("leaves_device", &[("LEAVES_DEVICE", "1")]),
    ("no_memory_pools", &[("ASYNC_ALLOC", "0")]),
    ("finalizes_alone", &[("FINALIZE", "local")]),
];

fn peculiar(settings: &[(&str, &str)], blocking: &str) -> Result<(), Failed> {
    let emulated = with(settings)?;
    let scenarios = [(streams::SCENARIOS, "many_streams"), (messages::SCENARIOS, "groups")];
    let more = [(streams::SCENARIOS, "dropped_at_once"), (streams::SCENARIOS, "current_device")];
    let names = scenarios.iter().chain(&more).map(|(all, name)| all.iter().find(|one| one.name == *name));
    let mut names = names.map(|found| found.expect("a scenario of that name").name);
    let first = Launch::new(names.next().expect("four of them"), 2).env("PHALANX_BACKEND", "nccl").arg("");
    let all = names.fold(first, |launch, name| launch.then(name).arg(""));
    let all = all.deadline(TIMEOUT * 10).env("NCCL_COMM_BLOCKING", blocking);
    Ok(emulated.launch(all).reports().map(drop)?)
}

fn with(settings: &[(&str, &str)]) -> Result<Emulated, Failed> {
    let emulated = Emulated::new()?;
    Ok(settings.iter().fold(emulated, |emulated, (name, value)| emulated.set(name, value)))
}

fn impatient(scenario: Scenario) -> Launch {
    launch(scenario, 2, "").env("PHALANX_TIMEOUT", &TIMEOUT.as_secs().to_string())
}

fn fails(function: &'static str, when: &str, failure: String, on_one: bool) -> Trial {
    Trial::test(format!("injected/{function}/{when}"), move || {
        fatal(function, &[("FAIL", &failure)], "1", on_one)
    })
}

/// Everything, with a failure: at least one rank says which call it was; the others what became of that one.
/// Nobody waits longer than the deadline.
fn fatal(function: &str, settings: &[(&str, &str)], blocking: &str, on_one: bool) -> Result<(), Failed> {
    let since = Instant::now();
    let emulated = with(settings)?;
    let ended = emulated.launch(impatient(SCENARIOS[0]).env("NCCL_COMM_BLOCKING", blocking)).run()?;
    let mut reports = Vec::new();
    for ended in ended {
        reports.push(
            ended.outcome.map_err(|problem| format!("rank {}: {problem}\n{}", ended.rank, ended.output))?,
        );
    }
    let told = reports.iter().filter(|report| report.contains(function)).count();
    if told == 0 || reports.iter().any(|report| report == "nothing failed") && !on_one {
        return Err(format!("{reports:#?}").into());
    }
    if since.elapsed() > TIMEOUT * 5 {
        return Err(format!("after {:?}: {reports:#?}", since.elapsed()).into());
    }
    Ok(())
}

fn harmless(settings: &[(&str, &str)]) -> Result<(), Failed> {
    let reports = with(settings)?.launch(impatient(SCENARIOS[0])).reports()?;
    if reports.iter().all(|report| report == "nothing failed") {
        Ok(())
    } else {
        Err(format!("{reports:?}").into())
    }
}

/// Everything that a program may do; reports the first error, which has to be a typed one of those that tell.
fn everything(_: &[String]) -> Outcome {
    let error = match exercise() {
        Ok(()) => return Ok("nothing failed".into()),
        Err(error) => error,
    };
    if error.is::<DriverError>() {
        // cudarc's own calls.
        return Ok(error.to_string());
    }
    match error.downcast_ref::<Error>() {
        Some(
            Error::Library(_)
            | Error::Peer(_)
            | Error::Timeout(_)
            | Error::Aborted { .. }
            | Error::Unsupported(_),
        ) => Ok(error.to_string()),
        other => Err(format!("{other:?}: {error}")),
    }
}

fn exercise() -> Result<(), Box<dyn std::error::Error>> {
    let comm = phalanx::init()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let stream = must("stream", comm.cuda_stream())?.clone();
    let of = |rank, len| values::<f32>(rank, len);
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
    let mut buffer = stream.clone_htod(&of(rank, 1000))?;
    comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
    comm.sync()?;
    expect("the sum", &stream.clone_dtoh(&buffer)?, sum)?;
    let mut other = stream.clone_htod(&of(rank, 1000 * ranks))?;
    comm.broadcast_in_place(&mut buffer, 0)?;
    comm.reduce_in_place(&mut buffer, ReduceOp::Max, 0)?;
    comm.all_gather(&buffer, &mut other)?;
    comm.reduce_scatter(&other, &mut buffer, ReduceOp::Sum)?;
    comm.all_to_all(&other.clone(), &mut other)?;
    comm.gather(&buffer, &mut other, 0)?;
    comm.scatter(&other, &mut buffer, 0)?;
    comm.all_reduce_in_place(&mut buffer, PreMulSum(0.5))?;
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    comm.send_recv(&buffer, right, &mut other.slice_mut(..1000), left)?;
    comm.group(|group| {
        group.all_reduce_in_place(&mut buffer, ReduceOp::Max)?;
        group.broadcast_in_place(&mut other, 0)
    })?;
    let mut host = vec![1.0f32; 100];
    comm.all_reduce_in_place(&mut host, ReduceOp::Sum)?;
    let nccl = comm.nccl().ok_or("NCCL")?;
    for registration in [Registration::Local, Registration::Symmetric] {
        let mut known = nccl.alloc_as::<f32>(1000, registration)?;
        comm.all_reduce_in_place(&mut known, ReduceOp::Sum)?;
    }
    device_comm::exercise(&nccl, &stream)?;
    let part = comm.split(Some(0), 0)?.ok_or("in it")?;
    part.all_reduce_in_place(&mut buffer, ReduceOp::Max)?;
    part.finalize()?;
    comm.barrier()?;
    comm.finalize()?;
    Ok(())
}

/// Registrations that succeed with nothing are said to be plain memory, which works.
fn null_handles(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    for wanted in [Registration::Local, Registration::Symmetric] {
        let mut buffer = must("alloc", nccl.alloc_as::<f32>(1000, wanted))?;
        assert_eq!(buffer.registration(), Registration::Plain);
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        let refused = nccl.put_signal(&buffer, 0..10, 0, &buffer, 10).unwrap_err();
        assert!(matches!(refused, Error::Unsupported(_)), "{refused}");
    }
    must("sync", comm.sync())?;
    done()
}

/// A thread that does not come back from the library has its GPU's turn for ever: others are told when it is late.
fn lost_in_abort(_: &[String]) -> Outcome {
    let on_gpu = |use_it: fn(Comm) -> phalanx::Result<()>| {
        let outcome = Comm::builder().backend(phalanx::BackendKind::Nccl).run(1, use_it);
        outcome.and_then(|mut ranks| ranks.remove(0))
    };
    on_gpu(|comm| {
        comm.abort();
        Ok(())
    })
    .map_err(|error| error.to_string())?;
    let aborted = Instant::now();
    let (since, refused) = loop {
        let since = Instant::now();
        match on_gpu(|comm| comm.all_reduce_in_place(&mut [1.0f32], ReduceOp::Sum)) {
            Err(refused) => break (since, refused),
            // It is aborted when nothing else is under way.
            Ok(()) => std::thread::sleep(Duration::from_millis(50)),
        }
        assert!(aborted.elapsed() < TIMEOUT, "it is not aborted");
    };
    assert!(since.elapsed() < 2 * TIMEOUT, "after {:?}", since.elapsed());
    assert!(refused.to_string().contains("has not come back from ncclCommAbort"), "{refused}");
    done()
}

/// A result that no release has: of a query it is the caller's error, and the communicator goes on; of an
/// operation it ends the communicator on all ranks, and those go on with another.
fn unknown_result(_: &[String]) -> Outcome {
    let comm = must("init", phalanx::init())?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let is_named = |error: &Error, function: &str, fatal: bool| {
        let text = error.to_string();
        let Error::Library(known) = error else { panic!("{error:?}") };
        assert_eq!((known.function, known.code, known.fatal), (function, UNKNOWN, fatal), "{text}");
        assert!(text.contains(&format!("{function} answered {UNKNOWN} (unknown result code")), "{text}");
    };
    let nccl = comm.nccl().ok_or("NCCL")?;
    is_named(&nccl.memory(MemoryStatistic::Total).expect_err("the first"), "ncclCommMemStats", false);
    must("the second", nccl.memory(MemoryStatistic::Total))?;

    let mut buffer = upload(&comm, &values::<f32>(rank, 1000))?;
    let mut sum = || comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync());
    must("the first", sum())?;
    // Nobody is still in the first when rank 1 fails in the second.
    must("barrier", comm.barrier())?;
    let error = sum().expect_err("rank 1 fails");
    match rank {
        1 => is_named(&error, "ncclAllReduce", true),
        _ => assert!(matches!(error, Error::Aborted { rank: 1 }), "{error:?}"),
    }
    let again = sum().expect_err("it has failed");
    assert_eq!(again.to_string(), error.to_string());

    let survivors = must("shrink", comm.shrink())?;
    assert_eq!(survivors.world_size(), ranks);
    let mut buffer = upload(&survivors, &values::<f32>(rank, 1000))?;
    must("afterwards", survivors.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
    expect("the sum", &download(&survivors, &buffer)?, sum)?;
    done()
}

/// A library that never gets ready is an error after the deadline.
fn init_hangs(_: &[String]) -> Outcome {
    let since = Instant::now();
    let error = Comm::builder().init().map(drop).unwrap_err();
    assert!(since.elapsed() < TIMEOUT * 3, "after {:?}", since.elapsed());
    assert!(matches!(error, Error::Timeout(_) | Error::Aborted { .. } | Error::Peer(_)), "{error:?}");
    done()
}
