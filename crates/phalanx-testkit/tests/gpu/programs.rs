//! The program and the examples, which cargo builds beside this suite.

use crate::world::BACKEND;
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::suite;
use phalanx_testkit::suite::Condition;
use std::path::PathBuf;
use std::process::Command;

/// A command line, and what its output has.
type Job = (&'static str, &'static [&'static str]);

/// Without kernels of their own.
const ANYWHERE: [Job; 21] = [
    ("all_reduce_gpu 2", &["[1.0, 1.0]"]),
    ("kv_cache", &["20 prompts in a cache of 64 blocks", "20 prompts of 192 tokens are right"]),
    ("phalanx launch -n 2 -- kv_cache 9", &["9 prompts of 192 tokens are right"]),
    ("gpu_window_bandwidth 65536 1", &["put of 1000 blocks   65536000", "get of 1000 blocks   65536000"]),
    (
        "phalanx doctor -v",
        &[
            "GPU 1",
            "between",
            "missing functions",
            "threads with GPUs",
            "processes with GPUs",
            "Works: ranks on this host",
        ],
    ),
    (
        "phalanx perf all_reduce -p 2 -b 3000 -e 3000 -d all -o all -n 1 -w 1",
        &["bf16", "f8e4m3", "mulsum", "0 OK"],
    ),
    ("phalanx perf all_reduce -t 2 -R 1 -b 8 -e 64K -f 64 -n 3 -w 1", &["registered GPU memory", "0 OK"]),
    ("phalanx perf all_gather -p 2 -R 2 -b 64 -e 64K -f 64 -n 3 -w 1", &["symmetric GPU memory", "0 OK"]),
    ("phalanx perf all_reduce -t 2 -R 2 -G 3 -b 8 -e 64K -f 64 -n 3 -w 1", &["CUDA graph", "0 OK"]),
    (
        "phalanx perf all_gather -g 2 -z 1 -b 64 -e 64K -f 64 -n 3 -w 1",
        &["2 ranks (threads)", "Each iteration is waited for", "0 OK"],
    ),
    ("ported nccl4py/allreduce", &["nccl4py/allreduce passed"]),
    ("ported nccl4py/allreduce_basic", &["rank 1 has [1.0]", "passed"]),
    ("ported nccl4py/allreduce_ub", &["rank 1 has", "passed"]),
    ("ported nccl4py/multiple_devices_single_process", &["GPU 1: ", "passed"]),
    ("ported nccl4py/ring_pattern", &["GPU 1 received the buffer of GPU 0", "passed"]),
    ("ported nccl4py/send_recv", &["rank 1 sent 101 and received [100.0]", "passed"]),
    ("ported cudarc/all_reduce", &["cudarc/all_reduce passed"]),
    ("ported cudarc/all_reduce_views", &["cudarc/all_reduce_views passed"]),
    ("ported cudarc/single_thread", &["cudarc/single_thread passed"]),
    ("phalanx launch -n 2 -- ported nccl4py/send_recv", &["received [100.0]", "passed"]),
    ("phalanx launch -n 2 -- ported nccl4py/allreduce_ub", &["rank 1 has", "passed"]),
];

/// What `perf` measures, and verifies.
const MEASURED: [&str; 12] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "all_to_all_v",
    "gather",
    "scatter",
    "send_recv",
    "ping_pong",
    "hypercube",
];

/// With kernels, or cuBLAS.
const ON_GPUS: [Job; 6] = [
    ("tensor_parallel 2", &["column layer", "row layer", "equal"]),
    ("ring_attention 2", &["of the exchange were behind the attention"]),
    ("overlap 2", &["rank 0's GPU did both for"]),
    ("train_digits_gpu 2", &["epoch 20", "all 2 ranks hold the same 4810 weights, bit for bit"]),
    ("phalanx launch -n 2 -- train_digits_gpu", &["epoch 20", "all 2 ranks hold the same 4810 weights"]),
    ("phalanx launch -n 2 -- overlap", &["rank 0's GPU did both for"]),
];

/// What is said where they lack libraries of CUDA.
const WITHOUT_CUDA: [Job; 2] = [
    ("tensor_parallel 2", &["libcublas.so", "was not found", "LD_LIBRARY_PATH"]),
    ("ring_attention 2", &["libnvrtc.so", "was not found", "LD_LIBRARY_PATH"]),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let emulated = crate::world::are_emulated();
    let anywhere = ANYWHERE.map(|job| (job, true, gpus >= 2));
    let on_gpus = ON_GPUS.map(|job| (job, true, gpus >= 2 && !emulated));
    let without = WITHOUT_CUDA.map(|job| (job, false, emulated && !has_cuda_libraries()));
    let all = anywhere.into_iter().chain(on_gpus).chain(without);
    let mut trials: Vec<_> =
        all.map(|((line, texts), succeeds, fits)| trial(line, texts, succeeds, fits)).collect();
    let with_phalanx = |name: &str, body: fn() -> Result<(), Failed>, fits| {
        if_built(&["phalanx"], Trial::test(format!("programs/{name}"), body), fits)
    };
    trials.push(with_phalanx("phalanx perf, every operation", every_operation, gpus >= 2));
    trials.push(with_phalanx("wrong_data", wrong_data, emulated));
    trials.push(with_phalanx("examined", examined, emulated));
    trials
}

/// Among threads and among processes, a GPU each: what every element of every row should be, it is.
fn every_operation() -> Result<(), Failed> {
    for operation in MEASURED {
        for ranks in ["-t 2", "-p 2"] {
            let line = format!("phalanx perf {operation} {ranks} -b 100 -e 90000 -f 30 -r all -n 2 -w 1");
            let backend = BACKEND.name();
            let kind = if ranks == "-t 2" { "threads" } else { "processes" };
            let head = format!("2 ranks ({kind}), backend {backend}, GPU memory");
            perform(&line, &[&head, "Rank 1: GPU 1", "Out of bounds values : 0 OK"], true)?;
        }
    }
    Ok(())
}

/// What `doctor` finds on machines of several kinds: their GPUs and links, the release and what it lacks, and
/// whether it works.
fn examined() -> Result<(), Failed> {
    let program = built("phalanx").ok_or("phalanx is not built: cargo build --workspace --bins")?;
    let older = Emulated::nccl("2.27.3")?.set("DEVICES", 3).set("COMPUTE_CAPABILITY", "8.0");
    type Machine<'a> = (&'static str, Emulated, bool, &'a [&'static str]);
    let machines: [Machine<'_>; 4] = [
        (
            "an older release",
            older,
            true,
            &[
                "made for CUDA 12.8",
                "GPU 0 Emulated GPU 0, 16 GiB, compute capability 8.0, PCI 0000:1B:00.0",
                "GPU 2 Emulated GPU 2",
                "between any two each can reach the other's memory, performance rank 0, with atomic operations (NVLink)",
                "version 2.27.3",
                "ncclCommRevoke",
                "ncclCommSuspend, ncclCommResume, ncclCommMemStats (since 2.29.7)",
                "nccl up to 3 ranks of this host, each with a GPU",
                "OK all_reduce, 3 threads with GPUs",
                "OK all_reduce, 3 processes with GPUs",
                "OK NVIDIA GPUs 3, for a rank each",
            ],
        ),
        (
            "one GPU",
            Emulated::new()?.set("DEVICES", 1),
            true,
            &["GPU 0 Emulated GPU 0", "version 2.32.3", "OK all_reduce, 1 threads with GPUs"],
        ),
        (
            "a library that never connects the ranks",
            Emulated::new()?.set("INIT", "hang").set("DEVICES", 2),
            false,
            &[
                "OK all_reduce, 2 threads",
                "FAILED all_reduce, 2 threads with GPUs",
                "FAILED all_reduce, 2 processes with GPUs",
                "timeout after 3.0s in init",
                "2 FAILED.",
            ],
        ),
        (
            "a library that calculates wrong",
            Emulated::new()?.set("WRONG", 7).set("DEVICES", 2),
            false,
            &["FAILED all_reduce, 2 processes with GPUs", "sums are wrong", "2 FAILED."],
        ),
    ];
    for (what, emulated, succeeds, texts) in machines {
        let wait = if succeeds { "30" } else { "3" };
        let output = emulated.command(&program).args(["doctor", "-v", "-T", wait]).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let missing = texts.iter().find(|part| !words.contains(**part));
        if output.status.success() != succeeds || missing.is_some() {
            return Err(format!("{what}: {}, {missing:?} is missing in\n{text}", output.status).into());
        }
    }
    Ok(())
}

