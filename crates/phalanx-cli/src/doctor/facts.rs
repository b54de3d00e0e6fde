//! The facts that the surveying process finds, as lines of JSON on its standard output.

use anyhow::Result;
use phalanx_sys::NotFound;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::path::Path;

/// A line of the surveying process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Line {
    Heading(String),
    /// A name and what is known of it.
    Fact(String, String),
    /// How many ranks can have an NVIDIA GPU each, or why none.
    Gpus(Result<usize, String>),
    /// The same for AMD's GPUs.
    AmdGpus(Result<usize, String>),
    /// How many GPUs the CUDA driver and HIP see, whether or not ranks can have them.
    Seen {
        cuda: usize,
        hip: usize,
    },
    /// A library that only matters where there are NVIDIA's GPUs: its name, and its version if it is there.
    Library(String, Option<String>),
}

impl Line {
    /// Prints the line at once: the next library may never return.
    pub fn print(&self) -> Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(self)?)?;
        Ok(out.flush()?)
    }
}

pub fn heading(text: &str) -> Result<()> {
    Line::Heading(text.to_owned()).print()
}

pub fn fact(name: impl Into<String>, text: impl Into<String>) -> Result<()> {
    Line::Fact(name.into(), text.into()).print()
}

/// A file or folder, and what led to it.
pub fn found(name: &str, path: &Path, origin: &str) -> Result<()> {
    fact(name, format!("{} (from {origin})", path.display()))
}

/// A missing library: the files that were tried, and the variable that can name one.
pub fn not_found(error: &NotFound) -> Result<()> {
    fact(error.library, format!("not found; {} can name its file", error.variable))?;
    error.tried.iter().try_for_each(|attempt| {
        let why = attempt.error.as_deref().unwrap_or("loaded");
        fact("tried", format!("{} (from {}): {why}", attempt.place.file.display(), attempt.place.origin))
    })
}

/// A library for the summary.
pub fn library(name: &str, version: Option<String>) -> Result<()> {
    Line::Library(name.to_owned(), version).print()
}

/// The functions that a library lacks.
pub fn missing(names: &[&str]) -> Result<()> {
    fact("missing functions", if names.is_empty() { "none".to_owned() } else { names.join(", ") })
}

/// The environment variables that start with a prefix, and configure a library.
pub fn variables(prefix: &str) -> Result<()> {
    let all = std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with(prefix));
    for (name, value) in all {
        fact(name.to_string_lossy(), value.to_string_lossy())?;
    }
    Ok(())
}
