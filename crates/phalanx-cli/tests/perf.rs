//! Tests of `phalanx perf` as a program: results of every operation, the table, the files, the comparison.
#![cfg(target_os = "linux")]

mod common;

use common::{eventually, phalanx, ranks_of, runs, say, signal, without_gpus};
use rustix::process::Signal;
use std::path::Path;
use std::process::{Command, Stdio};

const OPERATIONS: [&str; 21] = [
    "all_reduce",
    "all_reduce_with",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_object",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "scan",
    "exclusive_scan",
    "all_to_all",
    "all_to_all_v",
    "gather",
    "scatter",
    "send_recv",
    "recv_any",
    "neighbor_all_to_all",
    "ping_pong",
    "barrier",
    "agree",
    "hypercube",
];

/// Enough iterations for a row, few enough for a test.
const SHORT: &str = "-n 5 -w 1 -T 30";

/// The rows of a successful run's table.
fn rows(arguments: &str) -> Vec<Vec<String>> {
    let said = say(phalanx(&format!("perf {arguments} {SHORT}")));
    assert_eq!(said.code, Some(0), "{arguments}: {}{}", said.stdout, said.stderr);
    assert_eq!(said.stderr, "", "{arguments}");
    let lines = said.stdout.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
}

fn column(rows: &[Vec<String>], number: usize) -> Vec<&str> {
    rows.iter().map(|row| row[number].as_str()).collect()
}

#[test]
fn the_librarys_notes_are_shown_when_they_are_asked_for() {
    let noted = |level: &str| {
        let mut command = phalanx(&format!("perf barrier -p 2 {SHORT}"));
        command.env("PHALANX_LOG", level);
        say(command)
    };
    let all = noted("info");
    assert_eq!(all.code, Some(0), "{}", all.stderr);
    assert_eq!(all.stderr.matches("communicator backend=\"host\"").count(), 2, "{}", all.stderr);
    let few = noted("warn");
    assert_eq!((few.code, few.stderr.as_str()), (Some(0), ""));
    let wrong = noted("loud");
    assert_eq!(wrong.code, Some(2));
    assert!(wrong.stderr.contains("PHALANX_LOG=loud: expected off, error, warn"), "{}", wrong.stderr);
}

#[test]
fn a_file_is_for_results_of_one_form() {
    let said = say(phalanx("perf all_reduce --json results --csv results"));
    assert_eq!((said.code, &*said.stdout), (Some(2), ""));
    assert!(said.stderr.contains("results is named twice"), "{}", said.stderr);
}

#[test]
fn a_table_has_the_reference_benchmarks_columns() {
    for ranks in ["-t 2", "-p 2", "-t 3 -R 1", "-p 3 -R 1"] {
        let rows = rows(&format!("all_reduce -b 4 -e 64 {ranks}"));
        assert_eq!(column(&rows, 0), ["4", "16", "64"], "{ranks}");
        assert_eq!(column(&rows, 1), ["1", "4", "16"], "{ranks}");
        for row in &rows {
            assert_eq!(row.len(), 13, "{ranks}: {row:?}");
            assert_eq!(row[2..5], ["f32", "sum", "-1"], "{ranks}");
            let number = |column: usize| row[column].parse::<f64>().unwrap();
            assert!((5..8).chain(9..12).all(|column| number(column) >= 0.0), "{row:?}");
            assert_eq!((row[8].as_str(), row[12].as_str()), ("0", "0"), "{ranks}: #wrong");
        }
    }
}

#[test]
fn percentiles_and_the_spread_are_shown_when_they_are_asked_for() {
    for row in rows("all_reduce -b 4 -e 64 -t 2 -I 1") {
        assert_eq!(row.len(), 27, "{row:?}");
        let number = |column: usize| row[column].parse::<f64>().unwrap();
        assert!((13..27).all(|column| number(column) >= 0.0), "{row:?}");
        assert_eq!((&row[5], &row[9]), (&row[13], &row[20]), "the time is the median");
        assert!(number(13) <= number(14) && number(14) <= number(15), "percentiles ascend");
    }
}

