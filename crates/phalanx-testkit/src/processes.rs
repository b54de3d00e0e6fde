//! Ranks as processes of this host: the test binary starts itself again, once for each rank.
//!
//! A test's `main` first calls [`serve`]: in a rank process that runs the scenario and ends the process.
//! Otherwise `main` goes on as the test, which starts ranks with [`Launch`]. A rank reports over its
//! standard output: the phases it reaches ([`phase`]) and, as its last line, its outcome.
//!
//! [`World`] ends what is left of its ranks, by process id, when it is dropped.

mod world;

pub use world::{Ended, World, describe};

use crate::fault;
use crate::fields::{escape, unescape};
use crate::gpus::GPU_ALGORITHM;
use crate::hosts::Elsewhere;
use crate::mpi;
use crate::networked::NetworkedHosts;
use crate::scenario::{Body, Outcome, Scenario};
use crate::threads::host;
use phalanx::Comm;
use phalanx::internal::store::{Server, Settings, Token};
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The scenarios, one a line; their arguments follow, after tabs.
const SCENARIOS: &str = "PHALANX_TESTKIT_SCENARIOS";
/// How many ranks a process has, as threads of its own, which do the scenarios.
const THREADS: &str = "PHALANX_TESTKIT_THREADS";
const PHASE: &str = "@phase ";
const OUTCOME_OK: &str = "@ok ";
const OUTCOME_ERROR: &str = "@error ";

/// In a process that [`Launch`] or [`mpi`](mod@crate::mpi) started: runs its scenario and says how the
/// process ends.
pub fn serve(scenarios: &[Scenario]) -> Option<ExitCode> {
    if let Some(code) = mpi::serve(scenarios) {
        return Some(code);
    }
    let list = std::env::var(SCENARIOS).ok()?;
    let followed = fault::end_with_parent().map_err(|error| format!("cannot follow the parent: {error}"));
    let outcome = followed.and_then(|()| perform(scenarios, &list));
    let (line, code) = report(&outcome);
    say(&line);
    Some(code)
}

/// Makes a command, which starts the test again, run a scenario. For ranks of a launcher.
pub fn set_scenario(command: &mut Command, name: &str, args: &[String]) {
    command.env(SCENARIOS, line(name, args));
}

/// The line that tells an outcome, and what the process ends with.
pub(crate) fn report(outcome: &Outcome) -> (String, ExitCode) {
    match outcome {
        Ok(text) => (format!("{OUTCOME_OK}{}", escape(text)), ExitCode::SUCCESS),
        Err(text) => (format!("{OUTCOME_ERROR}{}", escape(text)), ExitCode::FAILURE),
    }
}

/// The outcome that a line tells.
pub(crate) fn outcome(line: &str) -> Option<Outcome> {
    let ok = line.strip_prefix(OUTCOME_OK).map(|text| Ok(unescape(text)));
    ok.or_else(|| line.strip_prefix(OUTCOME_ERROR).map(|text| Err(unescape(text))))
}

/// A line of a list of scenarios.
pub(crate) fn line(name: &str, args: &[String]) -> String {
    std::iter::once(name.to_owned()).chain(args.iter().map(|arg| escape(arg))).collect::<Vec<_>>().join("\t")
}

/// A scenario of a list, with its arguments.
type Named = (Body, String, Vec<String>);

/// Performs the scenarios of a list: a single one, or several for ranks, each on a communicator of its own.
pub(crate) fn perform(scenarios: &[Scenario], list: &str) -> Outcome {
    let named = |line: &str| -> Result<Named, String> {
        let mut words = line.split('\t').map(unescape);
        let name = words.next().unwrap_or_default();
        let scenario = scenarios.iter().find(|scenario| scenario.name == name);
        Ok((scenario.ok_or_else(|| format!("there is no scenario {name}"))?.body, name, words.collect()))
    };
    let list = list.lines().map(named).collect::<Result<Vec<_>, _>>()?;
    let init = || phalanx::init().map_err(|error| format!("init: {error}"));
    if let Some(ranks) = std::env::var(THREADS).ok().and_then(|ranks| ranks.parse().ok()) {
        return on_threads(ranks, &list);
    }
    match &list[..] {
        [(Body::Rank(body), _, args)] => body(init()?, args),
        [(Body::Process(body), _, args)] => body(args),
        list => one_after_another(init()?, list),
    }
}

