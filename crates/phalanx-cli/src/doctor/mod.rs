//! `phalanx doctor`: shows what this machine offers, and tries a real communication on it.
//!
//! Facts first, then judgements: a person sees why a test failed in the lines above it.

pub mod options;
mod system;
mod trial;

use crate::environment::{self, Launcher};
use anyhow::Result;
use options::DoctorArgs;
use std::io::{self, Write};
use std::process::ExitCode;

/// A heading and the lines below it: a name and what is known of it.
struct Section {
    heading: &'static str,
    lines: Vec<(String, String)>,
}

/// Examines and tries. The exit status says whether all tests passed.
pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    if args.as_rank {
        return trial::be_a_rank();
    }
    let mut out = io::stdout().lock();
    writeln!(out, "phalanx {}", env!("CARGO_PKG_VERSION"))?;
    for section in [system::machine(), system::limits(), system::kernel(), launcher(), backends()] {
        writeln!(out, "\n{}", section.heading)?;
        for (name, text) in &section.lines {
            writeln!(out, "  {name:<28}{text}")?;
        }
    }

    writeln!(out, "\nTests")?;
    let mut failed = 0;
    for test in trial::ALL {
        out.flush()?;
        let verdict = test.run(args.ranks);
        writeln!(out, "  {:<28}{verdict}", test.name(args.ranks))?;
        failed += usize::from(!verdict.passed());
    }
    match failed {
        0 => writeln!(out, "\nEverything works.")?,
        1 => writeln!(out, "\n1 test failed.")?,
        _ => writeln!(out, "\n{failed} tests failed.")?,
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What a launcher has said, and what `phalanx::init()` makes of it.
fn launcher() -> Section {
    let mut lines: Vec<(String, String)> =
        environment::set_variables().map(|(name, value)| (name.to_owned(), value)).collect();
    lines.push(("phalanx::init() makes".to_owned(), what_init_makes()));
    Section { heading: "Launcher", lines }
}

/// Read from the variables alone: to really join would wait for the other ranks, or disturb them.
fn what_init_makes() -> String {
    let Some(launcher) = Launcher::found() else {
        return "a world of one rank (no launcher's variables are set)".to_owned();
    };
    let (rank, ranks) = launcher.variables();
    let number = |name: &str| std::env::var(name).ok()?.trim().parse::<usize>().ok();
    match (number(rank), number(ranks)) {
        (Some(rank), Some(ranks)) if rank < ranks => {
            format!("rank {rank} of {ranks}, as {} says", launcher.name())
        }
        _ => format!("an error: {rank} and {ranks} must be set, to a rank and the number of ranks"),
    }
}

fn backends() -> Section {
    let line = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    Section {
        heading: "Backends",
        lines: vec![
            line("solo", "one rank"),
            line("host", "ranks of this host, over shared memory"),
            line("others", "NCCL, RCCL, NVSHMEM, MPI and the CUDA driver are not looked for by this version"),
        ],
    }
}
