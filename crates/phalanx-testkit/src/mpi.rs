//! Ranks of an MPI job: the test binary, started by an MPI's own mpirun.
//!
//! An mpirun takes a second to start, so one job performs several scenarios, each on a communicator of its
//! own. Ranks report in files: an mpirun mixes their outputs.

use crate::hosts::{self, Host};
use crate::processes;
use crate::random::ANY_ORDER;
use crate::scenario::{Outcome, Scenario};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The list of scenarios, and the folder for the reports.
const SCENARIOS: &str = "PHALANX_TESTKIT_MPI_SCENARIOS";
const REPORTS: &str = "PHALANX_TESTKIT_MPI_REPORTS";
const MARK: &str = "mark";
/// Of ranks on several hosts: the hosts, as files to go to, one a line; the first is where everybody is.
const HOSTS: &str = "PHALANX_TESTKIT_MPI_HOSTS";

/// The variable that names the folder of an MPI with the standard ABI (a Python environment with `mpich` 5).
pub const STANDARD_ABI: &str = "PHALANX_TEST_MPI_ABI";

/// The variable that names the folder of an Intel MPI (a Python environment with `impi-rt`). It is a test's
/// own wish: CI has none.
pub const INTEL: &str = "PHALANX_TEST_INTEL_MPI";

/// In a rank of a [`Job`]: performs its scenarios and says how the process ends.
pub(crate) fn serve(scenarios: &[Scenario]) -> Option<ExitCode> {
    let list = std::env::var(SCENARIOS).ok()?;
    if let Ok(hosts) = std::env::var(HOSTS) {
        eprintln!("cannot go to its host: {}", go_to_host(&hosts));
        return Some(ExitCode::FAILURE);
    }
    let reports = PathBuf::from(std::env::var_os(REPORTS)?);
    let (line, code) = processes::report(&processes::perform(scenarios, &list));
    // First under another name: whoever sees the file sees all of it.
    let name = std::process::id().to_string();
    let written = std::fs::write(reports.join(format!("{name}.new")), line)
        .and_then(|()| std::fs::rename(reports.join(format!("{name}.new")), reports.join(name)));
    Some(if written.is_ok() { code } else { ExitCode::FAILURE })
}

