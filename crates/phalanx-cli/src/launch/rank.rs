//! One rank: a child process with the launcher's variables, in a process group of its own.
//!
//! It dies with the launcher. The thread that signals it is also the one that reaps it: a signal can never
//! reach another process that got the same process id.

use super::events::{Events, LaunchEvent};
use super::job::Job;
use super::log_files::LogFiles;
use super::metrics;
use super::output::{self, LAST_OUTPUT, Reader, Tail};
use super::placement::Placement;
use super::reports::{self, Diagnosis, Report, Reports, What};
use super::start_error::StartError;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use std::io;
use std::os::unix::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A started rank.
pub struct Rank {
    number: usize,
    /// Whether it replaces a rank that has failed.
    is_newcomer: bool,
    child: Child,
    pid: Pid,
    readers: Vec<Reader>,
    tail: Tail,
    log: Option<PathBuf>,
    /// What it has reported.
    reported: Reported,
    /// The exit status, once the rank is reaped.
    pub status: Option<ExitStatus>,
    reaped: Option<Instant>,
}

/// What a rank has reported so far.
#[derive(Default)]
struct Reported {
    /// Its processes: the child, or what the child has started.
    processes: Vec<u32>,
    has_joined: bool,
    /// Where it can be asked for flight records.
    address: Option<SocketAddr>,
    records: Records,
    /// Its first word about a failure.
    trouble: Option<Trouble>,
    /// Whether the others have gone on without it.
    is_left_out: bool,
    /// When it is killed, if it still runs.
    kill_at: Option<Instant>,
}

enum Trouble {
    Panicked,
    Failed(Diagnosis),
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Records {
    #[default]
    NotRequested,
    Requested,
    Written,
}

impl Rank {
    /// Starts rank number `local` of this node.
    pub fn start(
        job: &Job,
        placement: &Placement,
        local: usize,
        reports: Option<&Reports>,
        is_newcomer: bool,
    ) -> Result<Rank, StartError> {
        let number = placement.first + local;
        let restart = placement.restart.max(job.restarts.done());
        let logs = job.log_dir.as_deref().map(|dir| LogFiles::create(dir, number, restart));
        let logs = logs.transpose()?;
        let mut command = Command::new(&job.program);
        placement.set_variables(&mut command, local, is_newcomer);
        match reports {
            Some(reports) => command.env(reports::VARIABLE, reports.name()),
            None => command.env_remove(reports::VARIABLE),
        };
        if job.serves_metrics {
            command.env(metrics::VARIABLE, "1");
        }
        command
            .args(&job.arguments)
            .stdin(standard_input(number))
            .stdout(job.output.stdio())
            .stderr(job.output.stdio())
            // Signals then reach a rank's descendants too, and a key press in the terminal reaches the
            // launcher alone, which forwards it once.
            .process_group(0);
        die_with_parent(&mut command);

        let child = job
            .binding
            .start(local, || command.spawn())
            .map_err(|source| StartError::Binding { rank: number, source })?
            .map_err(|error| StartError::program(&job.program, error))?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process id is above 0");
        let mut rank = Rank {
            number,
            is_newcomer,
            child,
            pid,
            readers: Vec::new(),
            tail: Tail::default(),
            log: logs.as_ref().map(|logs| logs.err_path.clone()),
            reported: Reported::default(),
            status: None,
            reaped: None,
        };
        if let Err(error) = rank.read_output(job.output, logs) {
            rank.kill();
            return Err(StartError::thread("passes a rank's output on", error));
        }
        Ok(rank)
    }

    fn read_output(&mut self, output: output::Output, logs: Option<LogFiles>) -> io::Result<()> {
        let (out, err) = logs.map_or((None, None), |logs| (Some(logs.out), Some(logs.err)));
        if let Some(stream) = self.child.stdout.take() {
            self.readers.push(output::pass_stdout(output, self.number, stream, out)?);
        }
        if let Some(stream) = self.child.stderr.take() {
            self.readers.push(output::pass_stderr(output, self.number, stream, err, self.tail.clone())?);
        }
        Ok(())
    }

    /// Makes another thread announce the rank's end, as that of number `index`. It does not reap the rank.
    pub fn watch(&self, index: usize, events: &Events) -> Result<(), StartError> {
        let (pid, sender, reports) = (self.pid, events.sender(), events.reports().cloned());
        let watch = move || {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            let succeeded = loop {
                match rustix::process::waitid(WaitId::Pid(pid), options) {
                    Err(rustix::io::Errno::INTR) => {}
                    Ok(Some(status)) => break status.exit_status() == Some(0),
                    Ok(None) | Err(_) => break false,
                }
            };
            let announced = reports.is_some_and(|reports| reports.announce_end(index, succeeded).is_ok());
            if !announced {
                let _ = sender.send(LaunchEvent::Ended { index, succeeded });
            }
        };
        let thread = std::thread::Builder::new().name(format!("rank {}", self.number));
        thread.spawn(watch).map_err(|error| StartError::thread("waits for a rank", error))?;
        Ok(())
    }

