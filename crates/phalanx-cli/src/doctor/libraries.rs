//! Facts about libraries: NCCL, RCCL, NVSHMEM, NVRTC and nvJitLink.

use super::facts::{fact, found, library as summary, missing, not_found, variables};
use anyhow::Result;
use phalanx_sys::nccl::{Api, version_text};
use phalanx_sys::nvshmem::{self, kernels};
use phalanx_sys::{Found, Library, NotFound, Search, nvjitlink, nvrtc};
use std::path::Path;

/// NCCL or RCCL: the loaded file, and others that could be meant.
pub fn nccl(search: &Search) -> Result<()> {
    let api = match Api::load(search) {
        Ok(api) => api,
        Err(error) => return not_found(&error),
    };
    fact("version", version_text(api.version()))?;
    found("file", api.path(), &api.library().place().origin)?;
    variables("NCCL_")?;
    let mut lacking = api.missing();
    lacking.sort_by_key(|function| function.since);
    if lacking.is_empty() {
        missing(&[])?;
    }
    for since in lacking.chunk_by(|a, b| a.since == b.since) {
        let names: Vec<&str> = since.iter().map(|function| function.name).collect();
        fact("missing functions", format!("{} (since {})", names.join(", "), version_text(since[0].since)))?;
    }
    for other in search.loaded_beside(api.path()) {
        fact("loaded too", format!("{}: two copies know nothing of each other", other.display()))?;
    }
    let same = |file: &Path| file.canonicalize().ok() == api.path().canonicalize().ok();
    for place in search.places().iter().filter(|place| place.file.is_absolute() && !same(&place.file)) {
        fact("not taken", format!("{} (from {})", place.file.display(), place.origin))?;
    }
    Ok(())
}

/// NVSHMEM: its host library, and the headers and device library for kernels.
pub fn nvshmem() -> Result<()> {
    match nvshmem::Api::load() {
        Ok(api) => {
            summary("NVSHMEM", Some(nvshmem::version_text(api.version())))?;
            fact("version", nvshmem::version_text(api.version()))?;
            if let Some((major, minor)) = api.openshmem_version() {
                fact("follows OpenSHMEM", format!("{major}.{minor}"))?;
            }
            found("file", api.path(), &api.library().place().origin)?;
            variables("NVSHMEM_")?;
            let lacking: Vec<&str> = api.missing().iter().map(|function| function.name).collect();
            missing(&lacking)?;
        }
        Err(error) => {
            summary("NVSHMEM", None)?;
            not_found(&error)?;
        }
    }
    folder("headers", kernels::headers())?;
    match kernels::device_library() {
        Ok(file) => fact("device library", file.display().to_string()),
        Err(error) => absent("device library", &error),
    }
}

/// NVRTC and nvJitLink, which compile and link kernels at run time.
pub fn compiler() -> Result<()> {
    let nvrtc = match nvrtc::Api::load() {
        Ok(api) => {
            let (major, minor) = api.version();
            summary("NVRTC", Some(format!("{major}.{minor}")))?;
            library("NVRTC", &format!("{major}.{minor}"), api.library())?;
            missing(&api.missing())?;
            folder("CUDA headers", api.cuda_headers())?;
            folder("CCCL headers", api.cccl_headers())?;
            Some(api)
        }
        Err(error) => {
            summary("NVRTC", None)?;
            not_found(&error)?;
            None
        }
    };
    match nvjitlink::Api::load(nvrtc.as_ref()) {
        Ok(api) => {
            summary("nvJitLink", Some(api.version_text()))?;
            library("nvJitLink", &api.version_text(), api.library())?;
            missing(&api.missing())
        }
        Err(error) => {
            summary("nvJitLink", None)?;
            not_found(&error)
        }
    }
}

fn library(name: &str, version: &str, library: &Library) -> Result<()> {
    let (path, origin): (&Path, _) = (library.path(), &library.place().origin);
    fact(name, format!("{version}; {} (from {origin})", path.display()))
}

fn folder(name: &str, folder: Result<Found, NotFound>) -> Result<()> {
    match folder {
        Ok(Found { folder, origin }) => found(name, &folder, &origin),
        Err(error) => absent(name, &error),
    }
}

/// In one line, without the places tried: for headers there are dozens.
fn absent(name: &str, error: &NotFound) -> Result<()> {
    let tried = error.tried.len();
    fact(name, format!("not found in {tried} places; {} can name the folder", error.variable))
}
