//! Making, splitting and ending communicators; the portable trait.

use crate::releases::is_since;
use crate::world::{DEADLINE, both, done, download, expect, launch, must, stream, upload, value, values};
use libtest_mimic::{Failed, Trial};
use phalanx::cudarc::driver::{CudaContext, DevicePtr};
use phalanx::nccl::{CollectiveConfig, Config};
use phalanx::{BackendKind, Comm, DType, Error, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("identity", identity),
    Scenario::rank("split", split),
    Scenario::rank("adopted", adopted),
    Scenario::rank("cycles", cycles),
    Scenario::rank("portable", portable),
    Scenario::rank("finalize", finalize),
    Scenario::rank("estimate", estimate),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    // NCCL and the driver keep memory of the first rounds, so that there must be some.
    let least = |scenario: &Scenario| if scenario.name == "cycles" { gpus } else { 1 };
    let both = |scenario: &Scenario| both(*scenario, least(scenario), gpus, &["30"]);
    let mut trials: Vec<_> = SCENARIOS.iter().flat_map(both).collect();
    // NCCL's thread that passes descriptors on looks for its end twice a second, and each communicator waits
    // for its own to end; parts that share it with their parent do not.
    let many = Trial::test("processes/cycles/many", || many_cycles("100", "0"));
    let shared = Trial::test("processes/cycles/shared", || many_cycles("1000", "1"));
    trials.extend([many, shared].map(|trial| trial.only_if(gpus >= 2, "it takes two GPUs")));
    trials.push(Trial::test("settings", settings));
    trials.push(Trial::test("last_error", last_error).only_if(gpus >= 1, "it takes a GPU"));
    let unique_ids = Trial::test("unique_ids", move || unique_ids(gpus));
    trials.push(unique_ids.only_if(gpus >= 2, "it takes two GPUs"));
    let non_blocking = Trial::test("non_blocking", move || non_blocking(gpus));
    trials.push(non_blocking.only_if(gpus >= 2, "it takes two GPUs"));
    let first = Trial::test("try_run_answers_the_first_error", the_first_error);
    trials.push(first.only_if(gpus >= 2, "it takes two GPUs"));
    trials
}

/// Rank 0 fails because rank 1 has left, and may return earlier than that one, which ends NCCL's communicator first.
fn the_first_error() -> Result<(), Failed> {
    let ran = Comm::builder().backend(BackendKind::Nccl).timeout(DEADLINE / 2).try_run(2, |comm| {
        let other = comm.duplicate()?;
        if comm.rank() == 1 {
            return Err(Box::<dyn std::error::Error + Send + Sync>::from("rank 1 cannot read its data"));
        }
        let mut buffer = upload(&comm, &[1.0f32; 100])?;
        other.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
        Ok(other.sync()?)
    });
    assert_eq!(ran.expect_err("rank 1 fails").to_string(), "rank 1 cannot read its data");
    Ok(())
}

fn identity(comm: Comm, _: &[String]) -> Outcome {
    let gpus = must("gpus", phalanx::nccl::gpus())?;
    assert_eq!(CudaContext::device_count(), Ok(gpus.len() as i32));
    let gpu = comm.rank() % gpus.len();
    assert_eq!((comm.backend(), comm.gpu()), (BackendKind::Nccl, Some(gpu)));
    let nccl = comm.nccl().ok_or("the backend's own features")?;
    assert!(nccl.version().starts_with("2.") && !nccl.raw_handle().is_null());
    assert_eq!(nccl.context().ordinal(), gpu);
    must("async_error", nccl.async_error())?;
    must("barrier", comm.barrier())?;
    done()
}