#[test]
fn a_table_fits_100_columns() {
    for arguments in [
        "all_reduce -t 2 -b 4 -e 64",
        "all_gather -t 2 -b 64M -e 64M -d f8e4m3 -n 1 -w 1 -c 0",
        "barrier -t 2",
    ] {
        let said = say(phalanx(&format!("perf {arguments} -T 60")));
        assert_eq!(said.code, Some(0), "{}", said.stderr);
        for line in said.stdout.lines().filter(|line| !line.starts_with("# CPU")) {
            assert!(line.chars().count() <= 100, "{} columns: {line}", line.chars().count());
        }
    }
}

#[test]
fn one_error_names_the_limit_of_ranks() {
    for arguments in [
        "perf all_reduce -p 1000 -e 8",
        "perf all_reduce -t 1000 -e 8",
        "perf all_reduce -p 100 -g 10 -e 8",
        "launch -n 600 -- true",
        "doctor -n 600",
    ] {
        let said = say(phalanx(arguments));
        assert_eq!((said.code, &*said.stdout), (Some(2), ""), "{arguments}: {}", said.stderr);
        assert!(said.stderr.contains("ranks are too many"), "{arguments}: {}", said.stderr);
        assert_eq!(said.stderr.matches("at most 512").count(), 1, "{arguments}: {}", said.stderr);
    }
}

/// A number with a minus sign is a value, not an option that nobody knows.
#[test]
fn negative_numbers_are_refused_as_values() {
    let of_perf = "-b -4,-b -4K,-e -1,-i -8,-f -2,-n -1,-w -1,-m -1,-N -1,-c -1,-G -1,-p -1,-t -1,-g -1,-T -1,-R -1,-a -1,\
                   -z -1,-C -1,-I -1,-r -2";
    let perf = of_perf.split(',').map(|option| format!("perf all_reduce {option}"));
    let others = ["doctor -n -1", "doctor -T -1", "trace --last -1 x", "launch -n -1 -- true"];
    let of_launch = ["--timeout", "--nnodes", "--node-rank", "--restarts", "--max-restarts"];
    let launch = of_launch.map(|option| format!("launch -n 1 {option} -1 -- true"));
    for arguments in perf.chain(others.map(str::to_owned)).chain(launch) {
        let said = say(phalanx(&arguments));
        assert_eq!(said.code, Some(2), "{arguments}: {}", said.stderr);
        assert!(said.stderr.contains("invalid value '-"), "{arguments}: {}", said.stderr);
        assert!(!said.stderr.contains("invalid digit"), "{arguments}: {}", said.stderr);
    }
}

/// Before ranks are started: a measurement may take hours.
#[test]
fn files_that_cannot_be_written_are_refused_before_measuring() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("taken.svg");
    std::fs::create_dir(&taken).unwrap();
    let taken = taken.to_str().unwrap();
    for ranks in ["-t 2", "-p 2"] {
        for option in ["-J", "--csv", "--plot"] {
            for file in [taken, "/nowhere/run.svg", "/proc/run.svg", "/dev/null/run.svg"] {
                let said = say(phalanx(&format!("perf all_reduce -e 4 {ranks} {option} {file} {SHORT}")));
                assert_eq!((said.code, &*said.stdout), (Some(1), ""), "{option} {file}: {}", said.stderr);
                assert_eq!(said.stderr.lines().count(), 1, "{option} {file}: {}", said.stderr);
                assert!(said.stderr.contains(file), "{option} {file}: {}", said.stderr);
            }
        }
    }
}

