//! The guard: a process that ends a job's processes when the launcher is killed.
//!
//! If the launcher is killed, the kernel kills the ranks, but not the processes that they started. The guard
//! notices the launcher's end by the end of a pipe. It then kills every process that is in a rank's process
//! group, or has the variables of this node's attempt in its environment.
//!
//! Not found is a process that left its rank's group and also cleared or overwrote its environment, or runs
//! as another user. If launcher and guard are killed together, only the ranks end.

use super::placement::Placement;
use crate::log::say;
use rustix::process::{Pid, Signal};
use std::collections::HashSet;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::Duration;

/// The name of the hidden subcommand.
pub const SUBCOMMAND: &str = "guard";
/// The line that dismisses the guard.
const DISMISSED: &str = "dismissed";
/// Searches for processes, at most. Processes that are found may be starting others.
const MAX_SEARCHES: usize = 100;

/// The launcher's handle of its guard.
pub struct Guard(Option<(Child, ChildStdin)>);

impl Guard {
    /// Starts the guard of this node's attempt. If that fails, the job runs without one.
    pub fn start(placement: &Placement) -> Guard {
        let start = || {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg(SUBCOMMAND).stdin(Stdio::piped()).stdout(Stdio::null());
            // The terminal's signals must not reach it, nor the guard of a job of which this launcher is a
            // rank.
            command.process_group(0).env_remove("PHALANX_JOB");
            let mut child = command.spawn()?;
            let pipe = child.stdin.take().expect("it is piped");
            std::io::Result::Ok((child, pipe))
        };
        let guard = start().map_err(|e| say(format_args!("phalanx launch: going on without a guard: {e}")));
        let mut guard = Guard(guard.ok());
        for mark in placement.marks() {
            guard.send(&format!("mark {mark}"));
        }
        guard
    }

    /// Adds a rank's process group.
    pub fn watch(&mut self, group: Pid) {
        self.send(&format!("group {}", group.as_raw_nonzero()));
    }

    /// Removes the group of a reaped rank: its number may soon be another process's.
    pub fn forget(&mut self, group: Pid) {
        self.send(&format!("forget {}", group.as_raw_nonzero()));
    }

    fn send(&mut self, line: &str) {
        if let Some((_, pipe)) = &mut self.0 {
            // If the guard was killed, the job goes on without one.
            let _ = writeln!(pipe, "{line}");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.send(DISMISSED);
        if let Some((mut child, pipe)) = self.0.take() {
            drop(pipe);
            let _ = child.wait();
        }
    }
}

/// The guard's process: reads the launcher's lines, and acts when they end without a dismissal.
pub fn run() -> ExitCode {
    let (mut marks, mut groups) = (Vec::new(), HashSet::new());
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        match line.split_once(' ') {
            Some(("mark", mark)) => marks.push(mark.to_owned()),
            Some(("group", group)) => groups.extend(group.parse().ok().and_then(Pid::from_raw)),
            Some(("forget", group)) => {
                group.parse().ok().and_then(Pid::from_raw).map(|group| groups.remove(&group));
            }
            _ if line == DISMISSED => return ExitCode::SUCCESS,
            _ => {}
        }
    }
    for group in groups {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    for _ in 0..MAX_SEARCHES {
        if kill_marked(&marks) == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    say("phalanx launch: the launcher was killed; its ranks and what they had started were ended");
    ExitCode::FAILURE
}

/// Kills the processes that have all these variables in their environment, and returns their number.
#[cfg(target_os = "linux")]
fn kill_marked(marks: &[String]) -> usize {
    use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};
    if marks.is_empty() {
        return 0;
    }
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return 0;
    };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(Pid::from_raw)
        .filter(|pid| {
            // Opened first: the process that is examined is then the one that is killed.
            let Ok(process) = pidfd_open(*pid, PidfdFlags::empty()) else {
                return false;
            };
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let has =
                |mark: &String| environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes());
            let is_ours = marks.iter().all(has);
            is_ours && pidfd_send_signal(&process, Signal::KILL).is_ok()
        })
        .count()
}

/// Without `/proc`, process groups must do.
#[cfg(not(target_os = "linux"))]
fn kill_marked(_marks: &[String]) -> usize {
    0
}