fn one_after_another(world: Comm, list: &[Named]) -> Outcome {
    for (body, name, args) in list {
        let Body::Rank(body) = body else { return Err(format!("{name} is not a scenario for ranks")) };
        let comm = world.split(Some(0), 0).map_err(|error| format!("{name}: split: {error}"))?;
        let comm = comm.ok_or("split answered None to a rank with a colour")?;
        body(comm, args).map_err(|problem| format!("{name} {args:?}: {problem}"))?;
    }
    world.finalize().map_err(|error| format!("finalize: {error}"))?;
    Ok(String::new())
}

/// The ranks are threads of this process.
fn on_threads(ranks: usize, list: &[Named]) -> Outcome {
    let outcomes = Comm::builder().run(ranks, |world| one_after_another(world, list));
    let outcomes = outcomes.map_err(|error| format!("{ranks} thread ranks: {error}"))?;
    let problems = outcomes.into_iter().enumerate().filter_map(|(rank, outcome)| {
        outcome.err().map(|problem| format!("\n  thread rank {rank}: {problem}"))
    });
    match problems.collect::<String>() {
        none if none.is_empty() => Ok(none),
        some => Err(some),
    }
}

/// In a rank: says that it has reached a phase. Without an effect in a thread rank.
pub fn phase(name: &str) {
    if std::env::var_os(SCENARIOS).is_some() {
        say(&format!("{PHASE}{name}"));
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // If the parent is gone there is nobody left to tell.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// How many rank processes share a GPU: `TESTKIT_RANKS_PER_GPU`, or each has one of its own.
pub fn ranks_per_gpu() -> usize {
    let told = std::env::var("TESTKIT_RANKS_PER_GPU").ok().and_then(|ranks| ranks.parse().ok());
    told.unwrap_or(1).max(1)
}

/// The GPUs of these ranks, for `CUDA_VISIBLE_DEVICES`.
pub fn gpus_of(ranks: &[usize]) -> String {
    let mut gpus: Vec<String> = ranks.iter().map(|rank| (rank / ranks_per_gpu()).to_string()).collect();
    gpus.dedup();
    gpus.join(",")
}

/// The variable for how long a rank on another host may be silent.
const HEARTBEAT_TIMEOUT: &str = "PHALANX_HEARTBEAT_TIMEOUT";
/// How long it may be by default here: shorter than by default, since tests wait for it.
const SILENCE: Duration = Duration::from_millis(1400);

/// Rank processes to be started.
#[derive(Debug, Clone)]
pub struct Launch {
    scenarios: Vec<(String, Vec<String>)>,
    ranks: usize,
    hosts: usize,
    /// Hosts with a network, and how many ranks each has.
    network: Option<(&'static NetworkedHosts, Vec<usize>)>,
    /// On such hosts: the host of each of the last processes, which are no ranks of the job's first communicator.
    newcomers: Vec<usize>,
    skipped: Vec<usize>,
    plain: bool,
    gpus: bool,
    env: Vec<(Option<usize>, String, Option<String>)>,
    deadline: Duration,
}

impl Launch {
    /// `ranks` processes of a scenario, in one job.
    pub fn new(scenario: &str, ranks: usize) -> Launch {
        Launch {
            scenarios: vec![(scenario.into(), Vec::new())],
            ranks,
            hosts: 1,
            network: None,
            newcomers: Vec::new(),
            skipped: Vec::new(),
            plain: false,
            gpus: false,
            env: Vec::new(),
            deadline: Duration::from_secs(60),
        }
    }

    /// One process that belongs to no job.
    pub fn alone(scenario: &str) -> Launch {
        Launch { plain: true, ..Launch::new(scenario, 1) }
    }

    /// The ranks are threads of one process, and the scenarios those of ranks.
    pub fn on_threads(self) -> Launch {
        let (threads, limit) = (self.ranks.to_string(), self.rank_deadline());
        let mut launch = Launch { plain: true, ranks: 1, ..self }.env(THREADS, &threads);
        // The first: a limit that the test has set counts.
        launch.env.insert(0, (None, "PHALANX_TIMEOUT".into(), Some(limit)));
        launch
    }

    /// When ranks give up, in seconds: a hang of the library then says who waits for whom.
    fn rank_deadline(&self) -> String {
        (self.deadline.as_secs_f64() / 2.0).to_string()
    }

    /// An argument of the scenario.
    pub fn arg(mut self, arg: impl ToString) -> Launch {
        let (_, args) = self.scenarios.last_mut().expect("there is one from the start");
        args.push(arg.to_string());
        self
    }

    /// One more scenario of the same ranks, with a communicator of its own: all have to be scenarios for
    /// ranks then.
    pub fn then(mut self, scenario: &str) -> Launch {
        self.scenarios.push((scenario.into(), Vec::new()));
        self
    }

    /// They see the machine's GPUs, which they do not otherwise.
    pub fn on_gpus(mut self) -> Launch {
        self.gpus = true;
        self
    }

    /// They are on so many hosts (see [`Elsewhere`]), each with as many of the ranks and of the GPUs, and
    /// meet in a store of this process.
    pub fn on_hosts(mut self, hosts: usize) -> Launch {
        self.hosts = hosts;
        self.env(HEARTBEAT_TIMEOUT, &SILENCE.as_secs_f64().to_string())
    }

    /// They are on hosts with a network, so many on each, and meet in a store beside these.
    pub fn on_network(mut self, hosts: &'static NetworkedHosts, sizes: Vec<usize>) -> Launch {
        self.hosts = sizes.len();
        self.network = Some((hosts, sizes));
        self
    }

    /// More processes, which join when the others ask for new ranks: one on each of these hosts with a network.
    pub fn with_newcomers(mut self, hosts: Vec<usize>) -> Launch {
        self.ranks += hosts.len();
        self.newcomers = hosts;
        self
    }

    /// The number of ranks of the job's first communicator.
    fn first_ranks(&self) -> usize {
        self.ranks - self.newcomers.len()
    }

    /// An environment variable of every rank.
    pub fn env(mut self, name: &str, value: &str) -> Launch {
        self.env.push((None, name.into(), Some(value.into())));
        self
    }

    /// An environment variable of one rank; `None` takes it away.
    pub fn env_of(mut self, rank: usize, name: &str, value: Option<&str>) -> Launch {
        self.env.push((Some(rank), name.into(), value.map(Into::into)));
        self
    }

    /// A rank that is never started.
    pub fn without_rank(mut self, rank: usize) -> Launch {
        self.skipped.push(rank);
        self
    }

    /// When ranks that are still running are ended; 60 seconds unless told otherwise.
    pub fn deadline(mut self, deadline: Duration) -> Launch {
        self.deadline = deadline;
        self
    }

    /// Starts the processes.
    pub fn start(&self) -> Result<World, String> {
        let job = job_id();
        let store = self.store()?;
        let mut world = World::until(Instant::now() + self.deadline);
        let (mut host, mut elsewhere) = (0, None);
        for rank in (0..self.ranks).filter(|rank| !self.skipped.contains(rank)) {
            let is_next = std::mem::replace(&mut host, self.host_of(rank)) != self.host_of(rank);
            if is_next && self.network.is_none() {
                drop(elsewhere.take());
                elsewhere = Some(Elsewhere::enter()?);
            }
            let child = self.command(rank, &job, store.as_ref())?.spawn();
            world.add(rank, child.map_err(|error| format!("rank {rank} does not start: {error}"))?)?;
        }
        world.keep(store.map(|(server, _)| server));
        Ok(world)
    }

    /// The store of ranks on several hosts.
    fn store(&self) -> Result<Option<(Server, Token)>, String> {
        if self.hosts == 1 {
            return Ok(None);
        }
        let token = Token::random().map_err(|error| format!("a token: {error}"))?;
        let told = self.env.iter().rfind(|(_, name, _)| name == HEARTBEAT_TIMEOUT);
        let silence = told
            .and_then(|(.., value)| value.as_ref()?.parse().ok())
            .map_or(SILENCE, Duration::from_secs_f64);
        let settings = Settings { ranks: Some(self.first_ranks() as u32), silence, ..Settings::default() };
        let start = |address: &str| {
            Server::start(address, token.clone(), settings).map_err(|error| error.to_string())
        };
        let server = match &self.network {
            Some((hosts, _)) => hosts.beside(|| start("10.77.0.254:0"))?,
            None => start("127.0.0.1:0")?,
        };
        Ok(Some((server, token)))
    }

    fn host_of(&self, rank: usize) -> usize {
        let Some((_, sizes)) = &self.network else { return rank * self.hosts / self.ranks };
        if let Some(newcomer) = rank.checked_sub(self.first_ranks()) {
            return self.newcomers[newcomer];
        }
        let last = |host: &usize| sizes[..=*host].iter().sum::<usize>() > rank;
        (0..sizes.len()).find(last).expect("each rank is on a host")
    }

    fn place_on_host(&self, command: &mut Command, rank: usize) {
        let host = self.host_of(rank);
        let here: Vec<usize> = (0..self.ranks).filter(|other| self.host_of(*other) == host).collect();
        let place = here.iter().position(|other| *other == rank).expect("a rank is on its host");
        command.env("PHALANX_LOCAL_RANK", place.to_string());
        command.env("PHALANX_LOCAL_WORLD_SIZE", here.len().to_string());
        command.env("NCCL_HOSTID", format!("host{host}"));
        if self.gpus {
            command.env("CUDA_VISIBLE_DEVICES", gpus_of(&here));
        }
    }

    /// Starts the processes and waits until all have ended.
    pub fn run(&self) -> Result<Vec<Ended>, String> {
        Ok(self.start()?.finish())
    }

    /// As [`run`](Self::run), with every rank's report; any other end of any rank is an error.
    pub fn reports(&self) -> Result<Vec<String>, String> {
        let ended = self.run()?;
        if ended.iter().all(|rank| rank.outcome.is_ok()) {
            return Ok(ended.into_iter().filter_map(|rank| rank.outcome.ok()).collect());
        }
        Err(describe(&ended))
    }

    fn command(&self, rank: usize, job: &str, store: Option<&(Server, Token)>) -> Result<Command, String> {
        let program = std::env::current_exe().map_err(|error| format!("no own path: {error}"))?;
        let mut command = match &self.network {
            None => Command::new(program),
            Some((hosts, _)) => {
                let mut command = hosts.command("run", &[&self.host_of(rank).to_string()]);
                command.arg(program);
                command
            }
        };
        // Variables of the test's own environment, which may itself be a launcher's, do not count.
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if is_launcher_variable(&name) {
                command.env_remove(name);
            }
        }
        // To find the names of a backtrace takes a rank that panics seconds, for which its peers wait.
        command.env("RUST_BACKTRACE", "0");
        let lines: Vec<String> = self.scenarios.iter().map(|(name, args)| line(name, args)).collect();
        command.env(SCENARIOS, lines.join("\n"));
        if !self.gpus {
            // What is tested does not depend on whether the machine has some. A driver that was asked keeps
            // files open.
            command
                .env("CUDA_VISIBLE_DEVICES", "")
                .env("PHALANX_CUDA_LIB", "none: the test is not about GPUs");
        }
        if !self.plain {
            command.env("PHALANX_BACKEND", host(self.ranks).name());
            let ranks = self.first_ranks();
            // A newcomer has a number that the launcher knows, whatever it is.
            let (rank, ranks) = ((rank % ranks).to_string(), ranks.to_string());
            command.env("PHALANX_RANK", &rank).env("PHALANX_LOCAL_RANK", rank);
            command.env("PHALANX_WORLD_SIZE", &ranks).env("PHALANX_LOCAL_WORLD_SIZE", ranks);
            command.env("PHALANX_JOB", job);
            command.env("PHALANX_TIMEOUT", self.rank_deadline());
        }
        if let Some((server, token)) = store {
            self.place_on_host(&mut command, rank);
            command.env("PHALANX_STORE", server.address().to_string()).env("PHALANX_TOKEN", token.reveal());
        }
        for (only, name, value) in &self.env {
            if only.is_none_or(|only| only == rank) {
                match value {
                    Some(value) => command.env(name, value),
                    None => command.env_remove(name),
                };
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }
}

/// `LD_LIBRARY_PATH` with this folder before what the test itself has.
pub(crate) fn library_path(first: &Path) -> String {
    let first = first.display();
    std::env::var("LD_LIBRARY_PATH").map_or_else(|_| first.to_string(), |others| format!("{first}:{others}"))
}

/// Whether a launcher sets it. What chooses between NCCL and own kernels is the test's, and goes on to the ranks.
pub fn is_launcher_variable(name: &str) -> bool {
    if name == GPU_ALGORITHM {
        return false;
    }
    const PREFIXES: [&str; 7] = ["PHALANX_", "OMPI_", "PMI_", "PMIX_", "PALS_", "SLURM_", "TORCHELASTIC_"];
    const NAMES: [&str; 6] =
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || NAMES.contains(&name)
}

/// The processes that were started with this variable and are still there half a second from now, or later.
pub(crate) fn with_variable(name: &str, value: &str) -> Vec<u32> {
    let variable = format!("{name}={value}");
    let has_it = |process: &u32| {
        let environment = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
    };
    let processes = || {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok())
    };
    let until = Instant::now() + Duration::from_millis(500);
    loop {
        let left: Vec<u32> = processes().filter(has_it).collect();
        if left.is_empty() || Instant::now() >= until {
            return left;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A name that no other job on this host has.
fn job_id() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let time = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    format!("testkit-{}-{}-{count}", std::process::id(), time.as_nanos())
}