#[test]
fn a_minus_sign_is_standard_output_and_the_table_gives_way() {
    for ranks in ["-t 2", "-p 2"] {
        let json = say(phalanx(&format!("perf all_reduce -b 4 -e 16 {ranks} -J - {SHORT}")));
        assert_eq!(json.code, Some(0), "{}", json.stderr);
        let report: serde_json::Value = serde_json::from_str(&json.stdout).expect("nothing but the report");
        assert_eq!(report["rows"][1]["size"], 16);
        assert!(json.stderr.contains("# Avg bus bandwidth"), "{}", json.stderr);
        let csv = say(phalanx(&format!("perf all_reduce -b 4 -e 16 {ranks} --csv - {SHORT}")));
        assert!(csv.stdout.starts_with("operation,ranks,"), "{}", csv.stdout);
        assert_eq!(csv.stdout.lines().count(), 1 + 2 * 2);
    }
    let both = say(phalanx("perf all_reduce -t 2 -e 4 -J - --csv -"));
    assert_eq!(both.code, Some(2), "{}", both.stderr);
}

#[test]
fn the_help_has_the_exit_statuses() {
    let said = say(phalanx("--help"));
    for line in ["  2  ", "  3  ", "124  ", "126, 127  ", "128+N"] {
        assert!(said.stdout.contains(line), "{line} is missing in\n{}", said.stdout);
    }
}

#[test]
fn the_head_and_the_end_say_what_was_measured() {
    let said = say(phalanx(&format!("perf broadcast -b 1K -e 1K -t 2 {SHORT}")));
    for text in [
        concat!("# phalanx ", env!("CARGO_PKG_VERSION"), " perf broadcast"),
        "# 2 ranks (threads), backend host, private memory, not pinned",
        "# CPU: ",
        "the median of the iterations",
        "#wrong",
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : ",
    ] {
        assert!(said.stdout.contains(text), "{text} is missing in\n{}", said.stdout);
    }
}

#[test]
fn every_operation_is_right_among_threads() {
    for operation in OPERATIONS {
        let rows = rows(&format!("{operation} -t 4 -b 100 -e 100K -f 30 -c 2"));
        assert!(!rows.is_empty(), "{operation}");
    }
}

#[test]
fn every_operation_is_right_among_processes() {
    for operation in OPERATIONS {
        let rows = rows(&format!("{operation} -p 2 -b 64 -e 256K -f 64 -r all"));
        assert!(!rows.is_empty(), "{operation}");
    }
}

#[test]
fn every_type_and_reduction_is_right() {
    for (operation, ranks) in [("all_reduce", "-t 3"), ("reduce_scatter", "-t 2"), ("reduce", "-p 2")] {
        let rows = rows(&format!("{operation} {ranks} -b 3000 -e 3000 -d all -o all"));
        assert_eq!(rows.len(), 14 * 6, "{operation}");
    }
}

#[test]
fn an_odd_number_of_ranks_and_of_elements_is_right() {
    for operation in OPERATIONS.iter().filter(|name| **name != "hypercube") {
        rows(&format!("{operation} -t 5 -b 1002 -e 7014 -i 3006 -d u16 -r 4"));
    }
}

#[test]
fn sizes_are_those_of_the_larger_buffer() {
    assert_eq!(rows("all_gather -t 2 -b 1K -e 1K")[0][..2], ["1024", "128"]);
    assert_eq!(rows("reduce_scatter -t 2 -b 1K -e 1K -d f64")[0][..2], ["1024", "64"]);
    assert_eq!(rows("barrier -t 2")[0][..5], ["0", "0", "none", "none", "-1"]);
    // Too small to hold an element for each rank: left out.
    assert_eq!(column(&rows("all_to_all -t 4 -b 4 -e 64"), 0), ["16", "64"]);
}

#[test]
fn options_that_change_the_table_do() {
    assert_eq!(rows("all_reduce -t 2 -b 4 -e 4 -N 3").len(), 3);
    assert_eq!(rows("all_reduce -t 2 -b 4 -e 4 -c 0")[0][8], "N/A");
    assert_eq!(column(&rows("reduce -t 2 -b 4 -e 4 -r all"), 4), ["0", "1"]);
    rows("all_reduce -t 2 -b 4 -e 4 -m 4 --pin");
    let whose = ["rank 0's", "the mean of all ranks", "the least of all ranks", "the greatest of all ranks"];
    for (number, words) in whose.iter().enumerate() {
        let averaged = say(phalanx(&format!("perf all_reduce -t 2 -b 4 -e 4 -a {number} {SHORT}")));
        let expected = format!("average over a loop without barriers, {words};");
        assert!(averaged.stdout.contains(&expected), "{}", averaged.stdout);
    }
    // The averages of ranks above 1 do not count.
    let averaged = say(phalanx(&format!("perf ping_pong -t 3 -b 4 -e 4 -a 1 {SHORT}")));
    assert!(averaged.stdout.contains("the greatest of all ranks"), "{}", averaged.stdout);
}

