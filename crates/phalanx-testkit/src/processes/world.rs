//! Running rank processes: what they report, how they end.

use super::{PHASE, outcome};
use crate::fault::{self, Fault};
use crate::scenario::Outcome;
use phalanx::internal::store::Server;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

enum OutputEvent {
    Line(String),
    Stderr(String),
    Closed,
}

fn read_lines(index: usize, stdout: impl Read, events: &Sender<(usize, OutputEvent)>) {
    // A line that is not text, or a receiver that is gone, ends the reading; nothing else is lost.
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        if events.send((index, OutputEvent::Line(line))).is_err() {
            return;
        }
    }
    let _ = events.send((index, OutputEvent::Closed));
}

fn read_all(index: usize, stderr: impl Read, events: &Sender<(usize, OutputEvent)>) {
    let mut text = Vec::new();
    let mut stderr = BufReader::new(stderr);
    // As far as it can be read: it is shown when a test fails, and never decides anything.
    let _ = stderr.read_to_end(&mut text);
    let _ = events.send((index, OutputEvent::Stderr(String::from_utf8_lossy(&text).into_owned())));
}

#[derive(Debug)]
struct Rank {
    rank: usize,
    child: Child,
    phases: Vec<String>,
    outcome: Option<Outcome>,
    output: String,
    open_streams: usize,
    /// Whether all lines have been read: its phases and outcome are known.
    silent: bool,
    status: Option<ExitStatus>,
}

impl Rank {
    fn new(rank: usize, child: Child) -> Rank {
        Rank {
            rank,
            child,
            phases: Vec::new(),
            outcome: None,
            output: String::new(),
            open_streams: 2,
            silent: false,
            status: None,
        }
    }

    fn take(&mut self, event: OutputEvent) {
        match event {
            OutputEvent::Line(line) => {
                if let Some(phase) = line.strip_prefix(PHASE) {
                    self.phases.push(phase.into());
                } else if let Some(outcome) = outcome(&line) {
                    self.outcome = Some(outcome);
                } else {
                    self.output += &line;
                    self.output.push('\n');
                }
            }
            OutputEvent::Stderr(text) => {
                self.output += &text;
                self.open_streams -= 1;
            }
            OutputEvent::Closed => {
                self.silent = true;
                self.open_streams -= 1;
            }
        }
    }

    fn end(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            // A child that has already ended cannot be killed, and is then just waited for.
            let _ = self.child.kill();
            self.status = self.child.wait().ok();
        }
        self.status
    }
}

/// Running rank processes.
pub struct World {
    ranks: Vec<Rank>,
    events: Receiver<(usize, OutputEvent)>,
    sender: Sender<(usize, OutputEvent)>,
    deadline: Instant,
    _store: Option<Server>,
}

/// How a rank's process ended.
#[derive(Debug)]
pub struct Ended {
    /// The rank.
    pub rank: usize,
    /// What it reported; if it reported nothing, how its process ended instead.
    pub outcome: Outcome,
    /// How its process ended, `None` if it had to be ended because its time was up.
    pub status: Option<ExitStatus>,
    /// What else it wrote.
    pub output: String,
}

impl World {
    /// Without ranks so far; these may run until then.
    pub(super) fn until(deadline: Instant) -> World {
        let (sender, events) = mpsc::channel();
        World { ranks: Vec::new(), events, sender, deadline, _store: None }
    }

    /// Takes a rank's process in.
    pub(super) fn add(&mut self, rank: usize, mut child: Child) -> Result<(), String> {
        let stdout = child.stdout.take().ok_or("no standard output")?;
        let stderr = child.stderr.take().ok_or("no standard error")?;
        let index = self.ranks.len();
        self.ranks.push(Rank::new(rank, child));
        let lines = self.sender.clone();
        std::thread::spawn(move || read_lines(index, stdout, &lines));
        let lines = self.sender.clone();
        std::thread::spawn(move || read_all(index, stderr, &lines));
        Ok(())
    }

