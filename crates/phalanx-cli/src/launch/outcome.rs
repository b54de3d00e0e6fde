//! How an attempt ended: the outcome on this node, and the notice of it for other nodes.

use super::start_error::StartError;
use super::{signals, status};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;
use std::{fmt, io};

/// The longest line, in characters, that is sent to other nodes: the store's messages are bounded.
const MAX_SENT_LINE: usize = 400;

/// How an attempt ended.
#[derive(Debug)]
pub enum Outcome {
    /// Every rank exited with status 0.
    Success,
    /// A rank failed; the others were ended.
    Failed(Failure),
    /// These ranks still ran at the deadline, and were ended.
    TimedOut { after: Duration, running: Vec<usize> },
    /// The launcher got this signal and forwarded it.
    Interrupted { signal: i32 },
    /// The attempt ended on another node, and therefore here.
    OtherNode(Notice),
    /// A rank could not be started.
    NotStarted(StartError),
    /// Every rank exited with status 0, but some of their output could not be written.
    OutputLost(io::Error),
}

impl Outcome {
    /// The launcher's exit status.
    pub fn exit_code(&self) -> u8 {
        match self {
            Outcome::Success => 0,
            Outcome::Failed(failure) => failure.exit_code,
            Outcome::TimedOut { .. } => status::TIMED_OUT,
            Outcome::Interrupted { signal } => status::signal_code(*signal),
            Outcome::OtherNode(notice) => notice.exit_code,
            Outcome::NotStarted(error) => error.exit_code(),
            Outcome::OutputLost(_) => 1,
        }
    }
}

/// A rank that failed: the first one, unless the ranks go on after failures.
#[derive(Debug, Clone)]
pub struct Failure {
    pub rank: usize,
    pub end: End,
    /// How long the attempt had run.
    pub after: Duration,
    /// The launcher's exit status: the rank's, or that of a rank that failed because of it.
    pub exit_code: u8,
    /// Ranks of this node that still ran.
    pub others: usize,
    /// What happens now.
    pub then: Then,
    /// Whether no rank has failed before.
    pub is_first: bool,
    /// The last lines of the rank's standard error.
    pub last_lines: Vec<String>,
    /// The file with all of its standard error.
    pub log: Option<PathBuf>,
    /// What another rank has reported about it.
    pub witness: Option<Witness>,
}

/// How a rank that failed has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    Status(ExitStatus),
    /// The others found it at fault, and it has not ended by itself.
    StillRuns,
    /// It is on another node: which, as text.
    Elsewhere(String),
}

/// What happens after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The others are ended. Whether they could have gone on without the rank: they communicate with phalanx.
    EndOthers { could_go_on: bool },
    /// The others go on.
    GoOn,
    /// The others go on, and the rank is started anew.
    Replace { restart: u32, most: u32 },
    /// All ranks are started anew: there is none that could take in a new one.
    StartOver { restart: u32, most: u32 },
}

/// A rank that reported why its communicator had failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Witness {
    pub rank: usize,
    pub why: String,
}

impl Failure {
    /// Whether all ranks are to be started anew.
    pub fn starts_over(&self) -> bool {
        matches!(self.then, Then::StartOver { .. })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { rank, end, after, .. } = self;
        let failed = match self.then {
            Then::EndOthers { .. } if self.is_first => "failed first",
            _ => "failed",
        };
        let seconds = after.as_secs_f64();
        match end {
            End::Status(status) if status.success() => {
                write!(
                    f,
                    "rank {rank} {failed}: it ended, with exit status 0, while others needed it, after {seconds:.1} s"
                )
            }
            End::Status(status) => {
                write!(f, "rank {rank} {failed}: {}, after {seconds:.1} s", status::describe(*status))
            }
            End::StillRuns => write!(f, "rank {rank} {failed}; its process still runs, after {seconds:.1} s"),
            End::Elsewhere(node) => write!(f, "rank {rank} {failed}, on {node}, after {seconds:.1} s"),
        }
    }
}

/// The end of an attempt on one node, as sent to the launchers of the other nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    pub node: usize,
    /// The node's host name.
    pub host: String,
    /// What happened: a sentence without its full stop.
    pub what: String,
    /// The last lines of the failed rank's standard error.
    pub last_lines: Vec<String>,
    /// The exit status of all launchers.
    pub exit_code: u8,
    /// Whether the job may be started again: only after a rank has failed.
    pub may_restart: bool,
    /// Whether all ranks are started anew, since none is left that could take in a new one.
    pub starts_over: bool,
    /// Whether the node's launcher is lost.
    is_loss: bool,
}

impl Notice {
    /// The notice of an outcome on this node; `None` for success.
    pub fn of(outcome: &Outcome, node: usize, host: &str) -> Option<Notice> {
        let (what, last_lines) = match outcome {
            Outcome::Success => return None,
            Outcome::OtherNode(notice) => return Some(notice.clone()),
            Outcome::Failed(failure) => (failure.to_string(), sendable(&failure.last_lines)),
            Outcome::TimedOut { after, .. } => {
                (format!("its ranks still ran after {:.1} s", after.as_secs_f64()), Vec::new())
            }
            Outcome::Interrupted { signal } => {
                (format!("its launcher got {}", signals::name(*signal)), Vec::new())
            }
            Outcome::NotStarted(error) => (error.to_string(), Vec::new()),
            Outcome::OutputLost(error) => (describe_lost_output(error), Vec::new()),
        };
        let (host, exit_code) = (host.to_owned(), outcome.exit_code());
        let may_restart = matches!(outcome, Outcome::Failed(_));
        let starts_over = matches!(outcome, Outcome::Failed(failure) if failure.starts_over());
        Some(Notice { node, host, what, last_lines, exit_code, may_restart, starts_over, is_loss: false })
    }

    /// The notice of a node whose launcher is lost, and cannot send its own.
    pub fn lost(node: usize, why: &str) -> Notice {
        Notice {
            node,
            host: "lost".to_owned(),
            what: why.to_owned(),
            last_lines: Vec::new(),
            exit_code: 1,
            may_restart: false,
            starts_over: false,
            is_loss: true,
        }
    }

    /// Whether the node's launcher is lost, and its ranks with it.
    pub fn is_loss(&self) -> bool {
        self.is_loss
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("text and numbers")
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<Notice> {
        serde_json::from_slice(bytes).ok()
    }
}

/// The message about output of the ranks that could not be written.
pub fn describe_lost_output(error: &io::Error) -> String {
    format!("the ranks' output could not be passed on: {error}")
}

fn sendable(lines: &[String]) -> Vec<String> {
    lines.iter().map(|line| line.chars().take(MAX_SENT_LINE).collect()).collect()
}
