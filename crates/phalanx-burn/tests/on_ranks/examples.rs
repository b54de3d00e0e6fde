//! The examples, on ranks as processes and as threads.

use libtest_mimic::{Failed, Trial};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("examples/train_loop", train_loop),
        Trial::test("examples/train_loop_loses_a_rank", train_loop_loses_a_rank),
        Trial::test("examples/train_digits", train_digits),
    ]
}

/// The folder of the examples, built in a moment if they are built already.
static EXAMPLES: LazyLock<PathBuf> = LazyLock::new(|| {
    let mut cargo = Command::new(env!("CARGO"));
    // Build scripts look at what cargo says to a test (ring's), and would run again.
    for (variable, _) in std::env::vars_os() {
        let text = variable.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&variable);
        }
    }
    let built = cargo.args(["build", "--examples", "--features", "train"]);
    let built = built.current_dir(env!("CARGO_MANIFEST_DIR"));
    let built = built.output().expect("cargo runs");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    // A test is in target/debug/deps.
    let own = std::env::current_exe().expect("its path");
    own.ancestors().nth(2).expect("two folders").join("examples")
});

fn text(ended: &Output) -> String {
    String::from_utf8_lossy(&ended.stdout).into_owned() + &String::from_utf8_lossy(&ended.stderr)
}

/// What the ranks of a program have said and how they ended, in rank order; each is a process.
fn processes(name: &str, ranks: usize, args: &[&str]) -> Result<Vec<Output>, Failed> {
    let number = |number: usize| number.to_string();
    let job = format!("{name}-{}-{ranks}-{}", std::process::id(), args.len());
    let start = |rank: usize| {
        let mut command = Command::new(EXAMPLES.join(name));
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).env("PHALANX_JOB", &job);
        command.env("PHALANX_RANK", number(rank)).env("PHALANX_LOCAL_RANK", number(rank));
        command
            .env("PHALANX_WORLD_SIZE", number(ranks))
            .env("PHALANX_LOCAL_WORLD_SIZE", number(ranks))
            .spawn()
    };
    let started = (0..ranks).map(start).collect::<Result<Vec<_>, _>>()?;
    Ok(started.into_iter().map(|rank| rank.wait_with_output()).collect::<Result<_, _>>()?)
}

/// The losses that rank 0 has printed, and all that it has said.
fn losses(ended: &[Output]) -> Result<(Vec<f64>, String), Failed> {
    let said = text(&ended[0]);
    let loss = |line: &str| line.split_once("loss ").and_then(|(_, number)| number.parse().ok());
    let losses: Vec<f64> = said.lines().filter_map(loss).collect();
    if losses.len() == 3 {
        Ok((losses, said))
    } else {
        Err(format!("three losses are expected: {said}").into())
    }
}

const SHORT: [&str; 4] = ["--steps", "150", "--accuracy", "75"];

fn compare(one: &[f64], several: &[f64]) -> Result<(), Failed> {
    match one.iter().zip(several).find(|(a, b)| (*a - *b).abs() > 2e-3) {
        Some((a, b)) => Err(format!("a loss of {b} where one rank has {a}").into()),
        None => Ok(()),
    }
}

/// The losses do not depend on the number of ranks.
fn train_loop() -> Result<(), Failed> {
    let (one, _) = losses(&processes("train_loop", 1, &SHORT)?)?;
    let several = processes("train_loop", 3, &SHORT)?;
    if let Some(failed) = several.iter().find(|rank| !rank.status.success()) {
        return Err(text(failed).into());
    }
    compare(&one, &losses(&several)?.0)
}

/// Nor on the loss of one.
fn train_loop_loses_a_rank() -> Result<(), Failed> {
    let (one, _) = losses(&processes("train_loop", 1, &SHORT)?)?;
    let ended = processes("train_loop", 3, &[&SHORT[..], &["--lose-at", "77"]].concat())?;
    let (several, said) = losses(&ended)?;
    if !said.contains("2 ranks go on with step 70") || !said.contains("by 2 ranks") {
        return Err(said.into());
    }
    let well: Vec<bool> = ended.iter().map(|rank| rank.status.success()).collect();
    if well != [true, true, false] {
        return Err(format!("{well:?}: {}", text(&ended[1])).into());
    }
    compare(&one, &several)
}

/// burn's `Learner` as threads, and on from its checkpoint with other ranks.
fn train_digits() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let place = folder.path().to_str().ok_or("a path of text")?;
    let run = |args: &[&str]| {
        let ended =
            Command::new(EXAMPLES.join("train_digits")).args(args).args(["--checkpoints", place]).output()?;
        if ended.status.success() { Ok(()) } else { Err(Failed::from(text(&ended))) }
    };
    run(&["--ranks", "2", "--epochs", "2", "--accuracy", "60"])?;
    if !folder.path().join("optim-2.bpk").exists() {
        return Err("there is no checkpoint".into());
    }
    run(&["--ranks", "3", "--epochs", "4", "--accuracy", "75", "--resume", "2"])
}
