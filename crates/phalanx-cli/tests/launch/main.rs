//! Tests of `phalanx launch` as a program: output, exit status, signals, and that no process is left.
#![cfg(target_os = "linux")]

#[path = "../common/mod.rs"]
mod common;
mod signals;

use common::{eventually, launch, number_in, phalanx, ranks_of, runs, say, signal};
use rustix::process::Signal;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

/// A script that writes its process id to its rank's file, and goes on with `then`.
fn with_pid_file(folder: &Path, then: &str) -> String {
    format!("echo $$ > {}/$PHALANX_RANK; {then}", folder.display())
}

/// The process ids of this number of ranks, once all have started.
fn pids(folder: &Path, ranks: usize) -> Vec<i32> {
    let read =
        || (0..ranks).map(|rank| number_in(&folder.join(rank.to_string()))).collect::<Option<Vec<i32>>>();
    eventually("all ranks have started", || read().is_some());
    read().unwrap()
}

#[test]
fn every_line_has_its_rank_in_front() {
    let said = say(launch("-n 3", "echo out; echo err >&2; printf last"));
    assert_eq!(said.code, Some(0));
    let expected = ["[0] last", "[0] out", "[1] last", "[1] out", "[2] last", "[2] out"];
    assert_eq!(sorted(&said.stdout), expected);
    assert_eq!(sorted(&said.stderr), ["[0] err", "[1] err", "[2] err"]);
}

#[test]
fn bound_ranks_have_their_cores_and_the_launcher_says_which() {
    let script = "grep Cpus_allowed_list /proc/self/status";
    let bound = |options: &str| {
        let said = say(launch(options, script));
        assert_eq!(said.code, Some(0), "{}", said.stderr);
        let lines = sorted(&said.stdout);
        let cores: Vec<_> = lines.iter().map(|line| line.rsplit('\t').next().unwrap().to_owned()).collect();
        (cores, said.stderr)
    };
    let (of_all, said) = bound("-n 1 --report-bindings");
    assert!(said.contains("ranks are not bound"), "{said}");
    let (of_core, said) = bound("-n 1 --bind-to core --report-bindings");
    assert!(
        said.contains(&format!("rank 0 is bound to core {}", of_core[0].split(['-', ',']).next().unwrap())),
        "{said}"
    );
    assert!(said.contains(&format!("(cores {})", of_core[0])), "{said}");
    // A domain holds the first core, and the launcher's own cores are as before for the next rank.
    let (of_domains, _) = bound("-n 2 --bind-to numa");
    assert!(of_domains.iter().all(|cores| cores.len() <= of_all[0].len()), "{of_domains:?} of {of_all:?}");
}

#[test]
fn more_ranks_than_cores_cannot_have_one_each() {
    let said = say(launch("-n 500 --bind-to core", "true"));
    assert_eq!(said.code, Some(2), "{}", said.stderr);
    assert!(said.stderr.contains("500 ranks") && said.stderr.contains("--bind-to numa"), "{}", said.stderr);
}

#[test]
fn without_prefix_the_output_is_left_alone() {
    let said = say(launch("-n 2 --no-prefix", "echo out"));
    assert_eq!((said.code, said.stdout.as_str()), (Some(0), "out\nout\n"));
}

#[test]
fn a_log_folder_changes_nothing_of_the_output() {
    let folder = tempfile::tempdir().unwrap();
    let options = format!("-n 1 --no-prefix --log-dir {}", folder.path().display());
    let output = launch(&options, r"printf 'a\nb\r\377'; printf e >&2").output().unwrap();
    assert_eq!((&output.stdout[..], &output.stderr[..]), (&b"a\nb\r\xff"[..], &b"e"[..]));
    assert_eq!(std::fs::read(folder.path().join("rank-0.out")).unwrap(), b"a\nb\r\xff");
}