/// A library that calculates wrong: `perf` counts it and exits with 3, and with 0 where nothing is checked.
fn wrong_data() -> Result<(), Failed> {
    let program = built("phalanx").ok_or("phalanx is not built: cargo build --workspace --bins")?;
    let emulated = Emulated::new()?.set("WRONG", 6);
    let perf = |arguments: &str| -> Result<(Option<i32>, String), Failed> {
        let mut command = emulated.command(&program);
        let line = format!("perf all_reduce -t 2 -b 4K -e 4K -n 2 -w 1 {arguments}");
        let output = command.args(line.split(' ')).env("PHALANX_TIMEOUT", "60").output()?;
        let text =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        Ok((output.status.code(), text))
    };
    for (arguments, expected) in [("-d f16", 3), ("-d f32", 0), ("-d f16 -c 0", 0)] {
        let (status, text) = perf(arguments)?;
        let told = text.lines().find(|line| line.contains("Out of bounds values")).unwrap_or_default();
        let is_told = expected == 0 || !told.is_empty() && !told.contains(" 0 OK");
        if status != Some(expected) || !is_told {
            return Err(format!("{arguments}: status {status:?}, expected {expected}, in\n{text}").into());
        }
    }
    Ok(())
}

fn has_cuda_libraries() -> bool {
    // SAFETY: the libraries' initialisers do nothing of note.
    ["libcublas.so", "libnvrtc.so"].iter().any(|name| unsafe { libloading::Library::new(*name) }.is_ok())
}

