//! Runs the program, without variables that a launcher around the tests may have set.

// Each test program uses a part of it.
#![allow(dead_code)]

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The time limit for events that tests wait for, on the slowest machine.
pub const TIMEOUT: Duration = Duration::from_secs(60);

const PROGRAM: &str = env!("CARGO_BIN_EXE_phalanx");

/// The program with these arguments, separated by spaces.
pub fn phalanx(arguments: &str) -> Command {
    alone(Command::new(PROGRAM), arguments)
}

/// Adds these arguments, and removes variables that are set around the tests.
fn alone(mut command: Command, arguments: &str) -> Command {
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    forget_settings(&mut command);
    command.env_remove("RANK").env_remove("WORLD_SIZE");
    // The same on every machine; tests of GPUs remove it.
    command.env("PHALANX_BACKEND", "host");
    command
}

/// Removes the variables that a launcher or a user around the tests has set.
pub fn forget_settings(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("PHALANX_")) {
            command.env_remove(name);
        }
    }
}

/// Makes the command find neither a CUDA driver nor NCCL, HIP and RCCL.
pub fn without_gpus(mut command: Command) -> Command {
    command.env_remove("PHALANX_BACKEND");
    command
        .envs([("PHALANX_CUDA_LIB", "/nowhere/libcuda.so.1"), ("PHALANX_NCCL_LIB", "/nowhere/libnccl.so.2")])
        .envs([
            ("PHALANX_HIP_LIB", "/nowhere/libamdhip64.so"),
            ("PHALANX_RCCL_LIB", "/nowhere/librccl.so.1"),
        ]);
    command
}

/// `phalanx launch` of a shell script, with these options. Tests in the background may ignore SIGINT and SIGQUIT, and under
/// nohup SIGHUP; the launcher must not inherit that.
pub fn launch(options: &str, script: &str) -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=INT,QUIT,HUP", PROGRAM]);
    let mut command = alone(command, &format!("launch {options} --"));
    command.args(["sh", "-c", script]);
    command
}

/// A program's output and exit status.
pub struct Said {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Runs a command to its end.
pub fn say(mut command: Command) -> Said {
    let Output { status, stdout, stderr } = command.output().expect("the program can be started");
    Said {
        code: status.code(),
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

/// Waits until a condition is true.
pub fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < TIMEOUT, "not after {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process runs. A zombie does not.
pub fn runs(pid: i32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => !stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')),
        Err(_) => false,
    }
}

/// Whether a process was stopped by a signal.
pub fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
}

/// The number in a file, once its line is complete.
pub fn number_in(path: &Path) -> Option<i32> {
    std::fs::read_to_string(path).ok()?.strip_suffix('\n')?.parse().ok()
}

/// The processes that a process has started.
pub fn children_of(pid: u32) -> Vec<i32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// The ranks that a launcher has started, in order, without its guard.
pub fn ranks_of(launcher: u32) -> Vec<i32> {
    let is_rank = |pid: &i32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry.starts_with(b"PHALANX_RANK="))
    };
    children_of(launcher).into_iter().filter(is_rank).collect()
}

/// Sends a signal.
#[cfg(unix)]
pub fn signal(pid: i32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a process id is not 0");
    rustix::process::kill_process(pid, signal).expect("the process is there");
}
