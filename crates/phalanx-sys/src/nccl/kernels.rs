//! Finding what kernels need that use NCCL's device API: its headers.

use super::NCCL;
use crate::{FileSearch, Found, NotFound};
use std::path::PathBuf;

/// Where NCCL's headers for devices may be.
pub const HEADERS: FileSearch = FileSearch {
    name: "NCCL's device headers (nccl_device.h)",
    file: "nccl_device.h",
    variable: "PHALANX_NCCL_INCLUDE",
    homes: NCCL.homes,
    below: &["include"],
    wheels: &["nvidia/nccl/include"],
    system: &["/usr/include"],
};

/// The folder with the headers, preferably of the library that is loaded, or would be: the two belong together.
///
/// # Errors
/// [`NotFound`] with every folder that was looked at.
pub fn headers() -> Result<Found, NotFound> {
    let places = NCCL.places().into_iter().map(|place| place.file);
    let files = NCCL.loaded().into_iter().chain(places).filter(|file| file.is_absolute());
    // The headers of a distribution are a folder further up: its libraries are in one for each kind of machine.
    let beside = |file: PathBuf| {
        let folder = file.parent().map(PathBuf::from).unwrap_or_default();
        let origin = format!("beside {}", file.display());
        ["../include", "../../include"]
            .map(|below| Found { folder: folder.join(below), origin: origin.clone() })
    };
    HEADERS.find(&files.flat_map(beside).collect::<Vec<_>>())
}
