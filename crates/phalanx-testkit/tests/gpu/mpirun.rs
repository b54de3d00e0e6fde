//! Ranks that an MPI's own mpirun starts on several hosts (see [`hosts::Host`]): MPI carries what they tell
//! each other, NCCL their data, and phalanx opens no port.

use crate::world::{BACKEND, are_emulated, done, download, elements, expect, must, upload, value, values};
use crate::{collectives, communicators, failures, messages, streams};
use libtest_mimic::{Failed, Trial};
use phalanx::{BackendKind, Comm, ReduceOp};
use phalanx_sys::mpi::Mpi;
use phalanx_testkit::Scenario;
use phalanx_testkit::fault::{Fault, inject_here};
use phalanx_testkit::hosts;
use phalanx_testkit::mpi::{Ended, Installation, Job, mark};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::sockets::listening;
use phalanx_testkit::suite;
use phalanx_testkit::suite::Condition;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("mpirun/chosen", chosen),
    Scenario::rank("mpirun/without_gpus", without_gpus),
    Scenario::process("mpirun/refused", refused),
    Scenario::process("mpirun/one_thread", |_| one_thread()),
    Scenario::process("mpirun/ports", ports),
    Scenario::process("mpirun/pmix", pmix),
    Scenario::process("mpirun/cycles", |_| cycles()),
    Scenario::process("mpirun/unfinished", |_| unfinished()),
    Scenario::rank("mpirun/lost", lost),
];

/// What a trial does with one MPI, and on how many GPUs.
type Test = fn(&Installation, usize) -> Result<(), Failed>;

const TESTS: [(&str, Test); 13] = [
    ("operations", operations),
    ("chosen", |mpi, gpus| Ok(on_hosts(mpi, gpus).scenario("mpirun/chosen", &[]).succeed().map(drop)?)),
    ("without_gpus", the_backend_of_mpi),
    ("a_rank_without_a_gpu", a_rank_without_a_gpu),
    ("backends_that_differ", backends_that_differ),
    ("one_thread", one_thread_is_refused),
    ("ports", no_port),
    ("pmix", only_mpi_knows),
    ("cycles", |mpi, gpus| Ok(on_hosts(mpi, gpus).scenario("mpirun/cycles", &[]).succeed().map(drop)?)),
    ("unfinished", |mpi, gpus| {
        Ok(on_hosts(mpi, gpus).scenario("mpirun/unfinished", &[]).succeed().map(drop)?)
    }),
    ("killed", |mpi, gpus| ended_by_the_launcher(mpi, gpus)),
    ("killed_and_survived", |mpi, gpus| survivors_name_it(mpi, gpus, "kill")),
    ("stopped", |mpi, gpus| survivors_name_it(mpi, gpus, "stop")),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let obstacle = hosts::Host::make().err();
    let must_run = std::env::var_os("PHALANX_TEST_NAMESPACES").is_some();
    let mut trials = Vec::new();
    // Intel MPI's are those of one host here.
    for (installation, found) in Installation::all().into_iter().filter(|(name, _)| *name != "intel_mpi") {
        // Where ranks that wait keep their core to themselves, no more of them than cores.
        let gpus = if installation == "open_mpi" { gpus / 2 * 2 } else { gpus.min(2) };
        for (name, test) in TESTS {
            let name = format!("mpirun/{installation}/{name}");
            // MPICH's mpirun is none of PMIx, and ends the job of a rank that is killed in any case.
            if ["/pmix", "/killed_and_survived"].iter().any(|end| name.ends_with(end))
                && installation != "open_mpi"
            {
                continue;
            }
            let why = found.clone().err().or_else(|| obstacle.clone().filter(|_| !must_run));
            trials.push(match (found.clone(), why) {
                (Ok(installation), None) => Trial::test(name, move || test(&installation, gpus))
                    .only_if(gpus >= 2, "it takes two GPUs"),
                (_, why) => {
                    let kind = why.map(|why| format!("cannot run: {why}")).unwrap_or_default();
                    suite::ignored(name, kind)
                }
            });
        }
    }
    trials
}

/// On two hosts, and nobody says which backend.
fn on_hosts(mpi: &Installation, gpus: usize) -> Job {
    mpi.job(gpus).on_hosts(2)
}

fn operations(mpi: &Installation, gpus: usize) -> Result<(), Failed> {
    let all =
        [collectives::SCENARIOS, messages::SCENARIOS, communicators::SCENARIOS, streams::SCENARIOS].concat();
    let others = ["identity", "cycles", "finalize"];
    let scenarios = all.iter().filter(|scenario| !others.contains(&scenario.name));
    let first = on_hosts(mpi, gpus).deadline(crate::world::DEADLINE).scenario("place", &["2"]);
    let job = scenarios.fold(first, |job, scenario| job.scenario(scenario.name, &["10"]));
    Ok(job.succeed().map(drop)?)
}

