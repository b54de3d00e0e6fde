//! `phalanx doctor`: shows what works on this machine, what is missing and whether that matters, and tests real
//! communication on it.
//!
//! The summary has a line for each part (`finding.rs`). With `-v` the details stand above it, in sections, so that
//! the reason of a failure comes before it.
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
mod section;
mod survey;
mod system;
mod trial;

use crate::error::explain;
use anyhow::Result;
use finding::{Finding, Status};
use launcher::Start;
use options::{DoctorArgs, Role};
use std::io::{self, Write};
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
    let mut out = io::stdout().lock();
    writeln!(out, "phalanx {} on {}", env!("CARGO_PKG_VERSION"), system::summary())?;
    let start = Start::find();
    let kernel = kernel::trials();
    if args.verbose {
        let sections = [system::machine(), system::limits(), kernel::section(&kernel)];
        sections.iter().chain([&start.section]).try_for_each(|section| section.write(&mut out))?;
        out.flush()?;
    }
    let survey = Survey::take(args.timeout);
    if args.verbose {
        survey.sections.iter().try_for_each(|section| section.write(&mut out))?;
        backends::backends(&survey).write(&mut out)?;
    }

    writeln!(out)?;
    let mut findings = vec![start.finding];
    findings.extend(kernel::findings(&kernel));
    if let Some(trouble) = &survey.trouble {
        findings.push(Finding::new(Status::Failed, "GPUs and their libraries", explain(trouble)));
    }
    findings.extend(backends::findings(&survey, start.is_mpi));
    findings.iter().try_for_each(|finding| writeln!(out, "{finding}"))?;
    for trial in Trial::all(args.ranks, survey.gpus.unwrap_or(0)) {
        out.flush()?;
        let finding = trial.run(args.timeout);
        writeln!(out, "{finding}")?;
        findings.push(finding);
    }

    let failed = findings.iter().filter(|finding| finding.status == Status::Failed).count();
    let verdict = if failed > 0 { format!("{failed} FAILED.") } else { verdict(&findings) };
    let more = if args.verbose { "" } else { "\nWhat was found and tried: phalanx doctor -v" };
    writeln!(out, "\n{verdict}{more}")?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
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
