//! NCCL or RCCL, loaded once for the process.

use super::copies::LoggedCopies;
use crate::types::error::Result;
use phalanx_sys::nccl::{Api, Flavour};
use std::sync::{Mutex, Once};

/// The loaded NCCL, or RCCL.
pub(crate) struct Library {
    api: Api,
    /// Registers, once, the end of all communicators when the process exits.
    pub(crate) ending: Once,
}

impl std::ops::Deref for Library {
    type Target = Api;

    fn deref(&self) -> &Api {
        &self.api
    }
}

/// Loads a flavour of the library, once for the process; a failure is not remembered.
pub(crate) fn load(flavour: Flavour) -> Result<&'static Library> {
    static LOADED: Mutex<Vec<&'static Library>> = Mutex::new(Vec::new());
    static COPIES: LoggedCopies = LoggedCopies::new();
    let (search, mut loaded) = (flavour.search(), crate::os::sync::lock(&LOADED));
    if let Some(library) = loaded.iter().find(|library| library.flavour() == flavour) {
        COPIES.look(search, library.path());
        return Ok(library);
    }
    let api = Api::load(search)?;
    crate::os::log::info!(
        version = phalanx_sys::nccl::version_text(api.version()),
        path = %api.path().display(),
        found = api.library().place().origin,
        "{}",
        api.name()
    );
    COPIES.look(search, api.path());
    let library: &'static Library = Box::leak(Box::new(Library { api, ending: Once::new() }));
    loaded.push(library);
    Ok(library)
}

impl Library {
    /// The functions that were found.
    pub fn api(&self) -> &Api {
        &self.api
    }
}

/// The version of the library that is, or would be, loaded; `None` if there is none.
pub(crate) fn loaded_version(flavour: Flavour) -> Option<u32> {
    load(flavour).ok().map(|library| library.version())
}
