//! The options of `phalanx doctor`.
//!
//! There is little to choose: it is for those who do not know yet what to ask.

use crate::launch::options::{parse_ranks, parse_seconds};
use clap::ValueEnum;
use std::time::Duration;

/// Show what this machine offers, and try a real communication on it.
///
/// Lists the system, the limits that matter, what the kernel can do, what a launcher has set, the GPUs
/// and the libraries that connect them; then lets ranks add numbers up, as threads and as processes, on
/// the host and on all GPUs. The exit status is 1 if that fails.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// How many ranks the tests on the host have. Those on GPUs have one for each GPU.
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = parse_ranks, default_value = "2")]
    pub ranks: usize,

    /// How many seconds the driver and the libraries may take to answer, and the ranks of a test to meet.
    #[arg(short = 'T', long = "timeout", value_name = "SECONDS", value_parser = parse_seconds, default_value = "60")]
    pub timeout: Duration,

    /// This process has a part in another's examination.
    #[arg(long, value_enum, hide = true)]
    pub part: Option<Part>,
}

/// What a process does that the doctor starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Asks the driver and the libraries.
    Survey,
    /// Is a rank on the host.
    HostRank,
    /// Is a rank with a GPU.
    GpuRank,
    /// Has all GPUs, a thread for each.
    AllGpus,
}
