//! NVSHMEM's bootstrap plugins, by which it finds the other PEs.

use crate::{Attempt, NotFound, Place, Search, environment};
use std::path::Path;

/// A bootstrap plugin: a library that NVSHMEM loads to find the other PEs.
#[derive(Debug)]
pub struct Plugin {
    /// The plugin's name in messages.
    name: &'static str,
    /// NVIDIA's file; empty if there is none.
    file: &'static str,
    /// The environment variable with another file.
    variable: &'static str,
}

/// The plugin for unique ids.
pub const UID: Plugin = Plugin {
    name: "NVSHMEM's plugin for unique ids",
    file: "nvshmem_bootstrap_uid.so.3",
    variable: "NVSHMEM_BOOTSTRAP_UID_PLUGIN",
};
/// The plugin for process managers with PMI-1.
pub const PMI: Plugin = Plugin {
    name: "NVSHMEM's plugin for PMI",
    file: "nvshmem_bootstrap_pmi.so.3",
    variable: "NVSHMEM_BOOTSTRAP_PMI_PLUGIN",
};
/// The plugin for process managers with PMI-2.
pub const PMI2: Plugin = Plugin {
    name: "NVSHMEM's plugin for PMI-2",
    file: "nvshmem_bootstrap_pmi2.so.3",
    variable: "NVSHMEM_BOOTSTRAP_PMI2_PLUGIN",
};
/// The plugin for process managers with PMIx.
pub const PMIX: Plugin = Plugin {
    name: "NVSHMEM's plugin for PMIx",
    file: "nvshmem_bootstrap_pmix.so.3",
    variable: "NVSHMEM_BOOTSTRAP_PMIX_PLUGIN",
};
/// The plugin for jobs of MPI.
pub const MPI: Plugin = Plugin {
    name: "NVSHMEM's plugin for MPI",
    file: "nvshmem_bootstrap_mpi.so.3",
    variable: "NVSHMEM_BOOTSTRAP_MPI_PLUGIN",
};
/// The plugin for jobs of OpenSHMEM.
pub const SHMEM: Plugin = Plugin {
    name: "NVSHMEM's plugin for OpenSHMEM",
    file: "nvshmem_bootstrap_shmem.so.3",
    variable: "NVSHMEM_BOOTSTRAP_SHMEM_PLUGIN",
};
/// The user's own plugin.
pub const OTHER: Plugin =
    Plugin { name: "a plugin for NVSHMEM's bootstrap", file: "", variable: "NVSHMEM_BOOTSTRAP_PLUGIN" };

impl Plugin {
    /// The plugin that the environment chooses (`NVSHMEM_BOOTSTRAP`, `NVSHMEM_BOOTSTRAP_PMI`); `None` for a choice that the
    /// library refuses.
    pub fn of_environment() -> Option<&'static Plugin> {
        let [bootstrap, pmi] =
            ["NVSHMEM_BOOTSTRAP", "NVSHMEM_BOOTSTRAP_PMI"].map(|name| std::env::var(name).ok());
        Plugin::chosen(bootstrap.as_deref(), pmi.as_deref())
    }

    fn chosen(bootstrap: Option<&str>, pmi: Option<&str>) -> Option<&'static Plugin> {
        // PMI is the default of NVIDIA's builds. Other builds can have PMI-2 or PMIx as their default.
        let [bootstrap, pmi] = [bootstrap, pmi].map(|value| value.unwrap_or("PMI").to_uppercase());
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

    /// Loads the plugin as NVSHMEM, with the file `library`, will: by a path, or by a name in its own folder and on the
    /// loader's path.
    ///
    /// # Errors
    /// [`NotFound`]. In that case NVSHMEM's initialisation fails too, or ends the process (3.4.5, by a double free).
    pub fn load(&self, library: &Path) -> Result<(), NotFound> {
        let Plugin { name, variable, .. } = *self;
        if let Some(file) = environment::left_out(variable) {
            // The library would load it, whatever this program's rights are.
            let place = Place { file, origin: variable.to_owned() };
            let tried = vec![Attempt { place, error: Some(environment::LEFT_OUT.to_owned()) }];
            return Err(NotFound { library: name, variable, tried });
        }
        let (file, origin) = match std::env::var(variable) {
            Ok(named) => (named, variable),
            Err(_) => (self.file.to_owned(), "the loader's path"),
        };
        let given = Place { file: file.clone().into(), origin: origin.to_owned() };
        if file.is_empty() {
            // The loader would take an empty name for the program itself.
            let tried = vec![Attempt { place: given, error: Some("no file is named".into()) }];
            return Err(NotFound { library: name, variable, tried });
        }
        let folder = library.parent().filter(|_| !file.contains('/'));
        let beside = folder.map(|folder| folder.join(&file)).filter(|file| file.is_file());
        let beside = beside.map(|file| Place { file, origin: "NVSHMEM's own folder".to_owned() });
        let search = Search { name, files: &[], variable, homes: &[], wheels: &[], global: false };
        search.open_among(beside.into_iter().chain([given]).collect()).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_asks_for_one() {
        let asked = |bootstrap, pmi| Plugin::chosen(bootstrap, pmi).map(|plugin| plugin.variable);
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
    fn the_librarys_own_folder_is_looked_at() {
        let libm = Search {
            name: "the mathematical library",
            files: &["libm.so.6"],
            variable: "PHALANX_TEST_NOWHERE_LIB",
            homes: &[],
            wheels: &[],
            global: false,
        };
        let folder = std::env::temp_dir().join(format!("phalanx-plugin-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let plugin = Plugin { file: "a-plugin-of-a-test.so", ..UID };
        std::fs::copy(libm.open().unwrap().path(), folder.join(plugin.file)).unwrap();
        let error = plugin.load(Path::new("/nowhere/libnvshmem_host.so.3")).unwrap_err().to_string();
        let loaded = plugin.load(&folder.join("libnvshmem_host.so.3"));
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(error.contains(plugin.file), "{error}");
        loaded.unwrap();
    }
}
