//! NVIDIA's own library on a machine without a GPU: loading, versions, the unique id, and the error where a GPU is
//! needed; in processes of their own, since it ends the process in some cases.
//!
//! `PHALANX_TEST_NVSHMEM` has folders with an installed wheel each (virtual environments), separated by colons. Without it
//! the trials are ignored, but in CI (`CI=true`), where they have to run.

use crate::world::{must, refused};
use libtest_mimic::{Failed, Trial};
use phalanx::nvshmem::{self, Context, UniqueId};
use phalanx::{Comm, Error};
use phalanx_testkit::Scenario;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::Outcome;
use std::path::{Path, PathBuf};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("library/asked", asked),
    Scenario::rank("library/without_a_gpu", without_a_gpu),
    Scenario::process("library/absent", absent),
];

const FOLDERS: &str = "PHALANX_TEST_NVSHMEM";

pub fn trials() -> Vec<Trial> {
    let folders = std::env::var(FOLDERS).unwrap_or_default();
    let folders: Vec<PathBuf> =
        folders.split(':').filter(|folder| !folder.is_empty()).map(Into::into).collect();
    let mut trials = vec![Trial::test("library/absent", no_library)];
    for folder in &folders {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for scenario in ["library/asked", "library/without_a_gpu"] {
            let folder = folder.clone();
            trials.push(Trial::test(format!("{scenario}/{name}"), move || with(&folder, scenario)));
        }
    }
    if folders.is_empty() {
        let required = std::env::var("CI").is_ok_and(|ci| ci == "true");
        let missing = || Err(Failed::from(format!("{FOLDERS} names no folder with NVSHMEM")));
        trials.push(
            Trial::test(format!("library (ignored: {FOLDERS} is not set)"), missing)
                .with_ignored_flag(!required),
        );
    }
    trials
}

fn with(folder: &Path, scenario: &str) -> Result<(), Failed> {
    // Found where wheels are, in the environment that is active.
    let folder = folder.display().to_string();
    let launch = if scenario.ends_with("asked") { Launch::alone(scenario) } else { Launch::new(scenario, 2) };
    let launch = launch.env("VIRTUAL_ENV", &folder).env("PHALANX_BACKEND", "host").arg(&folder);
    launch.reports().map(drop).map_err(Failed::from)
}

/// Everything that needs no GPU.
fn asked(args: &[String]) -> Outcome {
    let path = must("path", nvshmem::path())?;
    assert!(path.starts_with(&args[0]), "{path:?} is not in {}", args[0]);
    let version = must("version", nvshmem::version())?;
    assert!(version.starts_with("3."), "{version}");
    assert_eq!(must("openshmem_version", nvshmem::openshmem_version())?, (1, 3));
    let id = must("UniqueId::new", UniqueId::new())?;
    let bytes = id.to_bytes();
    assert_eq!(bytes[..4], 0x10080i32.to_ne_bytes());
    assert!(must("from_bytes", UniqueId::from_bytes(&bytes))? == id);
    let api = phalanx_sys::nvshmem::Api::load().map_err(|error| error.to_string())?;
    let oldest = phalanx_sys::nvshmem::OLDEST;
    let missing: Vec<_> = api.missing().into_iter().filter(|function| function.since <= oldest).collect();
    assert!(missing.is_empty(), "{version} lacks {missing:?}");
    let newer = api.missing().into_iter().filter(|function| function.since <= api.version());
    assert_eq!(newer.count(), 0, "{:?}", api.missing());
    for (dtype, name) in phalanx_sys::nvshmem::REDUCE_TYPES.iter().enumerate() {
        for (op, reduction) in phalanx_sys::nvshmem::REDUCE_OPS.iter().enumerate() {
            let expected = op < 4 || name.contains("int");
            let found = [api.reduce(dtype, op).is_some(), api.reduce_scatter(dtype, op).is_some()];
            assert_eq!(found, [expected; 2], "{name} {reduction}");
        }
    }
    Ok(version)
}

/// The driver, or a GPU, is found missing before the library is entered, which would end the process.
fn without_a_gpu(comm: Comm, _: &[String]) -> Outcome {
    let error = Context::init(&comm).err().ok_or("there is a GPU")?;
    let known = match &error {
        Error::LibraryNotFound(missing) => missing.library == "the CUDA driver",
        Error::Library(error) => error.library == "CUDA",
        Error::Unsupported(_) => true,
        _ => false,
    };
    if !known {
        return Err(format!("an unexpected error: {error}"));
    }
    // Nothing was entered, so it can be tried again, and the ranks still work together.
    let again = Context::init(&comm).err().ok_or("there is a GPU")?;
    assert_eq!(again.to_string(), error.to_string());
    must("barrier", comm.barrier())?;
    Ok(error.to_string())
}

/// Nothing is found: an error with all places, and the variable to set.
fn absent(_: &[String]) -> Outcome {
    let error = refused("version", nvshmem::version(), &["NVSHMEM", "PHALANX_NVSHMEM_LIB", "nowhere"])?;
    assert!(matches!(error, Error::LibraryNotFound(_)), "{error}");
    refused("UniqueId::new", UniqueId::new(), &["NVSHMEM"])?;
    let id = refused("no id", UniqueId::from_bytes(&[1; 128]), &["128 bytes"])?;
    Ok(id.to_string())
}

fn no_library() -> Result<(), Failed> {
    let launch = Launch::alone("library/absent").env("PHALANX_NVSHMEM_LIB", "/nowhere/libnvshmem_host.so.3");
    launch.reports().map(drop).map_err(Failed::from)
}
