//! `phalanx doctor`: shows what works on this machine, what is missing and whether that matters, and tests real
//! communication on it.
//!
//! The summary has a line for each part (`finding.rs`). With `-v` the details stand above it, in sections, so that
//! the reason of a failure comes before it. `report.rs` prints both, or makes an object of them.
//!
//! Facts about GPUs come from a process of its own: `survey.rs` starts it and reads its lines; `answers.rs`,
//! `gpus.rs` and `libraries.rs` run in it, and `facts.rs` has the form of a line.

mod answers;
mod backends;
mod facts;
mod finding;
mod gpus;
mod hosts;
mod kernel;
mod launcher;
mod libraries;
pub mod options;
#[cfg(target_os = "linux")]
mod reading;
mod report;
mod section;
mod survey;
mod system;
mod trial;

use crate::error::explain;
use anyhow::Result;
use finding::{Finding, Status};
use launcher::Start;
use options::{DoctorArgs, Role};
use report::Report;
use std::process::ExitCode;
use survey::Survey;
use trial::Trial;

/// Surveys and tests the machine, or plays the role that another doctor process asks for. The exit status is
/// 0 if nothing fails.
pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    match args.role {
        None if args.hosts => hosts::run(args),
        None => examine(args),
        Some(Role::Survey) => answers::print(),
        #[cfg(target_os = "linux")]
        Some(Role::Lender) => reading::lend(),
        #[cfg(target_os = "linux")]
        Some(Role::Reader) => reading::read(),
        Some(role) => trial::run_role(role, args.timeout),
    }
}

fn examine(args: &DoctorArgs) -> Result<ExitCode> {
    let mut report = Report::begin(args)?;
    let start = Start::find();
    let kernel = kernel::trials();
    for section in [system::machine(), system::limits(), kernel::section(&kernel), start.section] {
        report.section(section)?;
    }
    let mut survey = Survey::take(args.timeout);
    let backends = backends::backends(&survey);
    for section in survey.sections.drain(..).chain([backends]) {
        report.section(section)?;
    }

    report.finding(start.finding)?;
    for finding in kernel::findings(&kernel) {
        report.finding(finding)?;
    }
    if let Some(trouble) = &survey.trouble {
        report.finding(Finding::new(Status::Failed, "GPUs and their libraries", explain(trouble)))?;
    }
    for finding in backends::findings(&survey, start.is_mpi) {
        report.finding(finding)?;
    }
    for trial in Trial::all(args.ranks, survey.gpus.unwrap_or(0)) {
        report.finding(trial.run(args.timeout))?;
    }
    Ok(if report.finish()? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What ranks can use, and what is missing.
fn verdict(findings: &[Finding]) -> String {
    let places = [backends::MPI, backends::UCX, backends::NVIDIA, backends::AMD];
    let of = |status: Status| {
        let names = findings.iter().filter(|finding| finding.status == status).map(|finding| &*finding.name);
        names.filter(|name| places.contains(name)).collect::<Vec<_>>()
    };
    let works = [vec!["ranks on this host"], of(Status::Ok)].concat().join(", ");
    match &*of(Status::Missing) {
        [] => format!("Works: {works}."),
        missing => format!("Works: {works}. Missing: {}.", missing.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_names_what_is_missing() {
        let finding = |status, name| Finding::new(status, name, "");
        let all = [
            finding(Status::Ok, backends::MPI),
            finding(Status::Missing, backends::NVIDIA),
            finding(Status::Ok, "all_reduce, 2 threads"),
        ];
        assert_eq!(verdict(&all), "Works: ranks on this host, MPI. Missing: NVIDIA GPUs.");
        assert_eq!(verdict(&all[2..]), "Works: ranks on this host.");
    }
}
