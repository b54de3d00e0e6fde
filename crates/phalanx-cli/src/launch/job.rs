//! A job: ranks that are started together, watched, and ended together when one fails.
//!
//! One thread decides everything, from a queue of events; the other threads only feed it.

use super::output::Output;
use super::rank::Rank;
use super::signals::Forwarder;
use rustix::process::Signal;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// How long ranks that were asked to end may take before they are killed.
const GRACE: Duration = Duration::from_secs(5);

/// What to start, how often, and what to do with its output.
#[derive(Debug)]
pub struct Job {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    pub ranks: usize,
    pub output: Output,
    pub timeout: Option<Duration>,
}

/// How a job ended.
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
}

/// The rank that failed first.
#[derive(Debug, Clone)]
pub struct Failure {
    pub rank: usize,
    pub status: ExitStatus,
    /// How long the job had run.
    pub after: Duration,
    /// The ranks that were still running, and are ended now.
    pub others: usize,
    /// The last lines of its standard error.
    pub last_words: Vec<String>,
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
    /// Runs all ranks to their end. `failed` is called at once when the first rank has failed, before
    /// the others are ended.
    ///
    /// To be called from the main thread: the kernel ends the ranks when the thread that started
    /// them ends.
    pub fn run(self, failed: impl FnOnce(&Failure)) -> Result<Outcome, StartError> {
        let (sender, events) = mpsc::channel();
        let ranks = self.start(&sender)?;
        Ok(Supervisor::new(self.timeout, ranks, events).run(failed))
    }

