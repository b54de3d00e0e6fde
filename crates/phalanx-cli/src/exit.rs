//! Exit statuses: one table for all commands, which `phalanx --help` prints.

use crate::error::explain;
use std::error::Error;
use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

/// Something failed, and standard error says what.
pub const FAILED: u8 = 1;
/// The command line or a variable of the environment makes no sense. Nothing was started.
pub const USAGE: u8 = 2;
/// A benchmark found wrong elements.
pub const WRONG_DATA: u8 = 3;
/// A rank waited longer than the timeout for the others, or ran longer than it. The status of timeout(1).
pub const TIMED_OUT: u8 = 124;

/// The table in the help.
pub const TABLE: &str = "\
Exit statuses:
  0         it worked; perf: all results are right; doctor: nothing that was tried fails
  1         something failed, and standard error says what
  2         the command line or an environment variable makes no sense; nothing was started
  3         perf: wrong elements
  124       the timeout has passed (perf, launch)
  126, 127  launch: the program cannot be run, or is not there
  128+N     signal N has ended the rank that failed first, or this program
  others    launch: the exit status of the rank that failed first";

/// Whether a rank of `perf` that exits with this status has printed the reason itself.
pub fn is_explained(status: i32) -> bool {
    [FAILED, USAGE, WRONG_DATA, TIMED_OUT].map(i32::from).contains(&status)
}

/// Time for rank 0 to say what is wrong: a launcher ends all ranks when the first ends.
const FIRST_RANK: Duration = Duration::from_millis(500);

/// Ends a rank of a launcher without a word, unless it is rank 0. The ranks have one command line, so one of them says what is wrong
/// with it.
pub fn leave_to_rank_0() {
    let launcher = phalanx::choose().ok().and_then(|choice| choice.launcher);
    if launcher.is_some_and(|launcher| launcher.rank > 0) {
        std::thread::sleep(FIRST_RANK);
        std::process::exit(USAGE.into());
    }
}

/// Whether an error is one of the command line or the environment.
pub fn is_usage(error: &anyhow::Error) -> bool {
    status(error) == USAGE
}

/// The status for an error, by its kind.
pub fn of(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(status(error))
}

fn status(error: &anyhow::Error) -> u8 {
    let kind = |cause: &(dyn Error + 'static)| match cause.downcast_ref() {
        Some(phalanx::Error::Usage(_)) => Some(USAGE),
        Some(phalanx::Error::Timeout(_)) => Some(TIMED_OUT),
        _ => cause.is::<Usage>().then_some(USAGE),
    };
    error.chain().find_map(kind).unwrap_or(FAILED)
}

/// An error of the command line or the environment.
#[derive(Debug)]
struct Usage(String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Usage {}

/// Marks an error as one of the command line or the environment.
pub fn usage(error: anyhow::Error) -> anyhow::Error {
    Usage(explain(&error)).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};
    use phalanx::{TimeoutError, UsageError};
    use std::time::Duration;

    #[test]
    fn the_status_follows_from_the_kind_of_error() {
        let timeout = TimeoutError {
            operation: "barrier".to_owned(),
            sequence: 1,
            reporter: 0,
            waited: Duration::from_secs(1),
            missing: Vec::new(),
        };
        let setting = UsageError::WorldSize { world_size: 600, limit: 512 };
        let cases = [
            (anyhow!("no memory"), FAILED),
            (usage(anyhow!("-b 8 -e 4")), USAGE),
            (phalanx::Error::from(setting).into(), USAGE),
            (phalanx::Error::from(timeout).into(), TIMED_OUT),
            (phalanx::Error::Aborted { rank: 1 }.into(), FAILED),
        ];
        for (error, status) in cases {
            let expected = format!("{:?}", ExitCode::from(status));
            assert_eq!(format!("{:?}", of(&error)), expected, "{error}");
            let within = Err::<(), _>(error).context("rank 0").unwrap_err();
            assert_eq!(format!("{:?}", of(&within)), expected, "{within}");
        }
    }

    #[test]
    fn every_status_is_in_the_table() {
        for status in [FAILED, USAGE, WRONG_DATA, TIMED_OUT] {
            let starts = |line: &str| line.trim().starts_with(&format!("{status} "));
            assert!(TABLE.lines().any(starts), "{status}");
        }
    }
}
