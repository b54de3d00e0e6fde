//! The examples, which `cargo test` builds beside this program.

use libtest_mimic::{Failed, Trial};
use std::process::Command;

pub fn trials() -> Vec<Trial> {
    vec![Trial::test("examples/train_ddp", train_ddp)]
}

/// What an example prints.
fn run(name: &str, args: &[&str]) -> Result<String, Failed> {
    let own = std::env::current_exe()?;
    let built = own.parent().and_then(|deps| deps.parent()).ok_or("no folder of programs")?;
    let example = built.join("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    let ended = Command::new(&example)
        .args(args)
        .output()
        .map_err(|error| format!("{}: {error}", example.display()))?;
    let (told, complaint) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    if !ended.status.success() {
        return Err(format!("{name} {args:?}: {}\n{told}{complaint}", ended.status).into());
    }
    Ok(told.into_owned())
}

/// The loss curve does not depend on the number of ranks, of which one has no samples in each last batch.
fn train_ddp() -> Result<(), Failed> {
    let losses = |ranks: &str| -> Result<Vec<f64>, Failed> {
        let told = run("train_ddp", &["--ranks", ranks])?;
        let loss = |line: &str| line.split_once("loss ").and_then(|(_, number)| number.parse().ok());
        let losses: Vec<f64> = told.lines().filter_map(loss).collect();
        if losses.len() != 12 {
            return Err(format!("no loss of each epoch: {told}").into());
        }
        Ok(losses)
    };
    let one = losses("1")?;
    for ranks in ["2", "3"] {
        let several = losses(ranks)?;
        if let Some((a, b)) = one.iter().zip(&several).find(|(a, b)| (*a - *b).abs() > 2e-3) {
            return Err(format!("{ranks} ranks: a loss of {b} where one rank has {a}").into());
        }
    }
    Ok(())
}
