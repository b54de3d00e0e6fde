//! The start of a large job: stand-ins for its ranks join a store and exchange a value each.
//!
//! The store is a process of its own, and the ranks are in as many processes as the limit of open files asks for. A stand-in has
//! what a rank has of the store (a connection, authentication, heartbeats, the values of all) and nothing else.

mod crowd;
mod plot;
mod process;
mod usage;

use clap::{Args, Subcommand};
use phalanx::internal::store::{Server, Settings, Token};
use plot::Line;
use process::{Contestant, Job, Row};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Longer than any step of the largest job takes.
const PATIENCE: Duration = Duration::from_secs(300);

/// What to measure.
#[derive(Args, Debug, Clone)]
pub struct Options {
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "500,1000,2000")]
    ranks: Vec<usize>,
    /// Ranks of a host, which share a connection. 1: each has its own.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    per_host: u16,
    /// Bytes of each rank.
    #[arg(long, default_value_t = 256)]
    bytes: usize,
    /// Encrypted connections.
    #[arg(long)]
    encrypted: bool,
    /// Measures torch's TCPStore, too: the command that runs docs/benchmarks/torch_store.py. Its ranks have a connection each.
    #[arg(long, value_name = "COMMAND", conflicts_with = "encrypted")]
    torch_store: Option<String>,
    /// The most ranks for TCPStore, of which each asks for the value of each.
    #[arg(long, default_value_t = 1000)]
    torch_most: usize,
    /// Where to write the table as a picture.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Fails if phalanx takes more seconds for any number of ranks.
    #[arg(long, value_name = "SECONDS")]
    within: Option<f64>,
}

/// A process of a measurement.
#[derive(Args, Debug)]
pub struct Part {
    #[command(subcommand)]
    kind: Kind,
}

#[derive(Subcommand, Debug)]
enum Kind {
    /// The store, until its input ends.
    Store {
        #[arg(long)]
        encrypted: bool,
    },
    /// Some of the ranks.
    Ranks(crowd::Crowd),
}

/// Measures each number of ranks, prints a table, and draws it.
pub fn measure(options: &Options) -> ExitCode {
    match table(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn table(options: &Options) -> Result<(), Box<dyn Error>> {
    let phalanx = Contestant::phalanx()?;
    let torch = options.torch_store.as_deref().map(Contestant::torch);
    let contestants = || [Some(&phalanx), torch.as_ref()].into_iter().flatten();
    let mut lines: Vec<Line> =
        contestants().map(|contestant| Line { name: contestant.name, points: Vec::new() }).collect();
    println!(
        "| ranks | store | join s | exchange s | its CPU s | all CPU s | a host's CPU ms | its MB | all MB |\n|---:|---|---:|---:|---:|---:|---:|---:|---:|"
    );
    for &ranks in &options.ranks {
        let Options { per_host, bytes, encrypted, .. } = *options;
        let job = Job { ranks, per_host: per_host.into(), bytes, encrypted };
        for (contestant, line) in contestants().zip(&mut lines) {
            if contestant.name != phalanx.name && ranks > options.torch_most {
                continue;
            }
            let row = contestant
                .measure(job)
                .map_err(|error| format!("{ranks} ranks, {}: {error}", contestant.name))?;
            println!("| {ranks} | {} | {} |", contestant.name, cells(&row, job.hosts()));
            line.points.push((ranks, row.seconds()));
        }
    }
    if let Some(path) = &options.svg {
        std::fs::write(path, plot::draw(&lines)?).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let slowest = lines[0].points.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
    match options.within {
        Some(most) if slowest > most => {
            Err(format!("the start took {slowest:.2} s, and may take {most} s").into())
        }
        _ => Ok(()),
    }
}

fn cells(row: &Row, hosts: usize) -> String {
    let times =
        [row.join, row.exchange, row.store_cpu, row.all_cpu].map(|time| format!("{:.2}", time.as_secs_f64()));
    let of_a_host = row.all_cpu.saturating_sub(row.store_cpu).as_secs_f64() * 1e3 / hosts as f64;
    let memory = [row.memory.first, row.memory.all].map(|bytes| (bytes / 1_000_000).to_string());
    [times.join(" | "), format!("{of_a_host:.1}"), memory.join(" | ")].join(" | ")
}

/// Runs a process of a measurement.
pub fn part(part: &Part) -> ExitCode {
    let mut token = String::new();
    if std::io::stdin().read_line(&mut token).is_err() {
        return ExitCode::FAILURE;
    }
    let token = Token::new(token.trim()).expect("the first process has made it");
    match &part.kind {
        Kind::Store { encrypted } => {
            let settings = Settings { encrypted: *encrypted, ..Settings::default() };
            let server = Server::start("127.0.0.1:0", token, settings).expect("a store");
            println!("{}", server.address());
            let _ = std::io::stdin().read_line(&mut String::new());
        }
        Kind::Ranks(crowd) => crowd.meet(&token),
    }
    ExitCode::SUCCESS
}