    fn start(&self, sender: &Sender<Event>) -> Result<Started, StartError> {
        let error = |source| StartError { program: self.program.clone(), source };
        let id = job_id().map_err(error)?;
        let to_queue = sender.clone();
        // Before the first rank starts: a signal in between would end the launcher alone.
        let forwarder = Forwarder::start(move |signal| {
            let _ = to_queue.send(Event::Signal(signal));
        });
        let forwarder = forwarder.map_err(error)?;

        let mut ranks: Vec<Rank> = Vec::with_capacity(self.ranks);
        for number in 0..self.ranks {
            match Rank::start(self, &id, number) {
                Ok(rank) => ranks.push(rank),
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
        for (number, rank) in ranks.iter().enumerate() {
            let to_queue = sender.clone();
            rank.watch(move |succeeded| {
                let _ = to_queue.send(Event::Ended { rank: number, succeeded });
            });
        }
        Ok(Started { ranks, _forwarder: forwarder })
    }
}

struct Started {
    ranks: Vec<Rank>,
    _forwarder: Forwarder,
}

enum Event {
    /// A rank has ended, and waits to be reaped.
    Ended { rank: usize, succeeded: bool },
    /// The launcher got a signal.
    Signal(i32),
}

/// What the job is up to.
enum Phase {
    Running,
    /// The ranks were asked to end; after the deadline, if any, they are killed.
    Ending {
        outcome: Outcome,
        kill_at: Option<Instant>,
    },
}

struct Supervisor {
    started: Instant,
    deadline: Option<Instant>,
    job: Started,
    events: Receiver<Event>,
    phase: Phase,
}

impl Supervisor {
    fn new(timeout: Option<Duration>, job: Started, events: Receiver<Event>) -> Supervisor {
        let started = Instant::now();
        // A timeout too long for the clock is none.
        let deadline = timeout.and_then(|timeout| started.checked_add(timeout));
        Supervisor { started, deadline, job, events, phase: Phase::Running }
    }

    fn run(mut self, failed: impl FnOnce(&Failure)) -> Outcome {
        let mut failed = Some(failed);
        while self.job.ranks.iter().any(Rank::is_running) {
            match self.next_event() {
                Some(Event::Ended { rank, succeeded }) => {
                    if let Some(failure) = self.ended(rank, succeeded) {
                        if let Some(failed) = failed.take() {
                            failed(&failure);
                        }
                        self.end_ranks(Outcome::Failed(failure));
                    }
                }
                Some(Event::Signal(signal)) => self.interrupted(signal),
                None => self.deadline_passed(),
            }
        }
        match self.phase {
            Phase::Running => Outcome::Success,
            // Ranks that handle the signal and finish in good order have not failed.
            Phase::Ending { outcome: Outcome::Interrupted { .. }, .. }
                if self.job.ranks.iter().all(|rank| rank.status.is_some_and(|s| s.success())) =>
            {
                Outcome::Success
            }
            Phase::Ending { outcome, .. } => outcome,
        }
    }

    /// The next event, or `None` when the next deadline has passed.
    fn next_event(&self) -> Option<Event> {
        let deadline = match &self.phase {
            Phase::Running => self.deadline,
            Phase::Ending { kill_at, .. } => *kill_at,
        };
        let received = match deadline {
            None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => self.events.recv_timeout(at.saturating_duration_since(Instant::now())),
        };
        match received {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => unreachable!("the signal thread holds a sender"),
        }
    }

    /// Reaps a rank; if it is the first to fail, says how.
    fn ended(&mut self, number: usize, succeeded: bool) -> Option<Failure> {
        let is_ending = matches!(self.phase, Phase::Ending { .. });
        let rank = &mut self.job.ranks[number];
        if is_ending || !succeeded {
            // What the rank has left behind goes with it, now that its group is still its own.
            rank.signal(Signal::KILL);
        }
        let status = rank.reap().expect("a child that has ended can be waited for");
        if is_ending || status.success() {
            return None;
        }
        let last_words = rank.last_words();
        let others = self.job.ranks.iter().filter(|rank| rank.is_running()).count();
        Some(Failure { rank: number, status, after: self.started.elapsed(), others, last_words })
    }

    fn interrupted(&mut self, signal: i32) {
        let again = matches!(self.phase, Phase::Ending { .. });
        let signal_to_send = if again { None } else { Signal::from_named_raw(signal) };
        self.signal_all(signal_to_send.unwrap_or(Signal::KILL));
        if !again {
            // No deadline: what a rank does with the signal is its own affair. A second one kills.
            self.phase = Phase::Ending { outcome: Outcome::Interrupted { signal }, kill_at: None };
        }
    }

    fn deadline_passed(&mut self) {
        match &mut self.phase {
            Phase::Running => {
                let ranks = self.job.ranks.iter().enumerate();
                let running = ranks.filter(|(_, rank)| rank.is_running()).map(|(n, _)| n).collect();
                self.end_ranks(Outcome::TimedOut { after: self.started.elapsed(), running });
            }
            Phase::Ending { kill_at, .. } => {
                *kill_at = None;
                self.signal_all(Signal::KILL);
            }
        }
    }

    fn end_ranks(&mut self, outcome: Outcome) {
        self.signal_all(Signal::TERM);
        self.phase = Phase::Ending { outcome, kill_at: Some(Instant::now() + GRACE) };
    }

    fn signal_all(&self, signal: Signal) {
        for rank in &self.job.ranks {
            rank.signal(signal);
        }
    }
}

/// A fresh id that no other job has and nobody can guess: the ranks trust whoever knows it.
fn job_id() -> io::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_ids_have_128_bits_and_differ() {
        let id = job_id().unwrap();
        assert_eq!(id.len(), 32);
        assert!(id.chars().all(|c| c.is_ascii_hexdigit()));
        assert_ne!(id, job_id().unwrap());
    }

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        let failure = |raw| Failure {
            rank: 0,
            status: ExitStatus::from_raw(raw),
            after: Duration::ZERO,
            others: 0,
            last_words: Vec::new(),
        };
        assert_eq!(failure(3 << 8).exit_code(), 3);
        assert_eq!(failure(9).exit_code(), 137);
    }
}
