//! Watches the ranks of an attempt, and decides what happens when one fails: the others are ended, or go on, or go on with a new
//! process in its place.
//!
//! One thread makes every decision, from the queue of events; the other threads only feed the queue.

use super::events::{Events, LaunchEvent};
use super::guard::Guard;
use super::job::Job;
use super::nodes::Nodes;
use super::outcome::{End, Failure, Outcome, Then, Witness};
use super::placement::Placement;
use super::rank::Rank;
use super::reports::{Diagnosis, Report, What};
use super::{report, signals, status};
use crate::log::say;
use rustix::process::Signal;
use std::os::unix::net::SocketAddr;
use std::time::{Duration, Instant};

/// Longest wait, between a failure and the request to end, for the flight records of the other ranks and for the end of the rank at
/// fault.
const SETTLING: Duration = Duration::from_secs(2);
/// Interval between looks whether ranks of other nodes are left that could take in new ones.
const LOOK: Duration = Duration::from_secs(1);
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
    /// The rank with this index has failed. The others are ended soon, at `until` the latest: they write their flight records, and the
    /// rank at fault may still be printing a backtrace.
    Settling {
        first: usize,
        until: Instant,
    },
    /// The ranks were sent a signal to end; at `kill_at` they are killed.
    Ending {
        outcome: Outcome,
        kill_at: Option<Instant>,
    },
}

/// The rank at fault for a failure.
enum Culprit {
    /// A rank of this node, by its index.
    Here(usize),
    /// A rank of another node, by its number.
    Elsewhere(usize),
}

/// Supervises the ranks of this node from their start to their end.
pub struct Supervisor<'a> {
    job: &'a Job,
    placement: &'a Placement,
    started: Instant,
    deadline: Option<Instant>,
    ranks: Vec<Rank>,
    /// Ranks that were replaced; some of their output may not be passed on yet.
    replaced: Vec<Rank>,
    guard: Guard,
    events: &'a Events,
    /// The other launchers, if there are any.
    nodes: Option<&'a Nodes>,
    /// The ranks of all nodes that could take in a new one, where that matters.
    able: usize,
    phase: Phase,
    /// The first failure, if ranks go on after failures.
    first_failure: Option<Failure>,
}