/// NCCL, without a word from the user; a part of the world; and `finalize`.
fn chosen(comm: Comm, _: &[String]) -> Outcome {
    let ranks = comm.world_size();
    assert_eq!((comm.backend(), comm.host_topology().num_hosts()), (BACKEND, 2));
    let choice = must("choose", phalanx::choose())?;
    assert!(choice.backend == BACKEND && choice.reason.contains("over MPI"), "{choice:?}");
    let mut buffer = upload(&comm, &values::<f32>(comm.rank(), 1000))?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
    expect("the sum", &download(&comm, &buffer)?, sum)?;
    let reversed = must("split", comm.split(Some(0), -(comm.rank() as i64)))?.ok_or("in it")?;
    assert_eq!(reversed.rank(), ranks - 1 - comm.rank());
    must("barrier", reversed.barrier())?;
    drop(reversed);
    must("finalize", comm.finalize())?;
    done()
}

/// As ever: MPI has the data.
fn without_gpus(comm: Comm, _: &[String]) -> Outcome {
    assert_eq!(comm.backend(), BackendKind::Mpi);
    let mut sum = [comm.rank() as u64];
    must("all_reduce", comm.all_reduce_in_place(&mut sum, ReduceOp::Sum))?;
    assert_eq!(sum[0] as usize, comm.world_size() * (comm.world_size() - 1) / 2);
    must("finalize", comm.finalize())?;
    done()
}

fn the_backend_of_mpi(mpi: &Installation, gpus: usize) -> Result<(), Failed> {
    let untold = || on_hosts(mpi, gpus).scenario("mpirun/without_gpus", &[]);
    untold().env("CUDA_VISIBLE_DEVICES", "").succeed()?;
    Ok(untold().env("PHALANX_BACKEND", "mpi").succeed().map(drop)?)
}

fn is_last() -> bool {
    let number = |names: [&str; 2]| names.into_iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
    let rank: Option<usize> = number(["OMPI_COMM_WORLD_RANK", "PMI_RANK"]);
    rank.map(|rank| rank + 1) == number(["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
}

/// Why there is no communicator, where the last rank, which is on the second host, has this variable.
fn refused(args: &[String]) -> Outcome {
    if is_last() {
        // SAFETY: this process has no other thread yet.
        unsafe { std::env::set_var(&args[0], &args[1]) };
    }
    let since = Instant::now();
    let error = Comm::builder().timeout(failures::TIMEOUT).init().map(drop);
    assert!(since.elapsed() < failures::TIMEOUT + failures::SLACK, "after {:?}", since.elapsed());
    Ok(error.err().ok_or("it should have failed")?.to_string())
}

/// All ranks report the same error, which says this.
fn all_say(ended: &Ended, says: &[&str]) -> Result<(), Failed> {
    let reports: Vec<&String> = ended.outcomes.iter().flatten().collect();
    let is_said = |report: &&String| **report == *reports[0] && says.iter().all(|part| report.contains(part));
    if reports.iter().all(is_said) {
        Ok(())
    } else {
        Err(format!("all should say {says:?}: {ended:#?}").into())
    }
}

fn a_rank_without_a_gpu(mpi: &Installation, gpus: usize) -> Result<(), Failed> {
    let job = on_hosts(mpi, gpus).scenario("mpirun/refused", &["CUDA_VISIBLE_DEVICES", ""]);
    let says = [&format!("rank {} on ", gpus - 1), "has no GPU of its own", "PHALANX_BACKEND=mpi"];
    all_say(&job.succeed()?, &says)?;
    all_say(&job.env("PHALANX_BACKEND", BACKEND.name()).succeed()?, &says)
}

fn backends_that_differ(mpi: &Installation, gpus: usize) -> Result<(), Failed> {
    let job = on_hosts(mpi, gpus).scenario("mpirun/refused", &["PHALANX_BACKEND", "mpi"]);
    let says = [&format!("rank {} on ", gpus - 1), "to use mpi"];
    all_say(&job.env("PHALANX_BACKEND", BACKEND.name()).succeed()?, &says)
}

/// MPI that the application has initialised, so or so.
fn application(level: impl Fn(&Mpi) -> i32) -> Result<Mpi, String> {
    let mpi = Mpi::load().map_err(|error| error.to_string())?;
    let (mut provided, null) = (-1, std::ptr::null_mut());
    // SAFETY: once, before any other use of MPI.
    let code = unsafe { (mpi.functions.init_thread)(null, null.cast(), level(&mpi), &raw mut provided) };
    if code == 0 { Ok(mpi) } else { Err(format!("MPI_Init_thread: {code}")) }
}

fn end_application(mpi: &Mpi) -> Result<(), String> {
    // SAFETY: the last call of MPI, as the application's duty.
    let code = unsafe { (mpi.functions.finalize)() };
    if code == 0 { Ok(()) } else { Err(format!("MPI_Finalize: {code}")) }
}

/// The last rank's MPI is for one thread.
fn one_thread() -> Outcome {
    let is_last = is_last();
    let mpi = application(|mpi| if is_last { 0 } else { mpi.constants.thread_multiple })?;
    let error = phalanx::init().map(drop).err().ok_or("it should have failed")?.to_string();
    end_application(&mpi)?;
    Ok(error)
}

fn one_thread_is_refused(mpi: &Installation, gpus: usize) -> Result<(), Failed> {
    let job = on_hosts(mpi, gpus).scenario("mpirun/one_thread", &[]);
    let rank = format!("rank {} on ", gpus - 1);
    all_say(&job.succeed()?, &[&rank, "MPI_THREAD_MULTIPLE", "PHALANX_STORE", "PHALANX_BACKEND=mpi"])
}

/// Which ports this process listens on when it has a communicator, beside those that MPI had opened before.
fn ports(args: &[String]) -> Outcome {
    let mpi = application(|mpi| mpi.constants.thread_multiple)?;
    let before = listening();
    let comm = must("init", phalanx::init())?;
    assert_eq!(comm.backend().name(), args[0]);
    if comm.backend() == BACKEND {
        let mut buffer = upload(&comm, &vec![1.0f32; elements(1 << 20)])?;
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync()))?;
    }
    must("barrier", comm.barrier())?;
    let new: Vec<String> = listening()
        .into_iter()
        .filter(|(socket, _)| !before.contains_key(socket))
        .map(|(_, at)| at)
        .collect();
    must("finalize", comm.finalize())?;
    end_application(&mpi)?;
    Ok(new.join(" "))
}

