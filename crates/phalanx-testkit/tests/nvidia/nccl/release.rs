//! A release of NCCL, as its wheel has it.

use phalanx_sys::nccl::version_text;
use std::path::{Path, PathBuf};

/// The folders of unpacked wheels, separated as in `PATH`.
const RELEASES: &str = "PHALANX_TEST_NCCL";

/// An unpacked wheel.
#[derive(Debug, Clone)]
pub struct Release {
    /// The folder in which Python would find the package.
    pub packages: PathBuf,
    /// The version code that its header says.
    pub version: u32,
}

impl Release {
    /// All that are there, or why there are none.
    pub fn all() -> Result<Vec<Release>, String> {
        let folders = std::env::var_os(RELEASES).ok_or_else(|| format!("{RELEASES} is not set"))?;
        let releases: Vec<Release> =
            std::env::split_paths(&folders).map(|folder| Release::at(&folder)).collect::<Result<_, _>>()?;
        if releases.is_empty() { Err(format!("{RELEASES} is empty")) } else { Ok(releases) }
    }

    fn at(packages: &Path) -> Result<Release, String> {
        let mut release = Release { packages: packages.into(), version: 0 };
        let header = release.header_text()?;
        let code = header.lines().find_map(|line| line.strip_prefix("#define NCCL_VERSION_CODE "));
        let code = code.and_then(|code| code.trim().parse().ok());
        release.version = code.ok_or_else(|| format!("{} says no version", release.include().display()))?;
        Ok(release)
    }

    /// `2.18.1`.
    pub fn version_text(&self) -> String {
        version_text(self.version)
    }

    /// The folder of its headers.
    pub fn include(&self) -> PathBuf {
        self.packages.join("nvidia/nccl/include")
    }

    /// The text of its header.
    pub fn header_text(&self) -> Result<String, String> {
        let path = self.include().join("nccl.h");
        std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Its shared library.
    pub fn library(&self) -> PathBuf {
        self.packages.join("nvidia/nccl/lib/libnccl.so.2")
    }
}
