//! The options of `phalanx launch`. Everything after `--` belongs to the program that is started.

use crate::parse;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

/// Start a program several times, as ranks that find each other.
///
/// The ranks run on this machine, or on several. Each copy gets its rank and the number of ranks in
/// environment variables, which `phalanx::init()` reads. Every line of its output appears with its rank in
/// front. When a rank fails, the others are ended, and the exit status is that of the rank that failed first
/// (128 + the signal's number if a signal killed it; 124 after --timeout).
///
/// With --keep-going or --restarts the others go on, for programs that shrink or rebuild their communicator. The
/// exit status is then 0 if a rank has ended with status 0 that the others did not miss; otherwise it is that of
/// the first rank that failed.
///
/// Rank 0 reads the standard input, unless that is a terminal; the other ranks have none. Signals are
/// forwarded to the ranks: USR1 and USR2, TSTP (Ctrl-Z) and CONT, and those that end the job.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct LaunchArgs {
    /// Number of ranks to start on this machine.
    #[arg(short = 'n', long = "ranks", visible_alias = "nproc-per-node", value_name = "N", value_parser = parse::ranks, allow_negative_numbers = true)]
    pub ranks: usize,

    /// End the ranks that still run after this many seconds; the exit status is then 124.
    #[arg(long, value_name = "SECONDS", value_parser = parse::seconds, allow_negative_numbers = true)]
    pub timeout: Option<Duration>,

    /// Pass the ranks' output on unchanged: no rank in front of each line.
    #[arg(long)]
    pub no_prefix: bool,

    /// Let the other ranks go on when one has failed, as after Comm::shrink.
    #[arg(long)]
    pub keep_going: bool,

    /// With --keep-going: end the others all the same when fewer ranks than this are left on this machine.
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = parse::ranks, allow_negative_numbers = true, requires = "keep_going")]
    pub min_ranks: usize,

    /// Start a rank that has failed anew, at most this many times in all; the others go on.
    ///
    /// The new process has the failed one's number, and PHALANX_REPLACES set to it. Its phalanx::init() joins the
    /// communicator that the others make with Comm::rebuild. If no rank is left that could take it in, or a rank
    /// fails before all have met, all ranks are started again. When no restart is left, the next failure ends the
    /// others, unless --keep-going is given, too. Several machines count together, and each is given the same number.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = restarts(), allow_negative_numbers = true, conflicts_with = "max_restarts")]
    pub restarts: u32,

    /// Start all ranks again when one has failed, at most this many times.
    ///
    /// The ranks find the number of restarts so far in PHALANX_RESTART_COUNT.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = restarts(), allow_negative_numbers = true, conflicts_with = "keep_going")]
    pub max_restarts: u32,

    /// Kill the ranks that still run so many seconds after they were asked to end (SIGTERM).
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_grace, allow_negative_numbers = true)]
    pub grace: Duration,

    /// Also write each rank's output to files in this folder: rank-0.out, rank-0.err, …
    #[arg(long, value_name = "FOLDER")]
    pub log_dir: Option<PathBuf>,

    /// Bind each rank to a part of this machine: a core (the ranks in order), a NUMA domain, or the cores next to its GPU.
    ///
    /// Only cores that the launcher itself may use are given out. Without the option a rank may use all of them, since programs have
    /// threads of their own.
    #[arg(long, value_enum, default_value_t = BindTo::None, value_name = "WHERE")]
    pub bind_to: BindTo,

    /// Say which cores each rank is bound to.
    #[arg(long)]
    pub report_bindings: bool,

    /// Serve the counters of this machine's ranks to Prometheus at this address, as http://ADDRESS/metrics; with port 0 at a free one.
    ///
    /// Whoever reaches the address can read them. The program needs phalanx's feature `metrics`.
    #[arg(long, value_name = "HOST:PORT")]
    pub metrics: Option<String>,

    #[command(flatten)]
    pub nodes: NodeArgs,

    /// The program to start, and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// What ranks are bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BindTo {
    None,
    Core,
    Numa,
    Gpu,
}

const EXAMPLES: &str = "\
Examples:
  phalanx launch -n 4 -- ./train --epochs 3

  Four ranks on each of two machines, alpha and beta, with the same secret in a file T (mode 600):
  alpha$ phalanx launch --nnodes 2 --node-rank 0 --store alpha:29400 --token-file T -n 4 -- ./train
  beta$  phalanx launch --nnodes 2 --node-rank 1 --store alpha:29400 --token-file T -n 4 -- ./train";

/// Options for several machines: `phalanx launch` runs once on each.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Several machines")]
pub struct NodeArgs {
    /// Number of machines that the job runs on.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_nodes, allow_negative_numbers = true)]
    pub nnodes: usize,

    /// Number of this machine, from 0.
    #[arg(long, value_name = "K", value_parser = parse::count, allow_negative_numbers = true, requires = "store")]
    pub node_rank: Option<usize>,

    /// The address at which the machines join: one of node 0 that all of them reach, with a free port.
    #[arg(long, visible_alias = "rdzv-endpoint", value_name = "HOST:PORT", requires = "node_rank")]
    pub store: Option<String>,

    /// The job's name, the same on all machines; by default Slurm's number of it. The store of another job turns them away.
    #[arg(long, visible_alias = "rdzv-id", value_name = "NAME", requires = "node_rank")]
    pub job: Option<String>,

    /// A file with a secret of at least 16 characters: the same on all machines, and readable only by you. Without it, the secret is
    /// read from the environment variable PHALANX_TOKEN.
    #[arg(long, value_name = "FILE", requires = "node_rank")]
    pub token_file: Option<String>,
}

impl LaunchArgs {
    pub fn program(&self) -> &OsStr {
        // clap requires at least one word.
        &self.command[0]
    }

    pub fn arguments(&self) -> &[OsString] {
        &self.command[1..]
    }
}

/// A grace may be 0: then ranks are killed at once.
fn parse_grace(text: &str) -> Result<Duration, String> {
    if text.parse() == Ok(0.0) { Ok(Duration::ZERO) } else { parse::seconds(text) }
}

fn restarts() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..)
}

fn parse_nodes(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|nodes| *nodes > 0).ok_or_else(|| format!("{text:?} is no number of machines"))
}
