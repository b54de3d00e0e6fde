//! Kernels compiled and linked by the real NVRTC and nvJitLink, which need no GPU; and launched, where there
//! is one.
//!
//! The libraries and headers are those of a Python environment that `PHALANX_TEST_CUDA` names, with the
//! packages that `.ci/run` installs, and, of NCCL, those that `PHALANX_TEST_NCCL` names. Without it the
//! trials are ignored; on a CI machine that is a failure. Each trial is a process of its own, since a library
//! stays loaded and the environment says where libraries are.

mod gpu;
mod trials;

use libtest_mimic::{Failed, Trial};
use phalanx_testkit::suite;
use std::process::{Command, ExitCode};
use trials::{Case, NOWHERE};

/// The Python environment.
const ENVIRONMENT: &str = "PHALANX_TEST_CUDA";
/// Which trial this process is.
const TRIAL: &str = "PHALANX_TESTKIT_KERNELS_TRIAL";

/// In a process that is a trial: does it.
pub fn serve() -> Option<ExitCode> {
    let name = std::env::var(TRIAL).ok()?;
    let mut cases = trials::TRIALS.iter().chain(gpu::TRIALS);
    let case = cases.find(|case| case.name == name).expect("a trial of this program");
    (case.body)();
    Some(ExitCode::SUCCESS)
}

pub fn trials() -> Vec<Trial> {
    let environment = std::env::var(ENVIRONMENT).ok().filter(|folder| !folder.is_empty());
    let no_gpu = gpu::objection();
    let trial = |case: &'static Case, objection: Option<&String>| {
        let name = format!("kernels/{}", case.name);
        match (environment.clone(), objection) {
            (Some(_), Some(reason)) => suite::ignored(name, reason),
            (Some(folder), None) => Trial::test(name, move || run(case, &folder)),
            (None, _) => suite::missing(name, format!("{ENVIRONMENT} is not set")),
        }
    };
    let without = trials::TRIALS.iter().map(|case| trial(case, None));
    without.chain(gpu::TRIALS.iter().map(|case| trial(case, no_gpu.as_ref()))).collect()
}

/// Runs a trial in a process that finds the libraries of the environment and no others.
fn run(case: &Case, environment: &str) -> Result<(), Failed> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(TRIAL, case.name).env("VIRTUAL_ENV", environment).env("RUST_BACKTRACE", "0");
    for variable in ["CUDA_HOME", "CUDA_PATH", "NVSHMEM_HOME", "NVSHMEM_PREFIX", "CONDA_PREFIX"] {
        command.env_remove(variable);
    }
    // Those of the newest release, which may be none that is installed.
    let releases = std::env::var_os("PHALANX_TEST_NCCL").unwrap_or_default();
    if let Some(newest) = std::env::split_paths(&releases).last() {
        command.env("PHALANX_NCCL_INCLUDE", newest.join("nvidia/nccl/include"));
    }
    let output = command.envs(case.nowhere.map(|variable| (variable, NOWHERE))).output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Err(format!("{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr)).into())
}
