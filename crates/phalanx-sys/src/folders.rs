//! Folders in which libraries and headers may be, and the files that are loaded.

use crate::environment;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

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

/// The folders of a wheel below a folder of Python packages. A `*` stands for the rest of a name.
pub(crate) fn in_packages(packages: &Path, wheel: &str) -> Vec<PathBuf> {
    match wheel.split_once("*/") {
        None => vec![packages.join(wheel)],
        Some((prefix, rest)) => {
            children(packages, prefix).into_iter().map(|folder| folder.join(rest)).collect()
        }
    }
}

/// Folders with Python packages, and the reason for each.
pub(crate) fn python_packages() -> Vec<(PathBuf, String)> {
    /// Installations with the system's packages, which come last.
    const SYSTEM: [&str; 3] = ["/", "/usr", "/usr/local"];
    let mut roots: Vec<(PathBuf, String)> = Vec::new();
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(root) = environment::folder(variable) {
            roots.push((root.join("lib"), variable.to_owned()));
        }
    }
    // An environment with an interpreter in PATH is active, too. Open MPI's mpirun puts the system's folder before it.
    for folder in environment::folders("PATH") {
        let root = folder.parent().filter(|_| folder.join("python3").exists());
        if let Some(root) = root.filter(|root| !SYSTEM.iter().any(|system| *root == Path::new(system))) {
            roots.push((root.join("lib"), "a python3 in PATH".to_owned()));
        }
    }
    if let Some(home) = environment::folder("HOME") {
        roots.push((home.join(".local/lib"), "the user's Python packages".to_owned()));
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

/// Whether a path's file name is `name`, with or without further version numbers.
pub(crate) fn is_version_of(path: &Path, name: &OsStr) -> bool {
    let (file, name) = (path.file_name().unwrap_or_default().to_string_lossy(), name.to_string_lossy());
    file.strip_prefix(&*name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Whether two paths lead to the same file.
pub(crate) fn are_one_file(one: &Path, other: &Path) -> bool {
    one == other || identity(one).is_some_and(|file| identity(other) == Some(file))
}

/// Device and number of a file: the same for hard links, which package managers make.
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
