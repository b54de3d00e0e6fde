//! Ranks of several hosts, which share no memory: half of them is elsewhere (see [`Elsewhere`]). What they
//! do, and that whatever goes wrong on one host is the same error on all.

use crate::world::{BACKEND, done, download, elements, expect, launch, must, upload, value, values};
use crate::{collectives, communicators, failures, messages, programs, streams};
use libtest_mimic::{Failed, Trial};
use phalanx::{BackendKind, Comm, Error, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::fault::Fault;
use phalanx_testkit::hosts::Elsewhere;
use phalanx_testkit::processes::{Launch, World, describe, gpus_of, phase, set_scenario};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite;
use phalanx_testkit::suite::Condition;
use phalanx_testkit::ucx;
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("place", place),
    Scenario::rank("going_on", going_on),
    Scenario::rank("late", late),
    Scenario::rank("differs", differs),
    Scenario::rank("leaves", leaves),
    Scenario::rank("aborts", aborts),
    Scenario::process("refused", refused),
    Scenario::process("grows", grows),
];

/// Set for a process that joins the others.
const NEWCOMER: &str = "GPU_TEST_NEWCOMER";

/// By when a loss is known to all: 2 s, and 1 s for a machine that has other things to do.
pub const LIMIT: Duration = Duration::from_secs(3);

pub fn trials(gpus: usize) -> Vec<Trial> {
    let hosts = if gpus.is_multiple_of(2) { 2 } else { gpus };
    let trials = [
        Trial::test("hosts/operations", move || operations(gpus, hosts)),
        Trial::test("hosts/finalize", move || perform(communicators::SCENARIOS, "finalize", gpus, hosts)),
        Trial::test("hosts/cycles", move || perform(communicators::SCENARIOS, "cycles", gpus, hosts)),
        Trial::test("hosts/killed", move || lost(gpus, hosts, Fault::Kill, "its process ended")),
        Trial::test("hosts/stopped", move || lost(gpus, hosts, Fault::Stop, "nothing is heard of it")),
        Trial::test("hosts/stopped_for_less_than_the_heartbeat_timeout", move || {
            stopped_for_less(gpus, hosts)
        }),
        Trial::test("hosts/torchrun", move || torchrun(gpus, hosts)),
        Trial::test("hosts/killed_with_the_store", move || lost_with_the_store(gpus, hosts)),
        Trial::test("hosts/missing_at_init", move || missing(gpus, hosts)),
        Trial::test("hosts/grows", move || grow(gpus, hosts))
            .only_if(gpus > 2, "a job of one rank does not grow: it takes three GPUs"),
        Trial::test("hosts/late", move || one_error(gpus, hosts, "late", "timeout after")),
        Trial::test("hosts/differs", move || one_error(gpus, hosts, "differs", "rank 0 called all_reduce")),
        Trial::test("hosts/leaves", move || one_error(gpus, hosts, "leaves", "it left the communicator")),
        Trial::test("hosts/aborts", move || one_error(gpus, hosts, "aborts", "aborted")),
        Trial::test("hosts/without_gpus", move || without_gpus(gpus, hosts)),
        Trial::test("hosts/backends_that_differ", move || backends_that_differ(gpus, hosts)),
    ];
    let launcher = match programs::built("phalanx") {
        None if suite::is_ci() => None,
        None => Some("phalanx is not built"),
        Some(_) => None,
    };
    let can_stage = BACKEND == BackendKind::Nccl && ucx::missing().is_none();
    let launched = [
        Trial::test("hosts/launcher", move || launched(gpus, hosts)),
        Trial::test("hosts/launcher_kv_cache", kv_cache)
            .only_if(can_stage, "GPU windows between hosts are NCCL's, over UCX"),
        Trial::test("hosts/launcher_names_the_lost", move || launcher_names_the_lost(gpus, hosts)),
        Trial::test("hosts/launcher_goes_on/killed", move || launcher_goes_on(gpus, hosts, Signal::KILL)),
        Trial::test("hosts/launcher_goes_on/cut_off", move || launcher_goes_on(gpus, hosts, Signal::STOP)),
    ];
    let launched = launched.map(|trial| match launcher {
        Some(why) => trial.only_if(false, why),
        None => trial,
    });
    let obstacle = Elsewhere::enter().err();
    let must_run = std::env::var_os("PHALANX_TEST_NAMESPACES").is_some();
    let can_run = |trial: Trial| match &obstacle {
        _ if gpus < 2 => trial.only_if(false, "it takes two GPUs"),
        Some(why) if !must_run => trial.only_if(false, &format!("cannot run: {why}")),
        _ => trial,
    };
    trials.into_iter().chain(launched).map(can_run).collect()
}