/// Becomes the same program on this rank's host, where the launcher's variables say how many ranks are there,
/// and the host's GPUs are its own. Comes back only with an error.
fn go_to_host(hosts: &str) -> String {
    let number = |names: [&str; 2]| {
        let value = names.into_iter().find_map(|name| std::env::var(name).ok());
        value.and_then(|value| value.parse::<usize>().ok())
    };
    let (Some(rank), Some(ranks)) =
        (number(["OMPI_COMM_WORLD_RANK", "PMI_RANK"]), number(["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]))
    else {
        return "no rank of an MPI job".into();
    };
    let hosts: Vec<&str> = hosts.lines().collect();
    let host_of = |rank: usize| rank * hosts.len() / ranks;
    let host = host_of(rank);
    let here: Vec<usize> = (0..ranks).filter(|other| host_of(*other) == host).collect();
    if host > 0
        && let Err(error) = hosts::go_to(hosts[host])
    {
        return error.to_string();
    }
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return error.to_string(),
    };
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).env_remove(HOSTS).env("NCCL_HOSTID", format!("host{host}"));
    if std::env::var_os("CUDA_VISIBLE_DEVICES").is_none() {
        command.env("CUDA_VISIBLE_DEVICES", processes::gpus_of(&here));
    }
    for (name, value) in [
        ("OMPI_COMM_WORLD_LOCAL_RANK", rank - here[0]),
        ("MPI_LOCALRANKID", rank - here[0]),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", here.len()),
        ("MPI_LOCALNRANKS", here.len()),
    ] {
        if std::env::var_os(name).is_some() {
            command.env(name, value.to_string());
        }
    }
    hosts::become_program(&mut command).to_string()
}

/// In a rank of a [`Job`]: notes that something happens to it now; [`Ended::mark`] tells when.
pub fn mark() -> std::io::Result<()> {
    let folder = std::env::var_os(REPORTS).ok_or(std::io::ErrorKind::NotFound)?;
    std::fs::write(Path::new(&folder).join(MARK), std::process::id().to_string())
}

/// An MPI that is installed.
#[derive(Debug, Clone)]
pub struct Installation {
    /// Its name in the tests' names.
    pub name: &'static str,
    /// Its mpirun.
    pub mpirun: PathBuf,
    arguments: &'static [&'static str],
    /// What `PHALANX_MPI_LIB` is set to, where the file is not the one that would be chosen.
    library: Option<PathBuf>,
    /// What it needs besides.
    env: Vec<(&'static str, String)>,
    /// What makes it CUDA-aware, if anything does.
    pub cuda_aware: Option<&'static [(&'static str, &'static str)]>,
}

impl Installation {
    /// The MPI libraries that the tests know: each, or why it cannot be used here.
    pub fn all() -> Vec<(&'static str, Result<Installation, String>)> {
        let of_path = |name, program: &str, arguments| {
            let mpirun = find(program).ok_or_else(|| format!("{program} is not installed"))?;
            Ok(Installation { name, mpirun, arguments, library: None, env: Vec::new(), cuda_aware: None })
        };
        let abi = || {
            let prefix =
                std::env::var_os(STANDARD_ABI).ok_or_else(|| format!("{STANDARD_ABI} is not set"))?;
            let prefix = Path::new(&prefix);
            let (mpirun, library) = (prefix.join("bin/mpirun"), prefix.join("lib/libmpi_abi.so.1"));
            if !mpirun.exists() || !library.exists() {
                return Err(format!("{} has no MPI with the standard ABI", prefix.display()));
            }
            let (name, library) = ("standard_abi", Some(library));
            Ok(Installation { name, mpirun, arguments: &[], library, env: Vec::new(), cuda_aware: None })
        };
        // Version 4 wants a program that reaches other hosts, also where there are none; a container may have
        // no ssh.
        let open_mpi: &[&str] = &["--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent", "sh"];
        let mut all = vec![
            ("open_mpi", of_path("open_mpi", "mpirun.openmpi", open_mpi)),
            ("mpich", of_path("mpich", "mpirun.mpich", &[])),
            ("standard_abi", abi()),
        ];
        all.extend(
            std::env::var_os(INTEL).map(|prefix| ("intel_mpi", Installation::intel(Path::new(&prefix)))),
        );
        all
    }

    fn intel(prefix: &Path) -> Result<Installation, String> {
        let (mpirun, library) = (prefix.join("bin/mpiexec.hydra"), prefix.join("lib/libmpi.so.12"));
        if !mpirun.exists() || !library.exists() {
            return Err(format!("{} has no Intel MPI", prefix.display()));
        }
        Ok(Installation {
            name: "intel_mpi",
            mpirun,
            arguments: &["-hosts", "localhost"],
            library: Some(library),
            env: vec![
                ("I_MPI_ROOT", prefix.display().to_string()),
                ("LD_LIBRARY_PATH", processes::library_path(&prefix.join("lib"))),
                ("I_MPI_FABRICS", "shm".into()),
            ],
            cuda_aware: Some(&[("I_MPI_OFFLOAD", "1"), ("I_MPI_OFFLOAD_IPC", "0")]),
        })
    }

    /// The interface of its process manager, by NVSHMEM's name: PMI-1 is what Hydra speaks, which all but
    /// Open MPI have.
    pub fn process_manager(&self) -> &'static str {
        if self.name == "open_mpi" { "PMIX" } else { "PMI" }
    }

    /// A job of this test binary.
    pub fn job(&self, ranks: usize) -> Job {
        let program = std::env::current_exe().expect("a process has a program");
        let mut job = self.job_of(program, ranks);
        if ranks > 2 {
            // With two ranks there is one order, but for the two operands'.
            job = job.env(ANY_ORDER, "1");
        }
        job
    }

    /// A job of another program.
    pub fn job_of(&self, program: impl Into<PathBuf>, ranks: usize) -> Job {
        let mut job = Job {
            installation: self.clone(),
            program: program.into(),
            launcher_arguments: Vec::new(),
            hosts: 1,
            arguments: Vec::new(),
            ranks,
            scenarios: Vec::new(),
            env: Vec::new(),
            deadline: Duration::from_secs(60),
        };
        if let Some(library) = &self.library {
            job = job.env("PHALANX_MPI_LIB", &library.to_string_lossy());
        }
        self.env.iter().fold(job, |job, (name, value)| job.env(name, value))
    }
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.exists())
}

