//! NVIDIA's own NCCL, as the wheels have it: our bindings against its headers, and its library without a GPU.
//!
//! `PHALANX_TEST_NCCL` names the folders of unpacked wheels, separated as in `PATH`; `.ci/run` installs the oldest
//! and the newest release that phalanx supports.

mod headers;
mod library;
mod release;

use libtest_mimic::{Arguments, Trial};
use phalanx_testkit::processes;
use release::Release;
use std::process::ExitCode;

/// What a trial does with a release.
type Check = fn(&Release) -> Result<(), String>;

const CHECKS: [(&str, Check); 9] = [
    ("header", headers::agree_with_the_bindings),
    ("differences", headers::notices_differences),
    ("functions", library::has_the_functions_of_its_version),
    ("version_and_id", library::tells_its_version_and_makes_ids),
    ("encryption", library::takes_a_key_for_sockets),
    ("parameters", library::tells_its_parameters),
    ("no_gpu", library::says_that_there_is_no_gpu),
    ("places", library::is_found_in_its_places),
    ("another_copy", library::notices_another_copy),
];

fn main() -> ExitCode {
    if let Some(code) = processes::serve(library::SCENARIOS) {
        return code;
    }
    let releases = Release::all();
    let is_ci = std::env::var("CI").is_ok_and(|value| value == "true");
    let trials = CHECKS.iter().flat_map(|(name, check)| match &releases {
        Ok(releases) => releases
            .iter()
            .map(|release| {
                let (title, release) = (format!("{}/{name}", release.version_text()), release.clone());
                Trial::test(title, move || Ok(check(&release)?))
            })
            .collect(),
        // A reason is no excuse where everything is there.
        Err(reason) => {
            let failure = reason.clone();
            vec![Trial::test(*name, move || Err(failure.into())).with_ignored_flag(!is_ci).with_kind(reason)]
        }
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}
