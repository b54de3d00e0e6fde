//! What the ranks tell the launcher: that they have joined, why their communicator failed, that their flight records are written, what they
//! have counted.
//!
//! The messages are described where they are sent, in `watch/launcher.rs` of the library. The end of a rank comes through the same
//! socket, behind everything that the rank has sent.

use super::events::LaunchEvent;
use anyhow::{Context, Result};
use phalanx::metrics::Sample;
use std::io;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

/// Environment variable with the socket's name, for the ranks.
pub const VARIABLE: &str = "PHALANX_LAUNCHER";
/// The longest message.
const MAX_MESSAGE: usize = 1 << 16;
/// Longest wait for room in a receiver's queue.
const SEND_TIMEOUT: Duration = Duration::from_millis(200);
/// A request for flight records.
const REQUEST: &[u8] = b"write";

/// A message of a rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The job of the sender, which it proves to belong to by knowing it.
    pub job: String,
    /// The sender's number, as the launcher gave it.
    pub rank: usize,
    pub process: u32,
    pub what: What,
}

#[derive(Debug, Clone, PartialEq)]
pub enum What {
    /// It is a rank of a communicator now.
    Joined {
        /// Whether it writes flight records on request.
        answers: bool,
        /// Whether it tells its counters on request.
        counts: bool,
        /// The processes without which it has gone on after a failure.
        lost: Vec<u32>,
    },
    /// Its communicator has failed.
    Failed(Diagnosis),
    /// It panics.
    Panicked,
    /// Its flight records are written.
    Written,
    /// Counters, in answer to a request.
    Metrics(Counters),
}

/// A part of a rank's counters.
#[derive(Debug, Clone, PartialEq)]
pub struct Counters {
    /// The number of the request.
    pub number: u64,
    /// Whether no further part comes.
    pub is_last: bool,
    pub samples: Vec<Sample>,
}

/// Why a rank's communicator has failed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Diagnosis {
    /// Ranks at fault by their numbers, where these are the launcher's.
    pub ranks: Vec<usize>,
    /// Processes of ranks at fault.
    pub processes: Vec<u32>,
    pub why: String,
}

impl Report {
    fn parse(message: &str) -> Option<Report> {
        let (mut job, mut rank, mut process, mut event, mut answers) = (None, None, None, None, false);
        let mut diagnosis = Diagnosis::default();
        let (mut counts, mut number, mut is_last) = (false, 0, false);
        let (head, body) = message.split_once("\n\n").unwrap_or((message, ""));
        for (name, value) in head.lines().filter_map(|line| line.split_once('=')) {
            match name {
                "job" => job = Some(value.to_owned()),
                "rank" => rank = value.parse().ok(),
                "process" => process = value.parse().ok(),
                "event" => event = Some(value),
                "answers" => answers = value == "1",
                "counts" => counts = value == "1",
                "ranks" => diagnosis.ranks = numbers(value),
                "processes" => diagnosis.processes = numbers(value),
                "why" => diagnosis.why = value.to_owned(),
                "number" => number = value.parse().ok()?,
                "last" => is_last = value == "1",
                _ => {}
            }
        }
        let what = match event? {
            "joined" => What::Joined { answers, counts, lost: diagnosis.processes },
            "failed" => What::Failed(diagnosis),
            "panicked" => What::Panicked,
            "written" => What::Written,
            "metrics" => What::Metrics(Counters {
                number,
                is_last,
                samples: body.lines().filter_map(Sample::parse).collect(),
            }),
            _ => return None,
        };
        Some(Report { job: job?, rank: rank?, process: process?, what })
    }
}

fn numbers<N: std::str::FromStr>(list: &str) -> Vec<N> {
    list.split(',').filter_map(|number| number.parse().ok()).collect()
}

/// The launcher's socket. Its thread ends with the process.
#[derive(Clone)]
pub struct Reports {
    socket: Arc<UnixDatagram>,
    name: String,
    /// Known to this process alone: nobody else can send a rank's end.
    secret: String,
}

