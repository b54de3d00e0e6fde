//! The start of a job, simulated: ranks join the store and exchange what they have to say about themselves.
//!
//! The store answers one request after the other. A rank's introduction is two requests and answers; in an exchange each rank hands in an
//! entry, and when the last has come, each gets all entries. The next exchange begins at each rank when it has them.

use super::runs::MeasuredStart;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Requests of a rank that joins.
const JOINING: usize = 2;
/// Exchanges: where the ranks are, and how they are reached.
const EXCHANGES: usize = 2;
/// Bytes of a rank's entry, about.
const ENTRY: f64 = 300.0;

/// Times of a start, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Start {
    /// What a process does alone: finding libraries, opening files.
    pub alone: f64,
    /// A request at the store, or an answer.
    pub request: f64,
    /// A message from a host to another, of the fit.
    pub latency: f64,
    /// A byte between hosts, of the fit.
    pub byte: f64,
}

impl Start {
    /// The times by which simulated starts are as long as the measured ones: the least squares of a line through the numbers of ranks.
    pub fn new(measured: &[MeasuredStart], latency: f64, byte: f64) -> Option<Start> {
        if measured.is_empty() {
            return None;
        }
        // What one request costs is seen in how a start grows with the ranks.
        let of = |start: &MeasuredStart| (requests(start.ranks), start.seconds);
        let number = measured.len() as f64;
        let mean = |f: &dyn Fn(&MeasuredStart) -> f64| measured.iter().map(f).sum::<f64>() / number;
        let (x, y) = (mean(&|start| of(start).0), mean(&|start| of(start).1));
        let spread = mean(&|start| (of(start).0 - x).powi(2));
        let slope = if spread > 0.0 { mean(&|start| (of(start).0 - x) * (of(start).1 - y)) / spread } else { 0.0 };
        let request = slope.clamp(0.0, y / x);
        Some(Start { alone: (y - request * x).max(0.0), request, latency, byte })
    }

    /// Seconds until the last of so many ranks has its communicator.
    pub fn simulate(&self, ranks: usize) -> f64 {
        let mut store = 0.0;
        // The times at which ranks hand in their next request.
        let mut arrivals: Vec<f64> = vec![self.alone + self.latency; ranks];
        for _ in 0..JOINING {
            arrivals = self.served(&mut store, arrivals, 2.0 * self.request);
        }
        for _ in 0..EXCHANGES {
            self.served(&mut store, arrivals, self.request);
            let answer = self.request + ranks as f64 * ENTRY * self.byte;
            arrivals = (0..ranks)
                .map(|_| {
                    store += answer;
                    store + 2.0 * self.latency
                })
                .collect();
        }
        arrivals.into_iter().fold(0.0, f64::max) - self.latency
    }

    /// The times at which the ranks come again, after the store has served each for so long, in the order of their arrival.
    fn served(&self, store: &mut f64, arrivals: Vec<f64>, service: f64) -> Vec<f64> {
        let in_nanoseconds = |time: f64| Reverse((time * 1e9) as u64);
        let mut waiting: BinaryHeap<Reverse<u64>> = arrivals.into_iter().map(in_nanoseconds).collect();
        let mut again = Vec::with_capacity(waiting.len());
        while let Some(Reverse(arrival)) = waiting.pop() {
            *store = store.max(arrival as f64 * 1e-9) + service;
            again.push(*store + 2.0 * self.latency);
        }
        again
    }
}

/// Requests and answers of a start.
fn requests(ranks: usize) -> f64 {
    (ranks * 2 * (JOINING + EXCHANGES)) as f64
}