fn on_hosts(name: &str, gpus: usize, hosts: usize) -> Launch {
    let scenario = SCENARIOS.iter().find(|scenario| scenario.name == name).expect("it is above");
    launch(*scenario, gpus, "").on_hosts(hosts)
}

/// All but one begin, and take the last one in.
fn grow(gpus: usize, hosts: usize) -> Result<(), Failed> {
    let launch = on_hosts("grows", gpus - 1, hosts).with_newcomers(vec![hosts - 1]);
    Ok(launch.env_of(gpus - 1, NEWCOMER, Some("1")).reports().map(drop)?)
}

fn grows(_: &[String]) -> Outcome {
    let comm = match std::env::var_os(NEWCOMER) {
        Some(_) => must("join", phalanx::join())?,
        None => {
            let comm = must("init", phalanx::init())?;
            must("barrier", comm.barrier())?;
            must("grow", comm.grow(1))?
        }
    };
    let (ranks, topology) = (comm.world_size(), comm.host_topology());
    assert_eq!((comm.backend(), topology.num_hosts() > 1), (BACKEND, true));
    let mut buffer = upload(&comm, &values::<f32>(comm.rank(), 1000))?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
    expect("the sum", &download(&comm, &buffer)?, sum)?;
    must("finalize", comm.finalize())?;
    done()
}

fn perform(scenarios: &[Scenario], name: &str, gpus: usize, hosts: usize) -> Result<(), Failed> {
    let scenario = scenarios.iter().find(|scenario| scenario.name == name).ok_or("no such scenario")?;
    Ok(launch(*scenario, gpus, "30").on_hosts(hosts).reports().map(drop)?)
}

fn operations(gpus: usize, hosts: usize) -> Result<(), Failed> {
    let all =
        [collectives::SCENARIOS, messages::SCENARIOS, communicators::SCENARIOS, streams::SCENARIOS].concat();
    let others = ["identity", "cycles", "finalize"];
    let scenarios = all.iter().filter(|scenario| !others.contains(&scenario.name));
    // On a communicator of the world's own, and each of the others on a part of it.
    let first = launch(SCENARIOS[0], gpus, &hosts.to_string()).on_hosts(hosts);
    let launch = scenarios.fold(first, |launch, scenario| launch.then(scenario.name).arg("30"));
    Ok(launch.reports().map(drop)?)
}

/// Each rank has its number among those of its host as its GPU, and knows who is where.
fn place(comm: Comm, args: &[String]) -> Outcome {
    let hosts: usize = args[0].parse().map_err(|error| format!("hosts: {error}"))?;
    let topology = comm.host_topology();
    assert_eq!((comm.backend(), topology.num_hosts()), (BACKEND, hosts));
    let here = topology.ranks_of(topology.host_of(comm.rank()));
    assert_eq!(here.len(), comm.world_size() / hosts);
    assert_eq!(comm.gpu(), here.iter().position(|rank| *rank == comm.rank()));
    let last = must("split", comm.split(Some(0), -(comm.rank() as i64)))?.ok_or("in it")?;
    assert_eq!(last.host_topology().host_of(0), 0);
    let mirrored = comm.world_size() - 1 - last.rank();
    assert!(topology.same_host(mirrored, comm.rank()) && mirrored == comm.rank());
    let Err(refused) = comm.symmetric::<u8>(1) else { return Err("the hosts share no memory".into()) };
    assert!(refused.to_string().contains("the job has several hosts"), "{refused}");
    assert!(matches!(
        comm.shared_by_host(1, |_: &mut [u8]| Ok::<(), String>(())),
        Err(Error::Unsupported(_))
    ));
    must("barrier", comm.barrier())?;
    done()
}

