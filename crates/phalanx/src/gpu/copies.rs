//! A warning about several copies of one library in a process. Communicators of two copies would wait for
//! each other forever.

use crate::os::sync::lock;
use phalanx_sys::Search;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// LoggedCopies that were logged already.
pub(crate) struct LoggedCopies(Mutex<Vec<PathBuf>>);

impl LoggedCopies {
    pub const fn new() -> LoggedCopies {
        LoggedCopies(Mutex::new(Vec::new()))
    }

    /// Warns about each copy beside the one in use, once. The program or another library may load one at any
    /// time.
    pub fn look(&self, search: &Search, used: &Path) {
        let mut named = lock(&self.0);
        for other in search.loaded_beside(used) {
            if named.contains(&other) {
                continue;
            }
            crate::os::log::warn!(
                "this process has loaded another {} too: {other:?} beside {used:?}; they know nothing of each other",
                search.name
            );
            named.push(other);
        }
    }
}
