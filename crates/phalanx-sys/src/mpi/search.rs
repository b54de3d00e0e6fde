//! Finding the MPI that fits this process's launcher.

use crate::{Place, Search, environment, is_secure};
use std::path::{Path, PathBuf};

const OPEN_MPI: &str = "libmpi.so.40";
const MPICH: &str = "libmpi.so.12";
const DEBIAN_MPICH: &str = "libmpich.so.12";
const STANDARD_ABI: &str = "libmpi_abi.so.1";

/// Where MPI may be, without a launcher that speaks PMI.
pub(super) const SEARCH: Search = Search {
    name: "MPI",
    files: &[OPEN_MPI, MPICH, DEBIAN_MPICH, STANDARD_ABI],
    variable: "PHALANX_MPI_LIB",
    homes: &["MPI_HOME", "MPI_ROOT", "I_MPI_ROOT", "OPAL_PREFIX", "VIRTUAL_ENV", "CONDA_PREFIX"],
    wheels: &[],
    global: true,
};

/// Where MPI may be under a launcher that speaks PMI: those of MPICH, Intel MPI, Cray PALS and Slurm.
const UNDER_PMI: Search = Search { files: &[MPICH, DEBIAN_MPICH, STANDARD_ABI, OPEN_MPI], ..SEARCH };

/// Names of programs that start MPI ranks.
const LAUNCHERS: [&str; 9] = [
    "orterun",
    "orted",
    "prterun",
    "prted",
    "prte",
    "hydra_pmi_proxy",
    "pmi_proxy",
    "mpiexec.hydra",
    "slurmstepd",
];

/// The places where MPI may be, in the order of the search:
/// 1. `PHALANX_MPI_LIB`; if it is set, nothing else;
/// 2. an MPI that the application has loaded;
/// 3. the installation of this process's launcher, unless this program [`is_secure`]: then its caller may have made both;
/// 4. the places of a [`Search`], first for the files that fit the launcher's variables.
pub fn places() -> Vec<Place> {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if environment::chosen(SEARCH.variable).is_some() {
        return SEARCH.places();
    }
    let search = if !set("OMPI_COMM_WORLD_SIZE") && set("PMI_RANK") { UNDER_PMI } else { SEARCH };
    let mut places: Vec<Place> = Vec::new();
    for file in search.loaded() {
        places.push(Place { file, origin: "this process, which has it loaded".to_owned() });
    }
    if let Some((_, program)) = launcher_process().filter(|_| !is_secure()) {
        for folder in library_folders(&program) {
            for file in search.files.iter().map(|file| folder.join(file)).filter(|file| file.exists()) {
                places.push(Place { file, origin: format!("the launcher, {}", program.display()) });
            }
        }
    }
    places.extend(search.places());
    places
}

/// The folders with the libraries of a program's installation.
fn library_folders(program: &Path) -> Vec<PathBuf> {
    let Some(prefix) = program.parent().and_then(Path::parent) else { return Vec::new() };
    let triplet = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    ["lib", "lib/release", "lib64", &triplet].map(|folder| prefix.join(folder)).into()
}

/// The id and the program of the launcher on this host, if this process descends from one.
pub fn launcher_process() -> Option<(u32, PathBuf)> {
    let mut process = std::process::id();
    // Up to 8 generations: shells and wrappers may be in between.
    for _ in 0..8 {
        process = parent(process)?;
        let Ok(program) = std::fs::read_link(format!("/proc/{process}/exe")) else { continue };
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        if LAUNCHERS.contains(&&*name) {
            return Some((process, program));
        }
    }
    None
}

fn parent(process: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // `pid (name) state parent …`, where the name may contain any character.
    let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
    (parent > 1).then_some(parent)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_found() {
        assert_eq!(parent(std::process::id()), Some(std::os::unix::process::parent_id()));
    }

    #[test]
    fn libraries_are_beside_the_program() {
        let folders = library_folders(Path::new("/opt/mpi/bin/prterun"));
        assert_eq!(folders[0], Path::new("/opt/mpi/lib"));
    }
}
