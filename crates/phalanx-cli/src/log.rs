//! What the library notes beside its answers: nothing, unless `PHALANX_LOG` asks for it.

use anyhow::{Context, Result};
use std::io;
use tracing_subscriber::filter::LevelFilter;

const VARIABLE: &str = "PHALANX_LOG";

/// Writes it to standard error, from the level that the variable names.
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
    tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr).with_ansi(false).init();
    Ok(())
}