/// Works until a rank is lost, and goes on without it.
fn going_on(comm: Comm, _: &[String]) -> Outcome {
    comm.set_timeout(failures::TIMEOUT);
    let mut buffer = upload(&comm, &vec![1.0f32; elements(1 << 20)])?;
    must("warm-up", comm.all_reduce_in_place(&mut buffer, ReduceOp::Max).and_then(|()| comm.sync()))?;
    phase("running");
    let (error, waited) = loop {
        let since = Instant::now();
        let result = (0..20).try_for_each(|_| comm.all_reduce_in_place(&mut buffer, ReduceOp::Max));
        if let Err(error) = result.and_then(|()| comm.sync()) {
            break (error, since.elapsed());
        }
    };
    phase("noticed");
    assert_eq!(comm.barrier().unwrap_err().to_string(), error.to_string());
    let shrunk = match comm.shrink() {
        Ok(shrunk) => shrunk,
        Err(why) => return Ok(format!("{}\t{why}\t{error}", waited.as_secs_f64())),
    };
    let ranks = shrunk.world_size();
    let mut buffer = upload(&shrunk, &values::<f32>(shrunk.rank(), 1000))?;
    must("all_reduce", shrunk.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
    expect("the sum of the survivors", &download(&shrunk, &buffer)?, sum)?;
    must("barrier", shrunk.barrier())?;
    let topology = shrunk.host_topology();
    // Longer than a launcher takes to notice the loss, too: it says that it goes on only if its ranks still do.
    std::thread::sleep(Duration::from_millis(500));
    must("finalize", shrunk.finalize())?;
    Ok(format!("{}\t{ranks} on {}\t{error}", waited.as_secs_f64(), topology.num_hosts()))
}

/// The last rank, which is elsewhere than rank 0, is lost; the others say so, and go on without it.
fn lost(gpus: usize, hosts: usize, fault: Fault, why: &str) -> Result<(), Failed> {
    let victim = gpus - 1;
    let reports = without(on_hosts("going_on", gpus, hosts).start()?, gpus, victim, fault)?;
    for [waited, survivors, error] in &reports {
        assert!(waited.parse::<f64>()? < LIMIT.as_secs_f64(), "{waited}");
        assert!(survivors.starts_with(&format!("{victim} on ")), "{survivors}");
        assert!(error.contains(&format!("rank {victim} is gone: {why}")), "{error}");
        assert_eq!(*error, reports[0][2]);
    }
    Ok(())
}

/// A rank that is silent for longer than in the other trials, and for less than the variable allows, is not lost. The store is in rank 0.
fn stopped_for_less(gpus: usize, hosts: usize) -> Result<(), Failed> {
    let victim = gpus - 1;
    let launch = on_hosts("going_on", gpus, hosts).env("PHALANX_HEARTBEAT_TIMEOUT", "9");
    let mut world = under_torchrun(launch, gpus, hosts)?.start()?;
    (0..gpus).try_for_each(|rank| world.await_phase(rank, "running"))?;
    world.inject(victim, Fault::Stop)?;
    std::thread::sleep(Duration::from_millis(2500));
    world.inject(victim, Fault::Continue)?;
    for [_, _, error] in without(world, gpus, victim, Fault::Kill)? {
        assert!(error.contains("its process ended"), "{error}");
    }
    Ok(())
}

/// With torchrun's variables; the store is in rank 0.
fn under_torchrun(launch: Launch, gpus: usize, hosts: usize) -> Result<Launch, Failed> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let here = gpus / hosts;
    let mut launch = launch
        .env("PHALANX_STORE", &format!("127.0.0.1:{port}"))
        .env("WORLD_SIZE", &gpus.to_string())
        .env("LOCAL_WORLD_SIZE", &here.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", "1");
    for rank in 0..gpus {
        launch = launch
            .env_of(rank, "RANK", Some(&rank.to_string()))
            .env_of(rank, "LOCAL_RANK", Some(&(rank % here).to_string()))
            .env_of(rank, "PHALANX_RANK", None)
            .env_of(rank, "PHALANX_WORLD_SIZE", None);
    }
    Ok(launch)
}

/// The rank that has the store waits for the others at its end, and no longer.
fn torchrun(gpus: usize, hosts: usize) -> Result<(), Failed> {
    let since = Instant::now();
    let launch = launch(SCENARIOS[0], gpus, &hosts.to_string()).on_hosts(hosts);
    under_torchrun(launch, gpus, hosts)?.reports()?;
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
    Ok(())
}

/// The store is lost with rank 0: nobody is left to ask, but all know.
fn lost_with_the_store(gpus: usize, hosts: usize) -> Result<(), Failed> {
    let launch = under_torchrun(on_hosts("going_on", gpus, hosts), gpus, hosts)?;
    for [waited, survivors, error] in without(launch.start()?, gpus, 0, Fault::Kill)? {
        assert!(waited.parse::<f64>()? < LIMIT.as_secs_f64(), "{waited}");
        assert!(survivors.contains("the job's store is gone"), "{survivors}");
        assert!(error.contains("rank 0 is gone: its process ended"), "{error}");
    }
    Ok(())
}

/// What the others report when a rank is lost.
fn without(mut world: World, gpus: usize, victim: usize, fault: Fault) -> Result<Vec<[String; 3]>, Failed> {
    for rank in 0..gpus {
        world.await_phase(rank, "running")?;
    }
    std::thread::sleep(Duration::from_millis(300));
    world.inject(victim, fault)?;
    for rank in (0..gpus).filter(|rank| *rank != victim) {
        world.await_phase(rank, "noticed")?;
    }
    if fault == Fault::Stop {
        world.inject(victim, Fault::Continue)?;
    }
    let survivors = world.finish().into_iter().filter(|ended| ended.rank != victim);
    survivors
        .map(|ended| {
            let report = ended.outcome.map_err(|problem| format!("{problem}\n{}", ended.output))?;
            let fields: Vec<String> = report.split('\t').map(str::to_owned).collect();
            fields.try_into().map_err(|fields| format!("three fields: {fields:?}").into())
        })
        .collect()
}

/// `phalanx launch --nnodes`, with a launcher on each host.
struct Launchers {
    launchers: Vec<Child>,
    folder: tempfile::TempDir,
}

impl Launchers {
    fn start(
        gpus: usize,
        hosts: usize,
        options: &[&str],
        set_program: impl Fn(&mut Command) -> Result<(), Failed>,
    ) -> Result<Launchers, Failed> {
        let phalanx = launcher_program()?;
        let folder = tempfile::tempdir()?;
        let token = folder.path().join("token");
        std::fs::write(&token, "the secret of this test")?;
        std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600))?;
        let store = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let here = gpus / hosts;
        let mut all = Launchers { launchers: Vec::new(), folder };
        for host in 0..hosts {
            let elsewhere = if host == 0 { None } else { Some(Elsewhere::enter()?) };
            let visible = gpus_of(&(host * here..(host + 1) * here).collect::<Vec<_>>());
            let mut command = Command::new(&phalanx);
            command.args(["launch", "--nnodes", &hosts.to_string(), "--node-rank", &host.to_string()]);
            command.args(["--store", &store.to_string(), "--token-file"]).arg(&token);
            command.args(["-n", &here.to_string()]).args(options).arg("--");
            set_program(&mut command)?;
            command.env("PHALANX_HEARTBEAT_TIMEOUT", "1.4").env("CUDA_VISIBLE_DEVICES", visible);
            command.env("NCCL_HOSTID", format!("host{host}"));
            let output = std::fs::File::create(all.output(host))?;
            command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
            all.launchers.push(command.spawn()?);
            drop(elsewhere);
        }
        Ok(all)
    }

    /// A launcher on each host, whose ranks do the scenario `going_on`.
    fn going_on(gpus: usize, hosts: usize, options: &[&str]) -> Result<Launchers, Failed> {
        let all = Launchers::start(gpus, hosts, options, |command| {
            set_scenario(command, "going_on", &[]);
            command.arg(std::env::current_exe()?);
            Ok(())
        })?;
        let deadline = Instant::now() + Duration::from_secs(30);
        let here = gpus / hosts;
        while (0..hosts).any(|host| all.said(host).matches("@phase running").count() < here) {
            if Instant::now() > deadline {
                return Err(format!("they do not run: {}", all.said(0)).into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(all)
    }

    fn output(&self, host: usize) -> PathBuf {
        self.folder.path().join(format!("output-{host}"))
    }

    fn said(&self, host: usize) -> String {
        std::fs::read_to_string(self.output(host)).unwrap_or_default()
    }

    /// The processes of a host: its launcher, and what that has started.
    fn processes(&self, host: usize) -> Vec<Pid> {
        let launcher = self.launchers[host].id();
        let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"));
        let children = children.unwrap_or_default();
        let children = children.split_whitespace().filter_map(|process| process.parse().ok());
        std::iter::once(launcher as i32).chain(children).filter_map(Pid::from_raw).collect()
    }

    /// The status of a host's launcher, and the output.
    fn end(&mut self, host: usize) -> Result<(bool, String), Failed> {
        let status = self.launchers[host].wait()?;
        Ok((status.success(), self.said(host)))
    }
}

impl Drop for Launchers {
    fn drop(&mut self) {
        for launcher in &mut self.launchers {
            // Its ranks end with it.
            let _ = launcher.kill();
            let _ = launcher.wait();
        }
    }
}

fn launcher_program() -> Result<PathBuf, Failed> {
    Ok(programs::built("phalanx").ok_or("phalanx is not built: cargo build -p phalanx-cli")?)
}

/// A program that checks its results.
fn launched(gpus: usize, hosts: usize) -> Result<(), Failed> {
    let phalanx = launcher_program()?;
    let mut all = Launchers::start(gpus, hosts, &[], |command| {
        command.arg(&phalanx).args(["perf", "all_reduce", "-b", "8", "-e", "64K", "-f", "64", "-n", "3"]);
        command.args(["-w", "1"]);
        Ok(())
    })?;
    let mut said = String::new();
    for host in 0..hosts {
        let (succeeded, output) = all.end(host)?;
        said += &output;
        assert!(succeeded, "{said}");
    }
    assert!(said.contains("0 OK") && said.contains(&format!("{gpus} ranks")), "{said}");
    Ok(())
}

/// A KV cache goes from a GPU of one host to one of another.
fn kv_cache() -> Result<(), Failed> {
    let example = programs::built("kv_cache").ok_or("kv_cache is not built")?;
    let mut all = Launchers::start(2, 2, &[], |command| {
        command.arg(&example).arg("9");
        Ok(())
    })?;
    let ended = [all.end(0)?, all.end(1)?];
    let said: String = ended.iter().map(|(_, output)| output.as_str()).collect();
    assert!(ended.iter().all(|(succeeded, _)| *succeeded), "{said}");
    assert!(said.contains("9 prompts of 192 tokens are right"), "{said}");
    Ok(())
}

/// The last host is cut off: the launcher of the first names the rank that its ranks name, and its node.
fn launcher_names_the_lost(gpus: usize, hosts: usize) -> Result<(), Failed> {
    let mut all = Launchers::going_on(gpus, hosts, &["--no-prefix"])?;
    let lost = all.processes(hosts - 1);
    lost.iter().try_for_each(|process| kill_process(*process, Signal::STOP))?;
    let (succeeded, said) = all.end(0)?;
    assert!(!succeeded, "{said}");
    let (first, node) = (gpus - gpus / hosts, hosts - 1);
    let by_rank = said.contains(&format!("rank {first} failed first, on node {node} ("));
    let by_node = said.contains(&format!("node {node} (lost)"));
    if by_rank || by_node { Ok(()) } else { Err(said.into()) }
}

/// The last host is lost, and the ranks of the first go on without it.
fn launcher_goes_on(gpus: usize, hosts: usize, signal: Signal) -> Result<(), Failed> {
    let mut all = Launchers::going_on(gpus, hosts, &["--keep-going"])?;
    let lost = all.processes(hosts - 1);
    lost.iter().try_for_each(|process| kill_process(*process, signal))?;
    let (succeeded, said) = all.end(0)?;
    assert!(succeeded && said.matches("@ok ").count() == gpus / hosts, "{said}");
    assert!(said.contains(&format!("going on without node {}", hosts - 1)), "{said}");
    Ok(())
}

/// What all ranks report is the same, and says this.
fn one_error(gpus: usize, hosts: usize, scenario: &str, says: &str) -> Result<(), Failed> {
    let reports = on_hosts(scenario, gpus, hosts).env("PHALANX_CHECK", "1").reports()?;
    let errors: Vec<&String> = reports.iter().filter(|report| !report.is_empty()).collect();
    let all_say = errors.iter().all(|error| *error == errors[0] && error.contains(says));
    if errors.len() + 1 >= gpus && all_say { Ok(()) } else { Err(format!("{reports:?}").into()) }
}

fn error_of(result: phalanx::Result<()>) -> Outcome {
    Ok(result.err().ok_or("it should have failed")?.to_string())
}

/// The last rank does not come to an operation.
fn late(comm: Comm, _: &[String]) -> Outcome {
    let culprit = comm.world_size() - 1;
    let mut buffer = upload(&comm, &[1.0f32; 1000])?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync()))?;
    comm.set_timeout(Duration::from_secs(2));
    if comm.rank() == culprit {
        std::thread::sleep(Duration::from_secs(5));
    }
    let error = comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync()).unwrap_err();
    let Error::Timeout(timeout) = &error else { return Err(error.to_string()) };
    assert_eq!(timeout.missing.iter().map(|missing| missing.rank).collect::<Vec<_>>(), [culprit], "{error}");
    Ok(format!("timeout after {:?} in {} on {}", timeout.waited, timeout.operation, timeout.reporter))
}

