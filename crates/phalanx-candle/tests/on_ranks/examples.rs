//! The examples.

use libtest_mimic::{Failed, Trial};
use phalanx_testkit::built::example;
use std::process::Command;

pub fn trials() -> Vec<Trial> {
    vec![Trial::test("examples/train_ddp", train_ddp), Trial::test("examples/train_gpt", train_gpt)]
}

/// What an example prints.
fn run(name: &str, args: &[&str]) -> Result<String, Failed> {
    let ended = Command::new(example(name)).args(args).output()?;
    let (told, complaint) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    if !ended.status.success() {
        return Err(format!("{name} {args:?}: {}\n{told}{complaint}", ended.status).into());
    }
    Ok(told.into_owned())
}

/// Losses of an example, in order.
fn losses(name: &str, args: &[&str], count: usize) -> Result<Vec<f64>, Failed> {
    let told = run(name, args)?;
    let loss = |line: &str| line.split_once("loss ").and_then(|(_, number)| number.parse().ok());
    let losses: Vec<f64> = told.lines().filter_map(loss).collect();
    if losses.len() != count {
        return Err(format!("{name} {args:?}: {count} losses are expected: {told}").into());
    }
    Ok(losses)
}

fn compare(what: &str, one: &[f64], several: &[f64]) -> Result<(), Failed> {
    match one.iter().zip(several).find(|(a, b)| (*a - *b).abs() > 2e-3) {
        Some((a, b)) => Err(format!("{what}: a loss of {b} where one rank has {a}").into()),
        None => Ok(()),
    }
}

/// The loss curve does not depend on the number of ranks, of which one has no samples in each last batch.
fn train_ddp() -> Result<(), Failed> {
    let run = |ranks| losses("train_ddp", &["--epochs", "8", "--accuracy", "80", "--ranks", ranks], 8);
    let one = run("1")?;
    ["2", "3"].into_iter().try_for_each(|ranks| compare(ranks, &one, &run(ranks)?))
}

/// Layers and batches split in any way, and a pause after which other ranks go on, give the losses of one rank. They fall.
fn train_gpt() -> Result<(), Failed> {
    let short = ["--steps", "30", "--length", "12", "--every", "10"];
    let gpt = |args: &[&str], count: usize| losses("train_gpt", &[&short[..], args].concat(), count);
    let one = gpt(&["--ranks", "1"], 3)?;
    if one[2] > one[0] - 0.3 {
        return Err(format!("the loss does not fall: {one:?}").into());
    }
    compare("2 × 2", &one, &gpt(&["--ranks", "4", "--tensor", "2"], 3)?)?;
    compare("1 × 4", &one, &gpt(&["--ranks", "4", "--tensor", "4"], 3)?)?;
    let folder = tempfile::tempdir()?;
    let place = folder.path().to_str().ok_or("a path of text")?;
    let first = gpt(&["--ranks", "4", "--tensor", "2", "--checkpoints", place, "--steps", "20"], 2)?;
    let then = gpt(&["--ranks", "2", "--checkpoints", place], 1)?;
    compare("with a pause", &one, &[first, then].concat())
}