/// None but MPI's own; and a store that has a port is seen in the same way.
fn no_port(mpi: &Installation, gpus: usize) -> Result<(), Failed> {
    let opened = |job: Job| -> Result<Vec<String>, String> {
        let ended = job.scenario("mpirun/ports", &[BACKEND.name()]).succeed()?;
        Ok(ended.outcomes.into_iter().flatten().filter(|ports| !ports.is_empty()).collect())
    };
    if !are_emulated() {
        // NCCL opens ports of its own.
        return Ok(());
    }
    let carried = opened(on_hosts(mpi, gpus))?;
    assert!(carried.is_empty(), "{carried:?}");
    let on_one_host = opened(mpi.job(gpus))?;
    assert!(on_one_host.is_empty(), "{on_one_host:?}");
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let with_store = on_hosts(mpi, gpus)
        .env("PHALANX_STORE", &format!("127.0.0.1:{port}"))
        .env("PHALANX_TOKEN", "the secret of this test");
    assert_eq!(opened(with_store)?, [format!("0100007F:{port:04X}")]);
    Ok(())
}

/// As `srun --mpi=pmix` starts ranks: nobody but MPI knows how many there are, or where.
fn pmix(args: &[String]) -> Outcome {
    let names: Vec<_> = std::env::vars_os().map(|(name, _)| name).collect();
    for name in names.iter().filter(|name| name.to_string_lossy().starts_with("OMPI_COMM_WORLD_")) {
        // SAFETY: this process has no other thread yet.
        unsafe { std::env::remove_var(name) };
    }
    let choice = must("choose", phalanx::choose())?;
    assert_eq!(choice.launcher.map(|launcher| (launcher.name, launcher.world_size)), Some(("PMIx", None)));
    let comm = must("init", phalanx::init())?;
    assert_eq!((comm.backend(), comm.host_topology().num_hosts().to_string()), (BACKEND, args[0].clone()));
    let mut buffer = upload(&comm, &[1.0f32; 100])?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    expect("the sum", &download(&comm, &buffer)?, |_| comm.world_size() as f32)?;
    must("finalize", comm.finalize())?;
    done()
}

fn only_mpi_knows(mpi: &Installation, gpus: usize) -> Result<(), Failed> {
    mpi.job(gpus).scenario("mpirun/pmix", &["1"]).succeed()?;
    Ok(on_hosts(mpi, gpus).scenario("mpirun/pmix", &["2"]).succeed().map(drop)?)
}

