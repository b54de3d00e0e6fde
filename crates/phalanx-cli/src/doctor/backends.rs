//! Which backends this machine has.

use super::finding::{Finding, Status};
use super::section::Section;
use super::survey::Survey;

pub const MPI: &str = "MPI";
pub const UCX: &str = "UCX";
pub const NVIDIA: &str = "NVIDIA GPUs";
pub const AMD: &str = "AMD GPUs";

/// A library that can be loaded.
struct Usable {
    version: String,
    details: String,
}

/// The section about backends.
pub fn backends(survey: &Survey) -> Section {
    let line = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let on = |gpus: &Result<usize, String>| match gpus {
        Ok(1) => "1 rank, with a GPU".to_owned(),
        Ok(gpus) => format!("up to {gpus} ranks of this host, each with a GPU"),
        Err(why) => format!("not available: {why}"),
    };
    let lines = vec![
        line("solo", "one rank"),
        line("host", "ranks of this host, over shared memory"),
        line(
            "mpi",
            &match mpi() {
                Ok(Usable { version, details }) => {
                    format!("{version}; {details}. To try it: mpirun -n 2 phalanx perf all_reduce")
                }
                Err(error) => format!("none: {error}"),
            },
        ),
        line(
            "ucx",
            &match ucx() {
                Ok(Usable { version, details }) => {
                    format!("{version}; {details}. Host memory of several hosts")
                }
                Err(error) => format!("none: {error}"),
            },
        ),
        line("nccl", &on(&survey.gpus)),
        line("rccl", &on(&survey.amd_gpus)),
    ];
    Section::new("Backends", lines)
}

/// The summary of MPI, UCX and the GPUs. `needs_mpi`: a launcher of MPI has started this process.
pub fn findings(survey: &Survey, needs_mpi: bool) -> Vec<Finding> {
    let (cuda, hip) = survey.seen;
    let mut findings = vec![match mpi() {
        Ok(mpi) => Finding::new(Status::Ok, MPI, mpi.version),
        Err(_) if needs_mpi => Finding::new(Status::Failed, MPI, "not found, and the launcher is one of MPI"),
        Err(_) => {
            Finding::new(Status::Missing, MPI, "matters only to programs that mpirun, mpiexec or srun starts")
        }
    }];
    findings.push(match ucx() {
        Ok(ucx) => Finding::new(Status::Ok, UCX, ucx.version),
        Err(_) => Finding::new(
            Status::Missing,
            UCX,
            "matters only to ranks without GPUs on several hosts, without an MPI",
        ),
    });
    findings.push(gpus(NVIDIA, &survey.gpus, cuda));
    if cuda > 0 {
        findings.extend(survey.libraries.iter().map(|(name, version)| match version {
            Some(version) => Finding::new(Status::Ok, name, version),
            None => Finding::new(Status::Missing, name, "matters only to programs that use it"),
        }));
    }
    findings.push(gpus(AMD, &survey.amd_gpus, hip));
    findings
}

fn gpus(name: &str, usable: &Result<usize, String>, seen: usize) -> Finding {
    match usable {
        Ok(count) => Finding::new(Status::Ok, name, format!("{count}, for a rank each")),
        Err(why) if seen > 0 => {
            Finding::new(Status::Missing, name, format!("{why}: the {seen} here are not used"))
        }
        Err(why) => {
            Finding::new(Status::Missing, name, format!("{why}; matters only on a machine with such GPUs"))
        }
    }
}

/// The MPI library. It is loaded and not initialised.
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
fn mpi() -> Result<Usable, String> {
    let mpi = phalanx_sys::mpi::Mpi::load().map_err(|error| error.to_string())?;
    let (path, origin) = (mpi.library.path().display(), &mpi.library.place().origin);
    let details = format!("{path}, from {origin}; handles of {}", mpi.flavour.name());
    Ok(Usable { version: mpi.version.clone(), details })
}

/// UCX. It is loaded and not initialised.
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
fn ucx() -> Result<Usable, String> {
    let ucx = phalanx_sys::ucx::Ucx::load().map_err(|error| error.to_string())?;
    let (major, minor, release) = ucx.version();
    let (path, origin) = (ucx.library().path().display(), &ucx.library().place().origin);
    Ok(Usable { version: format!("{major}.{minor}.{release}"), details: format!("{path}, from {origin}") })
}

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
fn mpi() -> Result<Usable, String> {
    Err("needs a 64-bit little-endian machine".to_owned())
}

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
fn ucx() -> Result<Usable, String> {
    Err("needs a 64-bit little-endian machine".to_owned())
}
