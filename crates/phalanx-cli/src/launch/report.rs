//! What the launcher says about its ranks, on standard error.
//!
//! The rank that failed first comes first: what the others say after that is mostly its echo.

use super::job::{Failure, Outcome};
use super::notice::Notice;
use super::signals;
use crate::log::say;
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Says which rank failed first, how, and what it said last.
pub fn print_failure(failure: &Failure) {
    say(describe_failure(failure).trim_end());
}

/// Says how the job ended, where that has not been said.
pub fn print_end(outcome: &Outcome) {
    match outcome {
        Outcome::Success | Outcome::Failed(_) => {}
        Outcome::NotStarted(error) => say(format_args!("phalanx launch: {error}")),
        Outcome::Unwritten(error) => print_unwritten(error),
        Outcome::Elsewhere(notice) => say(describe_notice(notice).trim_end()),
        Outcome::TimedOut { after, running } => {
            let ranks: Vec<String> = running.iter().map(usize::to_string).collect();
            let noun = if running.len() == 1 { "rank" } else { "ranks" };
            say(format_args!(
                "phalanx launch: timeout: {noun} {} still ran after {:.1} s and had to be ended",
                ranks.join(", "),
                after.as_secs_f64()
            ));
        }
        Outcome::Interrupted { signal } => {
            say(format_args!(
                "phalanx launch: {} was forwarded and the ranks have ended",
                signals::name(*signal)
            ));
        }
    }
}

/// Says that what the ranks wrote could not be passed on.
pub fn print_unwritten(error: &io::Error) {
    say(format_args!("phalanx launch: {}", describe_unwritten(error)));
}

pub fn describe_unwritten(error: &io::Error) -> String {
    format!("the ranks' output could not be passed on: {error}")
}

fn describe_failure(failure: &Failure) -> String {
    let mut text = format!(
        "phalanx launch: rank {} failed first: {}, after {:.1} s",
        failure.rank,
        describe_status(failure.status),
        failure.after.as_secs_f64()
    );
    match failure.others {
        0 => {}
        1 => text += "; ending the other rank",
        others => text += &format!("; ending the {others} others"),
    }
    text.push('\n');
    text += &describe_last_words(&failure.last_words);
    if let Some(log) = &failure.log {
        text += &format!("phalanx launch: all of it is in {}\n", log.display());
    }
    text
}

fn describe_last_words(lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let lines = lines.iter().map(|line| format!("    {line}\n"));
    format!("phalanx launch: the last lines of its standard error:\n{}", lines.collect::<String>())
}

/// What happened on another node.
fn describe_notice(notice: &Notice) -> String {
    let Notice { node, host, what, last_words, .. } = notice;
    format!("phalanx launch: node {node} ({host}): {what}\n{}", describe_last_words(last_words))
}

/// `exit status 3`, `killed by SIGKILL`.
pub fn describe_status(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("killed by {}", signals::name(signal)),
        (None, None) => status.to_string(),
    }
}

/// Why a program could not be started, and what to do.
pub fn describe_start_error(program: &OsStr, error: &io::Error) -> String {
    let program = program.to_string_lossy();
    match error.kind() {
        io::ErrorKind::NotFound if program.contains('/') => {
            format!("cannot start {program}: there is no such file, or its interpreter is missing")
        }
        io::ErrorKind::NotFound => format!(
            "cannot start {program}: it is in no directory of PATH; for one in this directory write ./{program}"
        ),
        io::ErrorKind::PermissionDenied => {
            format!("cannot start {program}: it is not executable (chmod +x?)")
        }
        _ => format!("cannot start {program}: {error}{}", remedy(error)),
    }
}

/// What to do about an error that the user can mend.
pub fn remedy(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => "; raise `ulimit -n`",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_failure_is_described_with_its_last_words() {
        let failure = Failure {
            rank: 2,
            status: ExitStatus::from_raw(11),
            after: Duration::from_millis(1250),
            others: 3,
            last_words: vec!["oh no".to_owned()],
            log: Some("logs/rank-2.err".into()),
        };
        assert_eq!(
            describe_failure(&failure),
            "phalanx launch: rank 2 failed first: killed by SIGSEGV, after 1.2 s; ending the 3 others\n\
             phalanx launch: the last lines of its standard error:\n    oh no\n\
             phalanx launch: all of it is in logs/rank-2.err\n"
        );
    }

    #[test]
    fn a_missing_program_is_explained() {
        let missing = io::Error::from(io::ErrorKind::NotFound);
        assert!(describe_start_error(OsStr::new("tool"), &missing).contains("./tool"));
        assert!(describe_start_error(OsStr::new("./tool"), &missing).contains("no such file"));
    }

    #[test]
    fn too_few_descriptors_have_a_remedy() {
        let too_few = io::Error::from(Errno::MFILE);
        assert!(describe_start_error(OsStr::new("tool"), &too_few).ends_with("; raise `ulimit -n`"));
    }
}