    /// Keeps the ranks' store as long as they run.
    pub(super) fn keep(&mut self, store: Option<Server>) {
        self._store = store;
    }

    /// Waits until a rank has reached a phase.
    pub fn await_phase(&mut self, rank: usize, phase: &str) -> Result<(), String> {
        loop {
            let reached = self.rank(rank)?;
            if reached.phases.iter().any(|reached| reached == phase) {
                return Ok(());
            }
            if reached.outcome.is_some() || reached.silent {
                let ended = self.finish_in_place();
                return Err(format!("rank {rank} never reached {phase:?}: {}", describe(&ended)));
            }
            if !self.next_event() {
                let ended = self.finish_in_place();
                return Err(format!("rank {rank} did not reach {phase:?} in time: {}", describe(&ended)));
            }
        }
    }

    /// Waits until a rank's process is stopped, or has ended.
    pub fn await_stop(&self, rank: usize) -> Result<(), String> {
        let stat = format!("/proc/{}/stat", self.rank(rank)?.child.id());
        while Instant::now() < self.deadline {
            let stat = std::fs::read_to_string(&stat).unwrap_or_default();
            let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
            if matches!(state, None | Some('T' | 'Z' | 'X')) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(format!("rank {rank} is neither stopped nor at its end"))
    }

    /// Kills, stops or continues a rank's process.
    pub fn inject(&mut self, rank: usize, fault: Fault) -> Result<(), String> {
        fault::inject(&self.rank(rank)?.child, fault)
            .map_err(|error| format!("{fault:?} of rank {rank}: {error}"))
    }

    /// Waits until all ranks have ended, in rank order; ends those that are running at the deadline.
    pub fn finish(mut self) -> Vec<Ended> {
        self.finish_in_place()
    }

    fn finish_in_place(&mut self) -> Vec<Ended> {
        while self.ranks.iter().any(|rank| rank.open_streams > 0) && self.next_event() {}
        for rank in &mut self.ranks {
            // With both streams closed the process is about to end, unless it hangs on its way out.
            while rank.open_streams == 0 && rank.status.is_none() {
                rank.status = rank.child.try_wait().ok().flatten();
                if Instant::now() >= self.deadline {
                    break;
                }
                if rank.status.is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        self.ranks.iter_mut().map(ended).collect()
    }

    fn rank(&self, rank: usize) -> Result<&Rank, String> {
        self.ranks.iter().find(|r| r.rank == rank).ok_or_else(|| format!("rank {rank} was not started"))
    }

    /// Takes in the next event; false at the deadline.
    fn next_event(&mut self) -> bool {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.events.recv_timeout(left) {
            Ok((index, event)) => {
                self.ranks[index].take(event);
                true
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => false,
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            rank.end();
        }
    }
}

fn ended(rank: &mut Rank) -> Ended {
    let status = rank.status;
    rank.end();
    let outcome = match (status, rank.outcome.take()) {
        // It may crash on its way out.
        (Some(status), Some(Ok(report))) if !status.success() => {
            Err(format!("it ended ({status}) after it had reported {report:?}"))
        }
        (Some(_), Some(outcome)) => outcome,
        (None, Some(outcome)) => {
            Err(format!("it was still running at the deadline, after it had reported {outcome:?}"))
        }
        (Some(status), None) => Err(format!("it ended without a report ({status})")),
        (None, None) => Err("it was still running at the deadline".to_owned()),
    };
    Ended { rank: rank.rank, outcome, status, output: std::mem::take(&mut rank.output) }
}

/// All ranks' outcomes and what else they wrote, for the message of a failed test.
pub fn describe(ended: &[Ended]) -> String {
    let ranks = ended.iter().map(|Ended { rank, outcome, output, .. }| {
        let output = if output.is_empty() {
            String::new()
        } else {
            format!("\n    {}", output.trim_end().replace('\n', "\n    "))
        };
        match outcome {
            Ok(report) => format!("\n  rank {rank}: ok {report}{output}"),
            Err(problem) => format!("\n  rank {rank}: FAILED {problem}{output}"),
        }
    });
    ranks.collect()
}
