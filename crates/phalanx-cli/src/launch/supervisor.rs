//! Watches the ranks of an attempt, and ends all of them when one fails.
//!
//! One thread makes every decision, from the queue of events; the other threads only feed the queue.

use super::events::{Events, LaunchEvent};
use super::guard::Guard;
use super::outcome::{Failure, Outcome};
use super::rank::Rank;
use super::report;
use super::signals;
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// Time for ranks to end after SIGTERM before they are killed.
const GRACE: Duration = Duration::from_secs(5);
/// Interval between checks whether the last output has been passed on.
const OUTPUT_POLL: Duration = Duration::from_millis(2);

/// The started ranks and their guard.
pub struct Started {
    pub ranks: Vec<Rank>,
    pub guard: Guard,
}

/// The state of an attempt.
enum Phase {
    Running,
    /// The ranks were sent a signal to end; at `kill_at` they are killed.
    Ending {
        outcome: Outcome,
        kill_at: Option<Instant>,
    },
}

/// Supervises the ranks of this node from their start to their end.
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

    /// Waits for all ranks to end.
    ///
    /// Calls `ending` with the reason as soon as the ranks are made to end before their time. It may return
    /// another outcome, which replaces that reason.
    pub fn run(mut self, mut ending: impl FnMut(&Outcome) -> Option<Outcome>) -> Outcome {
        while self.job.ranks.iter().any(Rank::is_running) {
            let was_running = matches!(self.phase, Phase::Running);
            match self.next_event() {
                Some(LaunchEvent::Ended { index, succeeded }) => {
                    if let Some(failure) = self.reap(index, succeeded) {
                        self.end_ranks(Outcome::Failed(failure));
                    }
                }
                Some(LaunchEvent::Signal(signal)) => self.handle_signal(signal),
                Some(LaunchEvent::OtherNode(notice)) if was_running => {
                    self.end_ranks(Outcome::OtherNode(notice))
                }
                Some(LaunchEvent::OtherNode(_) | LaunchEvent::Exchanged(_)) => {}
                None => self.handle_deadline(),
            }
            if let Phase::Ending { outcome, .. } = &mut self.phase
                && was_running
                && let Some(replacement) = ending(outcome)
            {
                *outcome = replacement;
            }
        }
        self.conclude()
    }

    /// The outcome after all ranks have ended.
    fn conclude(mut self) -> Outcome {
        let all_succeeded = self.job.ranks.iter().all(|rank| rank.status.is_some_and(|s| s.success()));
        let interrupted = self.wait_for_output();
        let outcome = match self.phase {
            Phase::Running => Outcome::Success,
            // Ranks that handled the signal and exited with status 0 have not failed.
            Phase::Ending { outcome: Outcome::Interrupted { .. }, .. } if all_succeeded => Outcome::Success,
            Phase::Ending { outcome, .. } => outcome,
        };
        let output_error = self.job.ranks.iter().find_map(Rank::take_output_error);
        match (outcome, interrupted, output_error) {
            (Outcome::Success, Some(signal), _) => Outcome::Interrupted { signal },
            (Outcome::Success, None, Some(error)) => Outcome::OutputLost(error),
            (outcome, _, output_error) => {
                output_error.iter().for_each(report::print_lost_output);
                outcome
            }
        }
    }

    /// Waits until the ranks' output has been passed on, however slow its reader is. A signal that ends the
    /// job ends the wait and is returned.
    fn wait_for_output(&mut self) -> Option<i32> {
        while !self.job.ranks.iter().all(Rank::is_silent) {
            match self.events.next(Some(Instant::now() + OUTPUT_POLL)) {
                Some(LaunchEvent::Signal(signal)) if signals::is_ending(signal) => return Some(signal),
                Some(LaunchEvent::Signal(signal)) => self.handle_signal(signal),
                _ => {}
            }
        }
        None
    }

    /// The next event, or `None` when the next deadline has passed.
    fn next_event(&self) -> Option<LaunchEvent> {
        let deadline = match &self.phase {
            Phase::Running => self.deadline,
            Phase::Ending { kill_at, .. } => *kill_at,
        };
        self.events.next(deadline)
    }

    /// Reaps a rank. Returns the failure if the rank is the first to fail.
    fn reap(&mut self, index: usize, succeeded: bool) -> Option<Failure> {
        let is_ending = matches!(self.phase, Phase::Ending { .. });
        let rank = &mut self.job.ranks[index];
        if is_ending || !succeeded {
            // Its descendants end with it. Before it is reaped, the group cannot be another process's.
            rank.signal(Signal::KILL);
        }
        let status = rank.reap().expect("a child that has ended can be waited for");
        self.job.guard.forget(rank.group());
        if is_ending || status.success() {
            return None;
        }
        let (number, last_lines, log) = (rank.number(), rank.last_lines(), rank.log().map(ToOwned::to_owned));
        let others = self.job.ranks.iter().filter(|rank| rank.is_running()).count();
        Some(Failure { rank: number, status, after: self.started.elapsed(), others, last_lines, log })
    }

    fn handle_signal(&mut self, signal: i32) {
        if signals::is_ending(signal) {
            return self.interrupt(signal);
        }
        Signal::from_named_raw(signal).into_iter().for_each(|signal| self.signal_all(signal));
        if signal == signals::STOP {
            // Until SIGCONT, which is forwarded, too.
            signals::stop_self();
        }
    }

    /// Forwards the first signal that ends the job, and kills the ranks at the second.
    fn interrupt(&mut self, signal: i32) {
        let is_second = matches!(self.phase, Phase::Ending { .. });
        let signal_to_send = if is_second { None } else { Signal::from_named_raw(signal) };
        self.signal_all(signal_to_send.unwrap_or(Signal::KILL));
        if !is_second {
            self.continue_all();
            // Without a deadline of its own: a rank may handle the signal, and take its time.
            self.phase = Phase::Ending { outcome: Outcome::Interrupted { signal }, kill_at: self.deadline };
        }
    }

    fn handle_deadline(&mut self) {
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
        self.continue_all();
        self.phase = Phase::Ending { outcome, kill_at: Some(Instant::now() + GRACE) };
    }

    /// A stopped rank handles no other signal.
    fn continue_all(&self) {
        self.signal_all(Signal::CONT);
    }

    fn signal_all(&self, signal: Signal) {
        for rank in &self.job.ranks {
            rank.signal(signal);
        }
    }
}
