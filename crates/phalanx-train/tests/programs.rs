//! The examples run, and learn.

use phalanx_testkit::built::example;
use std::process::{Command, Output};

fn text(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{}\n{out}{err}", output.status)
}

/// Runs an example; what it printed.
fn run(name: &str, args: &[&str]) -> String {
    let output = Command::new(example(name)).args(args).output().expect("it runs");
    assert!(output.status.success(), "{name} {args:?}: {}", text(&output));
    text(&output)
}

/// The number behind `what` in the last line that has it.
fn last(text: &str, what: &str) -> f64 {
    let line = text.lines().rfind(|line| line.contains(what)).unwrap_or_else(|| panic!("no {what}: {text}"));
    let rest = line.split_once(what).map_or("", |(_, rest)| rest).trim_start();
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    rest[..end].parse().unwrap_or_else(|_| panic!("no number behind {what}: {line}"))
}

#[test]
fn pipeline_shows_its_schedule_and_learns() {
    for ranks in ["2", "5"] {
        let text = run("pipeline", &[ranks]);
        assert!(text.contains("bubble ") && last(&text, "step 400: loss ") < 0.02, "{text}");
    }
}

#[test]
fn the_experts_of_moe_learn() {
    // The experts are the same wherever they are; the tokens are others.
    for ranks in ["1", "4"] {
        let text = run("moe", &[ranks]);
        assert!(last(&text, "step 600: loss ") < 0.03, "{text}");
    }
}

#[test]
fn diloco_learns_with_fifty_times_fewer_bytes() {
    let text = run("diloco", &["3"]);
    assert!(last(&text, "DiLoCo:  loss ") < 0.02, "{text}");
}

#[test]
fn sharded_digits_are_learnt_with_any_number_of_ranks() {
    for ranks in ["1", "3"] {
        let folder = tempfile::tempdir().expect("there is a folder for temporary files");
        let folder = folder.path().to_string_lossy();
        let text = run("train_digits_sharded", &["--ranks", ranks, "--folder", &folder]);
        assert!(last(&text, "epoch 20: loss 0.") > 0.0 && last(&text, "accuracy ") >= 95.0, "{text}");
    }
}

/// Starts a command as a rank of a job, as a launcher does.
#[cfg(target_os = "linux")]
fn start_as_rank(command: &mut Command, rank: usize, ranks: usize, job: &str) -> std::process::Child {
    for (name, value) in [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks)] {
        command.env(format!("PHALANX_{name}"), value.to_string());
    }
    command
        .env("PHALANX_LOCAL_WORLD_SIZE", ranks.to_string())
        .env("PHALANX_JOB", job)
        .env("PHALANX_TIMEOUT", "30")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it starts")
}

/// On emulated GPUs.
#[cfg(target_os = "linux")]
#[test]
fn steps_on_gpus_are_timed_with_and_without_communication() {
    let emulated =
        phalanx_testkit::emulated::Emulated::new().expect("the emulated libraries").set("DEVICES", 2);
    let sizes = "--width 8 --blocks 2 --vocabulary 12 --rows 4 --rounds 2 --steps 1";
    for (mode, precision) in [("ddp", "mixed"), ("ddp", "bf16"), ("shard", "mixed"), ("shard", "bf16")] {
        let job = format!("steps-{}-{:?}", std::process::id(), std::time::SystemTime::now());
        let start = |rank: usize| {
            let mut command = emulated.command(example("gpu_step"));
            command.args(["--mode", mode, "--precision", precision]).args(sizes.split(' '));
            start_as_rank(&mut command, rank, 2, &job)
        };
        let outputs = [0, 1].map(start).map(|rank| rank.wait_with_output().expect("it ends"));
        let texts = outputs.each_ref().map(text);
        assert!(outputs.iter().all(|output| output.status.success()), "{texts:?}");
        assert!(
            last(&texts[0], "step ") > 0.0 && last(&texts[0], "without communication ") > 0.0,
            "{texts:?}"
        );
    }
}

#[cfg(target_os = "linux")]
#[test]
fn sharded_digits_are_learnt_although_a_rank_is_killed() {
    use std::io::{BufRead, BufReader};
    let program = example("train_digits_sharded");
    for victim in [0, 1] {
        let folder = tempfile::tempdir().expect("there is a folder for temporary files");
        let job = format!("sharded-{}-{victim}-{:?}", std::process::id(), std::time::SystemTime::now());
        let start = |rank: usize| {
            let mut command = Command::new(&program);
            command.arg("--folder").arg(folder.path()).env("PHALANX_BACKEND", "host");
            start_as_rank(&mut command, rank, 3, &job)
        };
        let mut ranks: Vec<_> = (0..3).map(start).collect();
        // Rank 0 talks, and rank 1 after it.
        let mut said = BufReader::new(ranks[0].stdout.take().expect("a pipe"));
        let mut line = String::new();
        while !line.starts_with("epoch  4:") {
            line.clear();
            assert!(said.read_line(&mut line).expect("it can be read") > 0, "rank 0 has ended");
        }
        ranks[victim].kill().expect("it runs");
        let mut rest = String::new();
        for line in said.lines() {
            rest += &format!("{}\n", line.expect("it can be read"));
        }
        for (rank, child) in ranks.into_iter().enumerate() {
            let output = child.wait_with_output().expect("it ends");
            assert_eq!(output.status.success(), rank != victim, "rank {rank}: {rest}{}", text(&output));
            rest += &text(&output);
        }
        assert!(rest.contains("a rank is lost, 2 go on"), "{rest}");
        assert!(last(&rest, "epoch 20: loss 0.") > 0.0 && last(&rest, "accuracy ") >= 95.0, "{rest}");
    }
}
