//! The library itself, in a process without GPUs.

use super::release::Release;
use phalanx::{BackendKind, Comm, Error};
use phalanx_sys::nccl::{Api, FUNCTIONS, Flavour, Function, NCCL, ncclResult_t, ncclUniqueId, version_code};
use phalanx_testkit::Scenario;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::Outcome;
use std::ffi::CStr;
use std::sync::{Arc, Mutex};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("missing", |_| Ok(names(&load()?.missing()).join(" "))),
    Scenario::process("version_and_id", version_and_id),
    Scenario::process("init_all", init_all),
    Scenario::process("front", front),
    Scenario::process("encryption", encryption),
    Scenario::process("parameters", parameters),
    Scenario::process("another_copy", another_copy),
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

/// As the environment has them.
pub fn tells_its_parameters(release: &Release) -> Result<(), String> {
    let has = release.version >= version_code(2, 30, 4);
    let expected = if has { "INIT,P2P" } else { "missing ncclParamGetAllParameterKeys" };
    let launch = alone("parameters").env("NCCL_DEBUG_SUBSYS", "INIT,P2P");
    let report = launch.env("PHALANX_NCCL_LIB", &release.library().to_string_lossy()).reports()?;
    if report[0] == expected { Ok(()) } else { Err(format!("{}, expected {expected}", report[0])) }
}

fn parameters(_: &[String]) -> Outcome {
    match phalanx::nccl::parameters() {
        Ok(all) => all.get("NCCL_DEBUG_SUBSYS").cloned().ok_or(format!("not in {all:?}")),
        Err(Error::MissingFunction(missing)) => Ok(format!("missing {}", missing.function)),
        Err(error) => Err(error.to_string()),
    }
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

/// Where it is looked for: a variable of the environment, what it names, and where the library is below that.
const PLACES: [(&str, &str, &str); 10] = [
    ("VIRTUAL_ENV", "", "lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"),
    ("CONDA_PREFIX", "", "lib/libnccl.so.2"),
    ("CONDA_PREFIX", "", "lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"),
    ("NCCL_HOME", "", "lib/libnccl.so.2"),
    ("NCCL_ROOT", "", "lib64/libnccl.so"),
    ("CUDA_HOME", "", "targets/x86_64-linux/lib/libnccl.so.2"),
    ("CUDA_PATH", "", "lib64/libnccl.so.2"),
    ("PHALANX_NCCL_LIB", "", "libnccl.so.2"),
    ("PHALANX_NCCL_LIB", "", "libnccl.so"),
    ("PHALANX_NCCL_LIB", "any/name", "any/name"),
];

pub fn is_found_in_its_places(release: &Release) -> Result<(), String> {
    let text = |error: std::io::Error| error.to_string();
    let is_in_the_loaders_path =
        Api::load(&NCCL).is_ok_and(|api| api.library().place().origin == "the loader's path");
    for (variable, named, place) in PLACES {
        if is_in_the_loaders_path && variable != NCCL.variable {
            // The loader finds another one first.
            continue;
        }
        let home = tempfile::tempdir().map_err(text)?;
        let file = home.path().join(place);
        std::fs::create_dir_all(file.parent().expect("below the home")).map_err(text)?;
        std::os::unix::fs::symlink(release.library(), &file).map_err(text)?;
        let reports = alone("place").env(variable, &home.path().join(named).to_string_lossy()).reports()?;
        let expected = format!("{variable}\t{}", file.display());
        if reports[0] != expected {
            return Err(format!("{variable}, {place}: {}, expected {expected}", reports[0]));
        }
    }
    Ok(())
}

/// Another copy, that the program loads before or after, is noticed, once.
pub fn notices_another_copy(release: &Release) -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let copy = folder.path().join("libnccl.so.2");
    std::fs::copy(release.library(), &copy).map_err(|error| error.to_string())?;
    for order in ["before", "after"] {
        let launch = alone("another_copy").arg(order).arg(copy.display());
        let report = launch.env("PHALANX_NCCL_LIB", &release.library().to_string_lossy()).reports()?;
        if report[0].matches("another NCCL").count() != 1 || !report[0].contains(&copy.display().to_string())
        {
            return Err(format!("loaded {order}: the log has {:?}", report[0]));
        }
    }
    Ok(())
}

fn another_copy(args: &[String]) -> Outcome {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .init();
    let load = || phalanx::nccl::version().map_err(|error| error.to_string());
    // SAFETY: a library's own initialisation.
    let load_other =
        || unsafe { libloading::Library::new(&args[1]) }.map(std::mem::forget).map_err(|e| e.to_string());
    if args[0] == "before" {
        load_other()?;
    }
    load()?;
    if args[0] == "after" {
        assert_eq!(log.text(), "");
        load_other()?;
    }
    for _ in 0..2 {
        load()?;
    }
    Ok(log.text())
}

/// What the library notes.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
