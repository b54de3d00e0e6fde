//! A flight record as a file: JSON, one object, as `phalanx trace` reads it.
//!
//! A rank writes a file for each of its communicators. Times are nanoseconds of the host's monotonic clock;
//! the header has that clock and the wall clock at the time of writing, and the host's boot id: files with
//! the same boot id have the same monotonic clock.

use super::TRACE_DIR;
use super::recorder::Recorder;
use super::slot::Record;
use crate::contract::Operation;
use crate::os::fresh_file;
use crate::types::error::{Error, PeerEvent, Result, UsageError};
use std::ffi::OsString;
use std::fmt::{self, Write};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Identifies the file format.
const FORMAT: &str = "phalanx flight record";
/// Version of the file format.
const VERSION: u32 = 1;

/// Why the file is written.
pub(crate) enum Reason<'a> {
    Failure(&'a Error),
    Panic,
    Request,
    Signal,
}

impl Reason<'_> {
    fn name(&self) -> &'static str {
        match self {
            Reason::Failure(_) => "failure",
            Reason::Panic => "panic",
            Reason::Request => "request",
            Reason::Signal => "signal",
        }
    }
}

/// The folder for flight records, if one is set. The caller of a program that has more rights than it does not choose where this writes.
pub(super) fn folder() -> Option<OsString> {
    std::env::var_os(TRACE_DIR).filter(|folder| !folder.is_empty() && !phalanx_sys::is_secure())
}

/// Checks that the folder for flight records can be written, if one is set.
pub(crate) fn check_folder() -> Result<()> {
    let Some(folder) = folder() else { return Ok(()) };
    // The folder is created with the first file, so check its nearest existing ancestor.
    let here = Path::new(".");
    let made_in = Path::new(&folder).ancestors().find(|folder| folder.exists()).unwrap_or(here);
    crate::os::check_writable(made_in).map_err(|error| {
        let expected =
            format!("a folder that is there or can be made, and written ({}: {error})", made_in.display());
        let (name, value) = (TRACE_DIR.to_owned(), folder.to_string_lossy().into_owned());
        UsageError::Setting { name, value, expected }.into()
    })
}

/// Writes the flight record if a folder is set; otherwise logs how to get one next time.
pub(crate) fn on_event(recorder: &Recorder, reason: &Reason<'_>) {
    let rank = recorder.rank;
    match folder() {
        None => crate::os::log::info!(
            rank,
            "set {TRACE_DIR} to a folder to have every rank's last operations written there on a failure, for \
             `phalanx trace`"
        ),
        Some(folder) => match write(recorder, Path::new(&folder), reason) {
            Ok(path) => crate::os::log::info!(rank, "flight record: {}", path.display()),
            Err(error) => crate::os::log::error!(rank, "no flight record: {error}"),
        },
    }
}

/// Writes the flight record to a file in `folder`, and returns its path.
pub(crate) fn write(recorder: &Recorder, folder: &Path, reason: &Reason<'_>) -> Result<PathBuf> {
    let refused = |call: &'static str| {
        move |error| {
            Error::system(
                call,
                error,
                format!(
                    "the flight record goes to {}: choose a folder that can be written",
                    folder.display()
                ),
            )
        }
    };
    std::fs::create_dir_all(folder).map_err(refused("mkdir"))?;
    let name: String = recorder
        .full_name()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' })
        .take(100)
        .collect();
    let path = folder.join(format!("{name}-rank{}-{}.json", recorder.rank, std::process::id()));
    // Renamed when complete, so that no reader finds half a file.
    let unfinished = path.with_extension("unfinished");
    let write = |mut file: File| file.write_all(text(recorder, reason).as_bytes());
    let written = fresh_file(&unfinished).and_then(write).map_err(refused("write"));
    let written = written.and_then(|()| std::fs::rename(&unfinished, &path).map_err(refused("rename")));
    if written.is_err() {
        // A full disk, for example: half a record only takes room.
        let _ = std::fs::remove_file(&unfinished);
    }
    written.map(|()| path)
}

fn text(recorder: &Recorder, reason: &Reason<'_>) -> String {
    let records = recorder.records();
    let mut json = String::with_capacity(1024 + 300 * records.len());
    // Writing to a string does not fail.
    let _ = write_header(&mut json, recorder, reason, &records);
    json.push_str("\"records\":[");
    for (i, record) in records.iter().enumerate() {
        json.push_str(if i == 0 { "\n" } else { ",\n" });
        let _ = write_record(&mut json, record);
    }
    json.push_str("\n]}\n");
    json
}

fn write_header(
    json: &mut String,
    recorder: &Recorder,
    reason: &Reason<'_>,
    records: &[Record],
) -> fmt::Result {
    let program = std::env::current_exe().ok();
    let program =
        program.as_deref().and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned();
    let unix = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
    writeln!(json, "{{\"format\":{},\"version\":{VERSION},", Quoted(FORMAT))?;
    writeln!(
        json,
        "\"communicator\":{},\"backend\":{},",
        Quoted(recorder.full_name()),
        Quoted(recorder.backend.name())
    )?;
    writeln!(json, "\"rank\":{},\"world_size\":{},", recorder.rank, recorder.world_size)?;
    writeln!(
        json,
        "\"host\":{},\"boot\":{},",
        Quoted(&crate::os::host_name()),
        Quoted(&crate::os::boot_id())
    )?;
    writeln!(json, "\"process\":{},\"program\":{},", std::process::id(), Quoted(&program))?;
    writeln!(json, "\"written_ns\":{},\"written_unix_ns\":{unix},", crate::os::monotonic_nanos())?;
    writeln!(json, "\"made\":{},\"lost\":{},", recorder.made(), recorder.made() - records.len() as u64)?;
    write!(json, "\"reason\":{},", Quoted(reason.name()))?;
    match reason {
        Reason::Failure(error) => write_error(json, error)?,
        _ => json.push_str("\"error\":null"),
    }
    json.push_str(",\n");
    Ok(())
}

