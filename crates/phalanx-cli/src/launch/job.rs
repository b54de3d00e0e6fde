//! A job: ranks that are started together, watched, and ended together when one fails.

use super::guard::Guard;
use super::nodes::Nodes;
use super::notice::Notice;
use super::output::Output;
use super::part::{self, Part};
use super::rank::Rank;
use super::supervisor::{Event, Events, Started, Supervisor};
use rustix::process::Signal;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

/// What to start, how often on this node, and what to do with its output.
#[derive(Debug)]
pub struct Job {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    pub ranks: usize,
    pub output: Output,
    /// Where each rank's output is written to as well.
    pub log_dir: Option<PathBuf>,
    pub timeout: Option<Duration>,
}

/// How an attempt ended.
#[derive(Debug)]
pub enum Outcome {
    /// Every rank exited with status 0.
    Success,
    /// A rank failed; the others were ended.
    Failed(Failure),
    /// These ranks were still running at the deadline, and were ended.
    TimedOut { after: Duration, running: Vec<usize> },
    /// The launcher got this signal and forwarded it.
    Interrupted { signal: i32 },
    /// It ended on another node, and so here.
    Elsewhere(Notice),
    /// The program could not be started.
    NotStarted(StartError),
    /// Every rank exited with status 0, but what they wrote could not be passed on.
    Unwritten(io::Error),
}

/// The rank that failed first.
#[derive(Debug, Clone)]
pub struct Failure {
    pub rank: usize,
    pub status: ExitStatus,
    /// How long the job had run.
    pub after: Duration,
    /// The ranks of this node that were still running, and are ended now.
    pub others: usize,
    /// The last lines of its standard error.
    pub last_words: Vec<String>,
    /// Where all of it is.
    pub log: Option<PathBuf>,
}

impl Failure {
    /// The status a shell would give: the rank's own, or 128 + the signal that killed it.
    pub fn exit_code(&self) -> u8 {
        match (self.status.code(), self.status.signal()) {
            (Some(code), _) => u8::try_from(code).unwrap_or(1),
            (None, Some(signal)) => signal_code(signal),
            (None, None) => 1,
        }
    }
}

/// The status a shell gives to a program that a signal ended.
pub fn signal_code(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// Why a rank could not be started.
#[derive(Debug)]
pub enum StartError {
    /// The program cannot be.
    Program { program: OsString, source: io::Error },
    /// A log file cannot be made, as the error says.
    Log(io::Error),
}

impl StartError {
    /// The status of a shell for a program that is not there or cannot be run.
    pub fn exit_code(&self) -> u8 {
        match self {
            StartError::Program { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            StartError::Program { .. } => 126,
            StartError::Log(_) => 1,
        }
    }
}

impl std::fmt::Display for StartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StartError::Program { program, source } => {
                f.write_str(&super::report::describe_start_error(program, source))
            }
            StartError::Log(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        let (StartError::Program { source, .. } | StartError::Log(source)) = self;
        Some(source)
    }
}

impl Job {
    /// Runs all ranks on this node, to their end. `failed` is called at once when the first rank has failed, before
    /// the others are ended.
    ///
    /// To be called from the main thread: the kernel ends the ranks when the thread that started
    /// them ends.
    pub fn run(self, failed: impl FnOnce(&Failure)) -> anyhow::Result<Outcome> {
        let (_store, part) = part::alone(self.ranks)?;
        let mut failed = Some(failed);
        let ending = |outcome: &Outcome| {
            if let (Outcome::Failed(failure), Some(failed)) = (outcome, failed.take()) {
                failed(failure);
            }
            None
        };
        let events = Events::catch()?;
        match self.attempt(&part, None, &events, ending) {
            Outcome::NotStarted(error) => Err(error.into()),
            outcome => Ok(outcome),
        }
    }

    /// Runs this node's part of an attempt to its end. `ending` is called at once when it is to end before
    /// its time, and may answer an outcome that counts in place of the one it was told.
    ///
    /// To be called from the main thread, as [`run`](Job::run).
    pub fn attempt(
        &self,
        part: &Part,
        nodes: Option<&Nodes>,
        events: &Events,
        ending: impl FnMut(&Outcome) -> Option<Outcome>,
    ) -> Outcome {
        let started = match self.start(part, events) {
            Ok(started) => started,
            Err(error) => return Outcome::NotStarted(error),
        };
        let _listening = nodes.map(|nodes| {
            let sender = events.sender();
            nodes.listen(part.restart, move |notice| {
                let _ = sender.send(Event::Elsewhere(notice));
            })
        });
        Supervisor::new(self.timeout, started, events).run(ending)
    }

    fn start(&self, part: &Part, events: &Events) -> Result<Started, StartError> {
        let mut guard = Guard::start(part);

        let mut ranks: Vec<Rank> = Vec::new();
        for local in 0..self.ranks {
            match Rank::start(self, part, local) {
                Ok(rank) => {
                    guard.watch(rank.group());
                    ranks.push(rank);
                }
                Err(error) => {
                    for rank in &mut ranks {
                        rank.signal(Signal::KILL);
                        // Its status is of no interest, only that no zombie stays.
                        let _ = rank.reap();
                    }
                    return Err(error);
                }
            }
        }
        for (index, rank) in ranks.iter().enumerate() {
            let sender = events.sender();
            rank.watch(move |succeeded| {
                let _ = sender.send(Event::Ended { index, succeeded });
            });
        }
        Ok(Started { ranks, guard })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        let failure = |raw| Failure {
            rank: 0,
            status: ExitStatus::from_raw(raw),
            after: Duration::ZERO,
            others: 0,
            last_words: Vec::new(),
            log: None,
        };
        assert_eq!(failure(3 << 8).exit_code(), 3);
        assert_eq!(failure(9).exit_code(), 137);
    }
}
