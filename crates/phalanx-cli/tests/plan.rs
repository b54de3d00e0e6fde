//! Tests of `phalanx plan` as a program, on runs made here and on runs measured here.

mod common;

use common::{Said, phalanx, say};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A row of a run: bytes, elements of a block, µs.
type Row = (usize, usize, f64);

/// Saves a run of an operation, whose time in µs is that of its bytes.
fn save(folder: &Path, operation: &str, ranks: usize, hosts: usize, time: impl Fn(usize) -> f64) -> PathBuf {
    let row = |power: usize| (1 << power, (1 << power) / 4, time(1 << power));
    save_rows(folder, operation, [ranks, hosts, 8], &(3..22).map(row).collect::<Vec<Row>>())
}

/// Saves a run with these ranks, hosts and cores.
fn save_rows(folder: &Path, operation: &str, [ranks, hosts, cores]: [usize; 3], rows: &[Row]) -> PathBuf {
    let backend = if hosts > 1 { "ucx" } else { "host" };
    let row = |&(size, count, time): &Row| {
        let figures = json!({
            "time": time, "iterations": 10, "p50": time, "p95": time, "p99": time, "min": time, "max": time,
            "mean": time, "variation": 0.0,
        });
        json!({ "size": size, "count": count, "type": "f32", "redop": "sum", "out_of_place": figures })
    };
    let run = json!({
        "format": 1, "version": "0.1.0", "date": "2026-01-02T03:04:05Z",
        "machine": { "cpu": "Some CPU", "usable_cores": cores, "os": null, "kernel": null, "memory": null },
        "options": {
            "operation": operation, "ranks": ranks, "ranks_are": "processes", "hosts": hosts, "start_seconds": 0.5,
            "backend": backend, "min_bytes": 8, "max_bytes": 2_097_152, "step": "2(factor)", "aggregate": 1,
            "checks": 0, "memory": "private", "pinned": false, "time": "median", "timeout_seconds": 300.0,
            "per_iteration": false,
        },
        "rows": rows.iter().map(row).collect::<Vec<Value>>(),
    });
    let path = folder.join(format!("{operation}-{ranks}-{hosts}.json"));
    std::fs::write(&path, run.to_string()).unwrap();
    path
}

/// Changes a saved run.
fn change(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut run: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut run);
    std::fs::write(path, run.to_string()).unwrap();
}

fn plan(runs: &[&PathBuf], options: &str) -> Said {
    let mut command = phalanx(&format!("plan {options}"));
    command.args(runs);
    say(command)
}

/// The time in µs of bytes that take 2 GB/s.
fn bytes(size: usize) -> f64 {
    size as f64 / 2000.0
}

#[test]
fn a_broadcast_between_two_hosts_says_what_a_thousand_take() {
    let folder = tempfile::tempdir().unwrap();
    // A message of 10 µs, which is one for the sender and one for the receiver, and 2 GB/s.
    let runs: Vec<PathBuf> = (2..5)
        .map(|hosts| {
            save(folder.path(), "gather", hosts, hosts, |size| {
                // The root gets a message and a block from each other host.
                let others = (hosts - 1) as f64;
                others * 10.0 + bytes(size / 4 * 4) * others
            })
        })
        .collect();
    let plan_file = folder.path().join("plan.json");
    let options = format!("-O broadcast -n 1024 -H 1024 -b 8 -e 8 -J {}", plan_file.display());
    let said = plan(&runs.iter().collect::<Vec<_>>(), &options);
    assert_eq!((said.code, said.stderr.as_str()), (Some(0), ""));
    let plan: Value = serde_json::from_slice(&std::fs::read(plan_file).unwrap()).unwrap();
    let row = &plan["places"][0]["rows"][0];
    assert_eq!(row["algorithm"], "tree");
    // Ten rounds of a message; the waits are in the messages.
    let time = row["time"].as_f64().unwrap();
    assert!((time / 100.0 - 1.0).abs() < 0.05, "{time} µs: {said}", said = said.stdout);
    // Bytes between all pairs of so many do not fit in an integer.
    let many = self::plan(&runs.iter().collect::<Vec<_>>(), "-O all_gather -n 10000000 -H 10000000 -e 64G");
    assert_eq!(many.code, Some(0), "{}", many.stderr);
    assert!(plan["held_out"]["median"].as_f64().unwrap() < 0.02, "{}", said.stdout);
    for note in
        ["The runs have up to 4 ranks; more are extrapolated.", "1024 ranks on 1024 hosts of 8 cores; start "]
    {
        assert!(said.stdout.contains(note), "{}", said.stdout);
    }
}

#[test]
fn the_table_is_as_wide_as_that_of_perf() {
    let folder = tempfile::tempdir().unwrap();
    let run = save(folder.path(), "all_reduce", 4, 1, |size| 1.0 + bytes(size));
    let said = plan(&[&run], "-n 4,8,500 --cores 64 -e 64G");
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    for line in said.stdout.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
    assert_eq!(said.stdout.matches("ranks on 1 host of 64 cores").count(), 3, "{}", said.stdout);
}

#[test]
fn json_on_standard_output_leaves_the_table_to_standard_error() {
    let folder = tempfile::tempdir().unwrap();
    let run = save(folder.path(), "all_reduce", 4, 1, |size| 1.0 + bytes(size));
    let said = plan(&[&run], "-J -");
    assert!(serde_json::from_str::<Value>(&said.stdout).is_ok(), "{}", said.stdout);
    assert!(said.stderr.contains("Error on points left out"), "{}", said.stderr);
}

