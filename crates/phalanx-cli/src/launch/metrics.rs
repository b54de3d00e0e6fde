//! `--metrics`: serves the ranks' counters to Prometheus. For each scrape the ranks are asked for them.

use super::reports::{Counters, Reports};
use super::start_error::StartError;
use crate::log::say;
use anyhow::{Context, Result};
use phalanx::metrics::{Sample, render};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Environment variable by which the ranks count.
pub const VARIABLE: &str = "PHALANX_METRICS";
/// Longest wait for the ranks' answers.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest wait for a client, and most bytes of its request.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);
const MAX_REQUEST: u64 = 8 << 10;

/// The ranks that can be asked, and what they have answered.
#[derive(Clone)]
pub struct Metrics(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    answered: Condvar,
}

#[derive(Default)]
struct State {
    /// The ranks of this machine that have joined, and where they are asked.
    ranks: BTreeMap<usize, SocketAddr>,
    /// The number of the last request.
    request: u64,
    /// What has come in answer to it, and whether that is all.
    answers: BTreeMap<usize, (Vec<Sample>, bool)>,
}

impl Metrics {
    /// Listens at an address; a thread serves the counters there.
    pub fn serve(address: &str, reports: Reports) -> Result<Metrics> {
        let listener = TcpListener::bind(address).with_context(|| {
            format!(
                "--metrics {address}: cannot listen there; give an address of this machine and a free port"
            )
        })?;
        let address = listener.local_addr()?;
        let metrics = Metrics(Arc::new(Shared { state: Mutex::default(), answered: Condvar::new() }));
        let of_thread = metrics.clone();
        let serve = move || {
            for stream in listener.incoming() {
                // A client that goes away is its own affair.
                let _ = stream.and_then(|stream| of_thread.answer(stream, &reports));
            }
        };
        let thread = std::thread::Builder::new().name("metrics".to_owned());
        thread.spawn(serve).map_err(|error| StartError::thread("serves metrics", error))?;
        say(format_args!("phalanx launch: metrics at http://{address}/metrics"));
        Ok(metrics)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A rank has joined its communicator, and can be asked.
    pub fn joined(&self, rank: usize, address: SocketAddr) {
        self.state().ranks.insert(rank, address);
    }

    /// A rank has ended.
    pub fn ended(&self, rank: usize) {
        self.state().ranks.remove(&rank);
        self.0.answered.notify_all();
    }

    /// A rank has answered.
    pub fn answered(&self, rank: usize, counters: Counters) {
        let mut state = self.state();
        if counters.number == state.request {
            let (samples, is_complete) = state.answers.entry(rank).or_default();
            samples.extend(counters.samples);
            *is_complete |= counters.is_last;
            self.0.answered.notify_all();
        }
    }

    fn answer(&self, stream: TcpStream, reports: &Reports) -> io::Result<()> {
        stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
        stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
        let mut lines = BufReader::new((&stream).take(MAX_REQUEST)).lines();
        let first = lines.next().transpose()?.unwrap_or_default();
        // The headers do not matter, but a connection closed before they are read may lose the answer.
        lines.map_while(Result::ok).take_while(|line| !line.is_empty()).for_each(drop);
        let (status, body) = match first.split_whitespace().collect::<Vec<_>>()[..] {
            ["GET", "/metrics", _] => ("200 OK", self.scrape(reports)),
            ["GET", ..] => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
            _ => ("405 Method Not Allowed", "only GET is served\n".to_owned()),
        };
        write!(
            &stream,
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
    }

    /// Asks all ranks, and puts their answers together. A rank that does not answer has `phalanx_up` 0.
    fn scrape(&self, reports: &Reports) -> String {
        let mut state = self.state();
        state.request += 1;
        state.answers.clear();
        let number = state.request;
        for address in state.ranks.values() {
            // One that has ended since cannot answer.
            let _ = reports.request_metrics(address, number);
        }
        let until = Instant::now() + PATIENCE;
        let is_waited_for = |state: &State| {
            state
                .ranks
                .keys()
                .any(|rank| !state.answers.get(rank).is_some_and(|(_, is_complete)| *is_complete))
        };
        while is_waited_for(&state) && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            state = self.0.answered.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let mut text = String::from(
            "# HELP phalanx_up Whether a rank that has joined its communicator answers.\n# TYPE phalanx_up gauge\n",
        );
        for rank in state.ranks.keys() {
            let up = u8::from(state.answers.contains_key(rank));
            let _ = writeln!(text, "phalanx_up{{rank=\"{rank}\"}} {up}");
        }
        let samples: Vec<Sample> = state.answers.values().flat_map(|(samples, _)| samples.clone()).collect();
        text + &render(&samples)
    }
}