#[test]
fn a_prompt_is_shown_before_it_is_answered() {
    use std::io::{Read, Write};
    for options in ["-n 1", "-n 1 --no-prefix --log-dir"] {
        let folder = tempfile::tempdir().unwrap();
        let with_folder = format!("{options} {}", folder.path().display());
        let options = if options.ends_with("dir") { &with_folder } else { options };
        let asks = folder.path().join("asks");
        let script = format!("touch {}; printf 'name? '; read name; echo hello $name", asks.display());
        let mut command = launch(options, &script);
        let mut launcher = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut answer, mut output) = (launcher.stdin.take().unwrap(), launcher.stdout.take().unwrap());
        let said = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let shown = said.clone();
        let reader = std::thread::spawn(move || {
            let mut byte = [0];
            while output.read(&mut byte).unwrap() > 0 {
                shown.lock().unwrap().push(byte[0]);
            }
        });
        let has_prompt = || said.lock().unwrap().ends_with(b"name? ");
        eventually("it asks", || asks.exists());
        // After a tenth of a second, and the rest is for a machine with much else to do.
        let start = Instant::now();
        while !has_prompt() && start.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let was_shown = has_prompt();
        answer.write_all(b"you\n").unwrap();
        assert!(launcher.wait().unwrap().success());
        reader.join().unwrap();
        assert!(was_shown, "not within a second");
        let expected = if options == "-n 1" { "[0] name? hello you\n" } else { "name? hello you\n" };
        assert_eq!(String::from_utf8_lossy(&said.lock().unwrap()), expected);
    }
}

#[test]
fn bytes_that_are_no_text_are_kept() {
    let output = launch("-n 1", r"printf '\377\000\n'").output().unwrap();
    assert_eq!(output.stdout, b"[0] \xff\x00\n");
}

#[test]
fn ranks_learn_who_they_are() {
    let script =
        "echo $PHALANX_RANK $PHALANX_WORLD_SIZE $PHALANX_LOCAL_RANK $PHALANX_LOCAL_WORLD_SIZE $PHALANX_JOB";
    let said = say(launch("-n 2", script));
    let lines = sorted(&said.stdout);
    let job = lines[0].strip_prefix("[0] 0 2 0 2 ").expect("rank 0 knows its place");
    assert_eq!(job.len(), 32, "128 bits");
    assert_eq!(lines[1], format!("[1] 1 2 1 2 {job}"));
    let other_job = say(launch("-n 1", "echo $PHALANX_JOB"));
    assert!(!other_job.stdout.contains(job));
}

#[test]
fn rank_0_reads_what_is_piped_in() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("input");
    std::fs::write(&file, "hello\n").unwrap();
    let mut command = launch("-n 2", "cat");
    command.stdin(std::fs::File::open(&file).unwrap());
    assert_eq!(say(command).stdout, "[0] hello\n");
}

#[test]
fn the_first_failure_is_reported_and_ends_the_others() {
    let folder = tempfile::tempdir().unwrap();
    // It fails when the others have started: they are to be ended.
    let others = [0, 2].map(|rank| folder.path().join(rank.to_string()).display().to_string());
    let fail = format!(
        "while [ ! -s {} ] || [ ! -s {} ]; do sleep 0.01; done; echo why >&2; exit 7",
        others[0], others[1]
    );
    let script = format!("if [ $PHALANX_RANK = 1 ]; then {fail}; fi; sleep 1000 & wait");
    let start = Instant::now();
    let said = say(launch("-n 3", &with_pid_file(folder.path(), &script)));
    assert_eq!(said.code, Some(7), "{}", said.stderr);
    assert!(start.elapsed() < common::TIMEOUT, "the others were not ended");
    let report = said.stderr.find("rank 1 failed first: exit status 7").expect("the rank is named");
    assert!(said.stderr[report..].contains("    why"), "its last line is shown: {}", said.stderr);
    for pid in pids(folder.path(), 3) {
        eventually("the rank has ended", || !runs(pid));
    }
}

#[test]
fn a_signal_that_kills_a_rank_is_named() {
    let said = say(launch("-n 2", "[ $PHALANX_RANK = 0 ] && kill -SEGV $$; sleep 1000"));
    assert_eq!(said.code, Some(128 + 11));
    assert!(said.stderr.contains("rank 0 failed first: killed by SIGSEGV"), "{}", said.stderr);
}

