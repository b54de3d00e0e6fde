//! What the launcher prints about its ranks, on standard error.
//!
//! The rank that failed first is reported first: later failures mostly follow from it.

use super::outcome::{Failure, Notice, Outcome, Then, Witness, describe_lost_output};
use super::signals;
use crate::log::say;
use std::io;

/// Prints which rank failed, how, what happens now, and the last lines of its standard error.
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

/// Prints why a job fails whose ranks could go on after failures.
pub fn print_not_survived(failure: &Failure) {
    say(format_args!("phalanx launch: no rank has ended well since rank {} failed", failure.rank));
}

/// Prints that output of the ranks could not be written.
pub fn print_lost_output(error: &io::Error) {
    say(format_args!("phalanx launch: {}", describe_lost_output(error)));
}

fn describe_failure(failure: &Failure) -> String {
    let mut text = format!("phalanx launch: {failure}{}\n", describe_next(failure));
    if let Some(Witness { rank, why }) = &failure.witness {
        text += &format!("phalanx launch: rank {rank} reported: {why}\n");
    }
    text += &describe_last_lines(&failure.last_lines);
    if let Some(log) = &failure.log {
        text += &format!("phalanx launch: all of it is in {}\n", log.display());
    }
    text
}

fn describe_next(failure: &Failure) -> String {
    let others = match failure.others {
        1 => "the other rank".to_owned(),
        others => format!("the {others} others"),
    };
    match failure.then {
        Then::EndOthers { .. } | Then::GoOn if failure.others == 0 => String::new(),
        Then::EndOthers { could_go_on: false } => format!("; ending {others}"),
        Then::EndOthers { could_go_on: true } => {
            format!("; ending {others} (with --keep-going they could shrink and go on)")
        }
        Then::GoOn => format!("; {others} may go on"),
        Then::Replace { restart, most } => {
            format!("; starting it anew (restart {restart} of at most {most})")
        }
        Then::StartOver { restart, most } => {
            format!(
                "; no rank can take in a new one: starting all anew (restart {restart} of at most {most})"
            )
        }
    }
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
    use crate::launch::outcome::End;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;
    use std::time::Duration;

    fn failure(then: Then) -> Failure {
        Failure {
            rank: 2,
            end: End::Status(ExitStatus::from_raw(11)),
            after: Duration::from_millis(1250),
            exit_code: 139,
            others: 3,
            then,
            last_lines: vec!["oh no".to_owned()],
            log: Some("logs/rank-2.err".into()),
            witness: None,
        }
    }

    #[test]
    fn a_failure_is_described_with_its_last_lines() {
        assert_eq!(
            describe_failure(&failure(Then::EndOthers { could_go_on: false })),
            "phalanx launch: rank 2 failed first: killed by SIGSEGV, after 1.2 s; ending the 3 others\n\
             phalanx launch: the last lines of its standard error:\n    oh no\n\
             phalanx launch: all of it is in logs/rank-2.err\n"
        );
    }

    #[test]
    fn what_happens_next_is_said() {
        let first_line = |then| describe_failure(&failure(then)).lines().next().unwrap().to_owned();
        assert!(first_line(Then::EndOthers { could_go_on: true }).contains("--keep-going"));
        assert_eq!(
            first_line(Then::GoOn),
            "phalanx launch: rank 2 failed: killed by SIGSEGV, after 1.2 s; the 3 others may go on"
        );
        let replaced = first_line(Then::Replace { restart: 1, most: 4 });
        assert!(replaced.ends_with("; starting it anew (restart 1 of at most 4)"), "{replaced}");
    }

    #[test]
    fn the_rank_that_the_others_found_is_described_by_them() {
        let witness = Some(Witness { rank: 0, why: "rank 2 has left".to_owned() });
        let end = End::Status(ExitStatus::from_raw(0));
        let described = describe_failure(&Failure { end, witness, ..failure(Then::GoOn) });
        assert!(described.contains("it ended, with exit status 0, while others needed it"), "{described}");
        assert!(described.contains("\nphalanx launch: rank 0 reported: rank 2 has left\n"), "{described}");
    }
}
