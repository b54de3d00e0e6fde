//! `phalanx doctor`: shows what this machine offers, and tests real communication on it.
//!
//! Facts come first and test results last, so that the reason of a failure stands above it.
//!
//! Facts about GPUs come from a process of its own: `survey.rs` starts it and reads its lines; `answers.rs`,
//! `gpus.rs` and `libraries.rs` run in it, and `facts.rs` has the form of a line.

mod answers;
mod backends;
mod facts;
mod gpus;
mod launcher;
mod libraries;
pub mod options;
mod section;
mod survey;
mod system;
mod trial;

use crate::error::explain;
use anyhow::Result;
use options::{DoctorArgs, Role};
use section::WIDTH;
use std::io::{self, Write};
use std::process::ExitCode;
use survey::Survey;
use trial::Trial;

/// Surveys and tests the machine, or plays the role that another doctor process asks for. The exit status is
/// 0 if everything works.
pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    match args.role {
        None => examine(args),
        Some(Role::Survey) => answers::print(),
        Some(role) => trial::run_role(role, args.timeout),
    }
}

fn examine(args: &DoctorArgs) -> Result<ExitCode> {
    let mut out = io::stdout().lock();
    writeln!(out, "phalanx {}", env!("CARGO_PKG_VERSION"))?;
    let mut failed = 0;
    for section in [system::machine(), system::limits(), system::kernel()] {
        section.write(&mut out)?;
    }
    let (launcher, init_succeeds) = launcher::launcher();
    launcher.write(&mut out)?;
    failed += usize::from(!init_succeeds);
    out.flush()?;
    let survey = Survey::take(args.timeout);
    survey.sections.iter().try_for_each(|section| section.write(&mut out))?;
    if let Some(trouble) = &survey.trouble {
        writeln!(out, "  {:<WIDTH$}FAILED: {}", "GPUs and their libraries", explain(trouble))?;
        failed += 1;
    }
    backends::backends(&survey).write(&mut out)?;

    writeln!(out, "\nTests")?;
    for trial in Trial::all(args.ranks, survey.gpus.unwrap_or(0)) {
        out.flush()?;
        let result = trial.run(args.timeout);
        writeln!(out, "  {:<WIDTH$}{result}", trial.name())?;
        failed += usize::from(!result.passed());
    }
    match failed {
        0 => writeln!(out, "\nEverything works.")?,
        _ => writeln!(out, "\n{failed} FAILED.")?,
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
