//! Watches the ranks of an attempt, and ends them together when one fails.
//!
//! One thread decides everything, from a queue of events; the other threads only feed it.

use super::guard::Guard;
use super::job::{Failure, Outcome};
use super::notice::Notice;
use super::rank::Rank;
use super::report;
use super::signals::{self, Forwarder};
use anyhow::{Context, Result};
use rustix::process::Signal;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// How long ranks that were asked to end may take before they are killed.
const GRACE: Duration = Duration::from_secs(5);
/// How often to see whether the last output has been passed on.
const GLANCE: Duration = Duration::from_millis(2);

/// The ranks, and what must last as long as they do.
pub struct Started {
    pub ranks: Vec<Rank>,
    pub guard: Guard,
}

pub enum Event {
    /// A rank has ended, and waits to be reaped.
    Ended { index: usize, succeeded: bool },
    /// The launcher got a signal.
    Signal(i32),
    /// The job ends because of what happened on another node.
    Elsewhere(Notice),
    /// What the launchers have told each other, which is waited for before and after an attempt.
    Exchanged(Result<Vec<Vec<u8>>>),
}

/// The queue of events, for the launcher's life: a signal is never lost, whatever it is waiting for.
pub struct Events {
    sender: Sender<Event>,
    queue: Receiver<Event>,
    _forwarder: Forwarder,
}

impl Events {
    /// Catches signals from now on. To be called before the first rank starts: one in between would end the
    /// launcher alone.
    pub fn catch() -> Result<Events> {
        let (sender, queue) = mpsc::channel();
        let to_queue = sender.clone();
        let forwarder = Forwarder::start(move |signal| {
            let _ = to_queue.send(Event::Signal(signal));
        });
        Ok(Events { sender, queue, _forwarder: forwarder.context("cannot catch signals")? })
    }

    pub fn sender(&self) -> Sender<Event> {
        self.sender.clone()
    }

    /// The next event, or `None` when the deadline, if any, has passed.
    pub fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        match deadline {
            None => Some(self.queue.recv().expect("there is a sender beside the queue")),
            Some(at) => self.queue.recv_timeout(at.saturating_duration_since(Instant::now())).ok(),
        }
    }
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

pub struct Supervisor<'a> {
    started: Instant,
    deadline: Option<Instant>,
    job: Started,
    events: &'a Events,
    phase: Phase,
}

impl Supervisor<'_> {
    pub fn new(timeout: Option<Duration>, job: Started, events: &Events) -> Supervisor<'_> {
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
                Some(Event::Elsewhere(_) | Event::Exchanged(_)) => {}
                None => self.deadline_passed(),
            }
            if let Phase::Ending { outcome, .. } = &mut self.phase
                && was_running
                && let Some(counts) = ending(outcome)
            {
                *outcome = counts;
            }
        }
        let all_succeeded = self.job.ranks.iter().all(|rank| rank.status.is_some_and(|s| s.success()));
        let interrupted = self.pass_last_output_on();
        let outcome = match self.phase {
            Phase::Running => Outcome::Success,
            // Ranks that handle the signal and finish in good order have not failed.
            Phase::Ending { outcome: Outcome::Interrupted { .. }, .. } if all_succeeded => Outcome::Success,
            Phase::Ending { outcome, .. } => outcome,
        };
        let unwritten = self.job.ranks.iter().find_map(Rank::take_output_error);
        match (outcome, interrupted, unwritten) {
            (Outcome::Success, Some(signal), _) => Outcome::Interrupted { signal },
            (Outcome::Success, None, Some(error)) => Outcome::Unwritten(error),
            (outcome, _, unwritten) => {
                unwritten.iter().for_each(report::print_unwritten);
                outcome
            }
        }
    }

    /// Waits until all that the ranks have written is passed on, however slow its reader is. A signal that ends the
    /// job ends that, too, and is answered.
    fn pass_last_output_on(&mut self) -> Option<i32> {
        while !self.job.ranks.iter().all(Rank::is_silent) {
            match self.events.next(Some(Instant::now() + GLANCE)) {
                Some(Event::Signal(signal)) if signals::is_ending(signal) => return Some(signal),
                Some(Event::Signal(signal)) => self.signalled(signal),
                _ => {}
            }
        }
        None
    }

    /// The next event, or `None` when the next deadline has passed.
    fn next_event(&self) -> Option<Event> {
        let deadline = match &self.phase {
            Phase::Running => self.deadline,
            Phase::Ending { kill_at, .. } => *kill_at,
        };
        self.events.next(deadline)
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
        if signals::is_ending(signal) {
            return self.interrupted(signal);
        }
        Signal::from_named_raw(signal).into_iter().for_each(|signal| self.signal_all(signal));
        if signal == signals::STOP {
            // Until the launcher is continued, which is a signal for the ranks, too.
            signals::stand_still();
        }
    }

    fn interrupted(&mut self, signal: i32) {
        let again = matches!(self.phase, Phase::Ending { .. });
        let signal_to_send = if again { None } else { Signal::from_named_raw(signal) };
        self.signal_all(signal_to_send.unwrap_or(Signal::KILL));
        if !again {
            self.wake_all();
            // No deadline of its own: what a rank does with the signal is its own affair. A second one kills.
            self.phase = Phase::Ending { outcome: Outcome::Interrupted { signal }, kill_at: self.deadline };
        }
    }

    fn deadline_passed(&mut self) {
        let running = self.job.ranks.iter().filter(|rank| rank.is_running()).map(Rank::number).collect();
        let timed_out = Outcome::TimedOut { after: self.started.elapsed(), running };
        match &mut self.phase {
            Phase::Running => self.end_ranks(timed_out),
            Phase::Ending { outcome, kill_at } => {
                *kill_at = None;
                if matches!(outcome, Outcome::Interrupted { .. }) {
                    *outcome = timed_out;
                }
                self.signal_all(Signal::KILL);
            }
        }
    }

    fn end_ranks(&mut self, outcome: Outcome) {
        self.signal_all(Signal::TERM);
        self.wake_all();
        self.phase = Phase::Ending { outcome, kill_at: Some(Instant::now() + GRACE) };
    }

    /// One that is stopped does not hear what it was told.
    fn wake_all(&self) {
        self.signal_all(Signal::CONT);
    }

    fn signal_all(&self, signal: Signal) {
        for rank in &self.job.ranks {
            rank.signal(signal);
        }
    }
}