fn trial(line: &'static str, texts: &'static [&'static str], succeeds: bool, fits: bool) -> Trial {
    let programs: Vec<&str> = line.split(' ').filter(|word| is_program(word)).collect();
    let trial = Trial::test(format!("programs/{line}"), move || perform(line, texts, succeeds));
    if_built(&programs, trial, fits)
}

/// Left out where a program is missing, which in CI it must not be.
fn if_built(programs: &[&str], trial: Trial, fits: bool) -> Trial {
    let missing = programs.iter().find(|name| built(name).is_none());
    match missing {
        Some(name) if !suite::is_ci() => trial.only_if(false, &format!("{name} is not built")),
        _ => trial.only_if(fits, "it does not fit these GPUs"),
    }
}

fn is_program(word: &str) -> bool {
    let lines = ANYWHERE.iter().chain(&ON_GPUS).map(|(line, _)| *line);
    word == "phalanx" || lines.filter_map(|line| line.split(' ').next()).any(|name| name == word)
}

/// The file of a program, near this one.
pub fn built(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let near = own.ancestors().skip(1).take(2);
    let mut places = near.flat_map(|folder| [folder.join("examples").join(name), folder.join(name)]);
    places.find(|path| path.is_file())
}

fn perform(line: &str, texts: &[&str], succeeds: bool) -> Result<(), Failed> {
    let program = |word: &str| -> Result<PathBuf, Failed> {
        if !is_program(word) {
            return Ok(word.into());
        }
        Ok(built(word)
            .ok_or_else(|| format!("{word} is not built: cargo build --workspace --examples --bins"))?)
    };
    let words = line.split(' ').map(program).collect::<Result<Vec<_>, _>>()?;
    let mut command = Command::new(&words[0]);
    let output = command.args(&words[1..]).env("PHALANX_TIMEOUT", "60").output()?;
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() == succeeds && texts.iter().all(|part| text.contains(part)) {
        return Ok(());
    }
    Err(format!("{}, expected {texts:?} in\n{text}", output.status).into())
}
