//! How a process ended: as text, and as the exit status that a shell gives it.

use super::signals;
pub use crate::exit::TIMED_OUT;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// `exit status 3`, `killed by SIGKILL`.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("killed by {}", signals::name(signal)),
        (None, None) => status.to_string(),
    }
}

/// The process's own exit status, or 128 + the signal that killed it.
pub fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(1),
        (None, Some(signal)) => signal_code(signal),
        (None, None) => 1,
    }
}

/// The exit status of a program that a signal ended.
pub fn signal_code(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!(exit_code(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(exit_code(ExitStatus::from_raw(9)), 137);
    }
}
