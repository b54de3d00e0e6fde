//! Finding NVSHMEM's headers and device code, for kernels that use it.

use super::types::{NVSHMEM, places};
use crate::{FileSearch, Found, NotFound};
use std::path::PathBuf;

/// Where NVSHMEM's headers may be.
pub const HEADERS: FileSearch = FileSearch {
    name: "the NVSHMEM headers (nvshmem.h)",
    file: "nvshmem.h",
    variable: "PHALANX_NVSHMEM_INCLUDE",
    homes: HOMES,
    below: &["include", ""],
    wheels: &["nvidia/nvshmem/include"],
    system: &["/usr/include/nvshmem_*", "/usr/include", "/usr/local/nvshmem/include"],
};

/// Where NVSHMEM's device code may be.
pub const DEVICE_LIBRARY: FileSearch = FileSearch {
    name: "NVSHMEM's device library (libnvshmem_device.a)",
    file: "libnvshmem_device.a",
    variable: "PHALANX_NVSHMEM_DEVICE",
    homes: HOMES,
    below: &["lib", "lib64", ""],
    wheels: &["nvidia/nvshmem/lib"],
    system: &[
        "/usr/lib/x86_64-linux-gnu/nvshmem/1*",
        "/usr/lib/aarch64-linux-gnu/nvshmem/1*",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib64",
        "/usr/local/nvshmem/lib",
    ],
};

const HOMES: &[&str] = &["NVSHMEM_HOME", "NVSHMEM_PREFIX", "CUDA_HOME", "CUDA_PATH"];

/// The folder with the headers. Those of the loaded host library come first, or of the library that would be loaded.
///
/// # Errors
/// [`NotFound`] with the folders that were tried.
pub fn headers() -> Result<Found, NotFound> {
    HEADERS.find(&beside(&["../include"]))
}

/// The file of the device code. That of the loaded host library comes first, or of the library that would be loaded, since
/// both must be of one version.
///
/// # Errors
/// As for [`headers`].
pub fn device_library() -> Result<PathBuf, NotFound> {
    Ok(DEVICE_LIBRARY.find(&beside(&[""]))?.folder.join(DEVICE_LIBRARY.file))
}

/// Folders relative to the host library's folder.
fn beside(folders: &[&str]) -> Vec<Found> {
    let loaded = NVSHMEM.loaded();
    let places = places().into_iter().map(|place| place.file);
    let files = loaded.into_iter().chain(places).filter(|file| file.is_absolute());
    let beside = |file: PathBuf| {
        let origin = format!("beside {}", file.display());
        let folder = file.parent().map(PathBuf::from).unwrap_or_default();
        folders
            .iter()
            .map(move |below| Found { folder: folder.join(below), origin: origin.clone() })
            .collect::<Vec<_>>()
    };
    files.flat_map(beside).collect()
}
