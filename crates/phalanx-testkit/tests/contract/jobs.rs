//! MPI jobs as such: who is recognised, who is refused, how they fail and how they end.

use libtest_mimic::{Failed, Trial};
use phalanx::{BackendKind, Comm, Error, ReduceOp};
use phalanx_sys::mpi::Mpi;
use phalanx_testkit::mpi::{Ended, Installation};
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::suite;
use phalanx_testkit::{Fields, Scenario, verdict};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("jobs/init", |_| init()),
    Scenario::process("jobs/application", application),
    Scenario::rank("jobs/one_rank_stays_away", |comm, args| one_rank_stays_away(&comm, args)),
    Scenario::rank("jobs/started_on_one_rank", |comm, _| started_on_one_rank(&comm)),
    Scenario::rank("jobs/differing_requests", |comm, _| differing_requests(&comm)),
    Scenario::rank("jobs/first_started_on_one_rank", |comm, _| {
        comm.barrier().map_err(text)?;
        comm.set_timeout(Duration::from_millis(500));
        started_on_one_rank(&comm)
    }),
    Scenario::rank("jobs/nothing_comes", |comm, _| nothing_comes(comm)),
    Scenario::rank("jobs/one_rank_fails", |comm, _| one_rank_fails(&comm)),
    Scenario::rank("jobs/one_rank_aborts", |comm, _| one_rank_aborts(comm)),
    Scenario::rank("jobs/wrong_lengths", |comm, args| wrong_lengths(&comm, args)),
    Scenario::rank("jobs/large_tag", |comm, _| large_tag(&comm)),
];

/// A test with one MPI.
type Test = fn(&Installation) -> Result<(), String>;

const TESTS: [(&str, Test); 18] = [
    ("recognised", recognised),
    ("on_the_host_backend", on_the_host_backend),
    ("initialised_by_the_application", |mpi| initialised_by_the_application(mpi, "multiple")),
    ("initialised_for_one_thread", |mpi| initialised_by_the_application(mpi, "single")),
    ("deadline_of_a_collective", |mpi| deadline(mpi, "collective", "all_reduce(f32 × 10, sum)")),
    ("deadline_names_the_communicator", |mpi| {
        deadline(mpi, "named", ", sum) of communicator world:pipeline")
    }),
    ("deadline_of_a_request", |mpi| deadline(mpi, "request", "all_reduce(f32 × 10, sum)")),
    ("first_started_on_one_rank", first_started_on_one_rank),
    ("started_on_one_rank", |mpi| checked(mpi, "jobs/started_on_one_rank")),
    ("differing_requests", |mpi| checked(mpi, "jobs/differing_requests")),
    ("deadline_of_a_send", |mpi| deadline(mpi, "send", "send(u8 × 10000000, to rank 1)")),
    ("deadline_of_a_receive", |mpi| mpi.job(2).scenario("jobs/nothing_comes", &[]).succeed().map(drop)),
    ("one_rank_fails", |mpi| ends_soon(mpi, "jobs/one_rank_fails", "")),
    ("one_rank_aborts", |mpi| ends_soon(mpi, "jobs/one_rank_aborts", "rank 1 aborted the communicator")),
    ("shorter_message", |mpi| mpi.job(2).scenario("jobs/wrong_lengths", &["5"]).succeed().map(drop)),
    ("longer_message", |mpi| mpi.job(2).scenario("jobs/wrong_lengths", &["5000"]).succeed().map(drop)),
    ("large_tag", |mpi| mpi.job(2).scenario("jobs/large_tag", &[]).succeed().map(drop)),
    ("another_mpi_is_refused", another_mpi_is_refused),
];

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (installation, found) in Installation::all() {
        for (name, test) in TESTS {
            let name = format!("mpi/{installation}/jobs/{name}");
            trials.push(match found.clone() {
                Ok(installation) => Trial::test(name, move || Ok::<(), Failed>(test(&installation)?)),
                Err(reason) => suite::ignored(name, reason),
            });
        }
    }
    trials.push(Trial::test("mpi/jobs/missing_library", missing_library));
    if Installation::all().iter().any(|(_, found)| found.is_ok()) {
        trials.push(Trial::test("mpi/jobs/worlds_of_one", worlds_of_one));
    }
    trials
}

