//! Standard error: the program's own messages, and the library's log where `PHALANX_LOG` asks for it.

use anyhow::{Context, Result};
use std::fmt::{Debug, Display};
use std::io::{self, Write};
use std::time::SystemTime;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

const VARIABLE: &str = "PHALANX_LOG";

/// Writes a line to standard error. If that fails, there is nobody to tell.
pub fn say(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Starts the library's log at the level that `PHALANX_LOG` names. Without the variable there is none.
pub fn install() -> Result<()> {
    let Some(value) = std::env::var_os(VARIABLE) else { return Ok(()) };
    let value = value.to_string_lossy();
    if value.trim().is_empty() {
        return Ok(());
    }
    let level: LevelFilter =
        value.trim().parse().ok().with_context(|| {
            format!("{VARIABLE}={value}: expected off, error, warn, info, debug or trace")
        })?;
    tracing::subscriber::set_global_default(Log(level)).context("a log is installed already")
}

/// Writes each event as a line: time, level, module, message, fields.
///
/// The library uses no spans. Without them this is all there is to a log, and `tracing-subscriber` would cost
/// five seconds of a release build.
struct Log(LevelFilter);

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.0
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.0)
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let time = humantime::format_rfc3339_micros(SystemTime::now());
        let mut line = Line(format!("{time} {:>5} {}:", metadata.level(), metadata.target()));
        event.record(&mut line);
        say(line.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// A line of the log.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &match field.name() {
            // Other programs' texts may be part of a message: they must not control the terminal.
            "message" => format!(" {value:?}").replace('\x1b', "\\x1b"),
            name => format!(" {name}={value:?}"),
        };
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.record_debug(field, &format_args!("{value}"));
    }
}
