//! `phalanx doctor`: shows what this machine offers, and tries a real communication on it.
//!
//! Facts first, then judgements: a person sees why a test failed in the lines above it.

pub mod options;
mod system;
mod trial;

use crate::environment;
use anyhow::Result;
use options::DoctorArgs;
use phalanx::Choice;
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
    let mut lines = environment::set_variables();
    // Read from the variables alone: to really join would wait for the other ranks, or disturb them.
    let makes = match phalanx::choose() {
        Ok(choice) => {
            lines.extend(recognised(&choice));
            what_init_makes(&choice)
        }
        Err(error) => format!("an error: {error}"),
    };
    lines.push(("phalanx::init() makes".to_owned(), makes));
    Section { heading: "Launcher", lines }
}

fn recognised(choice: &Choice) -> Option<(String, String)> {
    let launcher = choice.launcher.as_ref()?;
    let mut text = format!("{}, by {}", launcher.name, launcher.recognised_by.join(", "));
    if !launcher.ignored.is_empty() {
        text += &format!("; it comes before {}", launcher.ignored.join(", "));
    }
    Some(("recognised".to_owned(), text))
}

fn what_init_makes(choice: &Choice) -> String {
    let backend = format!("on the backend {}: {}", choice.backend, choice.reason);
    let Some(launcher) = &choice.launcher else {
        return format!("a world of one rank (no launcher's variables are set), {backend}");
    };
    let ranks = launcher.world_size.map_or("as many as MPI says".to_owned(), |size| size.to_string());
    format!("rank {} of {ranks}, as {} says, {backend}", launcher.rank, launcher.name)
}

fn backends() -> Section {
    let line = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    Section {
        heading: "Backends",
        lines: vec![
            line("solo", "one rank"),
            line("host", "ranks of this host, over shared memory"),
            line("mpi", &mpi()),
            line("others", "NCCL, RCCL, NVSHMEM and the CUDA driver are not looked for by this version"),
        ],
    }
}

/// The MPI library, which is loaded for this and not initialised.
#[cfg(all(unix, target_pointer_width = "64", target_endian = "little"))]
fn mpi() -> String {
    match phalanx_sys::mpi::Mpi::load() {
        Ok(mpi) => {
            let (path, origin) = (mpi.library.path().display(), &mpi.library.place().origin);
            format!(
                "{}; {path}, from {origin}; handles of {}. To try it: mpirun -n 2 phalanx perf all_reduce",
                mpi.version,
                mpi.flavour.name()
            )
        }
        Err(error) => format!("none: {error}"),
    }
}

#[cfg(not(all(unix, target_pointer_width = "64", target_endian = "little")))]
fn mpi() -> String {
    "needs 64-bit little-endian Unix".to_owned()
}
