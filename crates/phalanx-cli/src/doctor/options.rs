//! The options of `phalanx doctor`.
//!
//! There is little to choose: it is for those who do not know yet what to ask.

use crate::launch::options::parse_ranks;

/// Show what this machine offers, and try a real communication on it.
///
/// Lists the system, the limits that matter, what the kernel can do and what a launcher has set; then
/// lets ranks add numbers up, as threads and as processes. The exit status is 1 if that fails.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// How many ranks the tests have.
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = parse_ranks, default_value = "2")]
    pub ranks: usize,

    /// This process is one of the ranks of a test.
    #[arg(long, hide = true)]
    pub as_rank: bool,
}
