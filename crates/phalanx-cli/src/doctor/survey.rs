//! What the CUDA driver, HIP and the libraries for GPUs say of themselves, asked in a process of its own.
//!
//! Loading a library runs its code, and a driver in trouble may never answer: whatever happens there, what was said
//! before is shown, and the doctor goes on.

use super::{Section, libraries};
use crate::gpu::{self, Gpu, Link};
use crate::{launch, size};
use anyhow::{Context, Result, anyhow, bail, ensure};
use phalanx_sys::hip::Api as Hip;
use phalanx_sys::nccl::{Api, NCCL, RCCL, version_text};
use phalanx_sys::{NotFound, Search};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long a process that was killed may take to go. One inside a driver that hangs never does.
const GRACE: Duration = Duration::from_secs(1);

/// What came out.
pub struct Survey {
    pub sections: Vec<Section>,
    /// How many ranks can have a GPU each, or why none.
    pub gpus: Result<usize, String>,
    /// The same for AMD's.
    pub amd_gpus: Result<usize, String>,
    /// Why there may be more to say.
    pub trouble: Option<anyhow::Error>,
}

/// A line from the process that asks.
#[derive(Debug, Serialize, Deserialize)]
enum Word {
    Heading(String),
    Fact(String, String),
    Gpus(Result<usize, String>),
    AmdGpus(Result<usize, String>),
}

impl Survey {
    /// Asks, for so long at most.
    pub fn take(patience: Duration) -> Survey {
        let unknown = Err("the questions about GPUs were not answered".to_owned());
        let amd_gpus = unknown.clone();
        let mut survey = Survey { sections: Vec::new(), gpus: unknown, amd_gpus, trouble: None };
        survey.trouble = survey.ask(patience).err();
        survey
    }

    fn ask(&mut self, patience: Duration) -> Result<()> {
        let (reader, mut child) = start()?;
        let deadline = Instant::now() + patience;
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(reader).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let mut last_words = String::new();
        loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => match serde_json::from_str(&line) {
                    Ok(word) => self.hear(word),
                    // Libraries write what they like; the note that ends a panic is not what went wrong.
                    Err(_) if line.starts_with("note:") => {}
                    Err(_) => last_words = line,
                },
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    child.kill().ok();
                    wait(&mut child, Instant::now() + GRACE).ok();
                    bail!("no answer after {} s: the driver or a library hangs", patience.as_secs_f64());
                }
            }
        }
        let status = wait(&mut child, deadline)?;
        if status.success() {
            return Ok(());
        }
        Err(anyhow!("{} ({last_words})", launch::describe_status(status)))
    }

    fn hear(&mut self, word: Word) {
        match word {
            Word::Heading(heading) => self.sections.push(Section { heading, lines: Vec::new() }),
            Word::Fact(name, text) => {
                if let Some(section) = self.sections.last_mut() {
                    section.lines.push((name, text));
                }
            }
            Word::Gpus(gpus) => self.gpus = gpus,
            Word::AmdGpus(gpus) => self.amd_gpus = gpus,
        }
    }
}

/// Starts the process that asks; what it writes can be read.
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

/// The process that asks.
pub fn answer() -> Result<ExitCode> {
    heading("GPUs")?;
    gpus()?;
    heading("NCCL")?;
    library(&NCCL)?;
    heading("RCCL")?;
    library(&RCCL)?;
    libraries::nvshmem()?;
    libraries::compiler()?;
    heading("HIP")?;
    hip()?;
    say(&Word::AmdGpus(amd_gpus().map_err(|error| why_none(&error))))?;
    say(&Word::Gpus(gpu::usable().map_err(|error| why_none(&error))))?;
    Ok(ExitCode::SUCCESS)
}

/// In short: what was tried stands above.
fn why_none(error: &anyhow::Error) -> String {
    match error.downcast_ref::<NotFound>() {
        Some(error) => format!("{} was not found", error.library),
        None => crate::explain(error),
    }
}

