//! The queue of everything that a launcher reacts to.

use super::metrics::Metrics;
use super::outcome::Notice;
use super::reports::{Report, Reports};
use super::signals::Forwarder;
use super::start_error::StartError;
use crate::error::explain;
use crate::log::say;
use anyhow::{Result, bail};
use std::os::unix::net::SocketAddr;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Instant;

pub enum LaunchEvent {
    /// A rank has ended, and waits to be reaped.
    Ended { index: usize, succeeded: bool },
    /// A rank has reported something.
    Reported { report: Report, from: SocketAddr },
    /// The launcher got a signal.
    Signal(i32),
    /// The attempt ended on another node.
    OtherNode(Notice),
    /// The launchers' exchange before or after an attempt is complete.
    Exchanged(Result<Vec<Vec<u8>>>),
}

/// The queue of events. It lives as long as the launcher, so that no signal is lost between attempts.
pub struct Events {
    sender: Sender<LaunchEvent>,
    queue: Receiver<LaunchEvent>,
    reports: Option<Reports>,
    metrics: Option<Metrics>,
    _forwarder: Forwarder,
}

impl Events {
    /// Catches signals from now on. Call it before the first rank starts: a signal before it ends the
    /// launcher and not the ranks. Serves the ranks' counters, if an address for them is given.
    pub fn catch(metrics: Option<&str>) -> Result<Events> {
        let (sender, queue) = mpsc::channel();
        let to_queue = sender.clone();
        let forwarder = Forwarder::start(move |signal| {
            let _ = to_queue.send(LaunchEvent::Signal(signal));
        });
        let forwarder = forwarder.map_err(|error| StartError::thread("catches signals", error))?;
        let reports = Reports::open(sender.clone()).map_err(|error| {
            say(format_args!("phalanx launch: going on without the ranks' own reports: {}", explain(&error)))
        });
        let reports = reports.ok();
        let metrics = match (metrics, &reports) {
            (Some(address), Some(reports)) => Some(Metrics::serve(address, reports.clone())?),
            (Some(_), None) => bail!("--metrics needs the ranks' own reports"),
            (None, _) => None,
        };
        Ok(Events { sender, queue, reports, metrics, _forwarder: forwarder })
    }

    pub fn sender(&self) -> Sender<LaunchEvent> {
        self.sender.clone()
    }

    /// The ranks' reports, where a socket for them could be opened.
    pub fn reports(&self) -> Option<&Reports> {
        self.reports.as_ref()
    }

    /// Where the ranks' counters are served, if that is wanted.
    pub fn metrics(&self) -> Option<&Metrics> {
        self.metrics.as_ref()
    }

    /// The next event; `None` when the deadline has passed.
    pub fn next(&self, deadline: Option<Instant>) -> Option<LaunchEvent> {
        match deadline {
            None => Some(self.queue.recv().expect("there is a sender beside the queue")),
            Some(at) => self.queue.recv_timeout(at.saturating_duration_since(Instant::now())).ok(),
        }
    }
}
