//! The start of a job, simulated: ranks join the store and exchange what they have to say about themselves.
//!
//! The store answers one request after the other. A rank that joins makes two requests; in an exchange each rank hands in an entry, and
//! when the last has come, each gets all entries. The next exchange begins at each rank when it has them.

use super::fit::Fit;
use super::runs::Runs;
use super::terms::Term;
use serde::Serialize;

/// Requests of a rank that joins, one after the other.
const JOINING: usize = 2;
/// Exchanges: where the ranks are, and how they are reached.
const EXCHANGES: usize = 2;
/// Bytes of a rank's entry, about.
const ENTRY: f64 = 300.0;

/// Times of a start, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Start {
    /// What a process does alone on its core: finding libraries, opening files. From the measured starts.
    pub alone: f64,
    /// A message that the store gets or sends, a wait for it, and a byte: the fit's between hosts, or else between ranks of a host.
    pub message: f64,
    pub latency: f64,
    pub byte: f64,
}

impl Start {
    /// The times of the runs' starts; `None` if no run says how long it took to start.
    pub fn new(runs: &Runs, fit: &Fit) -> Option<Start> {
        let time =
            |far: Term, near: Term| fit.times[far as usize].or(fit.times[near as usize]).unwrap_or(0.0);
        let start = Start {
            alone: 0.0,
            message: time(Term::SwitchMessage, Term::HostMessage),
            latency: time(Term::SwitchWait, Term::HostWait),
            byte: time(Term::SwitchByte, Term::HostByte),
        };
        let mut alone: Vec<f64> = runs
            .starts
            .iter()
            .map(|measured| {
                (measured.seconds - start.simulate(measured.ranks, 1.0)).max(0.0) / measured.turns
            })
            .collect();
        alone.sort_by(f64::total_cmp);
        let median = *alone.get(alone.len() / 2)?;
        Some(Start { alone: median, ..start })
    }

    /// Seconds until the last of so many ranks, of which so many share a core, has its communicator.
    pub fn simulate(&self, ranks: usize, turns: f64) -> f64 {
        // The store's clock, and those of the ranks, in the order in which they are served.
        let mut store = 0.0;
        let mut clocks = vec![self.alone * turns.max(1.0); ranks];
        for _ in 0..JOINING {
            self.serve(&mut store, &mut clocks, 2.0 * self.message);
        }
        for _ in 0..EXCHANGES {
            // Nobody is answered before the last has handed in.
            self.serve(&mut store, &mut clocks, self.message);
            let table = self.message + ranks as f64 * ENTRY * self.byte;
            clocks.fill(0.0);
            self.serve(&mut store, &mut clocks, table);
        }
        clocks.last().copied().unwrap_or(0.0)
    }

    /// The store spends so long with each rank; a rank hears of it after a wait, as the store of the rank.
    fn serve(&self, store: &mut f64, clocks: &mut [f64], service: f64) {
        for clock in clocks {
            *store = store.max(*clock + self.latency) + service;
            *clock = *store + self.latency;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_what_a_hand_counts() {
        let start = Start { alone: 1.0, message: 0.001, latency: 0.0, byte: 0.0 };
        // Two requests with answers, two entries, two tables: 8 messages for each rank, one after the other at the store.
        assert!((start.simulate(1, 1.0) - 1.008).abs() < 1e-9);
        assert!((start.simulate(100, 1.0) - 1.8).abs() < 1e-9);
        assert!((start.simulate(100, 4.0) - 4.8).abs() < 1e-9, "four share a core");
        // Each of 10 ranks gets two tables of 10 entries.
        let start = Start { alone: 0.0, message: 0.0, latency: 0.0, byte: 1e-3 };
        assert!((start.simulate(10, 1.0) - 2.0 * 10.0 * 10.0 * ENTRY * 1e-3).abs() < 1e-9);
    }

    #[test]
    fn ranks_wait_for_the_store_and_not_for_each_other() {
        // To the store and back, for each of two requests and two exchanges.
        let start = Start { alone: 0.0, message: 0.0, latency: 1.0, byte: 0.0 };
        assert!((start.simulate(1000, 1.0) - 8.0).abs() < 1e-9, "{}", start.simulate(1000, 1.0));
    }
}