/// At once: nobody knows whether there will be another word.
fn say(word: &Word) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(word)?)?;
    Ok(out.flush()?)
}

pub(super) fn heading(text: &str) -> Result<()> {
    say(&Word::Heading(text.to_owned()))
}

pub(super) fn fact(name: impl Into<String>, text: impl Into<String>) -> Result<()> {
    say(&Word::Fact(name.into(), text.into()))
}

fn gpus() -> Result<()> {
    let driver = match gpu::driver() {
        Ok(driver) => driver,
        Err(error) => return not_found(&error),
    };
    found("CUDA driver", driver.path(), &driver.place().origin)?;
    fact("made for CUDA", gpu::driver_version().unwrap_or_else(|error| crate::explain(&error)))?;
    if let Some(visible) = std::env::var_os("CUDA_VISIBLE_DEVICES") {
        fact("CUDA_VISIBLE_DEVICES", visible.to_string_lossy())?;
    }
    let count = match gpu::count() {
        Ok(0) => return fact("GPUs", "none"),
        Ok(count) => count,
        Err(error) => return fact("GPUs", format!("none: {}", crate::explain(&error))),
    };
    for number in 0..count {
        let text = describe(number).unwrap_or_else(|error| crate::explain(&error));
        fact(format!("GPU {number}"), text)?;
    }
    for (pairs, text) in links(count)? {
        fact(pairs, text)?;
    }
    Ok(())
}

fn describe(number: usize) -> Result<String> {
    let gpu = Gpu::number(number)?;
    let (name, memory, pci) = (gpu.name()?, size::format(gpu.memory()?), gpu.pci()?);
    Ok(format!("{name}, {memory}, compute capability {}, PCI {pci}", gpu.capability()?))
}

/// The links between all GPUs, those together that are alike.
fn links(count: usize) -> Result<Vec<(String, String)>> {
    let mut kinds: Vec<(Link, Vec<String>)> = Vec::new();
    for from in 0..count {
        for to in from + 1..count {
            let link = Gpu::number(from)?.link(Gpu::number(to)?)?;
            let pair = format!("{from}-{to}");
            match kinds.iter_mut().find(|(known, _)| *known == link) {
                Some((_, pairs)) => pairs.push(pair),
                None => kinds.push((link, vec![pair])),
            }
        }
    }
    Ok(named(kinds))
}

fn named(kinds: Vec<(Link, Vec<String>)>) -> Vec<(String, String)> {
    let alike = kinds.len() == 1;
    let name = |(link, pairs): (Link, Vec<String>)| {
        let pairs =
            if alike { "between any two".to_owned() } else { format!("between {}", pairs.join(", ")) };
        (pairs, show_link(&link))
    };
    kinds.into_iter().map(name).collect()
}

fn show_link(link: &Link) -> String {
    let mut text = if link.access {
        "each can reach the other's memory".to_owned()
    } else {
        "no peer access: data goes through host memory".to_owned()
    };
    if let Some(rank) = link.rank {
        text += &format!(", performance rank {rank}");
    }
    text + if link.atomics {
        ", with atomic operations (NVLink)"
    } else {
        ", without atomic operations (PCIe)"
    }
}

fn library(search: &Search) -> Result<()> {
    let api = match Api::load(search) {
        Ok(api) => api,
        Err(error) => return not_found(&error),
    };
    fact("version", version_text(api.version()))?;
    found("file", api.path(), &api.library().place().origin)?;
    for (name, value) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("NCCL_")) {
        fact(name.to_string_lossy(), value.to_string_lossy())?;
    }
    let mut missing = api.missing();
    missing.sort_by_key(|function| function.since);
    if missing.is_empty() {
        fact("missing functions", "none")?;
    }
    for since in missing.chunk_by(|a, b| a.since == b.since) {
        let names: Vec<&str> = since.iter().map(|function| function.name).collect();
        fact("missing functions", format!("{} (since {})", names.join(", "), version_text(since[0].since)))?;
    }
    for other in search.loaded_beside(api.path()) {
        fact("loaded too", format!("{}: two copies know nothing of each other", other.display()))?;
    }
    let same = |file: &std::path::Path| file.canonicalize().ok() == api.path().canonicalize().ok();
    for place in search.places().iter().filter(|place| place.file.is_absolute() && !same(&place.file)) {
        fact("not taken", format!("{} (from {})", place.file.display(), place.origin))?;
    }
    Ok(())
}

