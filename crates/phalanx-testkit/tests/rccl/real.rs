//! AMD's own RCCL and HIP, as Debian packages them, on a machine without an AMD GPU: they load, say their
//! version, make ids, and refuse what needs a GPU.
//!
//! They need a newer C library than the system may have. So the variable [`ROOT`] names a folder in which
//! that release's packages are unpacked, and this program is started by the loader in there.

use libtest_mimic::{Failed, Trial};
use phalanx::{BackendKind, Comm, hip};
use phalanx_sys::hip::HIP;
use phalanx_sys::nccl::{Api, Flavour, NCCL_UNIQUE_ID_BYTES, RCCL, ncclResult_t, ncclUniqueId};
use phalanx_testkit::processes::is_launcher_variable;
use phalanx_testkit::suite;
use std::ffi::CStr;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// The folder with the unpacked packages.
const ROOT: &str = "PHALANX_TEST_RCCL_ROOT";

/// The argument that makes this program ask.
pub const PROBE: &str = "--ask-rccl";

const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

pub fn trials() -> Vec<Trial> {
    let root = std::env::var_os(ROOT).map(PathBuf::from);
    let usable = root.filter(|root| root.join(LIBRARIES).join("librccl.so.1").exists());
    let Some(root) = usable else {
        let text = format!("{ROOT} names no folder with usr/lib/x86_64-linux-gnu/librccl.so.1");
        return vec![suite::missing("real/answers", text)];
    };
    vec![Trial::test("real/answers", move || ask(&root))]
}

fn ask(root: &std::path::Path) -> Result<(), Failed> {
    let libraries = root.join(LIBRARIES);
    let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(&libraries).arg(std::env::current_exe()?).arg(PROBE);
    // The library's own account goes to its log only.
    command.env("NCCL_DEBUG", "WARN").env("RUST_BACKTRACE", "0");
    for (name, _) in std::env::vars_os() {
        if is_launcher_variable(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Err(format!("{}: {}{}", output.status, text(&output.stdout), text(&output.stderr)).into())
}

/// Asks; a wrong answer is a panic.
pub fn probe() -> ExitCode {
    let api = Api::load(&RCCL).expect("RCCL loads");
    assert_eq!((api.flavour(), api.version()), (Flavour::Rccl, 21304));
    assert_eq!(phalanx::rccl::version().expect("a version"), "2.13.4");
    functions(&api);
    id(&api);
    assert!(phalanx::hip::version().expect("HIP's version").starts_with("5.7."), "{:?}", hip::version());
    assert_eq!(HIP.loaded().len(), 1, "one HIP for RCCL and for phalanx: {:?}", HIP.loaded());
    if hip::device_count().expect("a number of GPUs") == 0 {
        without_gpu(&api);
    }
    ExitCode::SUCCESS
}

/// What came later is missing, with its name; what RCCL alone has, or spells otherwise, is there.
fn functions(api: &Api) {
    let missing: Vec<&str> = api.missing().iter().map(|function| function.name).collect();
    for absent in ["ncclCommInitRankConfig", "ncclCommSplit", "ncclMemAlloc", "ncclAllReduceWithBias"] {
        assert!(missing.contains(&absent), "{missing:?}");
    }
    let present = ["ncclAllReduce", "ncclCommAbort", "ncclGetLastError", "ncclRedOpCreatePreMulSum"];
    assert!(!present.iter().any(|function| missing.contains(function)), "{missing:?}");
    assert!(!missing.iter().any(|name| ["ncclAlltoAll", "ncclAlltoAllv", "ncclGather"].contains(name)));
    assert!(api.lacks("ncclCommSplit").to_string().contains("RCCL 2.13.4"));
}

fn id(api: &Api) {
    let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
    let get = api.ncclGetUniqueId.expect("ncclGetUniqueId");
    // SAFETY: an out-pointer on the stack, written during the call.
    assert_eq!(unsafe { get(&raw mut id) }, ncclResult_t::Success);
    assert!(id.internal.iter().any(|byte| *byte != 0));
}

fn without_gpu(api: &Api) {
    let mut comm = std::ptr::null_mut();
    let init = api.ncclCommInitAll.expect("ncclCommInitAll");
    // SAFETY: room for one communicator; no list: the first device.
    assert_eq!(unsafe { init(&raw mut comm, 1, std::ptr::null()) }, ncclResult_t::UnhandledCudaError);
    let describe = api.ncclGetErrorString.expect("ncclGetErrorString");
    // SAFETY: any code is allowed; the answer is a static text.
    let text = unsafe { CStr::from_ptr(describe(ncclResult_t::UnhandledCudaError)) };
    assert!(text.to_string_lossy().contains("unhandled"), "{text:?}");
    let error = Comm::builder().backend(BackendKind::Rccl).run(1, |_| ()).expect_err("no GPU");
    assert!(
        error.to_string().contains("RCCL for 1 ranks") && error.to_string().contains("sees 0"),
        "{error}"
    );
    let refused = hip::Device::new(0).expect_err("no GPU");
    assert!(refused.to_string().contains("HIP shows this process 0 GPUs"), "{refused}");
    assert_ne!(phalanx::choose().expect("a choice").backend, BackendKind::Rccl);
}
