//! A scenario: what each rank of a test does, by name, so that a process can be told to do it.

use phalanx::Comm;

/// What a rank reports when all went as it should, or else what went wrong.
pub type Outcome = Result<String, String>;

/// Something that ranks do together and that reports an outcome.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// Its name, unique in a test binary.
    pub name: &'static str,
    /// What is done.
    pub body: Body,
}

/// The code of a scenario; the arguments are the test's.
#[derive(Debug, Clone, Copy)]
pub enum Body {
    /// One rank's part, with its communicator. Runs as a thread or as a process.
    Rank(fn(Comm, &[String]) -> Outcome),
    /// The work of a whole process, which sets up (or fails to set up) whatever it needs.
    Process(fn(&[String]) -> Outcome),
}

impl Scenario {
    /// One rank's part.
    pub const fn rank(name: &'static str, body: fn(Comm, &[String]) -> Outcome) -> Scenario {
        Scenario { name, body: Body::Rank(body) }
    }

    /// The work of a whole process.
    pub const fn process(name: &'static str, body: fn(&[String]) -> Outcome) -> Scenario {
        Scenario { name, body: Body::Process(body) }
    }
}

/// Adds what was being done to a library error.
pub trait ErrorContext<T> {
    /// The error's text after `doing`.
    fn context(self, doing: impl FnOnce() -> String) -> Result<T, String>;
}

impl<T, E: std::fmt::Display> ErrorContext<T> for Result<T, E> {
    fn context(self, doing: impl FnOnce() -> String) -> Result<T, String> {
        self.map_err(|error| format!("{}: {error}", doing()))
    }
}

/// An error if no flight record of this process in the folder `PHALANX_TRACE_DIR` has this one.
pub fn recorded(error: &phalanx::Error) -> Result<(), String> {
    let folder = std::env::var_os("PHALANX_TRACE_DIR").ok_or("PHALANX_TRACE_DIR is not set")?;
    let own = format!("\"process\":{},", std::process::id());
    let entries = std::fs::read_dir(folder).map_err(|error| error.to_string())?.filter_map(Result::ok);
    let records = entries.filter_map(|entry| std::fs::read_to_string(entry.path()).ok());
    match records.filter(|record| record.contains(&own)).any(|record| record.contains(&error.to_string())) {
        true => Ok(()),
        false => Err(format!("no flight record says: {error}")),
    }
}
