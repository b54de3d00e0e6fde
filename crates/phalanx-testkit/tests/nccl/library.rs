//! The library itself, in a process without GPUs.

use crate::release::Release;
use phalanx::{BackendKind, Comm, Error};
use phalanx_sys::nccl::{Api, FUNCTIONS, Flavour, Function, NCCL, ncclResult_t, ncclUniqueId, version_code};
use phalanx_testkit::Scenario;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::Outcome;
use std::ffi::CStr;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("missing", |_| Ok(names(&load()?.missing()).join(" "))),
    Scenario::process("version_and_id", version_and_id),
    Scenario::process("init_all", init_all),
    Scenario::process("front", front),
    Scenario::process("encryption", encryption),
    Scenario::process("place", |_| {
        let api = load()?;
        Ok(format!("{}\t{}", api.library().place().origin, api.path().display()))
    }),
];

fn names(functions: &[Function]) -> Vec<&'static str> {
    functions.iter().map(|function| function.name).collect()
}

fn load() -> Result<Api, String> {
    Api::load(&NCCL).map_err(|error| error.to_string())
}

/// A scenario in a process that loads this release and sees no GPU; its report.
fn report(release: &Release, scenario: &str) -> Result<String, String> {
    alone(scenario)
        .env("PHALANX_NCCL_LIB", &release.library().to_string_lossy())
        .reports()
        .map(|all| all[0].clone())
}

fn alone(scenario: &str) -> Launch {
    // NCCL writes what it finds wrong to standard output, where the report goes, only from warnings on.
    Launch::alone(scenario).env("CUDA_VISIBLE_DEVICES", "").env("NCCL_DEBUG", "VERSION")
}

/// What it lacks is what came later, as the table says.
pub fn has_the_functions_of_its_version(release: &Release) -> Result<(), String> {
    let missing = report(release, "missing")?;
    let later = |function: &&Function| function.is_of(Flavour::Nccl) && function.since > release.version;
    let later: Vec<_> = FUNCTIONS.iter().filter(later).copied().collect();
    if missing == names(&later).join(" ") {
        return Ok(());
    }
    Err(format!("it lacks {missing}, expected {}", names(&later).join(" ")))
}

pub fn tells_its_version_and_makes_ids(release: &Release) -> Result<(), String> {
    let report = report(release, "version_and_id")?;
    if report == release.version_text() { Ok(()) } else { Err(format!("it says {report}")) }
}

fn version_and_id(_: &[String]) -> Outcome {
    let api = load()?;
    let ids = [0; 2].map(|_| {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: an out-pointer on the stack.
        let result = unsafe { api.ncclGetUniqueId.expect("always there")(&raw mut id) };
        assert_eq!(result, ncclResult_t::Success);
        id
    });
    assert!(ids[0] != ids[1] && ids[0].internal != [0; 128], "ids are unique");
    phalanx::nccl::version().map_err(|error| error.to_string())
}

/// The key is checked where the library has sockets with keys.
pub fn takes_a_key_for_sockets(release: &Release) -> Result<(), String> {
    let has = release.version >= version_code(2, 32, 0);
    let expected = if has { "taken" } else { "missing" };
    let report = report(release, "encryption")?;
    if report == expected { Ok(()) } else { Err(format!("{report}, expected {expected}")) }
}

fn encryption(_: &[String]) -> Outcome {
    let key = "k".repeat(32);
    match phalanx::nccl::encrypt_sockets(&key[..31]) {
        Err(Error::MissingFunction(missing)) if missing.function == "ncclSetEncryption" => {
            return Ok("missing".into());
        }
        Err(error) if error.to_string().contains("at least 32 bytes") => {}
        other => return Err(format!("a short key: {other:?}")),
    }
    phalanx::nccl::encrypt_sockets(&key).map(|()| "taken".into()).map_err(|error| error.to_string())
}

/// The C call and ours: errors that say what is missing, and no crash.
pub fn says_that_there_is_no_gpu(release: &Release) -> Result<(), String> {
    let text = report(release, "init_all")?;
    // An unhandled CUDA error, or since 2.27 a system error.
    if !text.contains("unhandled") {
        return Err(text);
    }
    report(release, "front").map(drop)
}

fn init_all(_: &[String]) -> Outcome {
    let api = load()?;
    let mut comms = [std::ptr::null_mut(); 2];
    // SAFETY: room for two communicators; no list means the first two GPUs.
    let result =
        unsafe { api.ncclCommInitAll.expect("always there")(comms.as_mut_ptr(), 2, std::ptr::null()) };
    assert!(result != ncclResult_t::Success, "there are no GPUs");
    // SAFETY: a static text.
    let text = unsafe { CStr::from_ptr(api.ncclGetErrorString.expect("always there")(result)) };
    Ok(format!("{result:?}: {}", text.to_string_lossy()))
}

fn front(_: &[String]) -> Outcome {
    let error = Comm::builder().backend(BackendKind::Nccl).run(2, |_| ()).map(drop).unwrap_err();
    // Without a driver, or with one and no GPU.
    assert!(matches!(error, Error::LibraryNotFound(_) | Error::Unsupported(_)), "{error:?}");
    let text = error.to_string();
    assert!(["CUDA", "GPU"].iter().any(|word| text.contains(word)), "{text}");
    Ok(text)
}

/// The wheel's place in an environment that is active.
pub fn is_found_in_a_virtual_environment(release: &Release) -> Result<(), String> {
    if Api::load(&NCCL).is_ok_and(|api| api.library().place().origin == "the loader's path") {
        // The loader finds another one first.
        return Ok(());
    }
    let environment = tempfile::tempdir().map_err(|error| error.to_string())?;
    let python = environment.path().join("lib/python3.12");
    std::fs::create_dir_all(&python).map_err(|error| error.to_string())?;
    std::os::unix::fs::symlink(&release.packages, python.join("site-packages"))
        .map_err(|error| error.to_string())?;
    let reports = alone("place").env("VIRTUAL_ENV", &environment.path().to_string_lossy()).reports()?;
    let file = python.join("site-packages/nvidia/nccl/lib/libnccl.so.2");
    let expected = format!("VIRTUAL_ENV\t{}", file.display());
    if reports[0] == expected { Ok(()) } else { Err(format!("{}, expected {expected}", reports[0])) }
}