#[test]
fn a_saved_run_can_be_compared_with() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let saved = path("saved.json");
    rows(&format!("all_reduce -t 2 -b 4 -e 64 -J {saved} --csv {}", path("run.csv")));

    let csv = std::fs::read_to_string(path("run.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 2 * 3);
    assert!(csv.starts_with("operation,ranks,"));

    let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&saved).unwrap()).unwrap();
    assert_eq!(json["options"]["operation"], "all_reduce");
    assert_eq!(json["rows"][2]["size"], 64);
    assert_eq!(json["rows"][0]["in_place"]["wrong"], 0);
    assert!(json["machine"]["usable_cores"].as_u64().unwrap() >= 1);

    let pictures = ["run.svg", "run.png"].map(path);
    for picture in &pictures {
        let compared = rows(&format!("all_reduce -t 2 -b 16 -e 256 --compare {saved} --plot {picture}"));
        let row = &compared[0];
        assert_eq!(row.len(), 15);
        for (place, time, ratio) in [("out_of_place", 5, 13), ("in_place", 9, 14)] {
            let number = |column: usize| row[column].parse::<f64>().unwrap();
            let expected = number(time) / json["rows"][1][place]["time"].as_f64().unwrap();
            assert!(
                (number(ratio) - expected).abs() <= 0.01 + 0.05 * expected,
                "{place}: {expected} in {row:?}"
            );
        }
        assert_eq!(compared[2][13..], ["N/A", "N/A"], "256 bytes were not saved");
    }
    let svg = std::fs::read_to_string(&pictures[0]).unwrap();
    assert!(svg.contains("saved run"));
    assert!(std::fs::read(&pictures[1]).unwrap().starts_with(b"\x89PNG"));

    let other = say(phalanx(&format!("perf all_gather -t 2 --compare {saved}")));
    assert_eq!(other.code, Some(1));
    assert!(other.stderr.contains("is a run of all_reduce"), "{}", other.stderr);
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (arguments, code, text) in [
        ("all_reduce -t 2 -b 8 -e 4", 2, "--minbytes 8 is above --maxbytes 4"),
        ("hypercube -t 3", 2, "hypercube needs"),
        ("ping_pong -t 1", 2, "at least 2"),
        ("reduce -t 2 -r 2", 2, "--root 2 does not exist"),
        ("all_reduce -t 2 -e 1", 2, "--maxbytes"),
        ("all_reduce -t 2 -b 10 -e 10", 2, "10 bytes are no multiple of 4, the size of an f32: give 8 or 12"),
        ("all_reduce -t 2 -b 8 -e 24 -i 3 -d f64", 2, "11 bytes are no multiple of 8"),
        ("all_reduce -t 2 -p 2", 2, "cannot be used with"),
        ("all_reduce -t 2 -G 1", 2, "-G: only work on GPUs"),
        ("all_reduce -t 2 -C", 2, "-C 1: on the host"),
        ("all_reduce -p 2 -R 2", 2, "-R 2: symmetric windows"),
        ("barrier -t 2 -G 1", 2, "-G: barrier waits"),
        ("all_reduce --backend rccl", 2, "possible values: auto, host, nccl"),
        ("all_reduce -n 18446744073709551615", 2, "at most"),
        ("all_reduce -p 18446744073709551615", 2, "at most"),
        ("all_reduce -t 2 -b 4194304T -e 4194304T", 2, "lower --maxbytes"),
        ("all_reduce -b 1 -e 64G -i 1", 2, "raise --stepbytes"),
        ("all_reduce -d f33", 2, "no element type"),
        ("all_reduce -t 2 --json /nowhere/run.json", 1, "/nowhere/run.json"),
        ("all_reduce -t 2 --compare /nowhere/run.json", 1, "/nowhere/run.json"),
        ("all_reduce -t 2 --plot run.pdf", 2, ".svg or .png"),
    ] {
        let said = say(phalanx(&format!("perf {arguments}")));
        assert_eq!(said.code, Some(code), "{arguments}: {}", said.stderr);
        assert!(said.stderr.contains(text), "{arguments}: {}", said.stderr);
        assert_eq!(said.stdout.lines().filter(|line| !line.starts_with('#')).count(), 0, "{arguments}");
    }
}

