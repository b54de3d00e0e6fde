//! The results as JSON: what `--compare` reads.
//!
//! The file is replaced as a whole after every row, so that it is complete at any moment.

use super::Exporter;
use crate::perf::report::Report;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// A JSON file.
pub struct Json {
    path: PathBuf,
}

impl Json {
    pub fn new(path: &Path) -> Json {
        Json { path: path.to_owned() }
    }

    fn write(&self, report: &Report) -> Result<()> {
        let mut text = serde_json::to_string_pretty(report)?;
        text.push('\n');
        let mut unfinished = OsString::from(&self.path);
        unfinished.push(".unfinished");
        fs::write(&unfinished, text)
            .and_then(|()| fs::rename(&unfinished, &self.path))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

impl Exporter for Json {
    fn begin(&mut self, report: &Report) -> Result<()> {
        self.write(report)
    }

    fn row(&mut self, report: &Report) -> Result<()> {
        self.write(report)
    }

    fn finish(&mut self, _report: &Report) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::report::samples;

    #[test]
    fn the_file_is_complete_after_every_row() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        let mut json = Json::new(&path);
        let mut report = samples::report(Vec::new());
        json.begin(&report).unwrap();
        assert_eq!(Report::load(&path).unwrap(), report);
        report.rows.push(samples::row(4, 1.0));
        json.row(&report).unwrap();
        assert_eq!(Report::load(&path).unwrap(), report);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let mut json = Json::new(Path::new("/nowhere/run.json"));
        let error = json.begin(&samples::report(Vec::new())).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/run.json"));
    }
}