/// Nothing is left of worlds that have ended: descriptors and threads.
fn cycles() -> Outcome {
    let count = |folder: &str| std::fs::read_dir(folder).map_or(0, Iterator::count);
    let mut held = Vec::new();
    for _ in 0..6 {
        let comm = must("init", phalanx::init())?;
        must("barrier", comm.barrier())?;
        must("finalize", comm.finalize())?;
        // What ends something may be at it for a moment.
        std::thread::sleep(Duration::from_millis(200));
        held.push((count("/proc/self/fd"), count("/proc/self/task")));
    }
    let tasks = std::fs::read_dir("/proc/self/task").map_err(|error| error.to_string())?;
    let names =
        tasks.flatten().map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default());
    let left: Vec<String> = names
        .filter(|name| {
            ["phalanx-carrier", "phalanx-store", "phalanx-relay"].iter().any(|own| name.starts_with(own))
        })
        .collect();
    let grew = held[5].0 > held[1].0 || held[5].1 > held[1].1;
    if grew || !left.is_empty() {
        Err(format!("descriptors and threads: {held:?}; {left:?}"))
    } else {
        done()
    }
}

/// A process that ends well, with its communicator: MPI is finalised nevertheless.
fn unfinished() -> Outcome {
    let comm = must("init", phalanx::init())?;
    must("barrier", comm.barrier())?;
    std::mem::forget(comm);
    done()
}

/// The last rank is killed or stopped at work. The others, as far as there are others then, say why they
/// cannot go on.
fn lost(comm: Comm, args: &[String]) -> Outcome {
    comm.set_timeout(failures::TIMEOUT);
    let mut buffer = upload(&comm, &vec![1.0f32; elements(1 << 20)])?;
    must("warm-up", comm.all_reduce_in_place(&mut buffer, ReduceOp::Max).and_then(|()| comm.sync()))?;
    must("barrier", comm.barrier())?;
    let (begun, mut is_there) = (Instant::now(), true);
    loop {
        if is_there && comm.rank() + 1 == comm.world_size() && begun.elapsed() > Duration::from_millis(300) {
            is_there = false;
            let fault = if args[0] == "stop" { Fault::Stop } else { Fault::Kill };
            must_system(mark())?;
            if fault == Fault::Stop {
                // So that the job comes to an end.
                let go_on = format!("sleep 5; kill -CONT {}", std::process::id());
                must_system(std::process::Command::new("sh").args(["-c", &go_on]).spawn())?;
            }
            must_system(inject_here(fault))?;
        }
        let since = Instant::now();
        let result = (0..20).try_for_each(|_| comm.all_reduce_in_place(&mut buffer, ReduceOp::Max));
        if let Err(error) = result.and_then(|()| comm.sync()) {
            return Ok(format!("{}\t{}\t{error}", comm.rank(), since.elapsed().as_secs_f64()));
        }
    }
}

fn must_system<T>(result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

/// An mpirun ends the job of a rank that is killed, and says why.
fn ended_by_the_launcher(mpi: &Installation, gpus: usize) -> Result<(), Failed> {
    let ended = on_hosts(mpi, gpus).scenario("mpirun/lost", &["kill"]).run()?;
    let (victim, since) = ended.mark.ok_or("nothing has happened")?;
    let fails = ended.status.is_some_and(|status| !status.success());
    let names = [format!("rank {}", gpus - 1), victim.to_string(), "(signal 9)".into()];
    let is_named = names.iter().any(|name| ended.output.contains(name));
    let in_time = since < failures::TIMEOUT + failures::SLACK;
    if fails && is_named && in_time && ended.left.is_empty() {
        Ok(())
    } else {
        Err(format!("{ended:#?}").into())
    }
}

/// Where the launcher does nothing, the others name the rank.
fn survivors_name_it(mpi: &Installation, gpus: usize, what: &str) -> Result<(), Failed> {
    let job = on_hosts(mpi, gpus).scenario("mpirun/lost", &[what]);
    let job = if what == "kill" { job.launcher_arg("--enable-recovery") } else { job };
    let ended = job.run()?;
    let victim = gpus - 1;
    let says = format!("rank {victim} is gone");
    let mut survivors = 0;
    for report in ended.outcomes.iter().flatten() {
        let fields: Vec<&str> = report.split('\t').collect();
        if fields[0] == victim.to_string() {
            continue;
        }
        survivors += 1;
        let in_time = fields[1].parse::<f64>()? < crate::hosts::LIMIT.as_secs_f64();
        assert!(in_time && fields[2].contains(&says), "{ended:#?}");
    }
    if survivors == victim && ended.left.is_empty() { Ok(()) } else { Err(format!("{ended:#?}").into()) }
}
