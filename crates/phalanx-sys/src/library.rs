//! Finding a library and its functions.

use crate::functions::Address;
use std::ffi::{CStr, OsStr};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

/// Where a library may be.
///
/// The places are tried in this order, and the first that loads is taken:
/// 1. the file that the environment variable [`variable`](Search::variable) names; if it is set, nothing else;
/// 2. the loader's own path (`LD_LIBRARY_PATH`, `ld.so.cache`), by each of the file names;
/// 3. below each home that an environment variable names: itself, `lib`, `lib64`, `targets/*/lib`;
/// 4. Python's packages, where wheels put libraries: of the active virtual or conda environment, of the user, and of
///    the system;
/// 5. the usual folders of distributions.
#[derive(Debug, Clone, Copy)]
pub struct Search {
    /// What the library is called in messages.
    pub name: &'static str,
    /// File names, the preferred first.
    pub files: &'static [&'static str],
    /// The variable with which a user names the file.
    pub variable: &'static str,
    /// Variables that name a folder in which the library was installed.
    pub homes: &'static [&'static str],
    /// Folders in Python's `site-packages`; a `*` stands for the rest of a name.
    pub wheels: &'static [&'static str],
    /// Whether its symbols are for everybody (`RTLD_GLOBAL`): for libraries with plugins that expect it.
    pub global: bool,
}

/// One place where a library may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// What is given to the loader.
    pub file: PathBuf,
    /// Why this place: a variable's name, `the loader's path`, …
    pub origin: String,
}

/// A place that was tried, and what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Where.
    pub place: Place,
    /// The loader's error; `None` if it was loaded.
    pub error: Option<String>,
}

/// No place had a library that loads.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{library} was not found ({}); install it, or set {variable} to where it is", describe(tried))]
pub struct NotFound {
    /// What was looked for.
    pub library: &'static str,
    /// The variable that says where it is.
    pub variable: &'static str,
    /// Every place that has such a file, or that only the loader knows, with the loader's answer.
    pub tried: Vec<Attempt>,
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

/// The loaded library does not have a function.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{library} {version} ({}) has no function {function}; a version that has it is needed", path.display())]
pub struct MissingFunction {
    /// The function.
    pub function: &'static str,
    /// The library's name.
    pub library: &'static str,
    /// Its version.
    pub version: String,
    /// Where it was loaded from.
    pub path: PathBuf,
}

/// A loaded library. It stays loaded until the process ends: its threads and exit handlers may outlive
/// whoever used it.
#[derive(Debug)]
pub struct Library {
    handle: ManuallyDrop<libloading::Library>,
    place: Place,
    path: PathBuf,
}

impl Search {
    /// Loads the library from the first place that works.
    ///
    /// # Errors
    /// [`NotFound`] with everything that was tried.
    pub fn open(&self) -> Result<Library, NotFound> {
        self.open_among(self.places())
    }

    /// Loads the library from the first of these places that works.
    ///
    /// # Errors
    /// [`NotFound`] with everything that was tried.
    pub fn open_among(&self, places: Vec<Place>) -> Result<Library, NotFound> {
        let mut tried = Vec::new();
        for place in places {
            match open(&place.file, self.global) {
                Ok(handle) => {
                    let path = self.path_of(&place);
                    return Ok(Library { handle: ManuallyDrop::new(handle), place, path });
                }
                Err(error) => tried.push(Attempt { place, error: Some(error) }),
            }
        }
        Err(NotFound { library: self.name, variable: self.variable, tried })
    }

