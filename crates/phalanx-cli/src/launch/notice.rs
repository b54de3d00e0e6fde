//! What a launcher tells the launchers of the other nodes: how its part of the job came to its end.

use super::job::{Failure, Outcome, signal_code};
use super::{report, signals};
use serde::{Deserialize, Serialize};

/// The end of an attempt on one node, as it is told to the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    pub node: usize,
    /// The node's name for itself.
    pub host: String,
    /// What happened, as a sentence without its end.
    pub what: String,
    /// The last lines of the failed rank's standard error.
    pub last_words: Vec<String>,
    /// The status the launchers exit with.
    pub exit_code: u8,
    /// Whether the job may be started again: a rank has failed, and nobody wanted it to end.
    pub may_restart: bool,
}

impl Notice {
    /// Of an outcome on this node; `None` for success.
    pub fn of(outcome: &Outcome, node: usize, host: &str) -> Option<Notice> {
        let own = |what: String, exit_code: u8| Notice {
            node,
            host: host.to_owned(),
            what,
            last_words: Vec::new(),
            exit_code,
            may_restart: false,
        };
        match outcome {
            Outcome::Success => None,
            Outcome::Failed(failure) => Some(Notice {
                last_words: shortened(failure),
                may_restart: true,
                ..own(
                    format!(
                        "rank {} failed first: {}, after {:.1} s",
                        failure.rank,
                        report::describe_status(failure.status),
                        failure.after.as_secs_f64()
                    ),
                    failure.exit_code(),
                )
            }),
            Outcome::TimedOut { after, .. } => {
                Some(own(format!("its ranks still ran after {:.1} s", after.as_secs_f64()), super::TIMED_OUT))
            }
            Outcome::Interrupted { signal } => {
                Some(own(format!("its launcher got {}", signals::name(*signal)), signal_code(*signal)))
            }
            Outcome::NotStarted(error) => Some(own(error.to_string(), error.exit_code())),
            Outcome::Unwritten(error) => Some(own(report::describe_unwritten(error), 1)),
            Outcome::Elsewhere(notice) => Some(notice.clone()),
        }
    }

    /// A node that is lost cannot say so itself.
    pub fn lost(node: usize, why: &str) -> Notice {
        Notice {
            node,
            host: "lost".to_owned(),
            what: why.to_owned(),
            last_words: Vec::new(),
            exit_code: 1,
            may_restart: false,
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("text and numbers")
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<Notice> {
        serde_json::from_slice(bytes).ok()
    }
}

/// Few enough for the store.
fn shortened(failure: &Failure) -> Vec<String> {
    failure.last_words.iter().map(|line| line.chars().take(400).collect()).collect()
}
