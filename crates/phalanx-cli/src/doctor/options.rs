//! The options of `phalanx doctor`.

use crate::parse;
use clap::ValueEnum;
use std::time::Duration;

/// Show what this machine offers, and test real communication on it.
///
/// Lists the system, the limits that matter, the kernel's features, the launcher's variables, the GPUs and
/// the libraries that connect them. Then ranks add numbers up: as threads and as processes, on the host and
/// on all GPUs. The exit status is 1 if something fails.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Number of ranks in the tests on the host. Tests on GPUs have one for each GPU.
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = parse::ranks, default_value = "2")]
    pub ranks: usize,

    /// Seconds that the driver and the libraries have to answer, and the ranks of a test to wait for each
    /// other.
    #[arg(short = 'T', long = "timeout", value_name = "SECONDS", value_parser = parse::seconds, default_value = "60")]
    pub timeout: Duration,

    /// What this process does for the doctor process that started it.
    #[arg(long = "part", value_enum, hide = true)]
    pub role: Option<Role>,
}

/// The role of a process that the doctor starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Prints facts about the driver and the libraries.
    Survey,
    /// A rank on the host.
    HostRank,
    /// A rank with a GPU.
    GpuRank,
    /// All ranks with GPUs, as threads.
    AllGpus,
}