impl<'a> Supervisor<'a> {
    pub fn new(
        job: &'a Job,
        placement: &'a Placement,
        Started { ranks, guard }: Started,
        events: &'a Events,
        nodes: Option<&'a Nodes>,
    ) -> Supervisor<'a> {
        let started = Instant::now();
        // A timeout too long for the clock is none.
        let deadline = job.timeout.and_then(|timeout| started.checked_add(timeout));
        let (replaced, phase) = (Vec::new(), Phase::Running);
        Supervisor {
            job,
            placement,
            started,
            deadline,
            ranks,
            replaced,
            guard,
            events,
            nodes,
            able: 0,
            phase,
            first_failure: None,
        }
    }

    /// Waits for all ranks to end.
    ///
    /// Calls `ending` with the reason as soon as the ranks are made to end before their time. It may return
    /// another outcome, which replaces that reason.
    pub fn run(mut self, mut ending: impl FnMut(&Outcome) -> Option<Outcome>) -> Outcome {
        self.count_able();
        while self.ranks.iter().any(Rank::is_running) {
            let was_ending = self.is_ending();
            match self.next_event() {
                Some(LaunchEvent::Ended { index, succeeded }) => self.rank_ended(index, succeeded),
                Some(LaunchEvent::Reported { report, from }) => {
                    if report.job == self.placement.job {
                        self.note(report, from);
                    }
                }
                Some(LaunchEvent::Signal(signal)) => self.handle_signal(signal),
                Some(LaunchEvent::OtherNode(notice)) if !was_ending => {
                    if self.job.keep_going && notice.is_loss() {
                        say(format_args!(
                            "phalanx launch: going on without node {}: {}",
                            notice.node, notice.what
                        ));
                    } else {
                        self.end_ranks(Outcome::OtherNode(notice));
                    }
                }
                Some(LaunchEvent::OtherNode(_) | LaunchEvent::Exchanged(_)) => {}
                None => self.handle_deadline(),
            }
            self.end_left_out();
            self.settle();
            if let Phase::Ending { outcome, .. } = &mut self.phase
                && !was_ending
                && let Some(replacement) = ending(outcome)
            {
                *outcome = replacement;
            }
        }
        self.count_able();
        self.conclude()
    }

    /// Kills all ranks.
    pub fn end_at_once(mut self) {
        self.ranks.iter_mut().filter(|rank| rank.is_running()).for_each(Rank::kill);
    }

    fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Ending { .. })
    }

    /// The outcome after all ranks have ended.
    fn conclude(mut self) -> Outcome {
        let all_succeeded = self.ranks.iter().all(|rank| rank.status.is_some_and(|s| s.success()));
        let has_survivor = self.has_survivor();
        let interrupted = self.wait_for_output();
        let output_error = self.all_ranks().find_map(Rank::take_output_error);
        let outcome = match self.phase {
            Phase::Running | Phase::Settling { .. } => match self.first_failure {
                None => Outcome::Success,
                Some(_) if has_survivor => Outcome::Success,
                Some(failure) => {
                    report::print_not_survived(&failure);
                    Outcome::Failed(failure)
                }
            },
            // Ranks that handled the signal and exited with status 0 have not failed.
            Phase::Ending { outcome: Outcome::Interrupted { .. }, .. } if all_succeeded => Outcome::Success,
            Phase::Ending { outcome, .. } => outcome,
        };
        match (outcome, interrupted, output_error) {
            (Outcome::Success, Some(signal), _) => Outcome::Interrupted { signal },
            (Outcome::Success, None, Some(error)) => Outcome::OutputLost(error),
            (outcome, _, output_error) => {
                output_error.iter().for_each(report::print_lost_output);
                outcome
            }
        }
    }

    /// Whether a rank has ended well. One that the others missed has not: it left too early.
    fn has_survivor(&self) -> bool {
        let missed = |index: usize| {
            let culprits = self.ranks.iter().filter_map(Rank::diagnosis).filter_map(|it| self.culprit_of(it));
            culprits.into_iter().any(|culprit| matches!(culprit, Culprit::Here(other) if other == index))
        };
        let ended_well =
            |rank: &Rank| rank.status.is_some_and(|status| status.success()) && !rank.is_left_out();
        self.ranks.iter().enumerate().any(|(index, rank)| ended_well(rank) && !missed(index))
    }

    /// All ranks, with those that were replaced.
    fn all_ranks(&self) -> impl Iterator<Item = &Rank> {
        self.replaced.iter().chain(&self.ranks)
    }

    /// Waits until the ranks' output has been passed on, however slow its reader is. A signal that ends the
    /// job ends the wait and is returned.
    fn wait_for_output(&mut self) -> Option<i32> {
        while !self.all_ranks().all(Rank::is_silent) {
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
            Phase::Running => {
                let look = self.nodes.filter(|_| self.has_lonely_newcomers()).map(|_| Instant::now() + LOOK);
                self.ranks.iter().filter_map(Rank::kill_at).chain(self.deadline).chain(look).min()
            }
            Phase::Settling { until, .. } => Some(*until),
            Phase::Ending { kill_at, .. } => *kill_at,
        };
        self.events.next(deadline)
    }

    /// Reaps a rank, and reacts to its end.
    fn rank_ended(&mut self, index: usize, succeeded: bool) {
        let is_ending = self.is_ending();
        let rank = &mut self.ranks[index];
        if is_ending || !succeeded {
            // Its descendants end with it. Before it is reaped, the group cannot be another process's.
            rank.signal(Signal::KILL);
        }
        let status = rank.reap().expect("a child that has ended can be waited for");
        self.guard.forget(rank.group());
        self.events.metrics().iter().for_each(|metrics| metrics.ended(rank.number()));
        if !matches!(self.phase, Phase::Running) {
            return;
        }
        self.count_able();
        if status.success() && !(self.ranks[index].is_left_out() && self.job.restarts.most > 0) {
            self.end_newcomers();
        } else if self.take_restart() {
            self.restart(index);
        } else if self.job.keep_going && self.has_enough_ranks() {
            self.go_on(index, Then::GoOn);
        } else {
            self.begin_to_settle(index);
        }
    }

    /// Whether as many ranks run, or have ended well, as are needed to go on; also if there is none left that could be ended.
    fn has_enough_ranks(&self) -> bool {
        let is_left = |rank: &&Rank| rank.status.is_none_or(|status| status.success());
        let runs = self.ranks.iter().any(Rank::is_running);
        !runs || self.ranks.iter().filter(is_left).count() >= self.job.min_ranks
    }

    /// Lets the others go on after a failure.
    fn go_on(&mut self, index: usize, then: Then) {
        let failure = self.failure(index, then);
        report::print_failure(&failure);
        self.first_failure.get_or_insert(failure);
    }

    /// Counts the ranks of all nodes that could take in a new one. Those of this node matter to the others at once.
    fn count_able(&mut self) {
        if self.job.restarts.most == 0 {
            return;
        }
        let here = self.ranks.iter().filter(|rank| rank.can_take_in_others()).count();
        self.able = match self.nodes {
            None => here,
            // Without the store no new rank finds the others.
            Some(nodes) => nodes.count_able(self.placement.restart, here).unwrap_or(0),
        };
    }

    /// Counts one more restart, if one is left.
    fn take_restart(&self) -> bool {
        let restarts = &self.job.restarts;
        if !restarts.is_left() {
            return false;
        }
        let done = match self.nodes {
            None => Some(restarts.done() + 1),
            Some(nodes) => nodes.take_restart(restarts.most),
        };
        restarts.note(done.unwrap_or(restarts.most));
        done.is_some()
    }

    /// Starts a new process in the place of a rank that has failed; or all ranks, if there is none that could take it in.
    fn restart(&mut self, index: usize) {
        let (restart, most) = (self.job.restarts.done(), self.job.restarts.most);
        if self.ranks[index].is_missing_at_start() || self.able == 0 {
            let failure = self.failure(index, Then::StartOver { restart, most });
            return self.end_ranks(Outcome::Failed(failure));
        }
        self.go_on(index, Then::Replace { restart, most });
        let started = Rank::start(self.job, self.placement, index, self.events.reports(), true);
        let started = started.and_then(|mut rank| match rank.watch(index, self.events) {
            Ok(()) => Ok(rank),
            Err(error) => {
                rank.kill();
                Err(error)
            }
        });
        match started {
            Ok(rank) => {
                self.guard.watch(rank.group());
                self.replaced.push(std::mem::replace(&mut self.ranks[index], rank));
            }
            Err(error) => self.end_ranks(Outcome::NotStarted(error)),
        }
    }

    /// Whether the ranks that run are new ones, all of which wait for others.
    fn has_lonely_newcomers(&self) -> bool {
        let is_running = self.ranks.iter().any(Rank::is_running);
        is_running && self.job.restarts.done() > 0 && !self.ranks.iter().any(Rank::can_take_in_others)
    }

    /// The others have ended well: ends newcomers, if these are left alone.
    fn end_newcomers(&mut self) {
        if self.has_lonely_newcomers() && self.able == 0 {
            say(
                "phalanx launch: the others have ended well, and no rank is left that a new one could join: ending the new ones",
            );
            self.end_ranks(Outcome::Success);
        }
    }

    /// Takes in what a rank has reported.
    fn note(&mut self, report: Report, from: SocketAddr) {
        if let What::Joined { lost, .. } = &report.what
            && matches!(self.phase, Phase::Running)
        {
            self.leave_out(lost);
        }
        if let Some(metrics) = self.events.metrics() {
            match &report.what {
                What::Joined { counts: true, .. } => metrics.joined(report.rank, from.clone()),
                What::Metrics(counters) => return metrics.answered(report.rank, counters.clone()),
                _ => {}
            }
        }
        let index = report.rank.checked_sub(self.placement.first);
        let Some(rank) = index.and_then(|index| self.ranks.get_mut(index)) else { return };
        let was_able = rank.can_take_in_others();
        rank.note(report, from);
        if rank.can_take_in_others() != was_able {
            self.count_able();
        }
    }

    /// The others have gone on without these processes. If they wait for new ones, those that still run have to end, and those that have
    /// ended well have failed nevertheless.
    fn leave_out(&mut self, processes: &[u32]) {
        let restarts = &self.job.restarts;
        for index in 0..self.ranks.len() {
            let rank = &mut self.ranks[index];
            if rank.is_left_out() || !processes.iter().any(|process| rank.has_process(*process)) {
                continue;
            }
            rank.leave_out((restarts.most > 0).then(|| Instant::now() + SETTLING));
            if rank.status.is_some_and(|status| status.success()) && self.take_restart() {
                self.restart(index);
            }
        }
    }

    /// Kills ranks that were left out and do not end.
    fn end_left_out(&mut self) {
        let now = Instant::now();
        for rank in self.ranks.iter_mut() {
            if rank.kill_at().is_some_and(|at| now >= at) {
                rank.signal(Signal::KILL);
                rank.leave_out(Some(now + SETTLING));
            }
        }
    }

    /// The first failure: asks the others for their flight records, before they are ended.
    fn begin_to_settle(&mut self, first: usize) {
        if let Some(reports) = self.events.reports() {
            self.ranks.iter_mut().for_each(|rank| rank.request_records(reports));
        }
        self.phase = Phase::Settling { first, until: Instant::now() + SETTLING };
    }

    /// Ends the others once there is nothing left to wait for.
    fn settle(&mut self) {
        let Phase::Settling { first, until } = self.phase else { return };
        let culprit_runs =
            || matches!(self.blame(first).0, Culprit::Here(index) if self.ranks[index].is_running());
        let is_settled = !self.ranks.iter().any(Rank::is_writing_records) && !culprit_runs();
        if is_settled || Instant::now() >= until {
            let has_survivor = self.ranks.iter().any(|rank| rank.is_running() && rank.has_joined());
            let could_go_on = has_survivor && !self.job.keep_going;
            let failure = self.failure(first, Then::EndOthers { could_go_on });
            self.end_ranks(Outcome::Failed(failure));
        }
    }

    /// Finds the rank at fault for the end of the rank that failed first. The first to end is not always the first to fail: the ranks'
    /// own diagnoses lead from one to the other.
    fn blame(&self, first: usize) -> (Culprit, Option<Witness>) {
        let (mut at, mut seen, mut witness) = (first, vec![first], None);
        while let Some(diagnosis) = self.ranks[at].diagnosis() {
            let found = self.culprit_of(diagnosis);
            if let Some(Culprit::Here(index)) = found
                && seen.contains(&index)
            {
                break;
            }
            witness = Some(Witness { rank: self.ranks[at].number(), why: diagnosis.why.clone() });
            match found {
                // A mismatch, for example: it is no rank's fault alone.
                None => break,
                Some(Culprit::Here(index)) => at = index,
                Some(culprit) => return (culprit, witness),
            }
            seen.push(at);
        }
        (Culprit::Here(at), witness)
    }

    /// The rank that a diagnosis names: by its process, or else by its number.
    fn culprit_of(&self, diagnosis: &Diagnosis) -> Option<Culprit> {
        let has = |process: &u32| self.ranks.iter().position(|rank| rank.has_process(*process));
        if let Some(index) = diagnosis.processes.iter().find_map(has) {
            return Some(Culprit::Here(index));
        }
        let number = *diagnosis.ranks.first()?;
        let here = self.ranks.iter().position(|rank| rank.number() == number);
        Some(here.map_or(Culprit::Elsewhere(number), Culprit::Here))
    }

    /// Describes the failure that began with the end of this rank.
    fn failure(&self, first: usize, then: Then) -> Failure {
        // A rank that the others can do without is responsible for its own end.
        let (culprit, witness) = match then {
            Then::EndOthers { .. } => self.blame(first),
            Then::GoOn | Then::Replace { .. } | Then::StartOver { .. } => (Culprit::Here(first), None),
        };
        let (number, rank) = match culprit {
            Culprit::Here(index) => (self.ranks[index].number(), Some(&self.ranks[index])),
            Culprit::Elsewhere(number) => (number, None),
        };
        let end = match rank.map(|rank| rank.status) {
            Some(Some(status)) => End::Status(status),
            Some(None) => End::StillRuns,
            None => End::Elsewhere(self.placement.describe_node_of(number)),
        };
        let first_status = self.ranks[first].status.expect("it has ended");
        let blamed_status = rank.and_then(|rank| rank.status).filter(|status| !status.success());
        let others = self.ranks.iter().filter(|rank| rank.is_running() && rank.number() != number);
        let ended = rank.and_then(Rank::ended).unwrap_or_else(Instant::now);
        Failure {
            rank: number,
            end,
            after: ended - self.started,
            exit_code: status::exit_code(blamed_status.unwrap_or(first_status)).max(1),
            others: others.count(),
            then,
            is_first: self.job.restarts.done() == 0 && self.first_failure.is_none(),
            last_lines: rank.map(Rank::last_lines).unwrap_or_default(),
            log: rank.and_then(Rank::log).map(ToOwned::to_owned),
            witness,
        }
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
        let is_second = self.is_ending();
        let signal_to_send = if is_second { None } else { Signal::from_named_raw(signal) };
        self.signal_all(signal_to_send.unwrap_or(Signal::KILL));
        if !is_second {
            self.continue_all();
            // Without a deadline of its own: a rank may handle the signal, and take its time.
            self.phase = Phase::Ending { outcome: Outcome::Interrupted { signal }, kill_at: self.deadline };
        }
    }

    fn handle_deadline(&mut self) {
        let running = self.ranks.iter().filter(|rank| rank.is_running()).map(Rank::number).collect();
        let timed_out = Outcome::TimedOut { after: self.started.elapsed(), running };
        match &mut self.phase {
            Phase::Running if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                self.end_ranks(timed_out)
            }
            // The ranks of other nodes may have ended; `end_left_out` does the rest.
            Phase::Running => {
                self.count_able();
                self.end_newcomers();
            }
            // `settle` ends it.
            Phase::Settling { .. } => {}
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
        self.phase = Phase::Ending { outcome, kill_at: Instant::now().checked_add(self.job.grace) };
    }

    /// A stopped rank handles no other signal.
    fn continue_all(&self) {
        self.signal_all(Signal::CONT);
    }

    fn signal_all(&self, signal: Signal) {
        for rank in &self.ranks {
            rank.signal(signal);
        }
    }
}
