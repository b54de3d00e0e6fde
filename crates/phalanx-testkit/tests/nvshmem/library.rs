//! NVIDIA's own library on a machine without a GPU: loading, versions, the unique id, the bootstrap by it and
//! by the process managers of MPIs up to where a GPU is needed, and the error there; in processes of their
//! own, since it ends the process in some cases.
//!
//! `PHALANX_TEST_NVSHMEM` has folders with an installed wheel each (virtual environments), separated by
//! colons. Without it the trials are ignored, but in CI (`CI=true`), where they have to run.

use crate::world::{must, refused};
use libtest_mimic::{Failed, Trial};
use phalanx::nvshmem::{self, Context, UniqueId};
use phalanx::{Comm, Error};
use phalanx_sys::nvshmem as nvshmem_sys;
use phalanx_testkit::Scenario;
use phalanx_testkit::mpi::Installation;
use phalanx_testkit::processes::{Ended, Launch, describe};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("library/asked", asked),
    Scenario::rank("library/without_a_gpu", without_a_gpu),
    Scenario::rank("library/bootstrap", bootstrap),
    Scenario::process("library/by_environment", by_environment),
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
        let folder = folder.clone();
        let of_mpirun = folder.clone();
        trials.push(Trial::test(format!("library/bootstrap/{name}"), move || finds_peers(&folder)));
        trials.extend(Installation::all().into_iter().map(|(mpi, found)| {
            let (name, folder) = (format!("library/by_environment/{name}/{mpi}"), of_mpirun.clone());
            // The wheels' plugins for PMIx fit some releases of it only.
            let found = if mpi == "open_mpi" { pmix(&folder).and(found) } else { found };
            match found {
                Ok(found) => Trial::test(name, move || finds_peers_of(&found, &folder)),
                Err(reason) => suite::ignored(name, reason),
            }
        }));
    }
    if folders.is_empty() {
        trials.push(suite::missing("library", format!("{FOLDERS} names no folder with NVSHMEM")));
    }
    trials
}