    /// Takes in what the rank has reported.
    pub fn note(&mut self, report: Report, from: SocketAddr) {
        let Reported { processes, has_joined, address, records, trouble, .. } = &mut self.reported;
        if !processes.contains(&report.process) {
            processes.push(report.process);
        }
        match report.what {
            What::Joined { answers, .. } => {
                // What was before has been overcome.
                (*has_joined, *trouble) = (true, None);
                *address = Some(from).filter(|_| answers);
            }
            What::Failed(diagnosis) => {
                trouble.get_or_insert(Trouble::Failed(diagnosis));
            }
            What::Panicked => {
                trouble.get_or_insert(Trouble::Panicked);
            }
            What::Written => *records = Records::Written,
            What::Metrics(_) => {}
        }
    }

    /// Whether it has told that it is a rank of a communicator.
    pub fn has_joined(&self) -> bool {
        self.reported.has_joined
    }

    /// Whether it runs, and is not a newcomer that still waits for the others.
    pub fn can_take_in_others(&self) -> bool {
        self.is_running() && (self.has_joined() || !self.is_newcomer)
    }

    /// Whether it had to be there for the job's first communicator to come about.
    pub fn is_missing_at_start(&self) -> bool {
        !self.has_joined() && !self.is_newcomer
    }

    /// Whether this is a process of the rank, as far as it has said.
    pub fn has_process(&self, process: u32) -> bool {
        self.reported.processes.contains(&process)
    }

    /// What the rank has found out about the failure of its communicator, unless it panicked itself.
    pub fn diagnosis(&self) -> Option<&Diagnosis> {
        match &self.reported.trouble {
            Some(Trouble::Failed(diagnosis)) => Some(diagnosis),
            Some(Trouble::Panicked) | None => None,
        }
    }

    /// Notes that the others have gone on without it, and when it is to be killed.
    pub fn leave_out(&mut self, kill_at: Option<Instant>) {
        (self.reported.is_left_out, self.reported.kill_at) = (true, kill_at);
    }

    /// Whether the others have gone on without it.
    pub fn is_left_out(&self) -> bool {
        self.reported.is_left_out
    }

    /// When it is to be killed, if it runs.
    pub fn kill_at(&self) -> Option<Instant> {
        self.reported.kill_at.filter(|_| self.is_running())
    }

    /// Asks a running rank to write its flight records, if it can.
    pub fn request_records(&mut self, reports: &Reports) {
        let address = self.reported.address.as_ref().filter(|_| self.status.is_none());
        if address.is_some_and(|address| reports.request_records(address).is_ok()) {
            self.reported.records = Records::Requested;
        }
    }

    /// Whether it is still writing flight records.
    pub fn is_writing_records(&self) -> bool {
        self.is_running() && self.reported.records == Records::Requested
    }

    /// The rank's number among all ranks of the job.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The rank's process group.
    pub fn group(&self) -> Pid {
        self.pid
    }

    /// The log file of its standard error.
    pub fn log(&self) -> Option<&Path> {
        self.log.as_deref()
    }

    pub fn is_running(&self) -> bool {
        self.status.is_none()
    }

    /// Sends a signal to the rank and its descendants.
    pub fn signal(&self, signal: Signal) {
        if self.is_running() {
            // It can only fail because none of them exists any more.
            let _ = rustix::process::kill_process_group(self.pid, signal);
        }
    }

    /// Waits for the rank's end and takes its exit status.
    pub fn reap(&mut self) -> io::Result<ExitStatus> {
        let status = self.child.wait()?;
        (self.status, self.reaped) = (Some(status), Some(Instant::now()));
        Ok(status)
    }

    /// Ends the rank and its descendants at once.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        // The status does not matter, but no zombie must stay.
        let _ = self.reap();
    }

    /// When it was reaped.
    pub fn ended(&self) -> Option<Instant> {
        self.reaped
    }

    /// Whether the rank was reaped and its output was passed on.
    pub fn is_silent(&self) -> bool {
        self.reaped.is_some_and(|ended| self.readers.iter().all(|reader| reader.is_done(ended)))
    }

    /// The last lines of a rank's standard error. For a reaped rank, waits a moment for the rest of it.
    pub fn last_lines(&self) -> Vec<String> {
        let deadline = Instant::now() + LAST_OUTPUT;
        while !self.is_running() && Instant::now() < deadline && !self.is_silent() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.tail.lines()
    }

    /// Why the rank's output could not be passed on, once.
    pub fn take_output_error(&self) -> Option<io::Error> {
        self.readers.iter().find_map(Reader::take_error)
    }
}

/// The launcher's standard input for rank 0, unless it is a terminal: a process that reads a terminal from
/// another process group is stopped.
fn standard_input(rank: usize) -> Stdio {
    use std::io::IsTerminal;
    if rank == 0 && !io::stdin().is_terminal() { Stdio::inherit() } else { Stdio::null() }
}

/// Makes the kernel kill the child when the launcher ends, however it ends.
#[cfg(target_os = "linux")]
fn die_with_parent(command: &mut Command) {
    let launcher = rustix::process::getpid();
    let in_child = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the launcher ended before that call, there is no signal.
        if rustix::process::getppid() != Some(launcher) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed. The closure makes two
    // system calls, without allocating or taking a lock.
    unsafe { command.pre_exec(in_child) };
}

#[cfg(not(target_os = "linux"))]
fn die_with_parent(_command: &mut Command) {}
