//! What the doctor says as it goes: text for people, or one JSON object at the end.

use super::finding::{Finding, Status};
use super::options::DoctorArgs;
use super::section::Section;
use super::{system, verdict};
use anyhow::Result;
use serde::Serialize;
use std::io::{self, StdoutLock, Write};

/// Takes in sections and findings. Text is printed at once: what comes next may take long, or never return.
pub struct Report {
    is_json: bool,
    is_verbose: bool,
    out: StdoutLock<'static>,
    sections: Vec<Section>,
    findings: Vec<Finding>,
}

/// The object of `--json`.
#[derive(Serialize)]
struct Object<'a> {
    version: &'a str,
    machine: String,
    sections: &'a [Section],
    findings: &'a [Finding],
    failed: usize,
    verdict: String,
}

impl Report {
    pub fn begin(args: &DoctorArgs) -> Result<Report> {
        let mut report = Report {
            is_json: args.json,
            is_verbose: args.verbose,
            out: io::stdout().lock(),
            sections: Vec::new(),
            findings: Vec::new(),
        };
        if !report.is_json {
            writeln!(report.out, "phalanx {} on {}", env!("CARGO_PKG_VERSION"), system::summary())?;
        }
        Ok(report)
    }

    pub fn section(&mut self, section: Section) -> Result<()> {
        if self.is_verbose && !self.is_json {
            section.write(&mut self.out)?;
            self.out.flush()?;
        }
        self.sections.push(section);
        Ok(())
    }

    pub fn finding(&mut self, finding: Finding) -> Result<()> {
        if !self.is_json {
            if self.findings.is_empty() {
                writeln!(self.out)?;
            }
            writeln!(self.out, "{finding}")?;
            self.out.flush()?;
        }
        self.findings.push(finding);
        Ok(())
    }

    /// Says the verdict; whether nothing has failed.
    pub fn finish(mut self) -> Result<bool> {
        let failed = self.findings.iter().filter(|finding| finding.status == Status::Failed).count();
        let verdict = if failed > 0 { format!("{failed} FAILED.") } else { verdict(&self.findings) };
        if self.is_json {
            let object = Object {
                version: env!("CARGO_PKG_VERSION"),
                machine: system::summary(),
                sections: &self.sections,
                findings: &self.findings,
                failed,
                verdict,
            };
            writeln!(self.out, "{}", serde_json::to_string_pretty(&object)?)?;
        } else {
            let more = if self.is_verbose { "" } else { "\nWhat was found and tried: phalanx doctor -v" };
            writeln!(self.out, "\n{verdict}{more}")?;
        }
        Ok(failed == 0)
    }
}
