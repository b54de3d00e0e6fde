//! What the GPUs' drivers and libraries report, found out by a process of its own.
//!
//! Loading a library runs its code, and a broken driver may never return. In a process of its own that costs
//! only the facts that were not printed yet.

use super::facts::Line;
use super::section::Section;
use crate::launch;
use anyhow::{Context, Result, anyhow, bail};
use std::io::{self, BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Time for a killed process to end. One that hangs in a driver never does.
const GRACE: Duration = Duration::from_secs(1);

/// The result of the survey.
pub struct Survey {
    pub sections: Vec<Section>,
    /// How many ranks can have an NVIDIA GPU each, or why none.
    pub gpus: Result<usize, String>,
    /// The same for AMD's GPUs.
    pub amd_gpus: Result<usize, String>,
    /// How many GPUs the CUDA driver and HIP see.
    pub seen: (usize, usize),
    /// Libraries for NVIDIA's GPUs, with their versions if they are there.
    pub libraries: Vec<(String, Option<String>)>,
    /// Why the survey is not complete.
    pub trouble: Option<anyhow::Error>,
}

impl Survey {
    /// Surveys, for at most `timeout`.
    pub fn take(timeout: Duration) -> Survey {
        let unknown = Err("the questions about GPUs were not answered".to_owned());
        let amd_gpus = unknown.clone();
        let mut survey = Survey { gpus: unknown, amd_gpus, ..Survey::empty() };
        survey.trouble = survey.collect(timeout).err();
        survey
    }

    fn empty() -> Survey {
        Survey {
            sections: Vec::new(),
            gpus: Ok(0),
            amd_gpus: Ok(0),
            seen: (0, 0),
            libraries: Vec::new(),
            trouble: None,
        }
    }

    fn collect(&mut self, timeout: Duration) -> Result<()> {
        let (reader, mut child) = start()?;
        let deadline = Instant::now() + timeout;
        let (sender, lines) = mpsc::channel();
        let read = move || {
            BufReader::new(reader).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        };
        if let Err(error) = std::thread::Builder::new().name("survey".to_owned()).spawn(read) {
            child.kill().ok();
            wait(&mut child, Instant::now() + GRACE).ok();
            return Err(launch::refused(error).context("cannot start a thread"));
        }
        let mut last_line = String::new();
        loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => match serde_json::from_slice(line.as_bytes()) {
                    Ok(line) => self.add(line),
                    // Libraries print, too. After a panic, the reason stands before its note.
                    Err(_) if line.starts_with("note:") => {}
                    Err(_) => last_line = line,
                },
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    child.kill().ok();
                    wait(&mut child, Instant::now() + GRACE).ok();
                    bail!("no answer after {} s: the driver or a library hangs", timeout.as_secs_f64());
                }
            }
        }
        let status = wait(&mut child, deadline)?;
        if status.success() {
            return Ok(());
        }
        Err(anyhow!("{} ({last_line})", launch::describe_status(status)))
    }

    fn add(&mut self, line: Line) {
        match line {
            Line::Heading(heading) => self.sections.push(Section { heading, lines: Vec::new() }),
            Line::Fact(name, text) => {
                if let Some(section) = self.sections.last_mut() {
                    section.lines.push((name, text));
                }
            }
            Line::Gpus(gpus) => self.gpus = gpus,
            Line::AmdGpus(gpus) => self.amd_gpus = gpus,
            Line::Seen { cuda, hip } => self.seen = (cuda, hip),
            Line::Library(name, version) => self.libraries.push((name, version)),
        }
    }
}

/// Starts the surveying process, and returns the reading end of its output.
fn start() -> Result<(io::PipeReader, Child)> {
    let (reader, writer) = io::pipe().context("cannot make a pipe")?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let child = Command::new(program)
        .args(["doctor", "--part", "survey"])
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(writer.try_clone().context("cannot make a pipe")?)
        .stderr(writer)
        .spawn()
        .map_err(launch::refused)
        .context("cannot start a process")?;
    Ok((reader, child))
}

fn wait(child: &mut Child, deadline: Instant) -> Result<ExitStatus> {
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(status),
            None if Instant::now() > deadline => bail!("it does not end"),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_belong_to_the_heading_before_them() {
        let mut survey = Survey::empty();
        survey.add(Line::Heading("NCCL".into()));
        survey.add(Line::Fact("version".into(), "2.28.9".into()));
        survey.add(Line::Gpus(Err("none".into())));
        assert_eq!(survey.sections[0].heading, "NCCL");
        assert_eq!(survey.sections[0].lines, [("version".to_owned(), "2.28.9".to_owned())]);
        assert_eq!(survey.gpus, Err("none".to_owned()));
    }
}
