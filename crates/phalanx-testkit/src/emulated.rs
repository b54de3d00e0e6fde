//! Shows processes the emulated CUDA driver and NCCL, or HIP and RCCL (crate `phalanx-emulated`) instead of
//! real ones.
//!
//! An [`Emulated`] is a folder in which the emulator has the names of the real libraries; processes that
//! start with [`Emulated::environment`] find it by the loader's own path. What the emulator can be told (its
//! versions, what fails) is listed in its `settings` module.

use crate::gpus::{self, GPU_ALGORITHM};
use crate::processes::{self, Launch};
use object::{Object, ObjectSection};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use tempfile::TempDir;

/// The file that cargo builds.
const FILE: &str = "libphalanx_emulated.so";

/// Names that the file gets. The first is the file, and what is loaded is seen under it; the others are
/// links, so that the libraries stay one, and share their state, when several are loaded.
type Names = &'static [&'static str];

/// NCCL, CUDA's driver, cuBLAS, NVSHMEM and those of its plugins whose work it does itself.
const NVIDIA: Names = &[
    "libnccl.so.2",
    "libnccl.so",
    "libcuda.so.1",
    "libcuda.so",
    "libcublas.so",
    "libcublas.so.12",
    "libnvshmem_host.so.3",
    "libnvshmem_host.so",
    "nvshmem_bootstrap_pmi.so.3",
    "nvshmem_bootstrap_uid.so.3",
];

/// RCCL and HIP.
const AMD: Names = &["librccl.so.1", "librccl.so", "libamdhip64.so", "libamdhip64.so.6"];

/// The functions that came with a version of NCCL.
const SINCE: [(&str, &[&str]); 10] = [
    ("2.19.3", &["ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister"]),
    ("2.22.3", &["ncclGroupSimulateEnd"]),
    ("2.23.4", &["ncclCommInitRankScalable"]),
    ("2.27.3", &["ncclCommShrink", "ncclCommWindowRegister", "ncclCommWindowDeregister"]),
    (
        "2.28.3",
        &[
            "ncclAlltoAll",
            "ncclGather",
            "ncclScatter",
            "ncclDevCommCreate",
            "ncclDevCommDestroy",
            "ncclLsaBarrierCreateRequirement",
            "ncclLLA2ACalcSlots",
            "ncclLLA2ACreateRequirement",
            "ncclTeamWorld",
            "ncclTeamLsa",
            "ncclTeamRail",
            "ncclTeamRankToWorld",
            "ncclTeamRankToLsa",
        ],
    ),
    ("2.28.7", &["ncclCommRevoke", "ncclGinBarrierCreateRequirement"]),
    (
        "2.29.2",
        &[
            "ncclCommGetUniqueId",
            "ncclCommGrow",
            "ncclPutSignal",
            "ncclSignal",
            "ncclWaitSignal",
            "ncclWinGetUserPtr",
            "ncclCommQueryProperties",
            "ncclGetLsaDevicePointer",
            "ncclGetPeerDevicePointer",
            "ncclGetLsaMultimemDevicePointer",
            "ncclGetMultimemDevicePointer",
        ],
    ),
    ("2.29.7", &["ncclCommSuspend", "ncclCommResume", "ncclCommMemStats"]),
    (
        "2.31.0",
        &[
            "ncclAllReduceConfig",
            "ncclBroadcastConfig",
            "ncclReduceConfig",
            "ncclAllGatherConfig",
            "ncclReduceScatterConfig",
            "ncclAlltoAllConfig",
            "ncclGatherConfig",
            "ncclScatterConfig",
            "ncclTeamCft",
            "ncclTeamCftMultimem",
            "ncclGetCftDeviceLeInfo",
            "ncclGetPeerDeviceLeInfo",
            "ncclGetMultimemDeviceLeInfo",
        ],
    ),
    ("2.32.0", &["ncclSetEncryption"]),
];

/// The functions that came with a version of RCCL, as far as they did not come with NCCL's.
const RCCL_SINCE: [(&str, &[&str]); 5] = [
    ("2.15.5", &["ncclCommInitRankConfig", "ncclCommFinalize"]),
    ("2.18.3", &["ncclCommSplit"]),
    ("2.20.5", &["ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister"]),
    ("2.22.3", &["ncclAllReduceWithBias"]),
    // Before, these were spelled with a capital T.
    ("2.30.4", &["ncclAlltoAll", "ncclAlltoAllv"]),
];

