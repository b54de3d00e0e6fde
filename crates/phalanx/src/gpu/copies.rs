//! Several copies of one library in a process: they know nothing of each other, so communicators of the two wait for ever.

use crate::os::sync::lock;
use phalanx_sys::Search;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Those that the log has named already.
pub(crate) struct Copies(Mutex<Vec<PathBuf>>);

impl Copies {
    pub const fn new() -> Copies {
        Copies(Mutex::new(Vec::new()))
    }

    /// Warns of copies beside the one that is used, each once. They may be loaded at any time: by the program, or by another library.
    pub fn look(&self, search: &Search, used: &Path) {
        let mut named = lock(&self.0);
        for other in search.loaded_beside(used) {
            if named.contains(&other) {
                continue;
            }
            tracing::warn!(
                "this process has loaded another {} too: {other:?} beside {used:?}; they know nothing of each other",
                search.name
            );
            named.push(other);
        }
    }
}