fn text(error: Error) -> String {
    error.to_string()
}

fn expect(is: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if is { Ok(()) } else { Err(what()) }
}

/// What `init` makes, or its error.
fn init() -> Outcome {
    let comm = match phalanx::init() {
        Ok(comm) => comm,
        Err(error) => return Ok(verdict::fields(&error).to_string()),
    };
    let mut sum = [comm.rank() as u64];
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
    let fields = Fields::new().with("kind", "joined").with("rank", comm.rank()).with("sum", sum[0]);
    let fields = fields.with("world_size", comm.world_size()).with("backend", comm.backend());
    comm.finalize().map_err(text)?;
    Ok(fields.to_string())
}

/// All ranks of a job of two, as they should report.
fn joined(ended: &Ended, backend: BackendKind) -> Result<(), String> {
    let mut ranks = Vec::new();
    for report in ended.outcomes.iter().flatten() {
        let fields = Fields::parse(report).ok_or("not a report")?;
        let right = fields.get("kind") == Some("joined")
            && fields.get("backend") == Some(backend.name())
            && fields.number("world_size") == Some(2)
            && fields.number("sum") == Some(1);
        expect(right, || fields.to_string())?;
        ranks.push(fields.number("rank"));
    }
    ranks.sort();
    expect(ranks == [Some(0), Some(1)], || format!("ranks {ranks:?}"))
}

/// By its real mpirun, without a word from the user; and its end leaves nothing to complain of.
fn recognised(mpi: &Installation) -> Result<(), String> {
    let ended = mpi.job(2).scenario("jobs/init", &[]).succeed()?;
    joined(&ended, BackendKind::Mpi)?;
    expect(ended.output.is_empty(), || format!("it wrote: {}", ended.output))
}

fn on_the_host_backend(mpi: &Installation) -> Result<(), String> {
    let job = mpi.job(2).scenario("jobs/init", &[]).env("PHALANX_BACKEND", "host");
    joined(&job.succeed()?, BackendKind::Host)
}

/// An application that initialises and finalises MPI itself.
fn application(args: &[String]) -> Outcome {
    let mpi = Mpi::load().map_err(|error| error.to_string())?;
    let level = if args.iter().any(|arg| arg == "single") { 0 } else { mpi.constants.thread_multiple };
    let mut provided = -1;
    let null = std::ptr::null_mut();
    // SAFETY: once, before any other use of MPI.
    let code = unsafe { (mpi.functions.init_thread)(null, null.cast(), level, &raw mut provided) };
    expect(code == 0 && provided >= level, || format!("MPI_Init_thread: {code}, level {provided}"))?;
    for _ in 0..2 {
        let comm = phalanx::init().map_err(text)?;
        let mut sum = [1u32];
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
        expect(sum[0] as usize == comm.world_size(), || format!("sum {sum:?}"))?;
        let message = comm.start_send(vec![comm.rank() as u8], 1 - comm.rank()).map_err(text)?;
        let mut received = [9u8];
        comm.recv(&mut received, 1 - comm.rank()).map_err(text)?;
        message.wait().map_err(text)?;
        // Whatever the level: whoever waits for one, or for a message, moves all of them along.
        let sums = [1, 1000, 300_000].map(|len| comm.start_all_reduce(vec![1u32; len], ReduceOp::Sum));
        let message = comm.start_send(vec![comm.rank() as u8], 1 - comm.rank()).map_err(text)?;
        comm.recv(&mut received, 1 - comm.rank()).map_err(text)?;
        message.wait().map_err(text)?;
        for sum in sums.into_iter().rev() {
            let sum = sum.map_err(text)?.wait().map_err(text)?;
            expect(sum.iter().all(|sum| *sum as usize == comm.world_size()), || format!("sum {}", sum[0]))?;
        }
        comm.finalize().map_err(text)?;
    }
    let mut finalized = -1;
    // SAFETY: a variable for the answer; then the last call, as the application's duty.
    unsafe {
        (mpi.functions.finalized)(&raw mut finalized);
        expect(finalized == 0, || "phalanx has finalised the application's MPI".into())?;
        expect((mpi.functions.finalize)() == 0, || "MPI_Finalize".into())?;
    }
    match phalanx::init() {
        Err(error @ Error::Bootstrap(_)) => Ok(error.to_string()),
        other => Err(format!("init after MPI_Finalize: {other:?}")),
    }
}

