//! Finding and loading a library.

use crate::environment;
use crate::folders::{are_one_file, in_packages, is_version_of, loaded_files, python_packages, targets};
use crate::library::{Library, Place, open};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Where a library may be.
///
/// [`open`](Search::open) tries these places in this order and takes the first one that loads:
/// 1. the file or folder in the environment variable [`variable`](Search::variable); if it is set, nothing else;
/// 2. the loader's path (`LD_LIBRARY_PATH`, `ld.so.cache`), by each of the file names;
/// 3. each home that an environment variable names: itself, `lib`, `lib64`, `targets/*/lib`;
/// 4. Python's packages, where wheels install libraries: those of the active virtual or conda environment, of the user,
///    and of the system;
/// 5. the usual folders of distributions.
///
/// Relative folders of the environment do not count. In a program that [`is_secure`](crate::is_secure), no variable does.
#[derive(Debug, Clone, Copy)]
pub struct Search {
    /// The library's name in messages.
    pub name: &'static str,
    /// File names, the preferred first.
    pub files: &'static [&'static str],
    /// The environment variable by which a user chooses the file.
    pub variable: &'static str,
    /// Environment variables with the folder of an installation.
    pub homes: &'static [&'static str],
    /// Folders in Python's `site-packages`; a `*` stands for the rest of a name.
    pub wheels: &'static [&'static str],
    /// Whether other libraries see its symbols (`RTLD_GLOBAL`), as the plugins of some libraries expect.
    pub global: bool,
}

/// A place that was tried, and the result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The place.
    pub place: Place,
    /// The loader's error; `None` if it was loaded.
    pub error: Option<String>,
}

/// The error if no place has a library that loads, or the file of a [`FileSearch`](crate::FileSearch).
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{library} was not found ({}); install it, or set {variable} to where it is", describe(tried))]
pub struct NotFound {
    /// The library's name.
    pub library: &'static str,
    /// The environment variable by which a user chooses the place.
    pub variable: &'static str,
    /// The places that were tried, with the loader's errors. Places without such a file are left out.
    pub tried: Vec<Attempt>,
}

debug_is_the_message!(NotFound);

impl NotFound {
    /// Says of a variable that does not count in this program that it was left out.
    pub(crate) fn with_left_out(mut self) -> NotFound {
        if let Some(file) = environment::left_out(self.variable) {
            let place = Place { file, origin: self.variable.to_owned() };
            self.tried.push(Attempt { place, error: Some(environment::LEFT_OUT.to_owned()) });
        }
        self
    }
}

fn describe(tried: &[Attempt]) -> String {
    if tried.is_empty() {
        return "there is no place to look in".to_owned();
    }
    let one = |attempt: &Attempt| {
        let error = attempt.error.as_deref().unwrap_or("loaded");
        format!("{}, from {}: {error}", attempt.place.file.display(), attempt.place.origin)
    };
    let all: Vec<String> = tried.iter().map(one).collect();
    format!("tried {}", all.join("; "))
}

impl Search {
    /// Loads the library from the first place where it loads.
    ///
    /// # Errors
    /// [`NotFound`] with the places that were tried.
    pub fn open(&self) -> Result<Library, NotFound> {
        self.open_among(self.places())
    }

    /// Loads the library from the first of these places where it loads.
    ///
    /// # Errors
    /// [`NotFound`] with the places that were tried.
    pub fn open_among(&self, places: Vec<Place>) -> Result<Library, NotFound> {
        let mut tried = Vec::new();
        for place in places {
            match open(&place.file, self.global) {
                Ok(handle) => {
                    let path = self.path_of(&place);
                    return Ok(Library::new(handle, place, path));
                }
                Err(error) => tried.push(Attempt { place, error: Some(error) }),
            }
        }
        Err(NotFound { library: self.name, variable: self.variable, tried }.with_left_out())
    }