/// The last rank calls something else.
fn differs(comm: Comm, _: &[String]) -> Outcome {
    let mut buffer = upload(&comm, &[1.0f32; 1000])?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    let op = if comm.rank() + 1 == comm.world_size() { ReduceOp::Max } else { ReduceOp::Sum };
    error_of(comm.all_reduce_in_place(&mut buffer, op).and_then(|()| comm.sync()))
}

/// The last rank is at its end while the others need it.
fn leaves(comm: Comm, _: &[String]) -> Outcome {
    let mut buffer = upload(&comm, &[1.0f32; 1000])?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync()))?;
    if comm.rank() + 1 == comm.world_size() {
        return done();
    }
    error_of(comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync()))
}

/// The last rank gives up.
fn aborts(comm: Comm, _: &[String]) -> Outcome {
    let mut buffer = upload(&comm, &[1.0f32; 1000])?;
    // It may do so before the others are through.
    let together = comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync());
    if comm.rank() + 1 == comm.world_size() {
        comm.abort();
        return done();
    }
    let mut next = || comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync());
    error_of(together.and_then(|()| next()))
}

/// A process that reports why there is no communicator.
fn refused(_: &[String]) -> Outcome {
    let since = Instant::now();
    let error = Comm::builder().timeout(failures::TIMEOUT).init().map(drop);
    assert!(since.elapsed() < failures::TIMEOUT + failures::SLACK, "after {:?}", since.elapsed());
    error_of(error)
}

