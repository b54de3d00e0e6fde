//! Which backends this machine has.

use super::section::Section;
use super::survey::Survey;

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
        line("mpi", &mpi()),
        line("nccl", &on(&survey.gpus)),
        line("rccl", &on(&survey.amd_gpus)),
    ];
    Section::new("Backends", lines)
}

/// The MPI library. It is loaded and not initialised.
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