    /// The places in the order of the search: files that exist, and names for the loader. If the variable is set, its
    /// file or folder is the only place.
    pub fn places(&self) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::new();
        if let Some(chosen) = environment::chosen(self.variable) {
            let chosen = PathBuf::from(chosen);
            let files = if chosen.is_dir() {
                self.files.iter().map(|file| chosen.join(file)).collect()
            } else {
                vec![chosen]
            };
            places.extend(files.into_iter().map(|file| Place { file, origin: self.variable.to_owned() }));
            return places;
        }
        for file in self.files {
            places.push(Place { file: file.into(), origin: "the loader's path".to_owned() });
        }
        for (folder, origin) in self.folders() {
            for file in self.files {
                let file = folder.join(file);
                if file.exists() && !places.iter().any(|place| place.file == file) {
                    places.push(Place { file, origin: origin.clone() });
                }
            }
        }
        places
    }

    fn folders(&self) -> Vec<(PathBuf, String)> {
        let mut folders = Vec::new();
        for variable in self.homes {
            let Some(home) = environment::folder(variable) else { continue };
            let below = [home.join("lib"), home.join("lib64")].into_iter().chain(targets(&home, "lib"));
            folders.extend(below.chain([home.clone()]).map(|folder| (folder, (*variable).to_owned())));
        }
        for (packages, origin) in python_packages() {
            let all = self.wheels.iter().flat_map(|wheel| in_packages(&packages, wheel));
            folders.extend(all.map(|folder| (folder, origin.clone())));
        }
        for folder in [
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/local/lib",
            "/usr/local/cuda/lib64",
            "/opt/rocm/lib",
            "/opt/rocm/lib64",
        ] {
            folders.push((folder.into(), "the system's folders".to_owned()));
        }
        folders
    }

    /// The file of a place, also if the loader found it by name.
    fn path_of(&self, place: &Place) -> PathBuf {
        if place.file.is_absolute() {
            return place.file.clone();
        }
        let name = place.file.file_name().unwrap_or_default();
        loaded_files()
            .into_iter()
            .find(|path| is_version_of(path, name))
            .unwrap_or_else(|| place.file.clone())
    }

    /// The library's files that this process has loaded, by any part of it. More than one means two copies with separate
    /// state.
    pub fn loaded(&self) -> Vec<PathBuf> {
        let ours = |path: &PathBuf| self.files.iter().any(|file| is_version_of(path, OsStr::new(file)));
        let mut files: Vec<PathBuf> = loaded_files().into_iter().filter(ours).collect();
        files.dedup();
        files
    }

    /// The [`loaded`](Search::loaded) files except this one. `file` may be a link to it.
    pub fn loaded_beside(&self, file: &Path) -> Vec<PathBuf> {
        self.loaded().into_iter().filter(|other| !are_one_file(other, file)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOWHERE: Search = Search {
        name: "Nowhere",
        files: &["libnowhere-to-be-found.so.7", "libnowhere-to-be-found.so"],
        variable: "PHALANX_TEST_NOWHERE_LIB",
        homes: &[],
        wheels: &[],
        global: false,
    };

    #[test]
    fn a_missing_library_says_what_was_tried() {
        let error = NOWHERE.open().unwrap_err();
        assert_eq!(error.tried.len(), 2);
        let text = error.to_string();
        for part in
            ["Nowhere", "libnowhere-to-be-found.so.7", "the loader's path", "PHALANX_TEST_NOWHERE_LIB"]
        {
            assert!(text.contains(part), "{text}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_the_loader_finds_is_named_with_its_path() {
        let libc = Search { name: "the C library", files: &["libc.so.6"], ..NOWHERE };
        let library = libc.open().unwrap();
        assert!(library.path().is_absolute(), "{:?}", library.path());
        assert!(library.has(c"malloc") && !library.has(c"no_such_function"));
        assert_eq!(libc.loaded(), [library.path()]);
    }

    /// The list of loaded files has the file's own name, and not the name of the link.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_link_is_not_another_copy() {
        let libm = Search { name: "the mathematical library", files: &["libm.so.6"], ..NOWHERE };
        let original = std::fs::canonicalize(libm.open().unwrap().path()).unwrap();
        let folder = std::env::temp_dir().join(format!("phalanx-links-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let [file, symbolic, hard] =
            ["libm-copied.so.6.1", "libm-copied.so.6", "libm-copied.so"].map(|name| folder.join(name));
        std::fs::copy(&original, &file).unwrap();
        std::os::unix::fs::symlink(&file, &symbolic).unwrap();
        std::fs::hard_link(&file, &hard).unwrap();
        let copied = Search { files: &["libm-copied.so.6"], ..libm };
        let place = Place { file: symbolic.clone(), origin: "a test".into() };
        let library = copied.open_among(vec![place]).unwrap();
        assert_eq!(library.path(), symbolic);
        assert_eq!(copied.loaded(), [&*file]);
        for path in [&file, &symbolic, &hard] {
            assert_eq!(copied.loaded_beside(path), [] as [PathBuf; 0], "{path:?}");
        }
        assert_eq!(copied.loaded_beside(&original), [file], "another copy");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
