//! Tests of signals: those that the launcher passes on, and those that it inherits blocked or ignored.

use crate::common::{self, eventually, is_stopped, launch, phalanx, runs, say, signal};
use crate::{pids, sorted, with_pid_file};
use rustix::process::Signal;
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn signals_are_forwarded() {
    for (sent, number, name) in [
        (Signal::TERM, 15, "SIGTERM"),
        (Signal::INT, 2, "SIGINT"),
        (Signal::HUP, 1, "SIGHUP"),
        (Signal::QUIT, 3, "SIGQUIT"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = launch("-n 2", &with_pid_file(folder.path(), "exec sleep 1000"));
        let launcher = command.stderr(Stdio::piped()).spawn().unwrap();
        let ranks = pids(folder.path(), 2);
        signal(launcher.id() as i32, sent);
        let output = launcher.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(128 + number), "{name}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(name));
        assert!(!ranks.iter().any(|&pid| runs(pid)), "{name}: a rank is left");
    }
}

/// The launcher with a signal state that whoever started it has left.
fn launch_after(env_options: &[&str], options: &str, script: &str) -> std::process::Command {
    let inner = launch(options, script);
    let mut command = std::process::Command::new("env");
    // The options of the inner `env` come last: INT, QUIT and HUP are as they say.
    command.args(env_options).arg(inner.get_program()).args(inner.get_args()).stdin(Stdio::null());
    common::forget_settings(&mut command);
    command
}

#[test]
fn a_launcher_that_inherits_sigchld_ignored_gets_its_ranks_statuses() {
    let said = say(launch_after(&["--ignore-signal=CHLD"], "-n 2", "exit 3"));
    assert_eq!(said.code, Some(3), "{}", said.stderr);
    assert!(said.stderr.contains("failed first: exit status 3"), "{}", said.stderr);
}

#[test]
fn a_signal_that_the_launcher_inherits_blocked_ends_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let script = with_pid_file(folder.path(), "exec sleep 1000");
    let mut launcher =
        launch_after(&["--block-signal"], "-n 2", &script).stderr(Stdio::null()).spawn().unwrap();
    let ranks = pids(folder.path(), 2);
    signal(launcher.id() as i32, Signal::TERM);
    let start = Instant::now();
    while launcher.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(10));
    }
    // If it has ended, this changes nothing.
    let _ = launcher.kill();
    assert_eq!(launcher.wait().unwrap().code(), Some(128 + 15));
    assert!(!ranks.into_iter().any(runs));
}

#[test]
fn ranks_get_the_signal_state_of_a_shells_child() {
    let options = ["--ignore-signal=CHLD,TERM,USR1", "--block-signal=TERM,USR2"];
    let said = say(launch_after(&options, "-n 1", "grep -E 'SigBlk|SigIgn' /proc/self/status"));
    let mask = |name: &str| {
        let line = said.stdout.lines().find_map(|line| line.strip_prefix(&format!("[0] {name}:")));
        u64::from_str_radix(line.expect(name).trim(), 16).unwrap()
    };
    assert_eq!(mask("SigBlk"), 0);
    // The C library keeps 32 and 33 to itself.
    assert_eq!(mask("SigIgn") & !(0b11 << 31), 0);
}

/// As `nohup` leaves HUP, and a shell its jobs in the background INT and QUIT.
#[test]
fn signals_that_the_launcher_ignores_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let masks = folder.path().join("masks");
    let script = format!("grep SigIgn /proc/self/status > {}; exec sleep 1000", masks.display());
    let inner = phalanx("launch -n 1 --");
    let mut command = std::process::Command::new("env");
    command.arg("--ignore-signal=HUP,INT,QUIT").arg(inner.get_program()).args(inner.get_args());
    command.args(["sh", "-c", &with_pid_file(folder.path(), &script)]).stdin(Stdio::null());
    common::forget_settings(&mut command);
    let mut launcher = command.stderr(Stdio::null()).spawn().unwrap();
    let ranks = pids(folder.path(), 1);
    for ignored in [Signal::HUP, Signal::INT, Signal::QUIT] {
        signal(launcher.id() as i32, ignored);
    }
    let mask = || std::fs::read_to_string(&masks).ok()?.trim().rsplit('\t').next().map(str::to_owned);
    eventually("the rank says what it ignores", || mask().is_some_and(|mask| !mask.is_empty()));
    std::thread::sleep(Duration::from_millis(300));
    let goes_on = launcher.try_wait().unwrap().is_none() && runs(ranks[0]);
    signal(launcher.id() as i32, Signal::TERM);
    assert_eq!(launcher.wait().unwrap().code(), Some(128 + 15));
    assert!(goes_on, "a signal that it ignores has ended it");
    let mask = u64::from_str_radix(&mask().unwrap(), 16).unwrap();
    assert_eq!(mask & 0b111, 0b111, "the rank ignores HUP, INT and QUIT, too");
}

