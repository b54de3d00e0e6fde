//! The options of `phalanx launch`.
//!
//! Everything after `--` belongs to the program that is started.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

/// Start a program several times, as ranks that find each other: on this machine, or on several.
///
/// Each copy gets its rank and the number of ranks in environment variables, which `phalanx::init()`
/// reads. Its output appears with its rank in front of every line. When a rank fails, the others are
/// ended, and the exit status is that of the rank that failed first (128 + the signal's number if a
/// signal killed it; 124 after --timeout).
///
/// If the standard input is no terminal, rank 0 reads it; the other ranks have none. Signals are passed on to the
/// ranks: USR1 and USR2, TSTP (Ctrl-Z) and CONT, and those that end the job.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct LaunchArgs {
    /// How many ranks to start on this machine.
    #[arg(short = 'n', long = "ranks", visible_alias = "nproc-per-node", value_name = "N", value_parser = parse_ranks)]
    pub ranks: usize,

    /// End the ranks that still run after this many seconds; the exit status is then 124.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub timeout: Option<Duration>,

    /// Leave the ranks' output as it is: no rank in front of each line.
    #[arg(long)]
    pub no_prefix: bool,

    /// Start all ranks again, at most so often, when one has failed.
    ///
    /// The ranks find in PHALANX_RESTART_COUNT how often that was done.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_restarts: u32,

    /// Write each rank's output to files in this folder as well: rank-0.out, rank-0.err, …
    #[arg(long, value_name = "FOLDER")]
    pub log_dir: Option<PathBuf>,

    #[command(flatten)]
    pub nodes: NodeArgs,

    /// The program to start, and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  phalanx launch -n 4 -- ./train --epochs 3

  Four ranks on each of two machines, alpha and beta, which have the same secret in a file (mode 600):
  alpha$ phalanx launch --nnodes 2 --node-rank 0 --store alpha:29400 --token-file T -n 4 -- ./train
  beta$  phalanx launch --nnodes 2 --node-rank 1 --store alpha:29400 --token-file T -n 4 -- ./train";

/// Several machines: `phalanx launch` runs once on each.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Several machines")]
pub struct NodeArgs {
    /// On how many machines the job runs.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_nodes)]
    pub nnodes: usize,

    /// Which of them this is, from 0.
    #[arg(long, value_name = "K", requires = "store", requires = "token_file")]
    pub node_rank: Option<usize>,

    /// Where the machines meet: an address of node 0 that all of them reach, with a port that is free there.
    #[arg(long, visible_alias = "rdzv-endpoint", value_name = "HOST:PORT", requires = "node_rank")]
    pub store: Option<String>,

    /// A file with a secret of at least 16 characters, the same on all machines, that only you can read.
    #[arg(long, value_name = "FILE", requires = "node_rank")]
    pub token_file: Option<String>,
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

/// More ranks than any machine can run.
const MOST_RANKS: usize = 1 << 16;
/// More seconds than anybody waits, and fewer than any clock can hold: 136 years.
const MOST_SECONDS: f64 = u32::MAX as f64;

/// Reads a number of ranks: at least 1.
pub fn parse_ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("0 ranks cannot do anything: give at least 1".to_owned()),
        Ok(ranks) if ranks > MOST_RANKS => Err(format!("{ranks} ranks are too many: at most {MOST_RANKS}")),
        Ok(ranks) => Ok(ranks),
        Err(_) => Err(format!("{text:?} is no number of ranks: expected 1, 2, 3, …")),
    }
}

fn parse_nodes(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|nodes| *nodes > 0).ok_or_else(|| format!("{text:?} is no number of machines"))
}

/// Reads a duration in seconds, which may have a fraction.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .filter(|seconds| *seconds <= MOST_SECONDS)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| {
            format!(
                "{text:?} is no duration: expected seconds above 0, like 30 or 0.5, at most {MOST_SECONDS}"
            )
        })
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
        assert!(parse_ranks("9999999999999999").unwrap_err().contains("at most 65536"));
    }

    #[test]
    fn durations_are_positive_seconds() {
        assert_eq!(parse_seconds("2"), Ok(Duration::from_secs(2)));
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "inf", "NaN", "1e300", "1.8e19", "soon"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }
}