impl Reports {
    /// Opens the socket; what arrives becomes an event.
    pub fn open(events: Sender<LaunchEvent>) -> Result<Reports> {
        let [name, secret] = [super::placement::random_job_id()?, super::placement::random_job_id()?];
        let name = format!("phalanx-launch-{name}");
        let open = || {
            let socket = UnixDatagram::bind_addr(&abstract_address(&name)?)?;
            socket.set_write_timeout(Some(SEND_TIMEOUT))?;
            io::Result::Ok(Arc::new(socket))
        };
        let socket = open().context("cannot open the socket for the ranks' reports")?;
        let reports = Reports { socket, name, secret };
        let of_thread = reports.clone();
        let thread = std::thread::Builder::new().name("reports".to_owned());
        thread
            .spawn(move || of_thread.receive(&events))
            .context("cannot start the thread for the ranks' reports")?;
        Ok(reports)
    }

    /// The socket's name, for the ranks.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Announces a rank's end behind everything that it has sent.
    pub fn announce_end(&self, index: usize, succeeded: bool) -> io::Result<()> {
        let message = format!("{} {index} {succeeded}", self.secret);
        let own = abstract_address(&self.name)?;
        loop {
            match self.socket.send_to_addr(message.as_bytes(), &own) {
                // This process's thread is behind with reading.
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                sent => return sent.map(drop),
            }
        }
    }

    /// Asks a rank for its flight records.
    pub fn request_records(&self, rank: &SocketAddr) -> io::Result<()> {
        self.socket.send_to_addr(REQUEST, rank).map(drop)
    }

    /// Asks a rank for its counters.
    pub fn request_metrics(&self, rank: &SocketAddr, number: u64) -> io::Result<()> {
        self.socket.send_to_addr(format!("metrics={number}").as_bytes(), rank).map(drop)
    }

    fn receive(&self, events: &Sender<LaunchEvent>) {
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            let (len, from) = match self.socket.recv_from(&mut buffer) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            let Ok(message) = std::str::from_utf8(&buffer[..len]) else { continue };
            let event = match message.strip_prefix(&self.secret) {
                Some(end) => end_event(end),
                None => Report::parse(message).map(|report| LaunchEvent::Reported { report, from }),
            };
            if event.is_some_and(|event| events.send(event).is_err()) {
                return;
            }
        }
    }
}

#[cfg(target_os = "linux")]
fn abstract_address(name: &str) -> io::Result<SocketAddr> {
    use std::os::linux::net::SocketAddrExt;
    SocketAddr::from_abstract_name(name)
}

#[cfg(not(target_os = "linux"))]
fn abstract_address(_name: &str) -> io::Result<SocketAddr> {
    Err(io::ErrorKind::Unsupported.into())
}

fn end_event(text: &str) -> Option<LaunchEvent> {
    let (index, succeeded) = text.trim_start().split_once(' ')?;
    Some(LaunchEvent::Ended { index: index.parse().ok()?, succeeded: succeeded == "true" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_as_it_is_written() {
        let text =
            "job=ab\nrank=1\nprocess=12\nevent=failed\nranks=2\nprocesses=13,14\nwhy=rank 2 has left: x=y";
        let diagnosis =
            Diagnosis { ranks: vec![2], processes: vec![13, 14], why: "rank 2 has left: x=y".to_owned() };
        let report = Report { job: "ab".to_owned(), rank: 1, process: 12, what: What::Failed(diagnosis) };
        assert_eq!(Report::parse(text), Some(report));
        let joined =
            Report::parse("job=ab\nrank=1\nprocess=12\nevent=joined\nanswers=1\ncounts=0\nprocesses=13")
                .unwrap();
        assert_eq!(joined.what, What::Joined { answers: true, counts: false, lost: vec![13] });
        for broken in
            ["", "job=ab", "job=ab\nrank=x\nprocess=1\nevent=joined", "job=a\nrank=1\nprocess=1\nevent=?"]
        {
            assert_eq!(Report::parse(broken), None, "{broken}");
        }
    }
}