/// Whether a wheel's plugin for PMIx loads on this machine.
fn pmix(folder: &Path) -> Result<(), String> {
    let pythons = std::fs::read_dir(folder.join("lib")).map_err(|error| error.to_string())?;
    let library = |python: std::fs::DirEntry| {
        python.path().join("site-packages/nvidia/nvshmem/lib").join(nvshmem_sys::NVSHMEM.files[0])
    };
    let library = pythons.flatten().map(library).find(|file| file.exists()).ok_or("no NVSHMEM")?;
    nvshmem_sys::plugin::PMIX.load(&library).map_err(|error| error.to_string())
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

/// The library itself, which phalanx does not enter without a GPU: two processes find each other by a unique
/// id, and initialisation comes to its end at the GPU.
fn bootstrap(comm: Comm, _: &[String]) -> Outcome {
    let api = nvshmem_sys::Api::load().map_err(|error| error.to_string())?;
    let Some((get, set)) = api.nvshmemx_get_uniqueid.zip(api.nvshmemx_set_attr_uniqueid_args) else {
        return Err(format!("functions are missing: {:?}", api.missing()));
    };
    let mut id = nvshmem_sys::nvshmemx_uniqueid_t::new();
    if comm.rank() == 0 {
        // SAFETY: an out-pointer whose version is set; needs no initialisation.
        assert_eq!(unsafe { get(&raw mut id) }, 0);
    }
    let mut bytes = id.to_bytes();
    must("broadcast", comm.broadcast_in_place(&mut bytes, 0))?;
    let id = nvshmem_sys::nvshmemx_uniqueid_t::from_bytes(&bytes).ok_or("no id")?;
    let mut attr = nvshmem_sys::nvshmemx_init_attr_t::new();
    let (rank, ranks) = (comm.rank() as i32, comm.world_size() as i32);
    // SAFETY: the id lives until initialisation is over; a rank of so many.
    assert_eq!(unsafe { set(rank, ranks, &raw const id, &raw mut attr) }, 0);
    // SAFETY: attributes of the version that they name, and an id that all have and that lives.
    let answer = unsafe { enter(&api, nvshmem_sys::init_flags::WITH_UNIQUEID, &raw mut attr) }?;
    if std::env::var_os("TESTKIT_FINALIZE").is_some() {
        let finalize = api.nvshmemx_hostlib_finalize.ok_or("no finalize")?;
        // SAFETY: nothing is in use; what it does to this process is what is asked.
        unsafe { finalize() };
    }
    Ok(answer)
}

/// The same by the launcher's process manager, in the way of `Context::init_from_environment`.
fn by_environment(_: &[String]) -> Outcome {
    let api = nvshmem_sys::Api::load().map_err(|error| error.to_string())?;
    let plugin = nvshmem_sys::Plugin::of_environment().ok_or("the environment asks for no plugin")?;
    plugin.load(api.path()).map_err(|error| error.to_string())?;
    // SAFETY: none are needed.
    unsafe { enter(&api, nvshmem_sys::init_flags::ENVIRONMENT, std::ptr::null_mut()) }
}

/// Begins, and says what came of it.
///
/// # Safety
/// Attributes that are valid with these flags.
unsafe fn enter(
    api: &nvshmem_sys::Api,
    flags: std::ffi::c_uint,
    attr: *mut nvshmem_sys::nvshmemx_init_attr_t,
) -> Outcome {
    let Some((init, status)) = api.nvshmemx_hostlib_init_attr.zip(api.nvshmemx_init_status) else {
        return Err(format!("functions are missing: {:?}", api.missing()));
    };
    // SAFETY: the caller's contract; needs no initialisation.
    let (code, status) = unsafe { (init(flags, attr), status()) };
    Ok(format!("{}: code {code}, status {status}", must("version", nvshmem::version())?))
}

/// The PEs found each other, and the GPU could not be set up: 3.4 calls that a success.
fn ends_at_the_gpu(outcome: &Outcome) -> bool {
    match outcome.as_deref() {
        Ok(text) if text.starts_with("3.4.") => text.ends_with(": code 0, status 1"),
        Ok(text) => text.ends_with(": code 7, status 1"),
        Err(_) => false,
    }
}

fn finds_peers(folder: &Path) -> Result<(), Failed> {
    let folder = folder.display().to_string();
    let launch = Launch::new("library/bootstrap", 2)
        .deadline(Duration::from_secs(30))
        .env("VIRTUAL_ENV", &folder)
        .env("PHALANX_BACKEND", "host")
        .env("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo");
    let answered = launch.clone().run()?;
    if !answered.iter().all(|ended| ends_at_the_gpu(&ended.outcome)) {
        return Err(describe(&answered).into());
    }
    // What it ends the process for: a call of finalize, and a setting for which it asks the driver.
    for (name, value, says) in
        [("TESTKIT_FINALIZE", "1", "finalize"), ("NVSHMEM_DEBUG", "INFO", "nranks 2 - DONE")]
    {
        let ended = launch.clone().env(name, value).run()?;
        let has_exited = |ended: &Ended| {
            let status = ended.status.and_then(|status| status.code());
            ended.outcome.is_err() && status == Some(255) && ended.output.contains(says)
        };
        if !ended.iter().all(has_exited) {
            return Err(format!("with {name}: {}", describe(&ended)).into());
        }
    }
    Ok(())
}

/// By PMI-1, which the process managers of MPICH and its relatives speak, and Open MPI's PMIx.
fn finds_peers_of(mpi: &Installation, folder: &Path) -> Result<(), Failed> {
    let job = mpi.job(2).scenario("library/by_environment", &[]);
    let job = job.env("VIRTUAL_ENV", &folder.display().to_string());
    let ended = job.env("NVSHMEM_BOOTSTRAP_PMI", mpi.process_manager()).run()?;
    if ended.outcomes.len() == 2 && ended.outcomes.iter().all(ends_at_the_gpu) {
        return Ok(());
    }
    Err(format!("{:?}\n{}", ended.outcomes, ended.output).into())
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
