//! One rank: a child process with the launcher's variables, in a process group of its own.
//!
//! It dies with the launcher. The thread that signals it is also the one that reaps it: a signal can never
//! reach another process that got the same process id.

use super::job::Job;
use super::log_files::LogFiles;
use super::output::{self, LAST_OUTPUT, Reader, Tail};
use super::placement::Placement;
use super::start_error::StartError;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A started rank.
pub struct Rank {
    number: usize,
    child: Child,
    pid: Pid,
    readers: Vec<Reader>,
    tail: Tail,
    log: Option<PathBuf>,
    /// The exit status, once the rank is reaped.
    pub status: Option<ExitStatus>,
    reaped: Option<Instant>,
}

impl Rank {
    /// Starts rank number `local` of this node.
    pub fn start(job: &Job, placement: &Placement, local: usize) -> Result<Rank, StartError> {
        let number = placement.first + local;
        let logs = job.log_dir.as_deref().map(|dir| LogFiles::create(dir, number, placement.restart));
        let logs = logs.transpose()?;
        let mut command = Command::new(&job.program);
        placement.set_variables(&mut command, local);
        command
            .args(&job.arguments)
            .stdin(standard_input(number))
            .stdout(job.output.stdio())
            .stderr(job.output.stdio())
            // Signals then reach a rank's descendants too, and a key press in the terminal reaches the
            // launcher alone, which forwards it once.
            .process_group(0);
        die_with_parent(&mut command);

        let mut child =
            command.spawn().map_err(|source| StartError::Program { program: job.program.clone(), source })?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process id is above 0");
        let tail = Tail::default();
        let mut readers = Vec::new();
        let (out, err, log) = match logs {
            Some(logs) => (Some(logs.out), Some(logs.err), Some(logs.err_path)),
            None => (None, None, None),
        };
        if let Some(stream) = child.stdout.take() {
            readers.push(output::pass_stdout(job.output, number, stream, out));
        }
        if let Some(stream) = child.stderr.take() {
            readers.push(output::pass_stderr(job.output, number, stream, err, tail.clone()));
        }
        Ok(Rank { number, child, pid, readers, tail, log, status: None, reaped: None })
    }

    /// Calls `ended` from another thread when the rank has ended, with whether it succeeded. It does not reap
    /// it.
    pub fn watch(&self, ended: impl FnOnce(bool) + Send + 'static) {
        let pid = self.pid;
        std::thread::spawn(move || {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            loop {
                match rustix::process::waitid(WaitId::Pid(pid), options) {
                    Err(rustix::io::Errno::INTR) => {}
                    Ok(Some(status)) => return ended(status.exit_status() == Some(0)),
                    Ok(None) | Err(_) => return ended(false),
                }
            }
        });
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

    /// Whether the rank was reaped and its output was passed on.
    pub fn is_silent(&self) -> bool {
        self.reaped.is_some_and(|ended| self.readers.iter().all(|reader| reader.is_done(ended)))
    }

    /// The last lines of a reaped rank's standard error. Waits a moment for the rest of it.
    pub fn last_lines(&self) -> Vec<String> {
        let deadline = Instant::now() + LAST_OUTPUT;
        while Instant::now() < deadline && !self.is_silent() {
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