/// How many ranks can have an AMD GPU each, with RCCL to connect them; an error says why none.
fn amd_gpus() -> Result<usize> {
    let api = Hip::load()?;
    let count = api.device_count().map_err(|error| anyhow!("HIP does not start: {}", api.describe(error)))?;
    ensure!(count > 0, "HIP sees no GPU");
    Api::load(&RCCL)?;
    Ok(count)
}

/// HIP, and AMD's GPUs.
fn hip() -> Result<()> {
    let api = match Hip::load() {
        Ok(api) => api,
        Err(error) => return not_found(&error),
    };
    fact("version", api.version())?;
    found("file", api.path(), &api.library().place().origin)?;
    for variable in ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"] {
        if let Some(visible) = std::env::var_os(variable) {
            fact(variable, visible.to_string_lossy())?;
        }
    }
    let count = match api.device_count() {
        Ok(0) => return fact("GPUs", "none"),
        Ok(count) => count,
        Err(error) => return fact("GPUs", format!("none: {}", api.describe(error))),
    };
    for number in 0..count {
        let text = match api.properties(number) {
            Ok(gpu) => format!("{}, {}, {}", gpu.name, size::format(gpu.memory as u64), gpu.architecture),
            Err(error) => api.describe(error),
        };
        fact(format!("GPU {number}"), text)?;
    }
    Ok(())
}

pub(super) fn found(name: &str, path: &std::path::Path, origin: &str) -> Result<()> {
    fact(name, format!("{} (from {origin})", path.display()))
}

/// What was tried, and how to say where it is.
pub(super) fn not_found(error: &NotFound) -> Result<()> {
    fact(error.library, format!("not found; {} can name its file", error.variable))?;
    error.tried.iter().try_for_each(|attempt| {
        let why = attempt.error.as_deref().unwrap_or("loaded");
        fact("tried", format!("{} (from {}): {why}", attempt.place.file.display(), attempt.place.origin))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_are_alike_are_one_line() {
        let link = Link { access: true, rank: Some(0), atomics: true };
        let all = named(vec![(link, vec!["0-1".into(), "0-2".into(), "1-2".into()])]);
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].0, "between any two");
        assert!(all[0].1.contains("NVLink") && all[0].1.contains("rank 0"), "{}", all[0].1);

        let other = Link { access: false, rank: None, atomics: false };
        let two = named(vec![(link, vec!["0-1".into(), "2-3".into()]), (other, vec!["0-2".into()])]);
        assert_eq!(two[0].0, "between 0-1, 2-3");
        assert!(two[1].1.starts_with("no peer access"), "{}", two[1].1);
    }

    #[test]
    fn facts_belong_to_the_heading_before_them() {
        let mut survey = Survey { sections: Vec::new(), gpus: Ok(0), amd_gpus: Ok(0), trouble: None };
        survey.hear(Word::Heading("NCCL".into()));
        survey.hear(Word::Fact("version".into(), "2.28.9".into()));
        survey.hear(Word::Gpus(Err("none".into())));
        assert_eq!(survey.sections[0].heading, "NCCL");
        assert_eq!(survey.sections[0].lines, [("version".to_owned(), "2.28.9".to_owned())]);
        assert_eq!(survey.gpus, Err("none".to_owned()));
    }
}
