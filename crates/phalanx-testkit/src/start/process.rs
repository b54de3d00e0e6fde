//! The processes of a measurement: one with the store, and some with the ranks. They take each step when the first process says so.

use super::crowd::Crowd;
use super::usage::{Peak, Watch, cpu_time};
use phalanx::internal::store::Token;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Error, Result, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Ranks of a process.
const PER_PROCESS: usize = 2000;

/// A store, as the command whose `store` serves it and whose `ranks` are stand-ins for ranks.
pub struct Contestant {
    pub name: &'static str,
    pub command: Vec<OsString>,
}

/// The size of a job, and how its ranks connect.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    pub ranks: usize,
    pub per_host: usize,
    pub bytes: usize,
    pub encrypted: bool,
}

impl Job {
    pub fn hosts(&self) -> usize {
        self.ranks.div_ceil(self.per_host)
    }
}

/// What a start took.
pub struct Row {
    pub join: Duration,
    pub exchange: Duration,
    /// Processor time of the store's process, and of all.
    pub store_cpu: Duration,
    pub all_cpu: Duration,
    pub memory: Peak,
}

impl Row {
    /// Joining and exchanging together.
    pub fn seconds(&self) -> f64 {
        (self.join + self.exchange).as_secs_f64()
    }
}

impl Contestant {
    /// phalanx's store.
    pub fn phalanx() -> Result<Contestant> {
        let program = std::env::current_exe()?.into_os_string();
        Ok(Contestant { name: "phalanx", command: vec![program, "start-part".into()] })
    }

    /// torch's, in the command that runs `docs/benchmarks/torch_store.py`.
    pub fn torch(command: &str) -> Contestant {
        Contestant { name: "TCPStore", command: command.split_whitespace().map(OsString::from).collect() }
    }

    /// Starts a job of this many ranks.
    pub fn measure(&self, job: Job) -> Result<Row> {
        let token = Token::random()?;
        let mut arguments = vec!["store".to_owned()];
        arguments.extend(job.encrypted.then(|| "--encrypted".to_owned()));
        let mut store = self.start(&arguments, &token)?;
        let address = store.line()?;
        let mut crowds = Vec::new();
        for first in (0..job.ranks).step_by(PER_PROCESS) {
            let count = PER_PROCESS.min(job.ranks - first);
            let Job { ranks, per_host, bytes, encrypted } = job;
            let crowd = Crowd { address: address.clone(), first, count, ranks, per_host, bytes, encrypted };
            crowds.push(self.start(&crowd.arguments(), &token)?);
        }
        let ids: Vec<u32> =
            std::iter::once(&store).chain(&crowds).map(|process| process.child.id()).collect();
        let watch = Watch::of(ids.clone());
        let cpu_times = || ids.iter().map(|id| cpu_time(*id)).collect::<Vec<Duration>>();
        all_go_on(&mut crowds)?;
        let (began, before) = (Instant::now(), cpu_times());
        all_go_on(&mut crowds)?;
        let join = began.elapsed();
        let began = Instant::now();
        all_go_on(&mut crowds)?;
        let exchange = began.elapsed();
        let cpu = cpu_times().into_iter().zip(before).map(|(after, before)| after.saturating_sub(before));
        let cpu: Vec<Duration> = cpu.collect();
        Ok(Row { join, exchange, store_cpu: cpu[0], all_cpu: cpu.iter().sum(), memory: watch.end() })
    }

    fn start(&self, arguments: &[String], token: &Token) -> Result<Process> {
        let (program, words) =
            self.command.split_first().ok_or_else(|| Error::other("the command is empty"))?;
        let mut child = Command::new(program)
            .args(words)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut process = Process { child, output };
        process.tell(token.reveal())?;
        Ok(process)
    }
}

/// A process of the measurement, with what it prints.
struct Process {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Waits for a line of its output.
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        match self.output.read_line(&mut line)? {
            0 => Err(Error::other("a process of the measurement has ended: see its message")),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    fn tell(&mut self, line: &str) -> Result<()> {
        writeln!(self.child.stdin.as_mut().expect("it is piped"), "{line}")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Waits until all processes have done their step, and tells them to take the next.
fn all_go_on(crowds: &mut [Process]) -> Result<()> {
    crowds.iter_mut().try_for_each(|crowd| crowd.line().map(drop))?;
    crowds.iter_mut().try_for_each(|crowd| crowd.tell(""))
}