/// RCCL had these from the beginning, and NCCL much later.
const RCCL_EARLY: [&str; 2] = ["ncclGather", "ncclScatter"];

/// Bytes of an entry of `.dynsym`.
const SYMBOL: usize = 24;

/// A folder with the emulated libraries, and settings for them. The folder goes when this is dropped.
#[derive(Debug)]
pub struct Emulated {
    folder: TempDir,
    settings: Vec<(String, String)>,
    algorithm: String,
}

impl Emulated {
    /// The newest version, with every function.
    pub fn new() -> io::Result<Emulated> {
        Emulated::with(NVIDIA, |library, to| std::fs::hard_link(library, to))
    }

    /// A version of NCCL such as `2.18.1`: it says so, and lacks the functions that came later.
    pub fn nccl(version: &str) -> io::Result<Emulated> {
        Ok(Emulated::without(&later(&SINCE, version))?.set("NCCL_VERSION", version))
    }

    /// A version of RCCL such as `2.21.5`, with HIP and without anything of NVIDIA's.
    pub fn rccl(version: &str) -> io::Result<Emulated> {
        Emulated::rccl_without(version, &[])
    }

    /// A version of RCCL, without some functions of it or of HIP.
    pub fn rccl_without(version: &str, functions: &[&str]) -> io::Result<Emulated> {
        let mut lacks = later(&SINCE, version);
        lacks.retain(|function| !RCCL_EARLY.contains(function));
        lacks.extend(later(&RCCL_SINCE, version));
        lacks.extend(functions);
        let put = |library: &Path, to: &Path| std::fs::write(to, hide(std::fs::read(library)?, &lacks)?);
        Ok(Emulated::with(AMD, put)?.set("NCCL_VERSION", version))
    }

    /// The newest version, without some functions: the loader does not find them.
    pub fn without(functions: &[&str]) -> io::Result<Emulated> {
        Emulated::with(NVIDIA, |library, to| std::fs::write(to, hide(std::fs::read(library)?, functions)?))
    }

    fn with(names: Names, put: impl FnOnce(&Path, &Path) -> io::Result<()>) -> io::Result<Emulated> {
        let library = built()?;
        // Beside the library, where a second name for it is possible.
        let beside = library.parent().unwrap_or(Path::new("."));
        let folder = tempfile::Builder::new().prefix("emulated-").tempdir_in(beside)?;
        put(&library, &folder.path().join(names[0]))?;
        for name in &names[1..] {
            std::os::unix::fs::symlink(names[0], folder.path().join(name))?;
        }
        Ok(Emulated { folder, settings: Vec::new(), algorithm: "nccl".into() })
    }

    /// Collectives go by phalanx's own kernels: by an algorithm as `PHALANX_GPU_ALGORITHM` has it. Without this, NCCL
    /// carries all of them out.
    pub fn own_kernels(mut self, algorithm: &str) -> Emulated {
        self.algorithm = algorithm.into();
        self
    }

    /// Sets `EMULATED_name`.
    pub fn set(mut self, name: &str, value: impl ToString) -> Emulated {
        self.settings.push((format!("EMULATED_{name}"), value.to_string()));
        self
    }

    /// The folder; there is room in it for what a test's processes share.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The variables of a process that shall find it.
    pub fn environment(&self) -> Vec<(String, String)> {
        let path = processes::library_path(self.folder.path());
        let algorithm = (GPU_ALGORITHM.to_owned(), self.algorithm.clone());
        let mut environment = vec![("LD_LIBRARY_PATH".to_owned(), path), algorithm];
        environment.extend(self.settings.iter().cloned());
        environment
    }

    /// A command that finds it.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command.envs(self.environment());
        command
    }

    /// Processes that find it.
    pub fn launch(&self, launch: Launch) -> Launch {
        self.environment().iter().fold(launch.on_gpus(), |launch, (name, value)| launch.env(name, value))
    }
}