#[test]
fn the_least_of_several_runs_counts() {
    let folder = tempfile::tempdir().unwrap();
    let good = save(folder.path(), "all_reduce", 4, 1, |size| 1.0 + bytes(size));
    let alone = plan(&[&good], "").stdout;
    let disturbed = folder.path().join("disturbed");
    std::fs::create_dir(&disturbed).unwrap();
    let disturbed = save(&disturbed, "all_reduce", 4, 1, |size| 900.0 + bytes(size));
    let both = plan(&[&disturbed, &good], "").stdout;
    let table = |text: &str| {
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(!table(&alone).is_empty());
    assert_eq!(table(&alone), table(&both));
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let good = save(folder.path(), "all_reduce", 4, 1, |size| 1.0 + bytes(size));
    let refused = |runs: &[&PathBuf], options: &str, code: i32, parts: &[&str]| {
        let said = plan(runs, options);
        assert_eq!((said.code, said.stdout.as_str()), (Some(code), ""), "{}", said.stderr);
        for part in parts {
            assert!(said.stderr.contains(part), "{part}: {}", said.stderr);
        }
    };
    let other = folder.path().join("other.json");
    std::fs::write(&other, "{}").unwrap();
    refused(&[&good, &other], "", 1, &["other.json is no run saved with `phalanx perf --json`"]);
    refused(&[&folder.path().join("absent.json")], "", 1, &["cannot read", "absent.json"]);

    let far = save(folder.path(), "all_reduce", 4, 2, |size| 50.0 + bytes(size));
    refused(&[&good, &far], "", 1, &["do not belong together: backend host in", "ucx in"]);
    change(&far, |run| run["options"]["hosts"] = Value::Null);
    refused(&[&far], "", 1, &["does not say on how many hosts"]);

    let gpus = save(folder.path(), "all_reduce", 8, 1, |size| 1.0 + bytes(size));
    change(&gpus, |run| run["options"]["backend"] = "nccl".into());
    refused(&[&gpus], "", 1, &["a run of the backend nccl", "host and ucx can be planned"]);

    let short = save(folder.path(), "barrier", 2, 1, |_| 1.0);
    change(&short, |run| run["rows"].as_array_mut().unwrap().truncate(1));
    refused(&[&short], "", 1, &["1 different points are too few: at least 6"]);
    change(&short, |run| run["rows"] = json!([]));
    refused(&[&short], "", 1, &["0 different points"]);

    refused(&[&good], "-H 2", 1, &["the backend host has no all_reduce among 4 ranks on 2 hosts"]);
    refused(&[&good], "-O hypercube", 1, &["no hypercube"]);
    refused(&[&good], "-n 2 -H 4", 2, &["2 ranks on 4 hosts"]);
    refused(&[&good], "-n 2,4,8 -H 1,2", 2, &["--ranks has 3 numbers and --hosts 2"]);
    refused(&[&good], "-n 0", 2, &["is no number"]);
    refused(&[], "", 2, &["RUN.json"]);
}

/// The errors of plans from the measurements in `plan/measured.csv`: of one host with 2, 4 and 8 ranks, and of 2 to 4 pretend hosts, which
/// shared two cores (2026-11-28; the commands are in docs/guide/planning.md).
#[test]
fn measured_points_that_are_left_out_are_predicted_within_a_quarter() {
    let mut runs: BTreeMap<(String, usize, usize), Vec<Row>> = BTreeMap::new();
    for line in include_str!("plan/measured.csv").lines().skip(1) {
        let [operation, ranks, hosts, size, count, time] = line.split(',').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let number = |text: &str| text.parse().unwrap();
        let key = (operation.to_owned(), number(ranks), number(hosts));
        runs.entry(key).or_default().push((number(size), number(count), time.parse().unwrap()));
    }
    for (several, options) in [(false, ""), (true, "--one-machine")] {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<PathBuf> = runs
            .iter()
            .filter(|((_, _, hosts), _)| (*hosts > 1) == several)
            .map(|((operation, ranks, hosts), rows)| {
                save_rows(folder.path(), operation, [*ranks, *hosts, 2], rows)
            })
            .collect();
        let said = plan(&files.iter().collect::<Vec<_>>(), &format!("{options} -J -"));
        let plan: Value = serde_json::from_str(&said.stdout).unwrap();
        assert!(plan["points"].as_array().unwrap().len() > 200, "{}", said.stderr);
        for which in ["held_out", "held_out_places"] {
            let error = plan[which]["median"].as_f64().unwrap();
            assert!(error <= 0.25, "{which}, several hosts: {several}: {error}\n{}", said.stderr);
        }
    }
}

/// The example of the help, word for word, in an empty folder.
#[test]
#[cfg(target_os = "linux")]
fn the_example_of_the_help_runs() {
    let help = say(phalanx("plan --help")).stdout;
    let example = help.split("Example:\n").nth(1).expect("the help has an example");
    let folder = tempfile::tempdir().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_phalanx"));
    let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-ec", example]).current_dir(&folder).env("PATH", path).env("PHALANX_BACKEND", "host");
    let said = say(shell);
    assert_eq!(said.code, Some(0), "{}", said.stderr);
    assert!(said.stdout.contains("# 64 ranks on 1 host of 64 cores"), "{}", said.stdout);
    assert!(said.stdout.contains("Error on points left out: median"), "{}", said.stdout);
    let plan: Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("plan.json")).unwrap()).unwrap();
    assert_eq!(plan["places"].as_array().unwrap().len(), 3);
    // Four operations among 2 and 4 ranks, of which one has no sizes.
    assert!(plan["points"].as_array().unwrap().len() > 35, "{}", said.stdout);
}
