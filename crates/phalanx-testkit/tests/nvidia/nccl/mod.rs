//! NVIDIA's own NCCL, as the wheels have it: our bindings against its headers, and its library without a GPU.
//!
//! `PHALANX_TEST_NCCL` names the folders of unpacked wheels, separated as in `PATH`; `.ci/run` installs the
//! oldest and the newest release that phalanx supports.

mod headers;
mod library;
mod release;

use libtest_mimic::Trial;
use phalanx_testkit::{Scenario, suite};
use release::Release;

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

pub const SCENARIOS: &[Scenario] = library::SCENARIOS;

pub fn trials() -> Vec<Trial> {
    let releases = match Release::all() {
        Ok(releases) => releases,
        Err(reason) => {
            let missing = |(name, _): &(&str, Check)| suite::missing(format!("nccl/{name}"), &reason);
            return CHECKS.iter().map(missing).collect();
        }
    };
    let trial = |(name, check): &(&str, Check), release: &Release| {
        let (title, release) = (format!("nccl/{}/{name}", release.version_text()), release.clone());
        let check = *check;
        Trial::test(title, move || Ok(check(&release)?))
    };
    CHECKS.iter().flat_map(|check| releases.iter().map(|release| trial(check, release))).collect()
}
