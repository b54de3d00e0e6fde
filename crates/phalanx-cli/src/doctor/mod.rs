//! `phalanx doctor`: shows what this machine offers, and tries a real communication on it.
//!
//! Facts first, then judgements: a person sees why a test failed in the lines above it.

mod libraries;
pub mod options;
mod survey;
mod system;
mod trial;

use crate::environment;
use anyhow::Result;
use options::{DoctorArgs, Part};
use phalanx::Choice;
use std::io::{self, Write};
use std::process::ExitCode;
use survey::Survey;
use trial::Trial;

/// Columns of the names in front of the facts.
const WIDTH: usize = 36;

/// A heading and the lines below it: a name and what is known of it.
struct Section {
    heading: String,
    lines: Vec<(String, String)>,
}

/// Examines and tries. The exit status says whether all of it works.
pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    match args.part {
        Some(Part::Survey) => return survey::answer(),
        Some(part) => return trial::take_part(part, args.timeout),
        None => {}
    }
    let mut out = io::stdout().lock();
    writeln!(out, "phalanx {}", env!("CARGO_PKG_VERSION"))?;
    let mut failed = 0;
    for section in [system::machine(), system::limits(), system::kernel()] {
        section.write(&mut out)?;
    }
    let (launcher, makes_one) = launcher();
    launcher.write(&mut out)?;
    failed += usize::from(!makes_one);
    out.flush()?;
    let survey = Survey::take(args.timeout);
    survey.sections.iter().try_for_each(|section| section.write(&mut out))?;
    if let Some(trouble) = &survey.trouble {
        writeln!(out, "  {:<WIDTH$}FAILED: {}", "GPUs and their libraries", crate::explain(trouble))?;
        failed += 1;
    }
    backends(&survey).write(&mut out)?;

    writeln!(out, "\nTests")?;
    for test in Trial::all(args.ranks, survey.gpus.unwrap_or(0)) {
        out.flush()?;
        let verdict = test.run(args.timeout);
        writeln!(out, "  {:<WIDTH$}{verdict}", test.name())?;
        failed += usize::from(!verdict.passed());
    }
    match failed {
        0 => writeln!(out, "\nEverything works.")?,
        _ => writeln!(out, "\n{failed} FAILED.")?,
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Section {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "\n{}", self.heading)?;
        self.lines.iter().try_for_each(|(name, text)| writeln!(out, "  {name:<WIDTH$}{text}"))
    }
}

/// What a launcher has said, and what `phalanx::init()` makes of it: whether that is a communicator.
fn launcher() -> (Section, bool) {
    let mut lines = environment::set_variables();
    // To really join would wait for the other ranks, or disturb them.
    let chosen = phalanx::choose();
    let makes_one = chosen.is_ok();
    let makes = match chosen {
        Ok(choice) => {
            lines.extend(recognised(&choice));
            what_init_makes(&choice)
        }
        Err(error) => format!("FAILED: {error}"),
    };
    lines.push(("phalanx::init() makes".to_owned(), makes));
    (Section { heading: "Launcher".to_owned(), lines }, makes_one)
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

fn backends(survey: &Survey) -> Section {
    let line = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let on = |gpus: &Result<usize, String>| match gpus {
        Ok(1) => "1 rank, with a GPU".to_owned(),
        Ok(gpus) => format!("up to {gpus} ranks of this host, each with a GPU"),
        Err(why) => format!("not available: {why}"),
    };
    Section {
        heading: "Backends".to_owned(),
        lines: vec![
            line("solo", "one rank"),
            line("host", "ranks of this host, over shared memory"),
            line("mpi", &mpi()),
            line("nccl", &on(&survey.gpus)),
            line("rccl", &on(&survey.amd_gpus)),
        ],
    }
}

/// The MPI library, which is loaded for this and not initialised.
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
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

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
fn mpi() -> String {
    "needs a 64-bit little-endian machine".to_owned()
}