/// Writes the error's fields for programs: its kind, the ranks that it names, the operation and its number.
fn write_error(json: &mut String, error: &Error) -> fmt::Result {
    let (kind, operation, sequence) = match error {
        Error::Mismatch(e) => ("mismatch", e.theirs.as_str(), e.sequence),
        Error::Peer(e) => {
            let kind = match e.event {
                PeerEvent::Died => "died",
                PeerEvent::Left => "left",
                PeerEvent::Panicked => "panicked",
                PeerEvent::Refused => "refused",
                PeerEvent::Stopped => "stopped",
                PeerEvent::Unreachable => "unreachable",
            };
            (kind, e.operation.as_str(), e.sequence)
        }
        Error::Timeout(e) => ("timeout", e.operation.as_str(), e.sequence),
        Error::Aborted { .. } => ("aborted", "", 0),
        _ => ("other", "", 0),
    };
    let ranks: Vec<String> = error.ranks_at_fault().iter().map(ToString::to_string).collect();
    write!(
        json,
        "\"error\":{{\"kind\":\"{kind}\",\"ranks\":[{}],\"operation\":{},\"sequence\":{sequence},\"text\":{}}}",
        ranks.join(","),
        Quoted(operation),
        Quoted(&error.to_string()),
    )
}

fn write_record(json: &mut String, record: &Record) -> fmt::Result {
    let operation = record.operation;
    write!(
        json,
        "{{\"operation\":\"{}\",\"sequence\":{},\"state\":\"{}\",",
        operation.name(),
        record.sequence,
        record.state.name()
    )?;
    if !operation.is_empty_handed() {
        write!(json, "\"dtype\":{},\"count\":{},", Quoted(record.dtype.name()), record.count)?;
    }
    if operation.reduces() {
        write!(json, "\"reduction\":\"{}\",", record.reduction.name())?;
    }
    if operation.is_rooted() {
        write!(json, "\"root\":{},", record.rank)?;
    }
    if matches!(operation, Operation::Send | Operation::Recv) {
        write!(json, "\"peer\":{},\"tag\":{},", record.rank, record.tag)?;
    }
    write!(
        json,
        "\"enqueued_ns\":{},\"started_ns\":{},\"ended_ns\":{}}}",
        record.enqueued, record.started, record.ended
    )
}

/// Prints text as a JSON string.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                c if c < ' ' => write!(f, "\\u{:04x}", c as u32)?,
                c => f.write_char(c)?,
            }
        }
        f.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{BackendKind, Call};

    #[test]
    fn any_text_is_a_string() {
        assert_eq!(Quoted("a\"b\\c\n\u{1}ü").to_string(), "\"a\\\"b\\\\c\\u000a\\u0001ü\"");
    }

    #[test]
    fn a_record_has_what_its_operation_has() {
        let recorder = Recorder::new(BackendKind::Host, "a/b".into(), 1, 3);
        let id = recorder.begin(&Call::empty(Operation::Broadcast));
        recorder.end(id, Ok(())).unwrap();
        recorder.enqueue(&Call::empty(Operation::Barrier));
        let json = text(&recorder, &Reason::Failure(&Error::Aborted { rank: 2 }));
        for part in [
            "\"operation\":\"broadcast\",\"sequence\":1,\"state\":\"completed\",\"dtype\":\"u8\",\"count\":0,\"root\":0,",
            "\"operation\":\"barrier\",\"sequence\":2,\"state\":\"enqueued\",\"enqueued_ns\":",
            "\"communicator\":\"a/b\"",
            "\"kind\":\"aborted\",\"ranks\":[2]",
            "\"made\":2,\"lost\":0,",
        ] {
            assert!(json.contains(part), "{part} is not in {json}");
        }
        let folder = std::env::temp_dir().join(format!("phalanx-dump-{}", std::process::id()));
        let path = write(&recorder, &folder, &Reason::Request).unwrap();
        assert_eq!(
            path.file_name().unwrap().to_str().unwrap(),
            format!("a_b-rank1-{}.json", std::process::id())
        );
        assert!(std::fs::read_to_string(&path).unwrap().contains("\"reason\":\"request\""));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn links_that_somebody_put_there_are_not_followed() {
        let recorder = Recorder::new(BackendKind::Host, "links".into(), 0, 1);
        let folder = std::env::temp_dir().join(format!("phalanx-dump-links-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let at = |extension: &str| folder.join(format!("links-rank0-{}.{extension}", std::process::id()));
        let (symbolic, hard) = (folder.join("symbolic"), folder.join("hard"));
        for precious in [&symbolic, &hard] {
            std::fs::write(precious, "precious").unwrap();
        }
        let written = || {
            let path = write(&recorder, &folder, &Reason::Request).unwrap();
            assert!(std::fs::read_to_string(&path).unwrap().contains("\"communicator\":\"links\""));
            for precious in [&symbolic, &hard] {
                assert_eq!(std::fs::read_to_string(precious).unwrap(), "precious");
            }
        };
        for extension in ["unfinished", "json"] {
            let _ = std::fs::remove_file(at(extension));
            std::os::unix::fs::symlink(&symbolic, at(extension)).unwrap();
            written();
            let _ = std::fs::remove_file(at(extension));
            std::fs::hard_link(&hard, at(extension)).unwrap();
            written();
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
