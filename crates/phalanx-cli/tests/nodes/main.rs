//! Tests of `phalanx launch` on several nodes: launchers on the loopback interface, and in network namespaces with a
//! wire that is cut; ranks on hosts, and steps of a real Slurm.

#[path = "../common/mod.rs"]
mod common;
#[cfg(target_os = "linux")]
mod hosts;
#[cfg(target_os = "linux")]
mod loopback;
#[cfg(target_os = "linux")]
mod members;
#[cfg(target_os = "linux")]
mod namespaces;
#[cfg(target_os = "linux")]
mod network;
#[cfg(target_os = "linux")]
mod node;
#[cfg(target_os = "linux")]
mod place;
#[cfg(target_os = "linux")]
mod rank;
#[cfg(target_os = "linux")]
mod slurm;
#[cfg(target_os = "linux")]
mod torchrun;

use libtest_mimic::Arguments;
#[cfg(target_os = "linux")]
use phalanx_testkit::suite::{self, Share};
use std::process::ExitCode;

/// How much of the suite a sample is: Python loads PyTorch several times for each of these.
#[cfg(target_os = "linux")]
const SHARES: &[Share] = &[("torchrun/real/", 3), ("hosts/", 2)];

/// A Slurm on hosts of its own is started for some of these; others load PyTorch, or wait for time limits.
#[cfg(target_os = "linux")]
const SLOW: &[&str] = &[
    "hosts/",
    "slurm/",
    "torchrun/real/",
    "a_port_that_is_taken",
    "a_rank_with_another_token",
    "an_outage_of_the_network",
    "hears_nothing_ends_the_job",
    "launchers_that_differ_in_encryption",
    "ranks_that_cannot_be_heard",
    "ranks_that_hear_nothing",
    "stopped_for_less_than_the_heartbeat",
    "whoever_is_waited_for",
    "a_name_that_comes_late",
    "a_node_cut_off",
    "a_node_that_cannot_be_heard",
    "ranks_cut_off",
];

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    if let Some(code) = rank::serve() {
        return code;
    }
    let mut args = Arguments::from_args();
    // One at a time: trials check time limits.
    args.test_threads.get_or_insert(1);
    let trials =
        [loopback::trials(), members::trials(), place::trials(), torchrun::trials(), namespaces::trials()];
    let trials = trials.into_iter().flatten().chain(hosts::trials()).chain(slurm::trials());
    let code = suite::run(&args, trials.collect(), SHARES, SLOW);
    hosts::end();
    code
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), Vec::new()).exit_code()
}