#[test]
fn ranks_that_ignore_the_request_to_end_are_killed() {
    let start = Instant::now();
    let said =
        say(launch("-n 2", "[ $PHALANX_RANK = 0 ] && { sleep 0.5; exit 1; }; trap '' TERM; sleep 1000"));
    assert_eq!(said.code, Some(1));
    let took = start.elapsed().as_secs_f64();
    assert!((5.0..15.0).contains(&took), "after {took} s, and not after the default of 5");
}

#[test]
fn the_time_to_end_is_an_option() {
    let start = Instant::now();
    let script =
        "[ $PHALANX_RANK = 0 ] && { sleep 0.2; exit 1; }; trap '' TERM; while :; do sleep 0.02; done";
    let said = say(launch("-n 2 --grace 0.3", script));
    assert_eq!(said.code, Some(1), "{}", said.stderr);
    assert!(start.elapsed() < Duration::from_secs(4), "not the default of 5 s");
}

#[test]
fn a_stopped_rank_hears_the_request_to_end() {
    let folder = tempfile::tempdir().unwrap();
    // Its handler prints this; a killed rank prints nothing.
    let stops = with_pid_file(folder.path(), "kill -STOP $$; sleep 1000 & wait");
    let script = format!(
        "trap 'echo ended; exit 0' TERM; [ $PHALANX_RANK = 1 ] && {{ {stops}; }}; echo $$ > {0}/0; \
         until grep -q 'T (stopped)' /proc/$(cat {0}/1)/status; do sleep 0.05; done; exit 3",
        folder.path().display()
    );
    let said = say(launch("-n 2", &script));
    assert_eq!(said.stdout, "[1] ended\n", "{}", said.stderr);
    assert_eq!(said.code, Some(3), "{}", said.stderr);
}

#[test]
fn descendants_of_a_rank_end_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let descendant = folder.path().join("descendant");
    let script = format!(
        "if [ $PHALANX_RANK = 0 ]; then sleep 1000 & echo $! > {0}; wait; fi
         while [ ! -s {0} ]; do sleep 0.01; done; exit 3",
        descendant.display()
    );
    assert_eq!(say(launch("-n 2", &script)).code, Some(3));
    let pid = number_in(&descendant).unwrap();
    eventually("the descendant has ended", || !runs(pid));
}

#[test]
fn descendants_of_the_rank_that_fails_end_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let descendant = folder.path().join("descendant");
    // It ignores the request to end, and holds none of the rank's streams.
    let sleeps =
        format!("(trap '' TERM; exec sleep 1000 >/dev/null 2>&1) & echo $! > {}", descendant.display());
    assert_eq!(say(launch("-n 1", &format!("{sleeps}; exit 3"))).code, Some(3));
    let pid = number_in(&descendant).unwrap();
    eventually("the descendant has ended", || !runs(pid));
}

#[test]
fn a_timeout_ends_the_ranks() {
    let said = say(launch("-n 2 --timeout 0.5", "[ $PHALANX_RANK = 0 ] || sleep 1000"));
    assert_eq!(said.code, Some(124));
    assert!(said.stderr.contains("timeout: rank 1 still ran after"), "{}", said.stderr);
}

#[test]
fn killing_the_launcher_leaves_no_rank() {
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = launch("-n 3", &with_pid_file(folder.path(), "exec sleep 1000")).spawn().unwrap();
    let ranks = pids(folder.path(), 3);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    for pid in ranks {
        eventually("the rank has ended", || !runs(pid));
    }
}

/// The kernel ends the ranks then.
#[test]
fn killing_the_launcher_and_its_guard_leaves_no_rank() {
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = launch("-n 2", &with_pid_file(folder.path(), "exec sleep 1000")).spawn().unwrap();
    let ranks = pids(folder.path(), 2);
    let guard: Vec<i32> =
        common::children_of(launcher.id()).into_iter().filter(|child| !ranks.contains(child)).collect();
    assert_eq!(guard.len(), 1, "the guard");
    signal(guard[0], Signal::KILL);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    eventually("the ranks have ended", || !ranks.iter().any(|&pid| runs(pid)));
}

