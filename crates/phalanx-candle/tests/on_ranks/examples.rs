//! The examples.

use libtest_mimic::{Failed, Trial};
use phalanx_testkit::built::{binary, example};
use std::process::{Command, Output, Stdio};

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("examples/train_ddp", train_ddp),
        Trial::test("examples/train_gpt", train_gpt),
        Trial::test("examples/llama_tp", llama_tp),
        Trial::test("examples/train_elastic", train_elastic),
    ]
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
    losses_in(&run(name, args)?, count)
}

fn losses_in(told: &str, count: usize) -> Result<Vec<f64>, Failed> {
    let loss = |line: &str| line.split_once("loss ").and_then(|(_, number)| number.parse().ok());
    let losses: Vec<f64> = told.lines().filter_map(loss).collect();
    if losses.len() != count {
        return Err(format!("{count} losses are expected: {told}").into());
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

/// Logits and words are those of one rank, on threads and by the launcher, with an output layer of its own and with the embedding's.
fn llama_tp() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let model = folder.path().to_str().ok_or("a path of text")?;
    let args = ["--model", model, "--tokens", "12", "--check", "--ids", "1,2,3,250,7", "9,9"];
    // Without the speed, which is the last line.
    let words = |told: String| {
        told.lines().skip(1).filter(|line| !line.contains("tokens/s")).map(String::from).collect()
    };
    let on = |ranks: &str| -> Result<Vec<String>, Failed> {
        Ok(words(run("llama_tp", &[&args[..], &["--ranks", ranks]].concat())?))
    };
    run("llama_tp", &["--model", model, "--init", "--tokens", "1", "--ranks", "2"])?;
    for is_tied in [false, true] {
        let config = folder.path().join("config.json");
        let text = std::fs::read_to_string(&config)?;
        let tied = |value: bool| format!("\"tie_word_embeddings\": {value}");
        std::fs::write(&config, text.replace(&tied(!is_tied), &tied(is_tied)))?;
        let one = on("1")?;
        if one.len() != 2 || one[0] == one[1] {
            return Err(format!("two prompts are answered: {one:?}").into());
        }
        for ranks in ["2", "4", "8"] {
            let several = on(ranks)?;
            if several != one {
                return Err(format!("{ranks} ranks say {several:?}, one says {one:?}").into());
            }
        }
        if is_tied {
            let mut launch = Command::new(binary("phalanx"));
            let launched =
                launch.args(["launch", "-n", "2", "--"]).arg(example("llama_tp")).args(args).output()?;
            let told = String::from_utf8_lossy(&launched.stdout).into_owned();
            if !one.iter().all(|line| told.contains(line)) {
                return Err(format!(
                    "{one:?} are not in {told}{}",
                    String::from_utf8_lossy(&launched.stderr)
                )
                .into());
            }
        }
    }
    Ok(())
}

/// A rank is lost and another comes, with the losses of a training that loses nobody.
fn train_elastic() -> Result<(), Failed> {
    let program = example("train_elastic");
    let processes = |ranks: usize, more: &[&str]| -> Result<Vec<Output>, Failed> {
        let folder = tempfile::tempdir()?;
        let number = |number: usize| number.to_string();
        let job = format!("train-elastic-{}-{ranks}", std::process::id());
        let start = |rank: usize| {
            let mut command = Command::new(&program);
            command.arg("--checkpoints").arg(folder.path()).args(["--steps", "60"]).args(more);
            command
                .env("PHALANX_JOB", &job)
                .env("PHALANX_RANK", number(rank))
                .env("PHALANX_LOCAL_RANK", number(rank));
            command.env("PHALANX_WORLD_SIZE", number(ranks)).env("PHALANX_LOCAL_WORLD_SIZE", number(ranks));
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
        };
        let started = (0..ranks).map(start).collect::<Result<Vec<_>, _>>()?;
        Ok(started.into_iter().map(|rank| rank.wait_with_output()).collect::<Result<_, _>>()?)
    };
    let text =
        |ended: &Output| String::from_utf8_lossy(&[&ended.stdout[..], &ended.stderr].concat()).into_owned();
    let one = losses_in(&text(&processes(1, &[])?[0]), 6)?;
    let ended = processes(3, &["--lose-at", "27", "--grow-at", "40"])?;
    let told = text(&ended[0]);
    let several = losses_in(&told, 6)?;
    let success: Vec<bool> = ended.iter().map(|rank| rank.status.success()).collect();
    if success != [true, true, false] {
        return Err(format!("{success:?}: {told}{}", text(&ended[1])).into());
    }
    for part in
        ["a rank was lost: 2 ranks go on", "7 steps are made again", "a new rank has come: 3 ranks go on"]
    {
        if !told.contains(part) {
            return Err(format!("{part:?} is not in {told}").into());
        }
    }
    compare("with a loss", &one, &several)
}
