//! The options of `phalanx launch`.
//!
//! Everything after `--` belongs to the program that is started.

use std::ffi::{OsStr, OsString};
use std::time::Duration;

/// Start a program several times on this machine, as ranks that find each other.
///
/// Each copy gets its rank and the number of ranks in environment variables, which `phalanx::init()`
/// reads. Its output appears with its rank in front of every line. When a rank fails, the others are
/// ended, and the exit status is that of the rank that failed first (128 + the signal's number if a
/// signal killed it; 124 after --timeout).
///
/// If the standard input is no terminal, rank 0 reads it; the other ranks have none.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  phalanx launch -n 4 -- ./train --epochs 3")]
pub struct LaunchArgs {
    /// How many ranks to start.
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = parse_ranks)]
    pub ranks: usize,

    /// End the ranks that still run after this many seconds; the exit status is then 124.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub timeout: Option<Duration>,

    /// Leave the ranks' output as it is: no rank in front of each line.
    #[arg(long)]
    pub no_prefix: bool,

    /// The program to start, and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

impl LaunchArgs {
    pub fn program(&self) -> &OsStr {
        // clap made sure that there is one.
        &self.command[0]
    }

    pub fn arguments(&self) -> &[OsString] {
        &self.command[1..]
    }
}

/// Reads a number of ranks: at least 1.
pub fn parse_ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("0 ranks cannot do anything: give at least 1".to_owned()),
        Ok(ranks) => Ok(ranks),
        Err(_) => Err(format!("{text:?} is no number of ranks: expected 1, 2, 3, …")),
    }
}

/// Reads a duration in seconds, which may have a fraction.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| format!("{text:?} is no duration: expected seconds above 0, like 30 or 0.5"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_least_one_rank_is_needed() {
        assert_eq!(parse_ranks("3"), Ok(3));
        assert!(parse_ranks("0").unwrap_err().contains("at least 1"));
        assert!(parse_ranks("-1").is_err());
        assert!(parse_ranks("two").is_err());
    }

    #[test]
    fn durations_are_positive_seconds() {
        assert_eq!(parse_seconds("2"), Ok(Duration::from_secs(2)));
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "inf", "NaN", "1e300", "soon"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }
}
