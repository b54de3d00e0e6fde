//! The start of a large job: stand-ins for its ranks join a store and exchange a value each.
//!
//! The store is a process of its own, and the ranks are in as many processes as the limit of open files asks for. A stand-in has
//! what a rank has of the store (a connection, authentication, heartbeats, the values of all) and nothing else.

mod crowd;
mod memory;
mod plot;

use clap::{Args, Subcommand};
use phalanx::internal::store::{Server, Settings, Token};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Longer than any step of the largest job takes.
const PATIENCE: Duration = Duration::from_secs(300);
/// Ranks of a process.
const PER_PROCESS: usize = 2000;

/// What to measure.
#[derive(Args, Debug, Clone)]
pub struct Options {
    /// Numbers of ranks, one row each.
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
    /// Where to write the table as a picture.
    #[arg(long)]
    svg: Option<PathBuf>,
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

/// What one number of ranks took.
struct Row {
    join: Duration,
    exchange: Duration,
    memory: memory::Peak,
}

/// Measures each number of ranks and prints a table.
pub fn measure(options: &Options) -> ExitCode {
    println!("ranks,join s,exchange s,store MB,all MB");
    let mut points = Vec::new();
    for &ranks in &options.ranks {
        let Row { join, exchange, memory } = match row(ranks, options) {
            Ok(row) => row,
            Err(error) => {
                eprintln!("{ranks} ranks: {error}");
                return ExitCode::FAILURE;
            }
        };
        let (join, exchange) = (join.as_secs_f64(), exchange.as_secs_f64());
        let [first, all] = [memory.first, memory.all].map(|bytes| bytes / 1_000_000);
        println!("{ranks},{join:.2},{exchange:.2},{first},{all}");
        points.push((ranks, join + exchange));
    }
    let written = options.svg.as_ref().map(|path| std::fs::write(path, plot::draw(&points)));
    match written.transpose() {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the picture cannot be written: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A process of the measurement, with what it prints.
struct Process {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Process {
    fn start(arguments: &[String]) -> std::io::Result<Process> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("start-part")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        Ok(Process { child, output })
    }

    /// Waits for a line of its output.
    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        match self.output.read_line(&mut line)? {
            0 => Err(std::io::Error::other("a process of the measurement has ended: see its message")),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    /// Tells it to go on.
    fn go_on(&mut self) -> std::io::Result<()> {
        self.child.stdin.as_mut().expect("it is piped").write_all(b"\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn row(ranks: usize, options: &Options) -> std::io::Result<Row> {
    let token = Token::random()?;
    let mut arguments = vec!["store".to_owned()];
    arguments.extend(options.encrypted.then(|| "--encrypted".to_owned()));
    let mut store = Process::start(&arguments)?;
    writeln!(store.child.stdin.as_mut().expect("it is piped"), "{}", token.reveal())?;
    let address = store.line()?;
    let mut crowds = Vec::new();
    for first in (0..ranks).step_by(PER_PROCESS) {
        let crowd = crowd::Crowd {
            address: address.clone(),
            first,
            count: PER_PROCESS.min(ranks - first),
            ranks,
            per_host: options.per_host.into(),
            bytes: options.bytes,
            encrypted: options.encrypted,
        };
        let mut process = Process::start(&crowd.arguments())?;
        writeln!(process.child.stdin.as_mut().expect("it is piped"), "{}", token.reveal())?;
        crowds.push(process);
    }
    let ids = std::iter::once(&store).chain(&crowds).map(|process| process.child.id()).collect();
    let watch = memory::Watch::of(ids);
    let step = |crowds: &mut Vec<Process>| -> std::io::Result<Duration> {
        crowds.iter_mut().try_for_each(|crowd| crowd.line().map(drop))?;
        let began = Instant::now();
        crowds.iter_mut().try_for_each(Process::go_on)?;
        Ok(began.elapsed())
    };
    step(&mut crowds)?;
    let began = Instant::now();
    step(&mut crowds)?;
    let join = began.elapsed();
    let began = Instant::now();
    step(&mut crowds)?;
    let exchange = began.elapsed();
    let memory = watch.end();
    drop(crowds);
    Ok(Row { join, exchange, memory })
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
