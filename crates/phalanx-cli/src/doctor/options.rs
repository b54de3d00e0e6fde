//! The options of `phalanx doctor`.

use crate::parse;
use clap::ValueEnum;
use std::time::Duration;

/// Show what works on this machine, what is missing, and whether that matters.
///
/// Tries the system calls that ranks need, looks for GPUs and the libraries that connect them, and lets ranks add
/// numbers up: as threads and as processes, on the host and on all GPUs. The exit status is 1 if something fails.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  phalanx doctor -v\n  phalanx doctor --json > doctor.json\n  phalanx launch --nnodes 2 --store HOST:29400 -- phalanx doctor --hosts"
)]
pub struct DoctorArgs {
    /// Number of ranks in the tests on the host. Tests on GPUs have one for each GPU.
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = parse::ranks, default_value = "2", allow_negative_numbers = true)]
    pub ranks: usize,

    /// Seconds that the driver and the libraries have to answer, and the ranks of a test to wait for each
    /// other.
    #[arg(short = 'T', long = "timeout", value_name = "SECONDS", value_parser = parse::seconds, default_value = "60", allow_negative_numbers = true)]
    pub timeout: Duration,

    /// Show the details, too: the machine and its limits, the launcher's variables, every library with the places
    /// that were tried and the functions that it lacks.
    #[arg(short, long)]
    pub verbose: bool,

    /// Print one JSON object with all details instead: what was found (`sections`), what works (`findings`, each `ok`, `slow`, `missing` or
    /// `failed`) and the verdict.
    #[arg(long, conflicts_with_all = ["verbose", "hosts"])]
    pub json: bool,

    /// Measure the network between the hosts of a job instead, by one rank of each: start it as that job's program.
    ///
    /// All pairs of up to 64 hosts, and for each host 63 others beyond that: latency, bandwidth, clocks, versions. The exit status is 1 if
    /// a host or a link is slow.
    #[arg(long)]
    pub hosts: bool,

    /// With --hosts: also draw the bandwidths, into a file that ends in .svg or .png.
    #[arg(long, value_name = "FILE", requires = "hosts")]
    pub picture: Option<std::path::PathBuf>,

    /// What this process does for the doctor process that started it.
    #[arg(long = "part", value_enum, hide = true)]
    pub role: Option<Role>,
}

/// The role of a process that the doctor starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Prints facts about the driver and the libraries.
    #[value(hide = true)]
    Survey,
    /// Has memory that another process reads.
    #[cfg(target_os = "linux")]
    #[value(hide = true)]
    Lender,
    /// Reads that memory.
    #[cfg(target_os = "linux")]
    #[value(hide = true)]
    Reader,
    /// A rank on the host.
    #[value(hide = true)]
    HostRank,
    /// A rank with a GPU.
    #[value(hide = true)]
    GpuRank,
    /// All ranks with GPUs, as threads.
    #[value(hide = true)]
    AllGpus,
}
