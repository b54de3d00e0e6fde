//! The plugins by which NVSHMEM finds the PEs in a launcher's environment.

use crate::{NotFound, Place, Search};
use std::path::Path;

/// A way to find the PEs, and the plugin that goes it.
#[derive(Debug)]
pub struct Plugin {
    /// What `NVSHMEM_BOOTSTRAP` says, in capitals.
    pub bootstrap: &'static str,
    /// What `NVSHMEM_BOOTSTRAP_PMI` says besides, in capitals; empty where that does not count.
    pub pmi: &'static [&'static str],
    /// Its files.
    pub search: Search,
}

/// The plugins of NVSHMEM 3. (One more, for the unique id, is not chosen by the environment.)
pub const PLUGINS: [Plugin; 5] = [
    plugin(
        "PMI",
        &["PMI"],
        "NVSHMEM's plugin for PMI",
        &["nvshmem_bootstrap_pmi.so.3", "nvshmem_bootstrap_pmi.so"],
        "NVSHMEM_BOOTSTRAP_PMI_PLUGIN",
    ),
    plugin(
        "PMI",
        &["PMI-2", "PMI2"],
        "NVSHMEM's plugin for PMI-2",
        &["nvshmem_bootstrap_pmi2.so.3", "nvshmem_bootstrap_pmi2.so"],
        "NVSHMEM_BOOTSTRAP_PMI2_PLUGIN",
    ),
    plugin(
        "PMI",
        &["PMIX"],
        "NVSHMEM's plugin for PMIx",
        &["nvshmem_bootstrap_pmix.so.3", "nvshmem_bootstrap_pmix.so"],
        "NVSHMEM_BOOTSTRAP_PMIX_PLUGIN",
    ),
    plugin(
        "MPI",
        &[],
        "NVSHMEM's plugin for MPI",
        &["nvshmem_bootstrap_mpi.so.3", "nvshmem_bootstrap_mpi.so"],
        "NVSHMEM_BOOTSTRAP_MPI_PLUGIN",
    ),
    plugin(
        "SHMEM",
        &[],
        "NVSHMEM's plugin for OpenSHMEM",
        &["nvshmem_bootstrap_shmem.so.3", "nvshmem_bootstrap_shmem.so"],
        "NVSHMEM_BOOTSTRAP_SHMEM_PLUGIN",
    ),
];

const fn plugin(
    bootstrap: &'static str,
    pmi: &'static [&'static str],
    name: &'static str,
    files: &'static [&'static str],
    variable: &'static str,
) -> Plugin {
    let search = Search { name, files, variable, homes: &[], wheels: &[], global: false };
    Plugin { bootstrap, pmi, search }
}

impl Plugin {
    /// The one that the environment asks for; `None` if that asks for something else, of which the library knows more.
    pub fn of_environment() -> Option<&'static Plugin> {
        let says = |variable: &str| match std::env::var(variable) {
            Ok(value) if !value.is_empty() => value.to_uppercase(),
            _ => "PMI".to_owned(),
        };
        let (bootstrap, pmi) = (says("NVSHMEM_BOOTSTRAP"), says("NVSHMEM_BOOTSTRAP_PMI"));
        let is_it = |plugin: &&Plugin| {
            plugin.bootstrap == bootstrap && (plugin.pmi.is_empty() || plugin.pmi.contains(&&*pmi))
        };
        const { &PLUGINS }.iter().find(is_it)
    }

    /// Loads it from where the library, which is this file, will: its own folder, or the loader's path.
    ///
    /// # Errors
    /// [`NotFound`]. The library itself then fails, or (3.4.5) ends the process: it frees twice what it knows of a plugin that does
    /// not load.
    pub fn load(&self, library: &Path) -> Result<(), NotFound> {
        let named = std::env::var_os(self.search.variable).is_some_and(|file| !file.is_empty());
        let folder = library.parent().filter(|_| !named);
        let beside = self.search.files.iter().filter_map(|file| {
            let file = folder?.join(file);
            file.exists().then(|| Place { file, origin: "NVSHMEM's own folder".to_owned() })
        });
        let elsewhere = self.search.places();
        self.search.open_among(beside.chain(elsewhere).collect()).map(drop)
    }
}