/// cudarc panics without a driver.
#[test]
#[cfg(target_os = "linux")]
fn a_library_that_is_no_driver_is_refused() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libc =
        maps.lines().find_map(|line| line.split_whitespace().last().filter(|path| path.contains("/libc.so")));
    let libc = libc.expect("this program is linked to a C library");
    let mut perf = without_gpus(phalanx("perf all_reduce --backend nccl -t 2 -e 4"));
    perf.env("PHALANX_CUDA_LIB", libc);
    let said = say(perf);
    assert_eq!(said.code, Some(1), "{}", said.stderr);
    assert!(said.stderr.contains("it has no cuInit"), "{}", said.stderr);
}

#[test]
fn without_gpus_they_are_refused_by_name_and_not_needed_otherwise() {
    for ranks in ["", "-t 2", "-p 2"] {
        let said = say(without_gpus(phalanx(&format!("perf all_reduce --backend nccl -e 4 {ranks}"))));
        assert_eq!(said.code, Some(1), "{ranks}: {}", said.stderr);
        assert_eq!(said.stdout, "", "{ranks}");
        for text in ["the CUDA driver was not found", "/nowhere/libcuda.so.1", "PHALANX_CUDA_LIB"] {
            assert!(said.stderr.contains(text), "{ranks}: {text} is missing in {}", said.stderr);
        }
    }
    for backend in ["auto", "host"] {
        let perf = format!("perf all_reduce --backend {backend} -b 4 -e 4 {SHORT}");
        let said = say(without_gpus(phalanx(&perf)));
        assert_eq!(said.code, Some(0), "{backend}: {}", said.stderr);
        assert!(said.stdout.contains("backend host"), "{}", said.stdout);
    }
}

#[test]
fn another_launchers_ranks_are_used() {
    let perf = format!("{} perf all_reduce -b 4 -e 4 {SHORT}", env!("CARGO_BIN_EXE_phalanx"));
    let said = say(phalanx(&format!("launch -n 2 -- {perf}")));
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    assert!(said.stdout.contains("[0] # 2 ranks (launched processes)"), "{}", said.stdout);
    assert!(!said.stdout.contains("[1]"), "rank 0 alone prints:\n{}", said.stdout);

    let refused = say(phalanx(&format!("launch -n 2 -- {perf} -t 2")));
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("leave out -t, -p and -g"), "{}", refused.stderr);
}

/// The ranks of a launcher have one command line: one of them says what is wrong with it.
#[test]
fn an_error_of_the_command_line_is_said_once_under_a_launcher() {
    let program = env!("CARGO_BIN_EXE_phalanx");
    for (arguments, error) in [
        ("hypercube -b 64 -e 64", "hypercube needs 1, 2, 4, 8, … ranks, not 3"),
        ("all_reduce -b 8 -e 4", "phalanx: "),
        ("all_reduce -t 2", "leave out -t, -p and -g"),
        ("all_reduce --nonsense", "unexpected argument"),
    ] {
        let said = say(phalanx(&format!("launch -n 3 -- {program} perf {arguments}")));
        assert_eq!(said.code, Some(2), "{arguments}: {}", said.stderr);
        let of_ranks: Vec<&str> = said.stderr.lines().filter(|line| line.starts_with('[')).collect();
        let errors = of_ranks.iter().filter(|line| line.contains(error)).count();
        assert_eq!(errors, 1, "{arguments}: {}", said.stderr);
        assert!(of_ranks.iter().all(|line| line.starts_with("[0]")), "{arguments}: {}", said.stderr);
    }
}

