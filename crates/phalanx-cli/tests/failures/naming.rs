//! The rank that failed first is named, also when others end before it.

use super::common::say;
use super::rank::launch;
use libtest_mimic::{Failed, Trial};
use std::time::{Duration, Instant};

pub fn trials() -> Vec<Trial> {
    const FAULTS: &[&str] = &["kill", "segfault", "abort", "exit 3", "exit 0", "panic", "return"];
    let by_fault = FAULTS.iter().map(|fault| {
        let name = format!("naming::the_rank_is_named_that_had_the_fault::{}", fault.replace(' ', "_"));
        Trial::test(name, move || is_named(fault, None))
    });
    let backtrace = Trial::test("naming::the_rank_is_named_that_panics_with_a_backtrace", || {
        is_named("panic", Some("full"))
    });
    let at_start = Trial::test("naming::a_rank_that_ends_before_the_others_have_met_is_named", ends_at_start);
    let stopped = Trial::test("naming::a_rank_that_is_stopped_is_named", is_stopped);
    let forged =
        Trial::test("naming::a_report_of_another_job_does_not_count", a_report_of_another_job_does_not_count);
    by_fault.chain([backtrace, at_start, stopped, forged]).collect()
}

fn is_named(fault: &str, backtrace: Option<&str>) -> Result<(), Failed> {
    for victim in [0, 2] {
        let folder = tempfile::tempdir()?;
        let mut command = launch("-n 4", "fail", &format!("{fault}@10:{victim}"), folder.path());
        backtrace.iter().for_each(|backtrace| {
            command.env("RUST_BACKTRACE", backtrace);
        });
        let said = say(command);
        let named = format!("rank {victim} failed first");
        if !said.stderr.contains(&named) {
            return Err(format!("no {named:?} in:\n{}", said.stderr).into());
        }
        let expected = match fault {
            "kill" => 137,
            "segfault" => 139,
            "abort" => 134,
            "exit 3" => 3,
            "panic" => 101,
            // Its own status is 0: the job has that of a rank that failed for it.
            _ => 1,
        };
        if said.code != Some(expected) {
            return Err(format!("exit status {:?}, not {expected}:\n{}", said.code, said.stderr).into());
        }
    }
    Ok(())
}

fn is_stopped() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let since = Instant::now();
    let said = say(launch("-n 3", "fail", "stop@10:1", folder.path()));
    // Noticed within 2 s, and waited for 2 s longer; the rest is for a machine with much else to do.
    if since.elapsed() > Duration::from_secs(12) {
        return Err(format!("it took {:?}", since.elapsed()).into());
    }
    for part in ["rank 1 failed first; its process still runs", "reported: rank 1 ", "stopped"] {
        if !said.stderr.contains(part) {
            return Err(format!("no {part:?} in:\n{}", said.stderr).into());
        }
    }
    if said.code == Some(1) { Ok(()) } else { Err(format!("exit status {:?}", said.code).into()) }
}

fn a_report_of_another_job_does_not_count() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let said = say(launch("-n 3", "fail", "forge@10:1,exit 3@11:1", folder.path()));
    let named = said.stderr.contains("rank 1 failed first: exit status 3");
    if named && said.code == Some(3) { Ok(()) } else { Err(said.stderr.into()) }
}

fn ends_at_start() -> Result<(), Failed> {
    // It connects, and ends before the last rank has come.
    let script =
        "case $PHALANX_RANK in 1) timeout -s KILL 0.5 $0; exit 0;; 2) sleep 1000;; *) exec $0;; esac";
    let folder = tempfile::tempdir()?;
    let program = std::env::current_exe()?;
    let inner = launch("-n 3", "fail", "", folder.path());
    let mut command = super::common::phalanx("launch -n 3 --");
    inner.get_envs().for_each(|(name, value)| {
        value.iter().for_each(|value| {
            command.env(name, value);
        });
    });
    command.args(["sh", "-c", script]).arg(program);
    let said = say(command);
    if !said.stderr.contains("rank 1 failed first") {
        return Err(said.stderr.into());
    }
    Ok(())
}