#[test]
fn perf_gets_its_ranks_statuses_when_sigchld_is_ignored() {
    let inner = phalanx("perf all_reduce -p 2 -e 8 -n 1");
    let mut command = std::process::Command::new("env");
    command.arg("--ignore-signal=CHLD").arg(inner.get_program()).args(inner.get_args());
    common::forget_settings(&mut command);
    let said = say(command);
    assert_eq!(said.code, Some(0), "{}", said.stderr);
}

#[test]
fn signals_that_are_no_end_are_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    let seen = |rank: usize| folder.path().join(format!("seen-{rank}"));
    // The traps are set before the pid files are written.
    let script = format!(
        "trap 'echo one; touch {0}/seen-$PHALANX_RANK' USR1; trap 'echo two; exit 0' USR2; {1}",
        folder.path().display(),
        with_pid_file(folder.path(), "while :; do sleep 0.02; done")
    );
    let mut command = launch("-n 2", &script);
    let launcher = command.stdout(Stdio::piped()).spawn().unwrap();
    pids(folder.path(), 2);
    signal(launcher.id() as i32, Signal::USR1);
    eventually("both have the first", || (0..2).all(|rank| seen(rank).exists()));
    signal(launcher.id() as i32, Signal::USR2);
    let output = launcher.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let expected = ["[0] one", "[0] two", "[1] one", "[1] two"];
    assert_eq!(sorted(&String::from_utf8_lossy(&output.stdout)), expected);
}

#[test]
fn ranks_stop_and_go_on_with_the_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = launch("-n 2", &with_pid_file(folder.path(), "exec sleep 1000")).spawn().unwrap();
    let ranks = pids(folder.path(), 2);
    let all: Vec<i32> = ranks.iter().copied().chain([launcher.id() as i32]).collect();
    signal(launcher.id() as i32, Signal::TSTP);
    eventually("all are stopped", || all.iter().all(|pid| is_stopped(*pid)));
    signal(launcher.id() as i32, Signal::CONT);
    eventually("all go on", || !all.iter().any(|pid| is_stopped(*pid)));
    signal(launcher.id() as i32, Signal::TERM);
    assert_eq!(launcher.wait().unwrap().code(), Some(128 + 15));
}

#[test]
fn ranks_may_end_in_good_order_after_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        format!("trap 'echo saved; exit 0' TERM; {}", with_pid_file(folder.path(), "sleep 1000 & wait"));
    let mut command = launch("-n 2", &script);
    let launcher = command.stdout(Stdio::piped()).spawn().unwrap();
    pids(folder.path(), 2);
    signal(launcher.id() as i32, Signal::TERM);
    let output = launcher.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(sorted(&String::from_utf8_lossy(&output.stdout)), ["[0] saved", "[1] saved"]);
}

#[test]
fn a_second_signal_kills_ranks_that_ignore_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("trap '' INT; {}", with_pid_file(folder.path(), "exec sleep 1000"));
    let mut launcher = launch("-n 2 --grace 1000", &script).stderr(Stdio::piped()).spawn().unwrap();
    let ranks = pids(folder.path(), 2);
    signal(launcher.id() as i32, Signal::INT);
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(launcher.try_wait().unwrap().is_none() && ranks.iter().all(|&pid| runs(pid)));
    signal(launcher.id() as i32, Signal::INT);
    eventually("the ranks are killed", || !ranks.iter().any(|&pid| runs(pid)));
    assert_eq!(launcher.wait().unwrap().code(), Some(130));
}

#[test]
fn a_stopped_rank_hears_the_signal_that_ends_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        format!("trap 'echo ended; exit 0' TERM; {}", with_pid_file(folder.path(), "sleep 1000 & wait"));
    let launcher = launch("-n 1", &script).stdout(Stdio::piped()).spawn().unwrap();
    let rank = pids(folder.path(), 1)[0];
    signal(rank, Signal::STOP);
    eventually("the rank is stopped", || is_stopped(rank));
    signal(launcher.id() as i32, Signal::TERM);
    // If it hears nothing, the test must not wait for ever.
    let deadline = Instant::now() + Duration::from_secs(20);
    while runs(rank) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    if runs(rank) {
        signal(rank, Signal::KILL);
    }
    assert_eq!(launcher.wait_with_output().unwrap().stdout, b"[0] ended\n");
}