#[test]
fn killing_the_launcher_leaves_no_descendant_either() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    // In the rank's group; in the group with an empty environment; in its own session; and without a parent.
    let script = format!(
        "sleep 1000 & echo $! > {}
         env -i sleep 1000 & echo $! > {}
         setsid sh -c 'echo $$ > {}; exec sleep 1000' &
         (setsid sh -c 'echo $$ > {}; exec sleep 1000' &)
         wait",
        at("group"),
        at("bare"),
        at("session"),
        at("orphan")
    );
    let mut launcher = launch("-n 1", &script).stderr(Stdio::piped()).spawn().unwrap();
    let names = ["group", "bare", "session", "orphan"];
    let read = || names.iter().map(|name| number_in(&folder.path().join(name))).collect::<Option<Vec<i32>>>();
    eventually("all processes have started", || read().is_some_and(|pids| pids.iter().all(|pid| runs(*pid))));
    launcher.kill().unwrap();
    // The guard prints a line when it is done, and ends: the stream ends with it.
    let output = launcher.wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("the launcher was killed"));
    for (name, pid) in names.iter().zip(read().unwrap()) {
        eventually(&format!("{name} has ended"), || !runs(pid));
    }
}

#[test]
fn a_job_that_has_ended_leaves_no_guard() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("launcher");
    let script = format!(
        "echo $PPID > {0}.part; mv {0}.part {0}; while [ -e {0} ]; do sleep 0.01; done",
        pid.display()
    );
    let launcher = launch("-n 1", &script).spawn().unwrap();
    eventually("the rank has started", || number_in(&pid).is_some());
    let children = common::children_of(launcher.id());
    assert_eq!(children.len(), 2, "a rank and the guard");
    std::fs::remove_file(&pid).unwrap();
    assert!(launcher.wait_with_output().unwrap().status.success());
    assert!(!children.into_iter().any(runs));
}

#[test]
fn a_restart_that_succeeds_is_a_success() {
    let script = "echo attempt $PHALANX_RESTART_COUNT $PHALANX_JOB; [ $PHALANX_RESTART_COUNT = 2 ] || exit 3";
    let said = say(launch("-n 2 --max-restarts 3", script));
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    assert!(said.stderr.contains("exit status 3"), "{}", said.stderr);
    assert!(said.stderr.contains("restart 2 of at most 3"), "{}", said.stderr);
    assert!(!said.stderr.contains("restart 3"), "{}", said.stderr);
    // Every attempt has its own job id.
    let job_of = |attempt: &str| {
        let jobs = said.stdout.lines().filter_map(|line| line.split_once(&format!("attempt {attempt} ")));
        let mut jobs: Vec<&str> = jobs.map(|(_, job)| job).collect();
        jobs.dedup();
        jobs.concat()
    };
    assert_eq!(job_of("2").len(), 32, "{}", said.stdout);
    assert_ne!(job_of("2"), job_of("1"));
}

#[test]
fn restarts_are_counted() {
    let said = say(launch("-n 2 --max-restarts 1", "[ $PHALANX_RANK = 1 ] && exit 4; sleep 1000"));
    assert_eq!(said.code, Some(4));
    assert_eq!(said.stderr.matches("rank 1 failed first: exit status 4").count(), 2, "{}", said.stderr);
}

#[test]
fn what_was_asked_to_end_is_not_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = launch("-n 2 --max-restarts 5", &with_pid_file(folder.path(), "exec sleep 1000"));
    let launcher = command.stderr(Stdio::piped()).spawn().unwrap();
    pids(folder.path(), 2);
    signal(launcher.id() as i32, Signal::TERM);
    let output = launcher.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 15));
    assert!(!String::from_utf8_lossy(&output.stderr).contains("restart"));
}

