//! Finding files other than shared libraries: headers, and archives of device code.

use crate::environment;
use crate::folders::{children, python_packages, targets};
use crate::{Attempt, NotFound, Place};
use std::path::{Path, PathBuf};

/// Where a file may be.
///
/// [`find`](FileSearch::find) looks into these folders in this order and takes the first one with the file:
/// 1. the folder in the environment variable [`variable`](FileSearch::variable); if it is set, nothing else;
/// 2. folders that the caller passes, such as those beside a loaded library;
/// 3. folders of each home that an environment variable names;
/// 4. Python's packages;
/// 5. folders of the system.
///
/// Relative folders of the environment do not count, except the first. In a program that [`is_secure`](crate::is_secure), no
/// variable does.
#[derive(Debug, Clone, Copy)]
pub struct FileSearch {
    /// The file's name in messages.
    pub name: &'static str,
    /// The file, as a path below the folder.
    pub file: &'static str,
    /// The environment variable by which a user chooses the folder.
    pub variable: &'static str,
    /// Environment variables with the folder of an installation.
    pub homes: &'static [&'static str],
    /// Folders below a home, and below `targets/*` of a CUDA installation.
    pub below: &'static [&'static str],
    /// Folders in Python's `site-packages`.
    pub wheels: &'static [&'static str],
    /// Folders of the system. One that ends in `*` stands for all with that prefix, in falling order.
    pub system: &'static [&'static str],
}

/// A folder with the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The folder.
    pub folder: PathBuf,
    /// The reason for the folder: an environment variable, `beside NVRTC`, …
    pub origin: String,
}

impl FileSearch {
    /// Finds the file. `beside` are folders of the caller.
    ///
    /// # Errors
    /// [`NotFound`] with the folders that were tried.
    pub fn find(&self, beside: &[Found]) -> Result<Found, NotFound> {
        let mut tried = Vec::new();
        for found in self.folders(beside) {
            let file = found.folder.join(self.file);
            if file.exists() {
                return Ok(found);
            }
            let place = Place { file, origin: found.origin };
            tried.push(Attempt { place, error: Some("no such file".to_owned()) });
        }
        Err(NotFound { library: self.name, variable: self.variable, tried }.with_left_out())
    }

    fn folders(&self, beside: &[Found]) -> Vec<Found> {
        if let Some(folder) = environment::chosen(self.variable) {
            return vec![Found { folder: folder.into(), origin: self.variable.to_owned() }];
        }
        let mut folders = beside.to_vec();
        let named = |variable: &&str| Some((environment::folder(variable)?, (*variable).to_owned()));
        let homes = self.homes.iter().filter_map(named);
        let tree = [(PathBuf::from("/usr/local/cuda"), "the system's folders".to_owned())];
        for (home, origin) in homes {
            self.add_home(&home, &origin, &mut folders);
        }
        for (packages, origin) in python_packages() {
            folders.extend(
                self.wheels
                    .iter()
                    .map(|wheel| Found { folder: packages.join(wheel), origin: origin.clone() }),
            );
        }
        for (home, origin) in tree {
            self.add_home(&home, &origin, &mut folders);
        }
        for folder in self.system.iter().flat_map(|pattern| matching(pattern)) {
            folders.push(Found { folder, origin: "the system's folders".to_owned() });
        }
        folders
    }

    fn add_home(&self, home: &Path, origin: &str, folders: &mut Vec<Found>) {
        for below in self.below {
            for folder in [home.join(below)].into_iter().chain(targets(home, below)) {
                folders.push(Found { folder, origin: origin.to_owned() });
            }
        }
    }
}

/// A folder, or all folders with a prefix in falling order.
fn matching(pattern: &str) -> Vec<PathBuf> {
    let Some(start) = pattern.strip_suffix('*') else { return vec![pattern.into()] };
    let (parent, prefix) = start.rsplit_once('/').unwrap_or(("", start));
    let mut found = children(Path::new(parent), prefix);
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEARCH: FileSearch = FileSearch {
        name: "the headers",
        file: "nowhere.h",
        variable: "PHALANX_TEST_NOWHERE_INCLUDE",
        homes: &[],
        below: &["include"],
        wheels: &[],
        system: &["/usr/no-such-folder"],
    };

    #[test]
    fn a_missing_file_says_where_it_was_looked_for() {
        let beside = Found { folder: "/beside".into(), origin: "beside the library".to_owned() };
        let text = SEARCH.find(&[beside]).unwrap_err().to_string();
        for part in [
            "the headers",
            "/beside/nowhere.h",
            "beside the library",
            "/usr/no-such-folder/nowhere.h",
            "_NOWHERE_INCLUDE",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn the_first_folder_that_has_it_is_taken() {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let search = FileSearch { file: "Cargo.toml", ..SEARCH };
        let beside = [("/beside", "first"), (env!("CARGO_MANIFEST_DIR"), "second")]
            .map(|(folder, origin)| Found { folder: folder.into(), origin: origin.to_owned() });
        assert_eq!(search.find(&beside).unwrap(), Found { folder, origin: "second".to_owned() });
    }

    #[test]
    fn patterns_stand_for_folders() {
        assert_eq!(matching("/usr/include"), [PathBuf::from("/usr/include")]);
        assert!(matching(concat!(env!("CARGO_MANIFEST_DIR"), "/Car*"))[0].ends_with("Cargo.toml"));
        assert!(matching("/no/such/folder*").is_empty());
    }
}
