//! Sections of the doctor's output.

use serde::Serialize;
use std::io::{self, Write};

/// Columns for the names in front of the facts.
const WIDTH: usize = 36;

/// A heading, and below it lines of a name and what is known of it.
#[derive(Serialize)]
pub struct Section {
    pub heading: String,
    pub lines: Vec<(String, String)>,
}

impl Section {
    pub fn new(heading: &str, lines: Vec<(String, String)>) -> Section {
        Section { heading: heading.to_owned(), lines }
    }

    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "\n{}", self.heading)?;
        self.lines.iter().try_for_each(|(name, text)| writeln!(out, "  {name:<WIDTH$}{text}"))
    }
}