fn initialised_by_the_application(mpi: &Installation, level: &str) -> Result<(), String> {
    mpi.job(2).scenario("jobs/application", &[level]).succeed().map(drop)
}

const LEFT_ALONE: &str = "nobody has ended the job";

/// Rank 1 does something else, for longer than the deadline.
fn one_rank_stays_away(comm: &Comm, args: &[String]) -> Outcome {
    comm.barrier().map_err(text)?;
    comm.set_timeout(Duration::from_millis(500));
    if comm.rank() == 1 {
        std::thread::sleep(Duration::from_secs(30));
        return Err(LEFT_ALONE.into());
    }
    let result = match args.first().map(String::as_str) {
        Some("collective") => comm.all_reduce_in_place(&mut [1.0f32; 10], ReduceOp::Sum),
        Some("named") => {
            comm.set_name("pipeline").map_err(text)?;
            comm.all_reduce_in_place(&mut [1.0f32; 10], ReduceOp::Sum)
        }
        Some("request") => {
            let request = comm.start_all_reduce(vec![1.0f32; 10], ReduceOp::Sum).map_err(text)?;
            request.wait().map(drop)
        }
        _ => comm.send(&vec![0u8; 10_000_000], 1),
    };
    Err(format!("a wait past its deadline came back: {result:?}"))
}

/// Unchecked, the first that is started has to be started on all ranks: the deadline says so.
fn first_started_on_one_rank(mpi: &Installation) -> Result<(), String> {
    let ended = mpi.job(2).scenario("jobs/first_started_on_one_rank", &[]).run()?;
    let failed = ended.status.is_some_and(|status| !status.success());
    expect(failed && ended.outcomes.is_empty(), || format!("{ended:?}"))?;
    for part in
        ["timeout after 5", "all_reduce(u32 × 1000, sum)", "on rank 0", "first that was started on this"]
    {
        expect(ended.output.contains(part), || format!("{part:?} is missing in {}", ended.output))?;
    }
    Ok(())
}

fn checked(mpi: &Installation, scenario: &str) -> Result<(), String> {
    mpi.job(2).scenario(scenario, &[]).env("PHALANX_CHECK", "1").succeed().map(drop)
}

/// In checked mode also the first that is started may meet a plain call.
fn started_on_one_rank(comm: &Comm) -> Outcome {
    let sum = if comm.rank() == 0 {
        comm.start_all_reduce(vec![1u32; 1000], ReduceOp::Sum).map_err(text)?.wait().map_err(text)?
    } else {
        let mut sum = vec![1u32; 1000];
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
        sum
    };
    expect(sum == [2; 1000], || format!("sum {}", sum[0]))?;
    Ok(String::new())
}