fn all_refused(launch: &Launch, says: &[&str]) -> Result<(), Failed> {
    let ended = launch.run()?;
    let is_said = |report: &String| says.iter().all(|part| report.contains(part));
    if ended.iter().all(|rank| rank.outcome.as_ref().is_ok_and(is_said)) {
        return Ok(());
    }
    Err(format!("all should say {says:?}:{}", describe(&ended)).into())
}

fn missing(gpus: usize, hosts: usize) -> Result<(), Failed> {
    let launch = on_hosts("refused", gpus, hosts).without_rank(gpus - 1);
    all_refused(&launch, &[&format!("have not come: [{}]", gpus - 1)])
}

/// Whether they were told to use GPUs or not.
fn without_gpus(gpus: usize, hosts: usize) -> Result<(), Failed> {
    let first = gpus - gpus / hosts;
    let launch = (first..gpus).fold(on_hosts("refused", gpus, hosts), |launch, rank| {
        launch.env_of(rank, "CUDA_VISIBLE_DEVICES", Some(""))
    });
    let says = format!("rank {first} on ");
    all_refused(&launch, &[&says, "has no GPU of its own"])?;
    let untold = (0..gpus).fold(launch, |launch, rank| launch.env_of(rank, "PHALANX_BACKEND", None));
    all_refused(&untold, &[&says, "has no GPU of its own"])
}

fn backends_that_differ(gpus: usize, hosts: usize) -> Result<(), Failed> {
    let launch = on_hosts("refused", gpus, hosts).env_of(gpus - 1, "PHALANX_BACKEND", Some("host"));
    all_refused(&launch, &["rank 0 was told to use nccl", &format!("rank {} on", gpus - 1), "to use host"])
}
