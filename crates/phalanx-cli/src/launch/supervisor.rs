//! Watches the ranks of an attempt, and ends them together when one fails.
//!
//! One thread decides everything, from a queue of events; the other threads only feed it.

use super::guard::Guard;
use super::job::{Failure, Outcome};
use super::notice::Notice;
use super::rank::Rank;
use super::signals::{self, Forwarder};
use rustix::process::Signal;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long ranks that were asked to end may take before they are killed.
const GRACE: Duration = Duration::from_secs(5);

/// The ranks, and what must last as long as they do.
pub struct Started {
    pub ranks: Vec<Rank>,
    pub guard: Guard,
    pub _forwarder: Forwarder,
}

pub enum Event {
    /// A rank has ended, and waits to be reaped.
    Ended { index: usize, succeeded: bool },
    /// The launcher got a signal.
    Signal(i32),
    /// The job ends because of what happened on another node.
    Elsewhere(Notice),
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

pub struct Supervisor {
    started: Instant,
    deadline: Option<Instant>,
    job: Started,
    events: Receiver<Event>,
    phase: Phase,
}

impl Supervisor {
    pub fn new(timeout: Option<Duration>, job: Started, events: Receiver<Event>) -> Supervisor {
        let started = Instant::now();
        // A timeout too long for the clock is none.
        let deadline = timeout.and_then(|timeout| started.checked_add(timeout));
        Supervisor { started, deadline, job, events, phase: Phase::Running }
    }

    /// Waits for all ranks to end. `ending` hears at once that they are about to be ended, and why; what it
    /// answers, if anything, is the reason that counts.
    pub fn run(mut self, mut ending: impl FnMut(&Outcome) -> Option<Outcome>) -> Outcome {
        while self.job.ranks.iter().any(Rank::is_running) {
            let was_running = matches!(self.phase, Phase::Running);
            match self.next_event() {
                Some(Event::Ended { index, succeeded }) => {
                    if let Some(failure) = self.ended(index, succeeded) {
                        self.end_ranks(Outcome::Failed(failure));
                    }
                }
                Some(Event::Signal(signal)) => self.signalled(signal),
                Some(Event::Elsewhere(notice)) if was_running => self.end_ranks(Outcome::Elsewhere(notice)),
                Some(Event::Elsewhere(_)) => {}
                None => self.deadline_passed(),
            }
            if let Phase::Ending { outcome, .. } = &mut self.phase
                && was_running
                && let Some(counts) = ending(outcome)
            {
                *outcome = counts;
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
    fn ended(&mut self, index: usize, succeeded: bool) -> Option<Failure> {
        let is_ending = matches!(self.phase, Phase::Ending { .. });
        let rank = &mut self.job.ranks[index];
        if is_ending || !succeeded {
            // What the rank has left behind goes with it, now that its group is still its own.
            rank.signal(Signal::KILL);
        }
        let status = rank.reap().expect("a child that has ended can be waited for");
        self.job.guard.forget(rank.group());
        if is_ending || status.success() {
            return None;
        }
        let (number, last_words, log) = (rank.number(), rank.last_words(), rank.log().map(ToOwned::to_owned));
        let others = self.job.ranks.iter().filter(|rank| rank.is_running()).count();
        Some(Failure { rank: number, status, after: self.started.elapsed(), others, last_words, log })
    }

    fn signalled(&mut self, signal: i32) {
        let passed_on = signals::PASSED_ON.contains(&signal);
        if !passed_on && signal != signals::STOP {
            return self.interrupted(signal);
        }
        Signal::from_named_raw(signal).into_iter().for_each(|signal| self.signal_all(signal));
        if signal == signals::STOP {
            // Here the launcher stands still until it is continued, which is a signal for the ranks, too.
            let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::STOP);
        }
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
                let running = self.job.ranks.iter().filter(|rank| rank.is_running());
                let running = running.map(Rank::number).collect();
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