/// By parity, in reverse order; with ranks that stay out; of a part.
fn split(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let color = (rank % 2) as u32;
    let part = must("split", comm.split(Some(color), -(rank as i64)))?.ok_or("in one part")?;
    let members: Vec<usize> = (0..ranks).rev().filter(|other| other % 2 == rank % 2).collect();
    assert_eq!(members[part.rank()], rank);
    let mut buffer = upload(&part, &values::<f32>(rank, 1000))?;
    must("all_reduce", part.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    let sum = |index: usize| members.iter().map(|member| value(*member, index)).sum::<i32>() as f32;
    expect("the part's sum", &download(&part, &buffer)?, sum)?;
    let some = must("split", comm.split((rank != 0).then_some(0), 0))?;
    assert_eq!(some.is_some(), rank != 0);
    if let Some(some) = some {
        let again = must("split of a split", some.split(Some(7), 0))?.ok_or("in it")?;
        must("barrier", again.barrier())?;
    }
    // The parent works on.
    must("barrier", comm.barrier())?;
    done()
}

/// A C communicator of the program's own (here that of a part) becomes a communicator, and stays as it is; one that does not fit is told.
fn adopted(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let nccl = comm.nccl().ok_or("NCCL")?;
    let given = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    let handle = given.nccl().ok_or("NCCL")?.raw_handle();
    let all = |comm: &Comm| {
        let mut buffer = upload(comm, &values::<f32>(rank, 1000))?;
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        expect("the sum", &download(comm, &buffer)?, |index| {
            (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32
        })
    };
    // SAFETY: the communicator of `given`, which is alive and calls nothing.
    let adopted = must("adopt", unsafe { nccl.adopt(handle) })?;
    assert_eq!((adopted.rank(), adopted.world_size()), (rank, ranks));
    assert_ne!(adopted.nccl().ok_or("NCCL")?.raw_handle(), handle);
    all(&adopted)?;
    must("finalize", adopted.finalize())?;
    all(&given)?;
    // SAFETY: a null pointer is refused before anything is called with it.
    let error = unsafe { nccl.adopt(std::ptr::null_mut()) }.unwrap_err();
    assert!(matches!(&error, Error::Usage(_)) && error.to_string().contains("a null pointer"), "{error}");
    if ranks > 1 {
        let alone = must("split", comm.split(Some(rank as u32), 0))?.ok_or("in it")?;
        let handle = alone.nccl().ok_or("NCCL")?.raw_handle();
        // SAFETY: as above, of `alone`.
        let error = unsafe { nccl.adopt(handle) }.unwrap_err();
        assert!(
            error.to_string().contains(&format!("rank 0 of 1 on GPU {}", comm.gpu().ok_or("a GPU")?)),
            "{error}"
        );
        must("barrier", comm.barrier())?;
        // SAFETY: on rank 0 as above; the others give nothing that fits.
        let error =
            unsafe { nccl.adopt(if rank == 0 { given.nccl().ok_or("NCCL")?.raw_handle() } else { handle }) };
        let error = error.unwrap_err().to_string();
        assert!(rank > 0 || error.contains("rank 1 could not adopt"), "{error}");
    }
    all(&comm)?;
    done()
}

/// What comes and goes again leaves nothing: threads, descriptors, memory. The argument is the number of
/// rounds, of which the first half warms up.
fn cycles(comm: Comm, args: &[String]) -> Outcome {
    let rounds: usize = args[0].parse().map_err(|error| format!("rounds: {error}"))?;
    let step = (rounds / 10).max(1);
    let mut seen = Vec::new();
    for round in 1..=rounds {
        let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
        let mut buffer = upload(&part, &[1.0f32; 16])?;
        must("all_reduce", part.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        must("sync", part.sync())?;
        drop(part);
        if round % step == 0 {
            seen.push((round, Resources::between_rounds(&comm)?));
        }
    }
    let [.., (_, after)] = &seen[..] else { return Err("no rounds".into()) };
    let (_, before) = &seen[(seen.len() - 1) / 2];
    // Threads that have done their work may not have come to their end.
    let few = 2 * comm.world_size() + 2;
    let grew = after.threads > before.threads + few
        || after.descriptors > before.descriptors + few
        || after.heap > before.heap + LITTLE
        || after.memory > before.memory + LITTLE
        || after.gpu_memory > before.gpu_memory + LITTLE;
    let lines: Vec<String> =
        seen.iter().map(|(round, has)| format!("after {round} rounds {has:?}")).collect();
    let report = lines.join("\n");
    if grew { Err(report) } else { Ok(report) }
}

/// Bytes by which memory may grow for whatever reason: less than 100 KiB for each of a thousand rounds.
const LITTLE: usize = 64 << 20;

/// What this process has.
#[derive(Debug)]
struct Resources {
    threads: usize,
    descriptors: usize,
    /// Bytes of the C library's heap that are in use.
    heap: usize,
    /// Resident bytes.
    memory: usize,
    /// Bytes of its GPU that are not free.
    gpu_memory: usize,
}

/// Bytes of the C library's heap that are in use, where it says so (glibc 2.33). Gives back what is not: it
/// keeps what threads that have ended had allocated for the next, as if memory grew with the first rounds.
fn trimmed_heap() -> usize {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        let library = libloading::os::unix::Library::this();
        // SAFETY: may be called at any time, on any thread.
        unsafe { libc::malloc_trim(0) };
        // SAFETY: the function's type is the header's; it may be called at any time, on any thread.
        let found = unsafe { library.get::<unsafe extern "C" fn() -> libc::mallinfo2>(b"mallinfo2") };
        found.map_or(0, |mallinfo2| {
            // SAFETY: as above.
            let heap = unsafe { mallinfo2() };
            // In mappings of their own, and in use of the rest.
            heap.hblkhd + heap.uordblks
        })
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    0
}

impl Resources {
    /// While no rank makes or ends anything: they may share a process, or a GPU.
    fn between_rounds(comm: &Comm) -> Result<Resources, String> {
        must("barrier", comm.barrier())?;
        let heap = trimmed_heap();
        let now = Resources::now(comm, heap);
        must("barrier", comm.barrier())?;
        now
    }

    fn now(comm: &Comm, heap: usize) -> Result<Resources, String> {
        let count = |folder: &str| std::fs::read_dir(folder).map_or(0, Iterator::count);
        let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<usize>().ok());
        let (free, total) = stream(comm).context().mem_get_info().map_err(|error| error.to_string())?;
        Ok(Resources {
            threads: count("/proc/self/task"),
            descriptors: count("/proc/self/fd"),
            heap,
            memory: kib.ok_or("no VmRSS")? << 10,
            gpu_memory: total - free,
        })
    }
}

/// The portable trait on addresses of GPU memory, and events between streams.
fn portable(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let compute = stream(&comm).clone();
    drop(must("on", comm.on(&compute))?);
    let communicator = comm.into_raw_communicator();
    let ops = communicator.as_stream_sync().ok_or("streams")?;
    let buffer = compute.clone_htod(&values::<f32>(rank, 4099)).map_err(|e| e.to_string())?;
    let (address, guard) = buffer.device_ptr(&compute);
    let ready = must("create_event", ops.create_event())?;
    must("record", ops.record_on_stream(ready, compute.cu_stream() as u64))?;
    must("wait", ops.comm_stream_wait_event(ready))?;
    // SAFETY: the buffer has 4099 f32 and lives until `sync`.
    must("all_reduce", unsafe { communicator.all_reduce(address, 4099, DType::F32, ReduceOp::Sum) })?;
    must("record", ops.record_on_comm_stream(ready))?;
    must("wait", ops.stream_wait_event(compute.cu_stream() as u64, ready))?;
    drop(guard);
    let sums = compute.clone_dtoh(&buffer).map_err(|e| e.to_string())?;
    expect("the sum", &sums, |index| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32)?;
    must("destroy", ops.destroy_event(ready))?;
    assert!(ops.record_on_comm_stream(ready).is_err(), "a destroyed event");
    assert!(ops.record_on_stream(1 << 40, 77).is_err(), "an unknown stream");
    // Messages match in the order of posting; nothing moves before `sync`.
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let received = compute.clone_htod(&vec![7.0f32; 4099]).map_err(|e| e.to_string())?;
    let (target, guard) = received.device_ptr(&compute);
    compute.synchronize().map_err(|e| e.to_string())?;
    // SAFETY: both buffers have 4099 f32 and live until `sync`.
    unsafe {
        must("recv", communicator.recv(target, 4099, DType::F32, left, 5))?;
        must("send", communicator.send(address, 4099, DType::F32, right, 5))?;
    }
    must("sync", communicator.sync())?;
    drop(guard);
    expect("the message", &compute.clone_dtoh(&received).map_err(|e| e.to_string())?, |index| {
        (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32
    })?;
    must("barrier", communicator.barrier())?;
    let part = must("split", communicator.split(0, 0))?.ok_or("in it")?;
    must("barrier", part.barrier())?;
    done()
}

/// Many rounds (`PHALANX_TEST_CYCLES` says how many), of parts that share their parent's resources or do not.
fn many_cycles(rounds: &str, share: &str) -> Result<(), libtest_mimic::Failed> {
    let cycles = SCENARIOS.iter().find(|scenario| scenario.name == "cycles").ok_or("the scenario")?;
    let rounds = &std::env::var("PHALANX_TEST_CYCLES").unwrap_or_else(|_| rounds.into());
    // Few channels: they are what takes NCCL long to make.
    let launch = launch(*cycles, 2, rounds)
        .deadline(8 * DEADLINE)
        .env("NCCL_COMM_SPLIT_SHARE_RESOURCES", share)
        .env("NCCL_MAX_CTAS", "1")
        .env("NCCL_MIN_CTAS", "1");
    for report in launch.reports()? {
        eprintln!("{report}");
    }
    Ok(())
}

fn finalize(comm: Comm, _: &[String]) -> Outcome {
    let mut buffer = upload(&comm, &vec![1.0f32; 1 << 20])?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    must("finalize", comm.finalize())?;
    done()
}

/// A setting is used, or refused by name if the library is too old for it.
fn settings() -> Result<(), libtest_mimic::Failed> {
    let run = |change: fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        Comm::builder().backend(BackendKind::Nccl).nccl(config).run(1, |comm| comm.barrier())
    };
    run(|config| config.max_ctas = Some(4))?.remove(0)?;
    let version = phalanx::nccl::version()?;
    let is_new = is_since(&version, "2.30");
    match run(|config| config.max_p2p_peers = Some(8)) {
        Ok(_) => assert!(is_new, "{version} knows no max_p2p_peers"),
        Err(error) => assert!(!is_new && error.to_string().contains("max_p2p_peers"), "{error}"),
    }
    let nul = run(|config| config.comm_name = Some("a\0b".into())).map(drop).unwrap_err();
    assert!(nul.to_string().contains("comm_name"), "{nul}");
    Ok(())
}

/// The library's own account of what it refused, which is in the error's text, too.
fn last_error() -> Result<(), libtest_mimic::Failed> {
    let mut config = CollectiveConfig::default();
    config.cga_cluster_size = Some(9);
    let outcomes = Comm::builder().backend(BackendKind::Nccl).run(1, |comm| -> Result<(), String> {
        let nccl = comm.nccl().ok_or("NCCL")?;
        must("last_error", nccl.last_error())?;
        let configured = match nccl.configured(&config) {
            Err(Error::Unsupported(_)) if !is_since(&nccl.version(), "2.31") => return Ok(()),
            answer => must("configured", answer)?,
        };
        let mut one = upload(&comm, &[1.0f32])?;
        let refused = configured.all_reduce_in_place(&mut one, ReduceOp::Sum);
        let Err(Error::Library(error)) = refused else { return Err(format!("{refused:?}")) };
        let says = must("last_error", nccl.last_error())?;
        assert!(says.contains("cgaClusterSize=9") && error.text.ends_with(&says), "{says:?} in {error}");
        Ok(())
    })?;
    Ok(outcomes.into_iter().collect::<Result<(), String>>()?)
}

/// What the library believes is an answer that changes nothing, and what it cannot believe anything of is
/// refused.
fn estimate(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let nccl = comm.nccl().ok_or("the backend's own features")?;
    let data = values::<f32>(rank, 1 << 20);
    let (mut all, mut few) = (upload(&comm, &data)?, upload(&comm, &data[..256])?);
    let long = match nccl.estimate(|g| g.all_reduce_in_place(&mut all, ReduceOp::Sum)) {
        Err(Error::MissingFunction(missing)) if nccl.version().as_str() < "2.22" => {
            assert_eq!(missing.function, "ncclGroupSimulateEnd");
            return done();
        }
        answer => must("estimate", answer)?,
    };
    let short = must("estimate", nccl.estimate(|g| g.all_reduce_in_place(&mut few, ReduceOp::Sum)))?;
    assert_eq!((long.is_some(), short.is_some()), (ranks > 1, ranks > 1));
    assert!(long >= short, "4 MiB {long:?}, 1 KiB {short:?}");
    assert!(download(&comm, &all)? == data && download(&comm, &few)? == data[..256]);

    let mut other = upload(&comm, &data[..256])?;
    let (send, mut on_host) = ([1.0f32], [0.0f32]);
    let refused = [
        ("nothing", nccl.estimate(|_| Ok(()))),
        ("messages", nccl.estimate(|g| g.send(&few, (rank + 1) % ranks))),
        (
            "several operations",
            nccl.estimate(|g| {
                g.broadcast_in_place(&mut few, 0)?;
                g.broadcast_in_place(&mut other, 0)
            }),
        ),
        ("GPU memory", nccl.estimate(|g| g.all_reduce(&send, &mut on_host, ReduceOp::Sum))),
    ];
    for (what, answer) in refused {
        let text = answer.err().ok_or(what)?.to_string();
        assert!(text.contains(what), "{what}: {text}");
    }
    // What was estimated has not been left to the next operation.
    must("all_reduce", comm.all_reduce_in_place(&mut all, ReduceOp::Sum))?;
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
    expect("the sum", &download(&comm, &all)?, sum)?;
    assert!(download(&comm, &few)? == data[..256]);
    done()
}

/// Communicators whose calls the library never holds do the same work.
fn non_blocking(gpus: usize) -> Result<(), libtest_mimic::Failed> {
    let mut config = Config::default();
    config.non_blocking = true;
    let works = |comm: Comm| -> Outcome {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let mut buffer = upload(&comm, &values::<f32>(rank, 1000))?;
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
        expect("the sum", &download(&comm, &buffer)?, sum)?;
        let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let (mine, mut theirs) = (upload(&comm, &[rank as u32])?, upload(&comm, &[0u32])?);
        must("send_recv", comm.send_recv(&mine, right, &mut theirs, left))?;
        assert_eq!(download(&comm, &theirs)?, [left as u32]);
        let part = must("split", comm.split(Some(0), -(rank as i64)))?.ok_or("in it")?;
        must("the part's barrier", part.barrier())?;
        let nccl = comm.nccl().ok_or("the backend's own features")?;
        let estimate = nccl.estimate(|g| g.all_reduce_in_place(&mut buffer, ReduceOp::Sum));
        let text = estimate.err().ok_or("an estimate, for which the library would do the work")?.to_string();
        assert!(text.contains("non_blocking"), "{text}");
        must("finalize", part.finalize())?;
        must("finalize", comm.finalize())?;
        done()
    };
    for outcome in Comm::builder().backend(BackendKind::Nccl).nccl(config).run(gpus, works)? {
        outcome?;
    }
    Ok(())
}

/// Ranks that are spread over every number of unique ids (a library that has it; `releases.rs` has those that
/// do not).
fn unique_ids(gpus: usize) -> Result<(), libtest_mimic::Failed> {
    let all: u32 = (1..=gpus as u32).sum();
    for ids in 1..=gpus {
        let mut config = Config::default();
        config.unique_ids = Some(ids);
        let sum = |comm: Comm| {
            let mut buffer = upload(&comm, &[comm.rank() as u32 + 1])?;
            must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
            must("barrier", comm.barrier())?;
            Ok::<_, String>(download(&comm, &buffer)?[0])
        };
        for sum in Comm::builder().backend(BackendKind::Nccl).nccl(config).run(gpus, sum)? {
            assert_eq!(sum?, all, "{ids} unique ids");
        }
    }
    Ok(())
}