#[test]
fn every_rank_has_its_log_files() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("new").join("logs");
    let script = "echo out $PHALANX_RANK; echo err $PHALANX_RANK >&2; [ $PHALANX_RANK = 0 ] || exit $PHALANX_RESTART_COUNT";
    let options = format!("-n 2 --max-restarts 1 --log-dir {}", logs.display());
    // It fails after a restart only, and is restarted after a failure only.
    let said = say(launch(&options, script));
    assert_eq!((said.code, sorted(&said.stdout)), (Some(0), vec!["[0] out 0", "[1] out 1"]));
    let read = |name: &str| std::fs::read_to_string(logs.join(name)).unwrap();
    assert_eq!((read("rank-0.out"), read("rank-0.err")), ("out 0\n".into(), "err 0\n".into()));
    assert_eq!((read("rank-1.out"), read("rank-1.err")), ("out 1\n".into(), "err 1\n".into()));

    let script = script.replace("exit $PHALANX_RESTART_COUNT", "exit 9");
    let said = say(launch(&format!("{options} --no-prefix"), &script));
    assert_eq!(said.code, Some(9));
    assert!(sorted(&said.stdout).contains(&"out 1"), "no prefix: {}", said.stdout);
    assert_eq!(read("rank-1.restart-1.err"), "err 1\n");
    let log = logs.join("rank-1.err").display().to_string();
    assert!(said.stderr.contains(&format!("all of it is in {log}")), "{}", said.stderr);
}

#[test]
fn log_files_that_cannot_be_are_explained() {
    let said = say(launch("-n 1 --log-dir /proc/nowhere", "true"));
    assert_eq!(said.code, Some(1));
    assert!(said.stderr.contains("/proc/nowhere"), "{}", said.stderr);
}

#[test]
fn a_log_file_that_cannot_be_is_not_the_programs_fault() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("rank-0.out")).unwrap();
    let said = say(launch(&format!("-n 1 --log-dir {}", folder.path().display()), "true"));
    assert_eq!(said.code, Some(1));
    assert!(said.stderr.contains("rank-0.out cannot be written"), "{}", said.stderr);
    assert!(!said.stderr.contains("cannot start"), "{}", said.stderr);
}

#[test]
fn ranks_are_told_where_the_store_is() {
    let said = say(launch("-n 2", "echo $PHALANX_STORE $PHALANX_TOKEN $PHALANX_NODE_RANK $PHALANX_NNODES"));
    let lines = sorted(&said.stdout);
    assert!(lines[0].starts_with("[0] 127.0.0.1:") && lines[0].ends_with(" 0 1"), "{}", said.stdout);
    assert_eq!(lines[0].strip_prefix("[0]"), lines[1].strip_prefix("[1]"));
}

#[test]
fn output_that_nobody_reads_does_not_keep_the_ranks() {
    let mut command = launch("-n 2", "while :; do echo line || exit 0; done");
    let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(launcher.stdout.take());
    eventually("the launcher has ended", || launcher.try_wait().unwrap().is_some());
}

/// Longer than the launcher waits for the output of a rank that has ended.
const PAUSE: Duration = Duration::from_secs(1);

/// A launcher whose rank has ended after writing more than the launcher's pipe holds, which is not read yet.
fn unread(options: &str) -> std::process::Child {
    let folder = tempfile::tempdir().unwrap();
    let script = with_pid_file(folder.path(), "exec seq 1 12000");
    let launcher = launch(options, &script).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    pids(folder.path(), 1);
    eventually("the rank has ended", || ranks_of(launcher.id()).is_empty());
    launcher
}

#[test]
fn output_that_is_read_late_is_complete() {
    let logs = tempfile::tempdir().unwrap();
    let launcher = unread(&format!("-n 1 --log-dir {}", logs.path().display()));
    std::thread::sleep(PAUSE);
    let output = launcher.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stdout.iter().filter(|byte| **byte == b'\n').count(), 12000);
    let log = std::fs::read_to_string(logs.path().join("rank-0.out")).unwrap();
    assert_eq!(log.lines().last(), Some("12000"));
}

#[test]
fn a_signal_ends_the_wait_for_whoever_does_not_read() {
    let mut launcher = unread("-n 1");
    // The first may arrive before the rank is reaped, and is then forwarded to it.
    eventually("the launcher has ended", || {
        signal(launcher.id() as i32, Signal::TERM);
        launcher.try_wait().unwrap().is_some()
    });
    assert_eq!(launcher.wait().unwrap().code(), Some(128 + 15));
}

