//! Finding the headers of NCCL's device API, for kernels that use it.

use super::types::NCCL;
use crate::{FileSearch, Found, NotFound};
use std::path::PathBuf;

/// Where the headers of NCCL's device API may be.
pub const HEADERS: FileSearch = FileSearch {
    name: "NCCL's device headers (nccl_device.h)",
    file: "nccl_device.h",
    variable: "PHALANX_NCCL_INCLUDE",
    homes: NCCL.homes,
    below: &["include"],
    wheels: &["nvidia/nccl/include"],
    system: &["/usr/include"],
};

/// The folder with the headers. Those of the loaded library come first, or of the library that would be loaded, since
/// headers and library must be of one version.
///
/// # Errors
/// [`NotFound`] with the folders that were tried.
pub fn headers() -> Result<Found, NotFound> {
    let places = NCCL.places().into_iter().map(|place| place.file);
    let files = NCCL.loaded().into_iter().chain(places).filter(|file| file.is_absolute());
    // Distributions have a folder of libraries for each architecture, so their headers are two folders up.
    let beside = |file: PathBuf| {
        let folder = file.parent().map(PathBuf::from).unwrap_or_default();
        let origin = format!("beside {}", file.display());
        ["../include", "../../include"]
            .map(|below| Found { folder: folder.join(below), origin: origin.clone() })
    };
    HEADERS.find(&files.flat_map(beside).collect::<Vec<_>>())
}
