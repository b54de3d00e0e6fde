//! Ranges of NVTX, as a profiler gets them: NVIDIA's library, and a profiler of a few lines that is compiled against its headers.

use libtest_mimic::Trial;
use phalanx::ReduceOp;
use phalanx_sys::nvtx::{INJECTION, NVTX};
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::{Outcome, Scenario};
use phalanx_testkit::suite;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The file into which the profiler writes.
const EVENTS: &str = "NVTX_TEST_EVENTS";
const FOLDER: &str = "PHALANX_TEST_CUDA";

pub const SCENARIOS: &[Scenario] = &[Scenario::rank("nvtx/work", |comm, _| work(&comm))];

/// Writes each range of a domain that begins or ends into a file.
const PROFILER: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <nvtx3/nvToolsExt.h>

static nvtxRangeId_t ranges;

static void say(const char *what, nvtxRangeId_t id, const nvtxEventAttributes_t *event) {
    FILE *file = fopen(getenv("NVTX_TEST_EVENTS"), "a");
    if (event)
        fprintf(file, "%s %d %s %llu\n", what, (int)id, event->message.ascii, (unsigned long long)event->payload.ullValue);
    else
        fprintf(file, "%s %d\n", what, (int)id);
    fclose(file);
}

static nvtxDomainHandle_t create(const char *name) { return (nvtxDomainHandle_t)name; }

static nvtxRangeId_t start(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    int is_ours = event->size == sizeof *event && event->payloadType == NVTX_PAYLOAD_TYPE_UNSIGNED_INT64
        && event->messageType == NVTX_MESSAGE_TYPE_ASCII && ((const char *)domain)[0] == 'p';
    say(is_ours ? "start" : "wrong", ++ranges, event);
    return ranges;
}

static void end(nvtxDomainHandle_t domain, nvtxRangeId_t id) { say(domain ? "end" : "wrong", id, NULL); }

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
    const NvtxExportTableCallbacks *callbacks = get(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned size;
    callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size);
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create;
    *table[NVTX_CBID_CORE2_DomainRangeStartEx] = (NvtxFunctionPointer)start;
    *table[NVTX_CBID_CORE2_DomainRangeEnd] = (NvtxFunctionPointer)end;
    return 1;
}
"#;

pub fn trials() -> Vec<Trial> {
    let wheel = std::env::var_os(FOLDER).and_then(|folder| packages(Path::new(&folder)));
    let wheel = wheel.filter(|wheel| wheel.join("lib/libnvtx3interop.so.1").exists());
    vec![match wheel {
        Some(wheel) => Trial::test("nvtx/ranges", move || Ok(ranges(&wheel)?)),
        None => suite::missing("nvtx/ranges", format!("{FOLDER} names no environment with nvidia-nvtx-cu12")),
    }]
}

/// NVTX's folder in a virtual environment.
fn packages(environment: &Path) -> Option<PathBuf> {
    let mut folders = std::fs::read_dir(environment.join("lib")).ok()?;
    folders.find_map(|folder| {
        Some(folder.ok()?.path().join("site-packages/nvidia/nvtx")).filter(|path| path.exists())
    })
}

fn work(comm: &phalanx::Comm) -> Outcome {
    let text = |error: phalanx::Error| error.to_string();
    comm.all_reduce_in_place(&mut [1.0f64; 4], ReduceOp::Sum).map_err(text)?;
    let request = comm.start_all_reduce(vec![1u8; 10], ReduceOp::Max).map_err(text)?;
    request.wait().map_err(text)?;
    Ok(String::new())
}

fn ranges(wheel: &Path) -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let [source, profiler, events] =
        ["profiler.c", "profiler.so", "events"].map(|name| folder.path().join(name));
    std::fs::write(&source, PROFILER).map_err(|error| error.to_string())?;
    let mut compiler = Command::new("cc");
    compiler
        .args(["-shared", "-fPIC", "-I"])
        .arg(wheel.join("include"))
        .arg(&source)
        .arg("-o")
        .arg(&profiler);
    let compiled = compiler.output().map_err(|error| format!("cc: {error}"))?;
    if !compiled.status.success() {
        return Err(String::from_utf8_lossy(&compiled.stderr).into_owned());
    }
    // Without a profiler nothing is loaded.
    Launch::new("nvtx/work", 1).reports()?;
    let library = wheel.join("lib/libnvtx3interop.so.1");
    let profiled = Launch::new("nvtx/work", 1)
        .env(NVTX.variable, &library.display().to_string())
        .env(INJECTION, &profiler.display().to_string())
        .env(EVENTS, &events.display().to_string());
    profiled.reports()?;
    let heard = std::fs::read_to_string(&events).map_err(|error| error.to_string())?;
    let expected = ["start 1 all_reduce 32", "end 1", "start 2 all_reduce 10", "end 2"];
    match heard.lines().collect::<Vec<_>>().starts_with(&expected) {
        true => Ok(()),
        false => Err(format!("not {expected:?}:\n{heard}")),
    }
}