/// Requests that differ, and those that were started behind them, get one verdict.
fn differing_requests(comm: &Comm) -> Outcome {
    let same = comm.start_all_reduce(vec![1u32; 10], ReduceOp::Sum).map_err(text)?;
    let differing = comm.start_all_reduce(vec![1f32; 10 + comm.rank()], ReduceOp::Sum).map_err(text)?;
    let behind = comm.start_broadcast(vec![1u8; 10], 0).map_err(text)?;
    for result in [behind.wait().map(drop), differing.wait().map(drop), comm.barrier()] {
        let Err(Error::Mismatch(mismatch)) = result else {
            return Err(format!("requests differ: {result:?}"));
        };
        let right = mismatch.sequence == 2
            && (mismatch.other_rank, &*mismatch.ours) == (0, "all_reduce(f32 × 10, sum)")
            && (mismatch.rank, &*mismatch.theirs) == (1, "all_reduce(f32 × 11, sum)");
        expect(right, || mismatch.to_string())?;
    }
    let sum = same.wait().map_err(text)?;
    expect(sum == [2; 10], || format!("before they differ: {sum:?}"))?;
    Ok(String::new())
}

/// A receive that nothing comes for is given up, and the rank lives on.
fn nothing_comes(comm: Comm) -> Outcome {
    comm.set_timeout(Duration::from_millis(500));
    if comm.rank() == 0 {
        match comm.recv(&mut [0u8; 3], 1) {
            Err(Error::Timeout(timeout)) => {
                let right = timeout.missing.iter().map(|missing| missing.rank).eq([1])
                    && timeout.operation == "recv(u8 × 3, from rank 1)"
                    && (490..5000).contains(&timeout.waited.as_millis());
                expect(right, || timeout.to_string())?;
            }
            other => return Err(format!("a receive of nothing: {other:?}")),
        }
        expect(comm.barrier().is_err(), || "the communicator has not failed".into())?;
    }
    Ok(String::new())
}

fn deadline(mpi: &Installation, what: &str, operation: &str) -> Result<(), String> {
    let run = || {
        let start = Instant::now();
        let ended = mpi.job(2).scenario("jobs/one_rank_stays_away", &[what]).run()?;
        Ok::<_, String>((ended, start.elapsed()))
    };
    let (mut ended, mut took) = run()?;
    if ended.outcomes.iter().any(|outcome| outcome.as_ref().is_err_and(|error| error == LEFT_ALONE)) {
        // Hydra of MPICH 5.0.2 does so once in many hundred runs, on a busy machine: it has the status of the
        // rank that called MPI_Abort, and lets the others run.
        (ended, took) = run()?;
    }
    let failed = ended.status.is_some_and(|status| !status.success());
    expect(failed && ended.outcomes.is_empty(), || format!("{ended:?}"))?;
    expect(took < Duration::from_secs(20), || format!("it took {took:?}: {}", ended.output))?;
    for part in ["timeout after ", "s in ", operation, "on rank 0", "operation number", "PHALANX_TIMEOUT"] {
        expect(ended.output.contains(part), || format!("{part:?} is missing in {}", ended.output))?;
    }
    Ok(())
}

/// Rank 1 ends with an error of its own while rank 0 waits for it.
fn one_rank_fails(comm: &Comm) -> Outcome {
    comm.barrier().map_err(text)?;
    if comm.rank() == 1 {
        return Err("an error of the application".into());
    }
    comm.barrier().map_err(text)?;
    Ok(String::new())
}

fn one_rank_aborts(comm: Comm) -> Outcome {
    comm.barrier().map_err(text)?;
    if comm.rank() == 1 {
        comm.abort();
    } else {
        comm.barrier().map_err(text)?;
    }
    Ok(String::new())
}

/// The job fails, long before its deadline.
fn ends_soon(mpi: &Installation, scenario: &str, said: &str) -> Result<(), String> {
    let start = Instant::now();
    let ended = mpi.job(2).scenario(scenario, &[]).run()?;
    let took = start.elapsed();
    expect(ended.status.is_some_and(|status| !status.success()), || format!("{ended:?}"))?;
    expect(took < Duration::from_secs(20), || format!("it took {took:?}"))?;
    expect(ended.output.contains(said), || format!("{said:?} is missing in {}", ended.output))
}