#[test]
fn a_stream_that_a_descendant_holds_open_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("descendant");
    let start = Instant::now();
    let said = say(launch("-n 1", &format!("echo out; sleep 1000 & echo $! > {}", pid.display())));
    assert!(start.elapsed() < Duration::from_secs(5), "after {:?}", start.elapsed());
    assert_eq!((said.code, said.stdout.as_str()), (Some(0), "[0] out\n"));
    signal(number_in(&pid).unwrap(), Signal::KILL);
}

#[test]
fn output_that_cannot_be_written_is_told() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let options = format!("-n 1 --log-dir {}", folder.path().display());
    let output = launch(&options, "echo hi").stdout(full()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("could not be passed on: No space left"), "{stderr}");
    let log = std::fs::read_dir(folder.path()).unwrap().next().expect("a log").unwrap().path();
    assert_eq!(std::fs::read_to_string(log).unwrap(), "hi\n");
    // No message can be written.
    assert_eq!(launch("-n 2", "exit 3").stderr(full()).status().unwrap().code(), Some(3));
}

#[test]
fn a_log_beyond_the_limit_of_files_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let phalanx = env!("CARGO_BIN_EXE_phalanx");
    // The rank's own limit is as before, and so is what SIGXFSZ does to it.
    let rank = "head -c 100000 /dev/zero; head -c 100000 /dev/zero > own; echo $? >&2";
    let script =
        format!("ulimit -f 1; exec {phalanx} launch -n 1 --no-prefix --log-dir logs -- sh -c '{rank}'");
    let mut bash = std::process::Command::new("bash");
    bash.args(["-c", &script]).current_dir(folder.path());
    let said = say(bash);
    assert_eq!((said.code, said.stdout.len()), (Some(0), 100_000), "{}", said.stderr);
    assert!(said.stderr.contains("153\n") && said.stderr.contains("File too large"), "{}", said.stderr);
}

#[test]
fn a_timeout_holds_for_ranks_that_go_on_after_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("trap '' TERM; {}", with_pid_file(folder.path(), "while :; do sleep 0.05; done"));
    let mut launcher = launch("-n 1 --timeout 2", &script).stderr(Stdio::null()).spawn().unwrap();
    pids(folder.path(), 1);
    signal(launcher.id() as i32, Signal::TERM);
    eventually("the launcher has ended", || launcher.try_wait().unwrap().is_some());
    assert_eq!(launcher.wait().unwrap().code(), Some(124));
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    for options in [
        "--restarts 1 --max-restarts 1",
        "--keep-going --max-restarts 1",
        "--min-ranks 2",
        "--keep-going --min-ranks 3",
    ] {
        let said = say(launch(&format!("-n 2 {options}"), "echo started"));
        assert_eq!((said.code, said.stdout.as_str()), (Some(2), ""), "{options}: {}", said.stderr);
    }
}

#[test]
fn what_cannot_be_started_is_explained() {
    let missing = say(phalanx("launch -n 2 -- no-such-program-anywhere"));
    assert_eq!(missing.code, Some(127));
    assert!(missing.stderr.contains("no-such-program-anywhere"), "{}", missing.stderr);
    assert!(missing.stderr.contains("PATH"), "{}", missing.stderr);

    let no_program = say(phalanx("launch -n 2 -- /etc/hostname-is-not-a-program/x"));
    assert_eq!(no_program.code, Some(127));

    let mut unnamed = phalanx("launch -n 2 --");
    unnamed.arg("");
    let unnamed = say(unnamed);
    assert_eq!(unnamed.code, Some(127));
    assert!(unnamed.stderr.contains("its name is empty"), "{}", unnamed.stderr);

    let folder = say(phalanx("launch -n 2 -- /etc"));
    assert_eq!(folder.code, Some(126));

    let none = say(phalanx("launch -n 0 -- true"));
    assert_eq!(none.code, Some(2));
    assert!(none.stderr.contains("at least 1"), "{}", none.stderr);
}
