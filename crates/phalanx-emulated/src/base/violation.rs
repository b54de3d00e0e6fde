//! The end of the process after a broken rule.

use std::fmt::Display;
use std::io::Write;

/// Prints the function and the rule that a call of it broke, and aborts the process.
pub fn violation(function: &str, rule: impl Display) -> ! {
    // One write, so that lines of several processes do not mix.
    let line = format!("EMULATED VIOLATION in {function}: {rule}\n");
    // Standard error may be closed; the process ends all the same.
    let _ = std::io::stderr().lock().write_all(line.as_bytes());
    std::process::abort()
}