/// Set in a process whose own GPUs are emulated (not `PHALANX_…`: those are taken from rank processes).
pub const EMULATED: &str = "TESTKIT_EMULATED_GPUS";

/// Whether this process's own GPUs are emulated.
pub fn is_emulated() -> bool {
    std::env::var_os(EMULATED).is_some()
}

/// Runs this program again, where it finds the emulated libraries. For a suite on a machine without GPUs.
pub fn run_again(emulated: io::Result<Emulated>, reason: &str) -> ExitCode {
    if is_emulated() {
        eprintln!("not even emulated GPUs: {reason}");
        return ExitCode::FAILURE;
    }
    eprintln!("no GPUs ({reason}): the trials run on emulated ones");
    let status = emulated.and_then(|emulated| {
        let mut command = emulated.command(std::env::current_exe()?);
        // The folder of the libraries goes with `emulated`, after the process has ended.
        command.args(std::env::args_os().skip(1)).env(EMULATED, "1").status()
    });
    match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(status) => {
            eprintln!("on emulated GPUs: {status}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("the emulated libraries cannot be used: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether there are real GPUs for so many ranks.
pub fn has_gpus_for(ranks: usize) -> bool {
    !is_emulated() && gpus::count().is_ok_and(|gpus| gpus * processes::ranks_per_gpu() >= ranks)
}

/// Runs so many ranks whose collectives go by phalanx's own kernels: on the machine's GPUs if it has enough of them, else on
/// emulated ones.
///
/// # Errors
/// What goes wrong in a rank.
pub fn on_own_kernels(algorithm: &str, ranks: usize, launch: Launch) -> Result<Vec<String>, String> {
    if has_gpus_for(ranks) {
        // Ranks that share a GPU have own kernels only if they are forced.
        let is_left_to_nccl = algorithm == "auto" && processes::ranks_per_gpu() > 1;
        let algorithm = if is_left_to_nccl { "ll128" } else { algorithm };
        return launch.on_gpus().env(GPU_ALGORITHM, algorithm).reports();
    }
    let emulated = Emulated::new().map_err(|error| error.to_string())?;
    let emulated = emulated.own_kernels(algorithm).set("DEVICES", ranks);
    emulated.launch(launch).reports()
}

/// The functions that came after a version.
fn later(table: &[(&str, &'static [&'static str])], version: &str) -> Vec<&'static str> {
    let later = table.iter().filter(|(since, _)| numbers(since) > numbers(version));
    later.flat_map(|(_, functions)| *functions).copied().collect()
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map(|number| number.parse().unwrap_or(0)).collect()
}

/// The library that cargo built beside this test.
fn built() -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let near: Vec<PathBuf> = program
        .ancestors()
        .skip(1)
        .take(2)
        .flat_map(|folder| [folder.join(FILE), folder.join("deps").join(FILE)])
        .collect();
    near.into_iter().find(|path| path.exists()).ok_or_else(|| {
        let text = format!(
            "{FILE} is not beside {}; cargo builds it for whoever depends on phalanx-testkit",
            program.display()
        );
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}

/// Takes the names away from symbols of a shared library.
fn hide(mut library: Vec<u8>, names: &[&str]) -> io::Result<Vec<u8>> {
    let (symbols, strings) = {
        let file = object::File::parse(&*library).map_err(io::Error::other)?;
        (section(&file, ".dynsym")?, section(&file, ".dynstr")?)
    };
    let texts = library[strings].to_vec();
    for entry in library[symbols].chunks_exact_mut(SYMBOL) {
        let (name, _) = entry.split_at_mut(4);
        let offset = u32::from_le_bytes([name[0], name[1], name[2], name[3]]) as usize;
        let text: Vec<u8> = texts[offset..].iter().copied().take_while(|byte| *byte != 0).collect();
        if names.iter().any(|name| name.as_bytes() == text) {
            // The empty string; the loader's hash table still leads here, and the names differ.
            name.fill(0);
        }
    }
    Ok(library)
}

fn section(file: &object::File<'_>, name: &str) -> io::Result<Range<usize>> {
    let range = file.section_by_name(name).and_then(|section| section.file_range());
    let (start, len) = range.ok_or_else(|| io::Error::other(format!("no section {name}")))?;
    Ok(start as usize..(start + len) as usize)
}