    /// The places in their order: files that exist, and names for the loader. The variable, if it is set, names the only place: a file,
    /// or the folder that has it.
    pub fn places(&self) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::new();
        if let Some(told) = std::env::var_os(self.variable).filter(|told| !told.is_empty()) {
            let told = PathBuf::from(told);
            let files = if told.is_dir() {
                self.files.iter().map(|file| told.join(file)).collect()
            } else {
                vec![told]
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
            let Some(home) = std::env::var_os(variable).filter(|home| !home.is_empty()) else { continue };
            let home = PathBuf::from(home);
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

    /// The file behind a name that the loader resolved.
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

    /// The files of this library that are in the process, whoever loaded them: more than one is trouble.
    pub fn loaded(&self) -> Vec<PathBuf> {
        let ours = |path: &PathBuf| self.files.iter().any(|file| is_version_of(path, OsStr::new(file)));
        let mut files: Vec<PathBuf> = loaded_files().into_iter().filter(ours).collect();
        files.dedup();
        files
    }

    /// Those of them that are other files than this one, which goes by the name of a link perhaps.
    pub fn loaded_beside(&self, file: &Path) -> Vec<PathBuf> {
        self.loaded().into_iter().filter(|other| !are_one_file(other, file)).collect()
    }
}

impl Library {
    /// The address of a symbol, as a pointer type.
    ///
    /// # Safety
    /// `T` is a pointer or an `extern "C"` function of the type that the symbol has.
    pub unsafe fn symbol<T: Copy>(&self, name: &CStr) -> Option<T> {
        // SAFETY: the caller's contract.
        unsafe { self.handle.get::<T>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol)
    }

    /// The address of a symbol.
    pub(crate) fn address(&self, name: &CStr) -> Address {
        // SAFETY: an address is not a reference to anything.
        unsafe { self.symbol::<Address>(name) }.flatten()
    }

    /// Whether it has a symbol.
    pub fn has(&self, name: &CStr) -> bool {
        // SAFETY: the address is not used.
        unsafe { self.symbol::<*const ()>(name) }.is_some()
    }

    /// The file, as far as it is known.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where it was found, and why there.
    pub fn place(&self) -> &Place {
        &self.place
    }
}

#[cfg(unix)]
fn open(file: &Path, global: bool) -> Result<libloading::Library, String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
    let visibility = if global { RTLD_GLOBAL } else { RTLD_LOCAL };
    // SAFETY: the libraries that a `Search` names have initialisers that are fit to run in any process.
    let opened = unsafe { Library::open(Some(file), RTLD_NOW | visibility) };
    opened.map(Into::into).map_err(|error| describe_error(&error))
}

/// The loader's own words.
fn describe_error(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(not(unix))]
fn open(file: &Path, _global: bool) -> Result<libloading::Library, String> {
    // SAFETY: the libraries that a `Search` names have initialisers that are fit to run in any process.
    unsafe { libloading::Library::new(file) }.map_err(|error| describe_error(&error))
}

/// The folders `targets/*/NAME` of a CUDA tree.
pub(crate) fn targets(home: &Path, name: &str) -> Vec<PathBuf> {
    children(&home.join("targets"), "").into_iter().map(|target| target.join(name)).collect()
}

/// The entries of a folder whose names start with `prefix`, sorted.
pub(crate) fn children(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let named = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with(prefix);
    let mut found: Vec<PathBuf> = entries.flatten().filter(named).map(|entry| entry.path()).collect();
    found.sort();
    found
}

/// A wheel's folders among Python's packages.
fn in_packages(packages: &Path, wheel: &str) -> Vec<PathBuf> {
    match wheel.split_once("*/") {
        None => vec![packages.join(wheel)],
        Some((prefix, rest)) => {
            children(packages, prefix).into_iter().map(|folder| folder.join(rest)).collect()
        }
    }
}

/// Folders in which Python keeps packages, with the reason why each was looked at.
pub(crate) fn python_packages() -> Vec<(PathBuf, String)> {
    /// What has the system's own packages, which come last.
    const SYSTEM: [&str; 3] = ["/", "/usr", "/usr/local"];
    let mut roots: Vec<(PathBuf, String)> = Vec::new();
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(root) = std::env::var_os(variable).filter(|root| !root.is_empty()) {
            roots.push((PathBuf::from(root).join("lib"), variable.to_owned()));
        }
    }
    // An environment whose interpreter is in the path is active too, announced or not. (Open MPI's mpirun puts the system's before it.)
    for folder in std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()) {
        let root = folder.parent().filter(|_| folder.join("python3").exists());
        if let Some(root) = root.filter(|root| !SYSTEM.iter().any(|system| *root == Path::new(system))) {
            roots.push((root.join("lib"), "a python3 in PATH".to_owned()));
        }
    }
    if let Some(home) = std::env::var_os("HOME") {
        roots.push((PathBuf::from(home).join(".local/lib"), "the user's Python packages".to_owned()));
    }
    for root in ["/usr/local/lib", "/usr/lib"] {
        roots.push((root.into(), "the system's Python packages".to_owned()));
    }
    let mut folders = Vec::new();
    for (root, origin) in roots {
        for python in children(&root, "python3") {
            for packages in ["site-packages", "dist-packages"] {
                folders.push((python.join(packages), origin.clone()));
            }
        }
    }
    folders
}

/// Whether a path's file name is `name` with or without further version numbers.
fn is_version_of(path: &Path, name: &OsStr) -> bool {
    let (file, name) = (path.file_name().unwrap_or_default().to_string_lossy(), name.to_string_lossy());
    file.strip_prefix(&*name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Whether two paths lead to the same file.
fn are_one_file(one: &Path, other: &Path) -> bool {
    one == other || identity(one).is_some_and(|file| identity(other) == Some(file))
}

/// Device and number: hard links, which package managers make, have one.
#[cfg(unix)]
fn identity(file: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    file.metadata().ok().map(|file| (file.dev(), file.ino()))
}

#[cfg(not(unix))]
fn identity(file: &Path) -> Option<PathBuf> {
    file.canonicalize().ok()
}

/// The files that are mapped into this process.
pub(crate) fn loaded_files() -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut files: Vec<PathBuf> =
        maps.lines().filter_map(|line| line.find('/').map(|start| PathBuf::from(&line[start..]))).collect();
    files.sort();
    files.dedup();
    files
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

    /// The loader's list has the file's own name, and not that of the link by which it was found.
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

    #[test]
    fn wheels_of_one_family() {
        let packages = std::env::temp_dir().join(format!("phalanx-wheels-{}", std::process::id()));
        for wheel in ["_rocm_sdk_libraries_gfx94X", "_rocm_sdk_libraries", "_rocm_sdk_core"] {
            std::fs::create_dir_all(packages.join(wheel)).unwrap();
        }
        let found = in_packages(&packages, "_rocm_sdk_libraries*/lib");
        let expected = ["_rocm_sdk_libraries/lib", "_rocm_sdk_libraries_gfx94X/lib"];
        assert_eq!(found, expected.map(|folder| packages.join(folder)));
        assert_eq!(in_packages(&packages, "torch/lib"), [packages.join("torch/lib")]);
        std::fs::remove_dir_all(&packages).unwrap();
    }

    #[test]
    fn file_names_with_versions() {
        assert!(is_version_of(Path::new("/a/libnccl.so.2.28.9"), OsStr::new("libnccl.so.2")));
        assert!(is_version_of(Path::new("/a/libnccl.so.2"), OsStr::new("libnccl.so")));
        assert!(!is_version_of(Path::new("/a/libnccl.so.20"), OsStr::new("libnccl.so.2")));
    }
}