/// A receive of 1000 elements, of a message of another length: the receiver is told, and for good.
fn wrong_lengths(comm: &Comm, args: &[String]) -> Outcome {
    let sent: usize = args.first().and_then(|arg| arg.parse().ok()).ok_or("no length was given")?;
    if comm.rank() == 0 {
        // It is received, though not as it should be.
        comm.send(&vec![1u16; sent], 1).map_err(text)?;
        return Ok(String::new());
    }
    let error = comm.recv(&mut [0u16; 1000], 0).err().ok_or("the receive succeeded")?;
    let Error::Mismatch(mismatch) = &error else { return Err(format!("{error:?}")) };
    let theirs = format!("send(u16 × {sent}, to rank 1)");
    expect(mismatch.other_rank == 0 && mismatch.ours == theirs, || error.to_string())?;
    expect(mismatch.rank == 1 && mismatch.theirs == "recv(u16 × 1000, from rank 0)", || error.to_string())?;
    match comm.send(&[1], 0) {
        Err(Error::Mismatch(_)) => Ok(String::new()),
        other => Err(format!("after a failure: {other:?}")),
    }
}

fn large_tag(comm: &Comm) -> Outcome {
    let peer = 1 - comm.rank();
    match comm.send_tagged(&[1u8], peer, u32::MAX) {
        Err(error @ Error::Unsupported(_)) => {
            expect(error.to_string().contains("4294967295"), || error.to_string())?;
        }
        other => return Err(format!("the largest of all tags: {other:?}")),
    }
    // Nothing was started, and the communicator works on.
    let mut received = [0u8];
    comm.send_recv(&[comm.rank() as u8], peer, &mut received, peer).context(|| "after it".into())?;
    expect(received[0] as usize == peer, || format!("{received:?}"))?;
    Ok(String::new())
}

/// A library that is not the launcher's makes worlds of one rank: each rank says so.
fn another_mpi_is_refused(mpi: &Installation) -> Result<(), String> {
    let other = if mpi.name == "open_mpi" { "mpich" } else { "open_mpi" };
    let all = Installation::all();
    let found = all.iter().find(|(name, _)| *name == other);
    if let Some((_, Err(reason))) = found {
        // With one MPI there is nothing to confuse it with.
        eprintln!("not done: {reason}");
        return Ok(());
    }
    let library = if other == "mpich" { "libmpich.so.12" } else { "libmpi.so.40" };
    let job = mpi.job(2).scenario("jobs/init", &[]).env("PHALANX_MPI_LIB", library);
    let ended = job.succeed()?;
    for report in ended.outcomes.iter().flatten() {
        refused(&Fields::parse(report).ok_or("not a report")?, &["started 2 ranks", "of 1", library])?;
    }
    Ok(())
}

fn refused(fields: &Fields, parts: &[&str]) -> Result<(), String> {
    let text = fields.get("text").unwrap_or_default();
    let says = |part: &&str| text.contains(*part);
    expect(fields.get("kind") == Some("bootstrap") && parts.iter().all(says), || fields.to_string())
}

/// Ranks that `phalanx launch` started are no MPI job: each would be a world of its own.
fn worlds_of_one() -> Result<(), Failed> {
    let launch = Launch::new("jobs/init", 2).env("PHALANX_BACKEND", "mpi");
    for report in launch.reports()? {
        let fields = Fields::parse(&report).ok_or("not a report")?;
        refused(&fields, &["phalanx launch started 2 ranks", "rank 0 of 1", "mpirun"])?;
    }
    Ok(())
}

fn missing_library() -> Result<(), Failed> {
    let launch = Launch::new("jobs/init", 1).env("PHALANX_BACKEND", "mpi");
    let reports = launch.env("PHALANX_MPI_LIB", "/nonexistent/libmpi.so").reports()?;
    let fields = Fields::parse(&reports[0]).ok_or("not a report")?;
    let text = fields.get("text").unwrap_or_default();
    let right = fields.get("kind") == Some("not found") && text.contains("/nonexistent/libmpi.so");
    Ok(expect(right, || fields.to_string())?)
}
