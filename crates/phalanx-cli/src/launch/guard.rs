//! What ends a job's processes when the launcher itself is killed.
//!
//! The kernel kills the ranks then, but not what they have started. A small process of its own, the guard,
//! notices the launcher's end by the end of a pipe, and kills every process that is in a rank's process group or
//! has the variables of this part of the job in its environment.
//!
//! What escapes: a process that left its rank's group and cleared or overwrote its environment, or runs as
//! another user; and everything but the ranks, if launcher and guard are killed together.

use super::part::Part;
use crate::log::say;
use rustix::process::{Pid, Signal};
use std::collections::HashSet;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::Duration;

/// The name of the hidden subcommand.
pub const SUBCOMMAND: &str = "guard";
/// The word that dismisses the guard.
const DISMISSED: &str = "dismissed";
/// How often to look for more processes, at most: they may be starting others meanwhile.
const ROUNDS: usize = 100;

/// The launcher's end.
pub struct Guard(Option<(Child, ChildStdin)>);

impl Guard {
    /// Starts a guard over the processes of a node's part of a job. Without one, the job runs all the same.
    pub fn start(part: &Part) -> Guard {
        let start = || {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg(SUBCOMMAND).stdin(Stdio::piped()).stdout(Stdio::null());
            // Out of reach of the terminal's signals, and of the guard of a job that this launcher is a rank of.
            command.process_group(0).env_remove("PHALANX_JOB");
            let mut child = command.spawn()?;
            let pipe = child.stdin.take().expect("it is piped");
            std::io::Result::Ok((child, pipe))
        };
        let guard = start().map_err(|e| say(format_args!("phalanx launch: going on without a guard: {e}")));
        let mut guard = Guard(guard.ok());
        // Another node may be on the same machine: what its launcher has started is not ours.
        for mark in part.marks() {
            guard.say(&format!("mark {mark}"));
        }
        guard
    }

    /// Has it watch over a rank's process group.
    pub fn watch(&mut self, group: Pid) {
        self.say(&format!("group {}", group.as_raw_nonzero()));
    }

    /// A rank has been reaped: the number of its group may soon be somebody else's.
    pub fn forget(&mut self, group: Pid) {
        self.say(&format!("forget {}", group.as_raw_nonzero()));
    }

    fn say(&mut self, line: &str) {
        if let Some((_, pipe)) = &mut self.0 {
            // It may have been killed; then there is none.
            let _ = writeln!(pipe, "{line}");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.say(DISMISSED);
        if let Some((mut child, pipe)) = self.0.take() {
            drop(pipe);
            let _ = child.wait();
        }
    }
}

/// The guard itself: listens to the launcher, and acts when it falls silent.
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
    for _ in 0..ROUNDS {
        if kill_marked(&marks) == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    say("phalanx launch: the launcher was killed; its ranks and what they had started were ended");
    ExitCode::FAILURE
}

/// Kills the processes that have all these variables in their environment; answers how many there were.
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
            // The handle first: what is looked at and what is killed is then the same process.
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

/// Where processes cannot be looked at, their groups have to do.
#[cfg(not(target_os = "linux"))]
fn kill_marked(_marks: &[String]) -> usize {
    0
}
