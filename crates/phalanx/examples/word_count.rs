//! Counts words. Rank 0 deals out lines, each rank counts, every word goes to the rank that it belongs to, and rank 0 collects the most
//! frequent ones: four collectives of objects.
//!
//! ```text
//! cargo run --release -p phalanx --example word_count -- 4 README.md     4 ranks as threads
//! phalanx launch -n 4 -- target/release/examples/word_count 4 README.md
//! ```
//!
//! Without a file it counts the words of this program.

#[path = "shared/ranks.rs"]
mod ranks;

use phalanx::{Comm, ReduceOp};
use ranks::Result;
use std::collections::BTreeMap;
use std::process::ExitCode;

type Counts = BTreeMap<String, u64>;

/// How many of the most frequent words are printed.
const SHOWN: usize = 5;

fn main() -> ExitCode {
    ranks::on_ranks("word_count", |comm, arguments| one_rank(comm, arguments.first().map(String::as_str)))
}

fn one_rank(comm: Comm, file: Option<&str>) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    // If the file cannot be read, all ranks are told, and end.
    let text = comm.broadcast_object((rank == 0).then(|| read(file)), 0)??;
    let lines: Vec<&str> = text.lines().collect();
    let deal = |to: usize| lines[to * lines.len() / ranks..(to + 1) * lines.len() / ranks].join("\n");
    let dealt = comm.scatter_objects((rank == 0).then(|| (0..ranks).map(deal).collect()), 0)?;

    let mut by_owner = vec![Counts::new(); ranks];
    for word in words(&dealt) {
        let owner = word.bytes().map(usize::from).sum::<usize>() % ranks;
        *by_owner[owner].entry(word).or_default() += 1;
    }
    let mut own = Counts::new();
    for (word, count) in comm.all_to_all_objects(by_owner)?.into_iter().flatten() {
        *own.entry(word).or_default() += count;
    }

    let total = comm.all_reduce_value(own.values().sum::<u64>(), ReduceOp::Sum)?;
    let distinct = comm.all_reduce_value(own.len() as u64, ReduceOp::Sum)?;
    let frequent = comm.gather_object(&most_frequent(own), 0)?;
    comm.finalize()?;
    if let Some(frequent) = frequent {
        println!("{total} words, {distinct} of them different");
        for (word, count) in most_frequent(frequent.into_iter().flatten()) {
            println!("{count:6} {word}");
        }
        let expected = words(&text).count() as u64;
        if total != expected {
            return Err(format!("{total} words were counted, the text has {expected}").into());
        }
    }
    Ok(())
}

fn read(file: Option<&str>) -> std::result::Result<String, String> {
    match file {
        None => Ok(include_str!("word_count.rs").into()),
        Some(file) => std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}")),
    }
}

fn words(text: &str) -> impl Iterator<Item = String> {
    text.split(|letter: char| !letter.is_alphabetic()).filter(|word| !word.is_empty()).map(str::to_lowercase)
}

/// The words with the highest counts; of equal counts the first by alphabet.
fn most_frequent(counts: impl IntoIterator<Item = (String, u64)>) -> Vec<(String, u64)> {
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by(|(word, count), (other, others)| others.cmp(count).then_with(|| word.cmp(other)));
    counts.truncate(SHOWN);
    counts
}
