//! The examples.

use libtest_mimic::{Failed, Trial};
use phalanx_testkit::built::example;
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

/// What the ranks of an example have said and how they ended, in rank order; each is a process.
fn processes(name: &str, ranks: usize, args: &[&str]) -> Result<Vec<Output>, Failed> {
    let program = example(name);
    let job = format!("{name}-{}-{ranks}", std::process::id());
    let start = |rank: usize| {
        let mut command = Command::new(&program);
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).env("PHALANX_JOB", &job);
        for (variable, value) in
            [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)]
        {
            command.env(format!("PHALANX_{variable}"), value.to_string());
        }
        command.spawn()
    };
    let started = (0..ranks).map(start).collect::<Result<Vec<_>, _>>()?;
    Ok(started.into_iter().map(|rank| rank.wait_with_output()).collect::<Result<_, _>>()?)
}

fn text(ended: &Output) -> String {
    String::from_utf8_lossy(&[&ended.stdout[..], &ended.stderr].concat()).into_owned()
}

/// Logits and words are those of one rank, on threads and processes, with an output layer of its own and with the embedding's.
fn llama_tp() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let model = folder.path().to_str().ok_or("a path of text")?;
    let args = ["--model", model, "--tokens", "12", "--check", "--ids", "1,2,3,250,7", "9,9"];
    // What answers the prompts, between the comparison and the speed.
    let words = |told: &str| -> Vec<String> {
        told.lines().filter(|line| line.ends_with(']')).map(String::from).collect()
    };
    run("llama_tp", &["--model", model, "--init", "--tokens", "1", "--ranks", "2"])?;
    for is_tied in [false, true] {
        let config = folder.path().join("config.json");
        let tied = |value: bool| format!("\"tie_word_embeddings\": {value}");
        let text_of = std::fs::read_to_string(&config)?;
        std::fs::write(&config, text_of.replace(&tied(!is_tied), &tied(is_tied)))?;
        let one = words(&run("llama_tp", &[&args[..], &["--ranks", "1"]].concat())?);
        if one.len() != 2 || one[0] == one[1] {
            return Err(format!("two prompts are answered: {one:?}").into());
        }
        let on_threads = run("llama_tp", &[&args[..], &["--ranks", "4"]].concat())?;
        let on_processes = text(&processes("llama_tp", 2, &args)?[0]);
        if let Some(told) = [on_threads, on_processes].iter().find(|told| words(told) != one) {
            return Err(format!("one rank says {one:?}, others {told}").into());
        }
    }
    Ok(())
}

/// A rank is lost and another comes, with the losses of a training that loses nobody.
fn train_elastic() -> Result<(), Failed> {
    let train = |ranks: usize, more: &[&str]| {
        let folder = tempfile::tempdir()?;
        let place = folder.path().to_str().ok_or("a path of text")?;
        processes("train_elastic", ranks, &[&["--checkpoints", place, "--steps", "60"], more].concat())
    };
    let one = losses_in(&text(&train(1, &[])?[0]), 6)?;
    let ended = train(3, &["--lose-at", "27", "--grow-at", "40"])?;
    let told = text(&ended[0]);
    let several = losses_in(&told, 6)?;
    let success: Vec<bool> = ended.iter().map(|rank| rank.status.success()).collect();
    if success != [true, true, false] {
        return Err(format!("{success:?}: {told}{}", text(&ended[1])).into());
    }
    let parts =
        ["a rank was lost: 2 ranks go on", "7 steps are made again", "a new rank has come: 3 ranks go on"];
    if let Some(part) = parts.iter().find(|part| !told.contains(**part)) {
        return Err(format!("{part:?} is not in {told}").into());
    }
    compare("with a loss", &one, &several)
}
