//! Standard error: what the program has to say, and what the library notes if `PHALANX_LOG` asks for it.

use anyhow::{Context, Result};
use std::fmt::Display;
use std::io::{self, Write};
use tracing_subscriber::filter::LevelFilter;

const VARIABLE: &str = "PHALANX_LOG";

/// Writes a line. Where standard error cannot be written there is nobody to tell.
pub fn say(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes the library's notes, from the level that the variable names.
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
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(io::stderr)
        .with_ansi(false)
        // It would panic where standard error cannot be written.
        .log_internal_errors(false)
        .init();
    Ok(())
}