/// Ranks to be started by an mpirun.
#[derive(Debug, Clone)]
pub struct Job {
    installation: Installation,
    program: PathBuf,
    launcher_arguments: Vec<String>,
    hosts: usize,
    arguments: Vec<String>,
    ranks: usize,
    scenarios: Vec<String>,
    env: Vec<(String, Option<String>)>,
    deadline: Duration,
}

/// How a job ended.
#[derive(Debug)]
pub struct Ended {
    /// What mpirun ended with; `None` if it had to be ended because its time was up.
    pub status: Option<ExitStatus>,
    /// What those ranks reported that came to it, in no order.
    pub outcomes: Vec<Outcome>,
    /// What mpirun and the ranks wrote.
    pub output: String,
    /// Of the rank that made a [`mark`]: its process, and how long before the job's end that was.
    pub mark: Option<(u32, Duration)>,
    /// Processes of the job that are still there.
    pub left: Vec<u32>,
    /// Of a job whose time was up: whether its ranks had all ended by then, and only mpirun had not.
    pub launcher_alone: bool,
    /// Of such a job: where the threads of its processes were, a line each.
    pub held: Vec<String>,
}

impl Job {
    /// A scenario and its arguments; several are performed one behind the other.
    pub fn scenario(mut self, name: &str, args: &[&str]) -> Job {
        self.scenarios.push(processes::line(name, &args.iter().map(ToString::to_string).collect::<Vec<_>>()));
        self
    }

    /// An argument of the program.
    pub fn arg(mut self, arg: &str) -> Job {
        self.arguments.push(arg.to_owned());
        self
    }

    /// An argument of mpirun.
    pub fn launcher_arg(mut self, arg: &str) -> Job {
        self.launcher_arguments.push(arg.to_owned());
        self
    }

    /// The ranks are on so many hosts (see [`hosts::Host`]), each with as many of the ranks and of the GPUs;
    /// MPI uses what goes between these. For scenarios only.
    pub fn on_hosts(mut self, hosts: usize) -> Job {
        self.hosts = hosts;
        let job = self.env("OMPI_MCA_btl", "tcp,self").env("MPIR_CVAR_NOLOCAL", "1");
        let job = job.env("PHALANX_HEARTBEAT_TIMEOUT", "1.4");
        // MPICH 4.0.2 now and then hangs in MPI_Finalize over UCX and TCP.
        job.env("UCX_TLS", "sysv,self")
    }

    /// An environment variable of every rank.
    pub fn env(mut self, name: &str, value: &str) -> Job {
        self.env.push((name.to_owned(), Some(value.to_owned())));
        self
    }

    /// When a job that is still running is ended; 60 seconds unless told otherwise. The ranks have half of it
    /// as their own deadline.
    pub fn deadline(mut self, deadline: Duration) -> Job {
        self.deadline = deadline;
        self
    }

    /// Runs it to its end.
    pub fn run(&self) -> Result<Ended, String> {
        let folder = Folder::new().map_err(|error| format!("a folder for reports: {error}"))?;
        let mut command = Command::new(&self.installation.mpirun);
        for (name, _) in std::env::vars_os() {
            if processes::is_launcher_variable(&name.to_string_lossy()) {
                command.env_remove(name);
            }
        }
        command
            .args(self.installation.arguments)
            .args(&self.launcher_arguments)
            .arg("-np")
            .arg(self.ranks.to_string());
        command.arg(&self.program).args(&self.arguments);
        command.env("PHALANX_TIMEOUT", (self.deadline.as_secs_f64() / 2.0).to_string());
        if !self.scenarios.is_empty() {
            command.env(SCENARIOS, self.scenarios.join("\n")).env(REPORTS, &folder.0);
        }
        let hosts: Vec<_> = (1..self.hosts).map(|_| Host::make()).collect::<Result<_, _>>()?;
        if self.hosts > 1 {
            let files = std::iter::once("here".to_owned()).chain(hosts.iter().map(Host::path));
            command.env(HOSTS, files.collect::<Vec<_>>().join("\n"));
        }
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let output = folder.0.join("output");
        let file = std::fs::File::create(&output).map_err(|error| error.to_string())?;
        let copy = file.try_clone().map_err(|error| error.to_string())?;
        command.stdin(Stdio::null()).stdout(file).stderr(copy);
        let child = command.spawn();
        let child = child.map_err(|error| format!("{}: {error}", self.installation.mpirun.display()))?;
        let ranks = || processes::with_variable(REPORTS, &folder.0.to_string_lossy());
        let End { status, launcher_alone, held } = wait(child, Instant::now() + self.deadline, ranks);
        let mark = folder.mark();
        let left = processes::with_variable(REPORTS, &folder.0.to_string_lossy());
        let (outcomes, output) = (folder.outcomes(), read(&output));
        Ok(Ended { status, outcomes, output, mark, left, launcher_alone, held })
    }

