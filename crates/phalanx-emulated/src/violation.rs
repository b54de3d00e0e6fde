//! Broken rules end the process.

use std::fmt::Display;
use std::io::Write;

/// Says which rule a call of `function` broke, and ends the process.
pub fn violation(function: &str, rule: impl Display) -> ! {
    // In one piece, so that lines of several processes do not mix.
    let line = format!("EMULATED VIOLATION in {function}: {rule}\n");
    // If standard error is closed there is nobody to tell.
    let _ = std::io::stderr().lock().write_all(line.as_bytes());
    std::process::abort()
}
