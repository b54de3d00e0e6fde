//! The report as JSON, which `--compare` reads.
//!
//! A regular file is replaced as a whole after every row, so that it is complete at any time; without a row
//! it is left alone. Anything else (a pipe, standard output) gets the report once, at the end.

use super::Exporter;
use crate::file;
use crate::perf::report::Report;
use anyhow::{Context, Result};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A JSON file.
pub struct Json {
    path: PathBuf,
    is_replaced: bool,
}

impl Json {
    pub fn new(path: &Path) -> Json {
        Json {
            // A link stays a link: its target is replaced.
            path: match path.canonicalize() {
                Ok(target) if !file::is_stdout(path) => target,
                _ => path.to_owned(),
            },
            is_replaced: !file::is_stdout(path) && path.metadata().map_or(true, |file| file.is_file()),
        }
    }

    fn write(&self, report: &Report) -> Result<()> {
        let mut text = serde_json::to_string_pretty(report)?;
        text.push('\n');
        if !self.is_replaced {
            return file::write(&self.path, text.as_bytes());
        }
        self.replace(&text).with_context(|| file::refused(&self.path))
    }

    fn replace(&self, text: &str) -> io::Result<()> {
        let unfinished = self.unfinished();
        fs::write(&unfinished, text).and_then(|()| fs::rename(&unfinished, &self.path)).inspect_err(|_| {
            let _ = fs::remove_file(&unfinished);
        })
    }

    fn unfinished(&self) -> OsString {
        let mut unfinished = OsString::from(&self.path);
        unfinished.push(".unfinished");
        unfinished
    }
}

impl Exporter for Json {
    fn begin(&mut self, _report: &Report) -> Result<()> {
        file::check_writable(&self.path)?;
        if self.is_replaced { file::check_writable(Path::new(&self.unfinished())) } else { Ok(()) }
    }

    fn row(&mut self, report: &Report) -> Result<()> {
        if self.is_replaced { self.write(report) } else { Ok(()) }
    }

    fn finish(&mut self, report: &Report) -> Result<()> {
        if self.is_replaced { Ok(()) } else { self.write(report) }
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
        fs::write(&path, "the results of before").unwrap();
        json.begin(&report).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "the results of before");
        report.rows.push(samples::row(4, 1.0));
        json.row(&report).unwrap();
        assert_eq!(Report::load(&path).unwrap(), report);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let report = samples::report(Vec::new());
        Json::new(&link).row(&report).unwrap();
        assert!(link.is_symlink());
        assert_eq!(Report::load(&file).unwrap(), report);
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_gets_the_results_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let mut json = Json::new(&path);
        let report = samples::report(Vec::new());
        // Nobody reads: to write now would wait for ever.
        json.begin(&report).unwrap();
        json.row(&report).unwrap();
        let reader = std::thread::spawn({
            let path = path.clone();
            move || fs::read_to_string(path).unwrap()
        });
        json.finish(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&reader.join().unwrap()).unwrap(), report);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let mut json = Json::new(Path::new("/nowhere/run.json"));
        let error = json.begin(&samples::report(Vec::new())).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/run.json"));
    }
}
