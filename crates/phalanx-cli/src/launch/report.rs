//! What the launcher prints about its ranks, on standard error.
//!
//! The rank that failed first is reported first: later failures mostly follow from it.

use super::outcome::{Failure, Notice, Outcome, describe_lost_output};
use super::signals;
use crate::log::say;
use std::io;

/// Prints which rank failed first, how, and the last lines of its standard error.
pub fn print_failure(failure: &Failure) {
    say(describe_failure(failure).trim_end());
}

/// Prints how an attempt ended. A failure was printed when it happened.
pub fn print_end(outcome: &Outcome) {
    match outcome {
        Outcome::Success | Outcome::Failed(_) => {}
        Outcome::NotStarted(error) => say(format_args!("phalanx launch: {error}")),
        Outcome::OutputLost(error) => print_lost_output(error),
        Outcome::OtherNode(notice) => say(describe_notice(notice).trim_end()),
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

/// Prints that output of the ranks could not be written.
pub fn print_lost_output(error: &io::Error) {
    say(format_args!("phalanx launch: {}", describe_lost_output(error)));
}

fn describe_failure(failure: &Failure) -> String {
    let mut text = format!("phalanx launch: {failure}");
    match failure.others {
        0 => {}
        1 => text += "; ending the other rank",
        others => text += &format!("; ending the {others} others"),
    }
    text.push('\n');
    text += &describe_last_lines(&failure.last_lines);
    if let Some(log) = &failure.log {
        text += &format!("phalanx launch: all of it is in {}\n", log.display());
    }
    text
}

fn describe_last_lines(lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let lines = lines.iter().map(|line| format!("    {line}\n"));
    format!("phalanx launch: the last lines of its standard error:\n{}", lines.collect::<String>())
}

fn describe_notice(notice: &Notice) -> String {
    let Notice { node, host, what, last_lines, .. } = notice;
    format!("phalanx launch: node {node} ({host}): {what}\n{}", describe_last_lines(last_lines))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;
    use std::time::Duration;

    #[test]
    fn a_failure_is_described_with_its_last_lines() {
        let failure = Failure {
            rank: 2,
            status: ExitStatus::from_raw(11),
            after: Duration::from_millis(1250),
            others: 3,
            last_lines: vec!["oh no".to_owned()],
            log: Some("logs/rank-2.err".into()),
        };
        assert_eq!(
            describe_failure(&failure),
            "phalanx launch: rank 2 failed first: killed by SIGSEGV, after 1.2 s; ending the 3 others\n\
             phalanx launch: the last lines of its standard error:\n    oh no\n\
             phalanx launch: all of it is in logs/rank-2.err\n"
        );
    }
}
