//! The examples, on ranks as processes and as threads.

use crate::ON_GPUS;
use libtest_mimic::{Failed, Trial};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("examples/train_loop", train_loop),
        Trial::test("examples/train_loop_loses_a_rank", train_loop_loses_a_rank),
        Trial::test("examples/train_loop_replaces_a_rank", train_loop_replaces_a_rank),
        Trial::test("examples/train_digits", train_digits),
    ]
}

/// The folder of the examples, built in a moment if they are built already; or one that is named, on a machine without cargo.
static EXAMPLES: LazyLock<PathBuf> = LazyLock::new(|| {
    if let Some(folder) = std::env::var_os("PHALANX_BURN_EXAMPLES") {
        return folder.into();
    }
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

/// How many ranks there are at most.
static RANKS: LazyLock<usize> = LazyLock::new(|| if *ON_GPUS { 2 } else { 3 });

fn device() -> &'static str {
    if *ON_GPUS { "cuda" } else { "cpu" }
}

fn text(ended: &Output) -> String {
    String::from_utf8_lossy(&ended.stdout).into_owned() + &String::from_utf8_lossy(&ended.stderr)
}

/// Ranks of a program as processes, which find each other as `phalanx launch` would have it.
struct Job<'a> {
    name: &'a str,
    ranks: usize,
    args: Vec<&'a str>,
}

impl Job<'_> {
    fn start(&self, rank: usize, replaces: bool) -> std::io::Result<Child> {
        let number = |number: usize| number.to_string();
        let Job { name, ranks, args } = self;
        let mut command = Command::new(EXAMPLES.join(name));
        command.args(args).args(["--device", device()]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("PHALANX_JOB", format!("{name}-{}-{ranks}-{}", std::process::id(), args.len()));
        command.env("PHALANX_RANK", number(rank)).env("PHALANX_LOCAL_RANK", number(rank));
        command.env("PHALANX_WORLD_SIZE", number(*ranks)).env("PHALANX_LOCAL_WORLD_SIZE", number(*ranks));
        if replaces {
            command.env("PHALANX_REPLACES", number(rank));
        }
        command.spawn()
    }

    /// What the ranks have said and how they ended, in rank order.
    fn run(&self) -> Result<Vec<Output>, Failed> {
        let started = (0..self.ranks).map(|rank| self.start(rank, false)).collect::<Result<Vec<_>, _>>()?;
        Ok(started.into_iter().map(Child::wait_with_output).collect::<Result<_, _>>()?)
    }

    /// The same, with a process that takes the last rank's place when that has ended, and is the last of the answer.
    fn run_and_replace(&self) -> Result<Vec<Output>, Failed> {
        let mut started =
            (0..self.ranks).map(|rank| self.start(rank, false)).collect::<Result<Vec<_>, _>>()?;
        let lost = started.pop().ok_or("no rank")?.wait_with_output()?;
        if lost.status.success() {
            return Err("the lost rank ended well".into());
        }
        started.push(self.start(self.ranks - 1, true)?);
        Ok(started.into_iter().map(Child::wait_with_output).collect::<Result<_, _>>()?)
    }
}

/// All of these ended well.
fn well(ended: &[Output]) -> Result<(), Failed> {
    match ended.iter().find(|rank| !rank.status.success()) {
        Some(failed) => Err(text(failed).into()),
        None => Ok(()),
    }
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

/// A short training on so many ranks.
fn training<'a>(ranks: usize, args: &[&'a str]) -> Job<'a> {
    let args = [&["--steps", "150", "--accuracy", "75"], args].concat();
    Job { name: "train_loop", ranks, args }
}

fn compare(one: &[f64], several: &[f64]) -> Result<(), Failed> {
    match one.iter().zip(several).find(|(a, b)| (*a - *b).abs() > 2e-3) {
        Some((a, b)) => Err(format!("a loss of {b} where one rank has {a}").into()),
        None => Ok(()),
    }
}

/// The losses do not depend on the number of ranks.
fn train_loop() -> Result<(), Failed> {
    let (one, _) = losses(&training(1, &[]).run()?)?;
    let several = training(*RANKS, &[]).run()?;
    well(&several)?;
    compare(&one, &losses(&several)?.0)
}

/// Nor on the loss of one.
fn train_loop_loses_a_rank() -> Result<(), Failed> {
    let (one, _) = losses(&training(1, &[]).run()?)?;
    let ended = training(*RANKS, &["--lose-at", "77"]).run()?;
    let (several, said) = losses(&ended)?;
    let left = *RANKS - 1;
    expect(&said, &[format!("{left} ranks go on with step 70"), format!("by {left} ranks")])?;
    well(&ended[..left])?;
    if ended[left].status.success() {
        return Err("the lost rank ended well".into());
    }
    compare(&one, &several)
}

/// Nor on who takes its place.
fn train_loop_replaces_a_rank() -> Result<(), Failed> {
    let (one, _) = losses(&training(1, &[]).run()?)?;
    let ended = training(*RANKS, &["--lose-at", "77", "--rebuild"]).run_and_replace()?;
    let (several, said) = losses(&ended)?;
    expect(&said, &[format!("{} ranks go on with step 70", *RANKS), format!("by {} ranks", *RANKS)])?;
    well(&ended)?;
    compare(&one, &several)
}

fn expect(said: &str, parts: &[String]) -> Result<(), Failed> {
    if parts.iter().all(|part| said.contains(part)) { Ok(()) } else { Err(said.into()) }
}

/// burn's `Learner` as threads, and on from its checkpoint with other ranks.
fn train_digits() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let place = folder.path().to_str().ok_or("a path of text")?;
    let run = |args: &[&str]| {
        let ended = Command::new(EXAMPLES.join("train_digits"))
            .args(args)
            .args(["--checkpoints", place, "--device", device()])
            .output()?;
        if ended.status.success() { Ok(()) } else { Err(Failed::from(text(&ended))) }
    };
    run(&["--ranks", "2", "--epochs", "2", "--accuracy", "60"])?;
    if !folder.path().join("optim-2.bpk").exists() {
        return Err("there is no checkpoint".into());
    }
    run(&["--ranks", &RANKS.to_string(), "--epochs", "4", "--accuracy", "75", "--resume", "2"])
}