/// The check before the measurement finds the file open for writing; the disk is full later.
#[test]
fn results_that_cannot_be_written_at_the_end_are_an_error() {
    for ranks in ["-t 2", "-p 2"] {
        for option in ["-J", "--csv"] {
            let said = say(phalanx(&format!("perf all_reduce -b 4 -e 4 {ranks} {option} /dev/full {SHORT}")));
            assert_eq!(said.code, Some(1), "{ranks} {option}: {}", said.stderr);
            assert!(said.stderr.contains("cannot write /dev/full"), "{ranks} {option}: {}", said.stderr);
        }
    }
}

/// A step of Slurm with one task is such a launcher.
#[test]
fn a_launcher_of_one_rank_is_no_obstacle() {
    for (ranks, says) in
        [("-t 2", "# 2 ranks (threads)"), ("-p 2", "# 2 ranks (processes)"), ("", " ranks (threads)")]
    {
        let mut perf = phalanx(&format!("perf all_reduce -b 4 -e 4 {ranks} {SHORT}"));
        perf.envs([("RANK", "0"), ("WORLD_SIZE", "1")]);
        let said = say(perf);
        assert_eq!(said.code, Some(0), "{ranks}: {}", said.stderr);
        assert!(said.stdout.contains(says), "{ranks}: {}", said.stdout);
    }
}

/// A run without end whose two ranks have written rows.
fn endless_run(folder: &Path) -> (std::process::Child, Vec<i32>) {
    let json = folder.join("run.json");
    let mut command = phalanx(&format!("perf all_reduce -p 2 -N 0 -b 4 -e 4 {SHORT} -J {}", json.display()));
    listen_to_interrupts(&mut command);
    let run = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the ranks write rows", || {
        std::fs::read_to_string(&json).is_ok_and(|text| text.contains("in_place"))
    });
    let ranks = ranks_of(run.id());
    assert_eq!(ranks.len(), 2);
    (run, ranks)
}

/// A background job of a shell ignores SIGINT, and so would what it starts.
fn listen_to_interrupts(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    // SAFETY: `signal` may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
}

/// As with `phalanx perf … | head`: the end of the reader is no error to report.
#[test]
fn a_closed_pipe_ends_the_run_quietly() {
    for ranks in ["-t 2", "-p 2"] {
        let mut command = phalanx(&format!("perf all_reduce {ranks} -N 0 -b 4 -e 4 {SHORT}"));
        let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(run.stdout.take());
        let output = run.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{ranks}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{ranks}");
    }
}

#[test]
fn a_killed_rank_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let (run, ranks) = endless_run(folder.path());
    signal(ranks[1], Signal::KILL);
    let output = run.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(137), "{stderr}");
    assert!(stderr.contains("rank 1 failed first: killed by SIGKILL"), "{stderr}");
    eventually("the other rank has ended", || !runs(ranks[0]));
}

#[test]
fn an_interrupted_run_leaves_no_rank_and_what_it_had() {
    let folder = tempfile::tempdir().unwrap();
    let (run, ranks) = endless_run(folder.path());
    signal(run.id() as i32, Signal::INT);
    assert_eq!(run.wait_with_output().unwrap().status.code(), Some(130));
    assert!(!ranks.iter().any(|&pid| runs(pid)));
    let text = std::fs::read_to_string(folder.path().join("run.json")).unwrap();
    assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "the file is complete");
}

/// The file may have no place on the hosts of other ranks, and several that tried to make it would meet.
#[test]
fn only_rank_0_of_a_launcher_needs_the_folder_of_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.json");
    let script = format!(
        "[ $PHALANX_RANK = 0 ] && file={} || file=/nowhere/run.json; exec {} perf barrier -n 5 -J $file",
        file.display(),
        env!("CARGO_BIN_EXE_phalanx")
    );
    let said = say(common::launch("-n 2", &script));
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    assert!(file.exists());
}
