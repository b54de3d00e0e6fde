//! The plugins by which NVSHMEM finds the PEs.

use crate::{Attempt, NotFound, Place, Search};
use std::path::Path;

/// A way to find the PEs is a library of its own, which NVSHMEM loads.
#[derive(Debug)]
pub struct Plugin {
    /// Its name and its file, and the variable that names another.
    search: Search,
}

const fn plugin(name: &'static str, files: &'static [&'static str], variable: &'static str) -> Plugin {
    Plugin { search: Search { name, files, variable, homes: &[], wheels: &[], global: false } }
}

/// For a unique id.
pub const UID: Plugin = plugin(
    "NVSHMEM's plugin for unique ids",
    &["nvshmem_bootstrap_uid.so.3"],
    "NVSHMEM_BOOTSTRAP_UID_PLUGIN",
);
/// For process managers with PMI-1.
pub const PMI: Plugin =
    plugin("NVSHMEM's plugin for PMI", &["nvshmem_bootstrap_pmi.so.3"], "NVSHMEM_BOOTSTRAP_PMI_PLUGIN");
/// For process managers with PMI-2.
pub const PMI2: Plugin =
    plugin("NVSHMEM's plugin for PMI-2", &["nvshmem_bootstrap_pmi2.so.3"], "NVSHMEM_BOOTSTRAP_PMI2_PLUGIN");
/// For process managers with PMIx.
pub const PMIX: Plugin =
    plugin("NVSHMEM's plugin for PMIx", &["nvshmem_bootstrap_pmix.so.3"], "NVSHMEM_BOOTSTRAP_PMIX_PLUGIN");
/// For jobs of an MPI.
pub const MPI: Plugin =
    plugin("NVSHMEM's plugin for MPI", &["nvshmem_bootstrap_mpi.so.3"], "NVSHMEM_BOOTSTRAP_MPI_PLUGIN");
/// For jobs of an OpenSHMEM.
pub const SHMEM: Plugin = plugin(
    "NVSHMEM's plugin for OpenSHMEM",
    &["nvshmem_bootstrap_shmem.so.3"],
    "NVSHMEM_BOOTSTRAP_SHMEM_PLUGIN",
);
/// Whatever the user has.
pub const OTHER: Plugin = plugin("a plugin for NVSHMEM's bootstrap", &[], "NVSHMEM_BOOTSTRAP_PLUGIN");

impl Plugin {
    /// The one that the environment asks for (`NVSHMEM_BOOTSTRAP`, `NVSHMEM_BOOTSTRAP_PMI`); `None` for what the library refuses.
    pub fn of_environment() -> Option<&'static Plugin> {
        let [bootstrap, pmi] =
            ["NVSHMEM_BOOTSTRAP", "NVSHMEM_BOOTSTRAP_PMI"].map(|name| std::env::var(name).ok());
        Plugin::asked_for(bootstrap.as_deref(), pmi.as_deref())
    }

    fn asked_for(bootstrap: Option<&str>, pmi: Option<&str>) -> Option<&'static Plugin> {
        // PMI is what NVIDIA's builds take where nothing is said; others can be built with PMI-2 or PMIx in its place.
        let [bootstrap, pmi] = [bootstrap, pmi].map(|said| said.unwrap_or("PMI").to_uppercase());
        match (&*bootstrap, &*pmi) {
            ("PMI", "PMI") => Some(&PMI),
            ("PMI", "PMI2" | "PMI-2") => Some(&PMI2),
            ("PMI", "PMIX") => Some(&PMIX),
            ("MPI", _) => Some(&MPI),
            ("SHMEM", _) => Some(&SHMEM),
            ("PLUGIN", _) => Some(&OTHER),
            _ => None,
        }
    }

    /// Loads it from where the library, which is this file, will: by a path, or by a name in its own folder and on the loader's path.
    ///
    /// # Errors
    /// [`NotFound`]. The library itself then fails, or (3.4.5) ends the process: it frees twice what it knows of a plugin that does
    /// not load.
    pub fn load(&self, library: &Path) -> Result<(), NotFound> {
        let named = std::env::var(self.search.variable).ok();
        let file = named.as_deref().or(self.search.files.first().copied()).unwrap_or_default();
        let of_whom = if named.is_some() { self.search.variable } else { "the loader's path" };
        let given = Place { file: file.into(), origin: of_whom.to_owned() };
        let beside = library.parent().filter(|_| !file.contains('/')).map(|folder| folder.join(file));
        let beside = beside
            .filter(|file| file.is_file())
            .map(|file| Place { file, origin: "NVSHMEM's own folder".to_owned() });
        if file.is_empty() {
            // The loader would take it for the program itself.
            let tried = vec![Attempt { place: given, error: Some("no file is named".into()) }];
            return Err(NotFound { library: self.search.name, variable: self.search.variable, tried });
        }
        self.search.open_among(beside.into_iter().chain([given]).collect()).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_asks_for_one() {
        let asked = |bootstrap, pmi| Plugin::asked_for(bootstrap, pmi).map(|plugin| plugin.search.variable);
        for (bootstrap, pmi, variable) in [
            (None, None, "NVSHMEM_BOOTSTRAP_PMI_PLUGIN"),
            (Some("pmi"), Some("PMIx"), "NVSHMEM_BOOTSTRAP_PMIX_PLUGIN"),
            (None, Some("pmi-2"), "NVSHMEM_BOOTSTRAP_PMI2_PLUGIN"),
            (None, Some("PMI2"), "NVSHMEM_BOOTSTRAP_PMI2_PLUGIN"),
            (Some("mpi"), Some("PMIX"), "NVSHMEM_BOOTSTRAP_MPI_PLUGIN"),
            (Some("SHMEM"), None, "NVSHMEM_BOOTSTRAP_SHMEM_PLUGIN"),
            (Some("plugin"), None, "NVSHMEM_BOOTSTRAP_PLUGIN"),
        ] {
            assert_eq!(asked(bootstrap, pmi), Some(variable), "{bootstrap:?}, {pmi:?}");
        }
        for (bootstrap, pmi) in
            [(Some(""), None), (Some("UID"), None), (None, Some("")), (None, Some("PMI3"))]
        {
            assert_eq!(asked(bootstrap, pmi), None, "{bootstrap:?}, {pmi:?}");
        }
    }

    #[test]
    fn what_does_not_load_is_named_with_the_variable() {
        let library = Path::new("/nowhere/libnvshmem_host.so.3");
        let error = PMIX.load(library).unwrap_err().to_string();
        for part in ["plugin for PMIx", "nvshmem_bootstrap_pmix.so.3", "NVSHMEM_BOOTSTRAP_PMIX_PLUGIN"] {
            assert!(error.contains(part), "{error}");
        }
        let error = OTHER.load(library).unwrap_err().to_string();
        assert!(error.contains("no file is named") && error.contains("NVSHMEM_BOOTSTRAP_PLUGIN"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_librarys_own_folder_comes_first() {
        let libm = Search { name: "the mathematical library", files: &["libm.so.6"], ..PMI.search };
        let path = libm.open().unwrap().path().to_owned();
        let beside = Plugin { search: Search { files: &["libm.so.6"], ..UID.search } };
        beside.load(&path.with_file_name("libnvshmem_host.so.3")).unwrap();
    }
}
