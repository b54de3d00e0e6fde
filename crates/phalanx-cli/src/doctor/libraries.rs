//! What NVSHMEM, NVRTC and nvJitLink say of themselves: facts of the survey.

use super::survey::{fact, found, heading, not_found};
use anyhow::Result;
use phalanx_sys::nvshmem::{self, kernels, version_text};
use phalanx_sys::{Found, NotFound, nvjitlink, nvrtc};
use std::path::Path;

/// NVSHMEM: its host library, and what kernels need of it.
pub fn nvshmem() -> Result<()> {
    heading("NVSHMEM")?;
    match nvshmem::Api::load() {
        Ok(api) => {
            fact("version", version_text(api.version()))?;
            if let Some((major, minor)) = api.openshmem_version() {
                fact("follows OpenSHMEM", format!("{major}.{minor}"))?;
            }
            found("file", api.path(), &api.library().place().origin)?;
            let variables = std::env::vars_os();
            for (name, value) in variables.filter(|(name, _)| name.to_string_lossy().starts_with("NVSHMEM_"))
            {
                fact(name.to_string_lossy(), value.to_string_lossy())?;
            }
            missing(api.missing().iter().map(|function| function.name).collect())?;
        }
        Err(error) => not_found(&error)?,
    }
    folder("headers", kernels::headers())?;
    match kernels::device_library() {
        Ok(file) => fact("device library", file.display().to_string()),
        Err(error) => absent("device library", &error),
    }
}

/// What compiles and links kernels at run time.
pub fn compiler() -> Result<()> {
    heading("Kernels compiled at run time")?;
    let nvrtc = match nvrtc::Api::load() {
        Ok(api) => {
            let (major, minor) = api.version();
            library("NVRTC", &format!("{major}.{minor}"), api.library())?;
            missing(api.missing())?;
            folder("CUDA headers", api.cuda_headers())?;
            folder("CCCL headers", api.cccl_headers())?;
            Some(api)
        }
        Err(error) => {
            not_found(&error)?;
            None
        }
    };
    match nvjitlink::Api::load(nvrtc.as_ref()) {
        Ok(api) => {
            library("nvJitLink", &api.version_text(), api.library())?;
            missing(api.missing())
        }
        Err(error) => not_found(&error),
    }
}

fn library(name: &str, version: &str, library: &phalanx_sys::Library) -> Result<()> {
    let (path, origin): (&Path, _) = (library.path(), &library.place().origin);
    fact(name, format!("{version}; {} (from {origin})", path.display()))
}

fn missing(names: Vec<&str>) -> Result<()> {
    fact("missing functions", if names.is_empty() { "none".to_owned() } else { names.join(", ") })
}

fn folder(name: &str, folder: Result<Found, NotFound>) -> Result<()> {
    match folder {
        Ok(Found { folder, origin }) => found(name, &folder, &origin),
        Err(error) => absent(name, &error),
    }
}

/// In one line: dozens of folders are tried for a header.
fn absent(name: &str, error: &NotFound) -> Result<()> {
    let tried = error.tried.len();
    fact(name, format!("not found in {tried} places; {} can name the folder", error.variable))
}
