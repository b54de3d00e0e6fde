//! A job: ranks that are started together, watched, and ended together when one fails.

use super::guard::Guard;
use super::nodes::Nodes;
use super::notice::Notice;
use super::output::Output;
use super::part::{self, Part};
use super::rank::Rank;
use super::signals::Forwarder;
use super::supervisor::{Event, Started, Supervisor};
use rustix::process::Signal;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::mpsc::{self, Sender};
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

/// The program could not be started.
#[derive(Debug)]
pub struct StartError {
    pub program: OsString,
    pub source: io::Error,
}

impl StartError {
    /// The status of a shell for a program that is not there or cannot be run.
    pub fn exit_code(&self) -> u8 {
        if self.source.kind() == io::ErrorKind::NotFound { 127 } else { 126 }
    }
}

impl std::fmt::Display for StartError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&super::report::describe_start_error(&self.program, &self.source))
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
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
        match self.attempt(&part, None, ending) {
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
        ending: impl FnMut(&Outcome) -> Option<Outcome>,
    ) -> Outcome {
        let (sender, events) = mpsc::channel();
        let ranks = match self.start(part, &sender) {
            Ok(ranks) => ranks,
            Err(error) => return Outcome::NotStarted(error),
        };
        let _listening = nodes.map(|nodes| {
            nodes.listen(part.restart, move |notice| {
                let _ = sender.send(Event::Elsewhere(notice));
            })
        });
        Supervisor::new(self.timeout, ranks, events).run(ending)
    }

    fn start(&self, part: &Part, sender: &Sender<Event>) -> Result<Started, StartError> {
        let error = |source| StartError { program: self.program.clone(), source };
        let to_queue = sender.clone();
        // Before the first rank starts: a signal in between would end the launcher alone.
        let forwarder = Forwarder::start(move |signal| {
            let _ = to_queue.send(Event::Signal(signal));
        });
        let forwarder = forwarder.map_err(error)?;
        let mut guard = Guard::start(part);

        let mut ranks: Vec<Rank> = Vec::with_capacity(self.ranks);
        for local in 0..self.ranks {
            match Rank::start(self, part, local) {
                Ok(rank) => {
                    guard.watch(rank.group());
                    ranks.push(rank);
                }
                Err(source) => {
                    for rank in &mut ranks {
                        rank.signal(Signal::KILL);
                        // Its status is of no interest, only that no zombie stays.
                        let _ = rank.reap();
                    }
                    return Err(error(source));
                }
            }
        }
        for (index, rank) in ranks.iter().enumerate() {
            let to_queue = sender.clone();
            rank.watch(move |succeeded| {
                let _ = to_queue.send(Event::Ended { index, succeeded });
            });
        }
        Ok(Started { ranks, guard, _forwarder: forwarder })
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