    /// As [`run`](Self::run); any other end than every rank's success is an error.
    pub fn succeed(&self) -> Result<Ended, String> {
        let ended = self.run()?;
        let reported = if self.scenarios.is_empty() { 0 } else { self.ranks };
        let succeeded = ended.status.is_some_and(|status| status.success());
        if succeeded && ended.outcomes.len() == reported && ended.outcomes.iter().all(Result::is_ok) {
            return Ok(ended);
        }
        let status = ended.status.map_or("still running at the deadline".to_owned(), |s| s.to_string());
        let problems: Vec<&str> =
            ended.outcomes.iter().filter_map(|outcome| outcome.as_ref().err().map(String::as_str)).collect();
        Err(format!(
            "{} with {} ranks: {status}; {} ranks reported; {}\n{}",
            self.installation.name,
            self.ranks,
            ended.outcomes.len(),
            problems.join("\n"),
            ended.output
        ))
    }
}

/// How an mpirun ended.
struct End {
    status: Option<ExitStatus>,
    launcher_alone: bool,
    held: Vec<String>,
}

/// Waits for an mpirun, and ends it at the deadline.
fn wait(mut child: Child, deadline: Instant, job: impl Fn() -> Vec<u32>) -> End {
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return End { status: Some(status), launcher_alone: false, held: Vec::new() };
        }
        if Instant::now() >= deadline {
            let there = job();
            let held = there.iter().flat_map(|process| threads_of(*process)).collect();
            // An mpirun ends its ranks when it is told to end, not when it is killed.
            #[cfg(target_os = "linux")]
            {
                let process = rustix::process::Pid::from_child(&child);
                let _ = rustix::process::kill_process(process, rustix::process::Signal::TERM);
                std::thread::sleep(Duration::from_secs(3));
            }
            let _ = child.kill();
            let _ = child.wait();
            return End { status: None, launcher_alone: there == [child.id()], held };
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Where the threads of a process are: its rank, then each thread's name, state, place in the kernel and system call.
fn threads_of(process: u32) -> Vec<String> {
    let folder = PathBuf::from(format!("/proc/{process}"));
    let environment = read(&folder.join("environ"));
    let is_rank = |entry: &&str| entry.starts_with("PMI_RANK=") || entry.starts_with("OMPI_COMM_WORLD_RANK=");
    let rank = environment.split('\0').find(is_rank).unwrap_or("no rank").to_owned();
    let threads = std::fs::read_dir(folder.join("task")).into_iter().flatten().flatten();
    let line = |thread: std::fs::DirEntry| {
        let part = |name: &str| read(&thread.path().join(name)).trim().to_owned();
        let status = part("status");
        let state = status.lines().find(|line| line.starts_with("State:")).unwrap_or_default();
        format!("{process} ({rank}) {}: {state}, {}, {}", part("comm"), part("wchan"), part("syscall"))
    };
    threads.map(line).collect()
}

fn read(path: &Path) -> String {
    std::fs::read(path)
        .map_or_else(|error| error.to_string(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// A folder that goes away.
struct Folder(PathBuf);

impl Folder {
    fn new() -> std::io::Result<Folder> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("phalanx-testkit-mpi-{}-{count}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Folder(path))
    }

    /// Whose mark there is, and how old it is.
    fn mark(&self) -> Option<(u32, Duration)> {
        let path = self.0.join(MARK);
        let process = read(&path).parse().ok()?;
        let age = std::fs::metadata(&path).ok()?.modified().ok()?.elapsed().unwrap_or_default();
        Some((process, age))
    }

    fn outcomes(&self) -> Vec<Outcome> {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        let reports = entries.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok());
        reports.filter_map(|entry| processes::outcome(&read(&entry.path()))).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left behind in the folder for temporary files harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
