//! Lines of the summary: what works, what is missing, and whether that matters.

use serde::Serialize;
use std::fmt;

/// How it is with a part of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    /// It works, and takes longer than it could.
    Slow,
    /// It is not there, and need not be.
    Missing,
    Failed,
}

/// A part of the machine, and how it is with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub status: Status,
    pub name: String,
    pub text: String,
}

impl Finding {
    pub fn new(status: Status, name: impl Into<String>, text: impl Into<String>) -> Finding {
        Finding { status, name: name.into(), text: text.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = match self.status {
            Status::Ok => "OK",
            Status::Slow => "slow",
            Status::Missing => "missing",
            Status::Failed => "FAILED",
        };
        write!(f, "  {status:<9}{:<35}{}", self.name, self.text)
    }
}
