//! The launchers of a job's nodes. They join a store, agree on rank numbers, tell each other how their
//! attempts end, and notice when one of them is lost.

use super::events::{Events, LaunchEvent};
use super::job::Job;
use super::outcome::{Notice, Outcome};
use super::placement::{self, PlacedNode, Placement, StoreAddress};
use super::signals;
use super::start_error::StartError;
use crate::machine::host_name;
use anyhow::{Context, Result, ensure};
use phalanx::internal::store::{Host, Member, Rendezvous, Role, Server, Settings, Store, Token};
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between looks for another node's notice.
const POLL: Duration = Duration::from_millis(200);
/// Time to announce an end to the store.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_secs(5);
/// The other nodes' ranks may run on for any time.
const NO_TIMEOUT: Duration = Duration::MAX;
/// From so many ranks of a job on, those of a node share their launcher's connection to the store.
const SHARED_FROM: usize = 256;
/// Time for the other launchers to end after a signal to this one: more than the supervisor gives their
/// ranks.
const PARTING: Duration = Duration::from_secs(10);

/// This node's launcher among the launchers.
pub struct Nodes {
    store: Arc<Store>,
    /// On node 0 only.
    server: Option<Server>,
    /// In a large job: passes on what this node's ranks ask of the store, in one attempt.
    passing_on: RefCell<Option<Server>>,
    /// What this node has added to the sum of [`count_able`](Nodes::count_able) in this attempt.
    able: Cell<i64>,
    timeout: Duration,
    address: StoreAddress,
    node: usize,
    nodes: usize,
    host: String,
}

/// A launcher's message before an attempt.
#[derive(Serialize, Deserialize)]
struct Begin {
    host: String,
    ranks: usize,
    /// A proposal; node 0's is taken.
    job: String,
}

/// A launcher's message after an attempt.
#[derive(Serialize, Deserialize)]
struct End {
    notice: Option<Notice>,
    restarts_left: u32,
}

impl Nodes {
    /// Joins the other launchers. Node 0 starts the store.
    pub fn join(
        address: &str,
        token: Token,
        job: &str,
        node: usize,
        nodes: usize,
        timeout: Duration,
    ) -> Result<Nodes> {
        let count = |n: usize| u32::try_from(n).context("too many nodes");
        let size = count(nodes)?;
        let nodes_job = Some(job.to_owned());
        let settings = Settings { nodes: Some(size), nodes_job, ..placement::store_settings()? };
        let (host, epoch, encrypted) = (Host::Rank(0), 0, settings.encrypted);
        let server = if node == 0 {
            Some(Server::for_hosts(address, token.clone(), settings, timeout)?)
        } else {
            None
        };
        let address = address.to_owned();
        let job = job.to_owned();
        let rendezvous =
            Rendezvous { address: address.clone(), token: token.clone(), job, epoch, host, encrypted };
        let member = Member { role: Role::Node, rank: count(node)?, size };
        let store = Arc::new(Store::join(&rendezvous, member, timeout)?);
        store.exchange("nodes", b"", timeout)?;
        let host = host_name();
        let address = StoreAddress { address, token };
        let (passing_on, able) = (RefCell::default(), Cell::new(0));
        Ok(Nodes { store, server, passing_on, able, timeout, address, node, nodes, host })
    }

    /// Agrees with the other launchers on an attempt's id and rank numbers. Breaks with the outcome if a
    /// signal ended the job.
    pub fn begin_attempt(
        &self,
        restart: u32,
        job: &Job,
        events: &Events,
    ) -> Result<ControlFlow<Outcome, Placement>> {
        let ranks = job.ranks;
        self.passing_on.take();
        self.able.set(0);
        if let Some(server) = &self.server {
            // The other nodes start no rank of the new epoch before the exchange below.
            server.begin_epoch(restart);
        }
        let own =
            serde_json::to_vec(&Begin { host: self.host.clone(), ranks, job: placement::random_job_id()? })?;
        let all = match self.exchange("begin", restart, own, events) {
            ControlFlow::Continue(all) => all?,
            ControlFlow::Break(outcome) => return Ok(ControlFlow::Break(outcome)),
        };
        let all: Vec<Begin> =
            all.iter().map(|bytes| serde_json::from_slice(bytes)).collect::<Result<_, _>>()?;
        let sum = |nodes: &[Begin]| nodes.iter().map(|node| node.ranks).sum::<usize>();
        ensure!(all.len() == self.nodes, "{} of {} nodes answered", all.len(), self.nodes);
        // New ranks need connections of their own.
        let shares = sum(&all) >= shared_from() && ranks > 1 && job.restarts.most == 0;
        let store = match shares {
            true => self.store_for_ranks(restart, ranks)?,
            false => self.address.clone(),
        };
        Ok(ControlFlow::Continue(Placement {
            job: all[0].job.clone(),
            restart,
            first: sum(&all[..self.node]),
            ranks,
            world_size: sum(&all),
            node: self.node,
            nodes: all.into_iter().map(|Begin { host, ranks, .. }| PlacedNode { host, ranks }).collect(),
            store: Some(store),
        }))
    }

    /// A store of this launcher, in a large job: it connects this node's ranks to the job's, all at once.
    fn store_for_ranks(&self, restart: u32, ranks: usize) -> Result<StoreAddress> {
        let StoreAddress { address, token } = self.address.clone();
        let settings = Settings { ranks: u32::try_from(ranks).ok(), ..placement::store_settings()? };
        let (host, encrypted, job) = (Host::Rank(0), settings.encrypted, String::new());
        let rendezvous = Rendezvous { address, token: token.clone(), job, epoch: restart, host, encrypted };
        let server = Server::carrying(&rendezvous, settings, self.timeout)?;
        let address = server.address().to_string();
        self.passing_on.replace(Some(server));
        Ok(StoreAddress { address, token })
    }

    /// Counts one more restart of a rank, of at most so many on all nodes. `None`: none is left, or the store cannot be asked.
    pub fn take_restart(&self, most: u32) -> Option<u32> {
        let done = self.store.add("restarts", 1, ANNOUNCE_TIMEOUT).ok()?;
        u32::try_from(done).ok().filter(|done| *done <= most)
    }

    /// Tells the other nodes how many ranks of this one could take in a new one; answers the number on all nodes. `None`: the store
    /// cannot be asked.
    pub fn count_able(&self, restart: u32, here: usize) -> Option<usize> {
        let here = i64::try_from(here).ok()?;
        let sum =
            self.store.add(&format!("able {restart}"), here - self.able.replace(here), ANNOUNCE_TIMEOUT);
        usize::try_from(sum.ok()?).ok()
    }

    /// Exchanges a message with the other launchers, however long they take.
    ///
    /// A signal that ends the job is announced to them, and they get [`PARTING`] to end; a second signal cuts
    /// that short. Both break with the outcome.
    fn exchange(
        &self,
        name: &str,
        restart: u32,
        own: Vec<u8>,
        events: &Events,
    ) -> ControlFlow<Outcome, Result<Vec<Vec<u8>>>> {
        let (store, sender, key) = (self.store.clone(), events.sender(), format!("{name} {restart}"));
        let exchange = move || {
            let all = store.exchange(&key, &own, NO_TIMEOUT).map_err(Into::into);
            let _ = sender.send(LaunchEvent::Exchanged(all));
        };
        if let Err(error) = std::thread::Builder::new().name("exchange".to_owned()).spawn(exchange) {
            let error = StartError::thread("talks to the other nodes", error);
            return ControlFlow::Continue(Err(error.into()));
        }
        // The outcome after a signal, and the end of the wait.
        let mut parting: Option<(Outcome, Instant)> = None;
        loop {
            match (events.next(parting.as_ref().map(|(_, until)| *until)), parting.take()) {
                (Some(LaunchEvent::Exchanged(all)), None) => return ControlFlow::Continue(all),
                (Some(LaunchEvent::Signal(signal)), None) if signals::is_ending(signal) => {
                    let interrupted = Outcome::Interrupted { signal };
                    let outcome = self.announce(restart, &interrupted).unwrap_or(interrupted);
                    parting = Some((outcome, Instant::now() + PARTING));
                }
                (Some(LaunchEvent::Exchanged(_)) | None, Some((outcome, _))) => {
                    return ControlFlow::Break(outcome);
                }
                (Some(LaunchEvent::Signal(signal)), Some((outcome, _))) if signals::is_ending(signal) => {
                    return ControlFlow::Break(outcome);
                }
                (Some(LaunchEvent::Signal(signals::STOP)), waiting) => {
                    signals::stop_self();
                    parting = waiting;
                }
                (_, waiting) => parting = waiting,
            }
        }
    }

    /// Announces to the other nodes that this node's attempt ends before its time. If another node announced
    /// its end first, returns that one's notice, which is the outcome of the job.
    pub fn announce(&self, restart: u32, outcome: &Outcome) -> Option<Outcome> {
        let own = Notice::of(outcome, self.node, &self.host)?;
        if matches!(outcome, Outcome::OtherNode(_)) {
            return None;
        }
        let first = self.store.set_first(&end_key(restart), &own.to_bytes(), ANNOUNCE_TIMEOUT).ok()?;
        Notice::from_bytes(&first).filter(|first| *first != own).map(Outcome::OtherNode)
    }

    /// Calls `on_end` from another thread when the attempt ends on another node, or a node is lost. Stops
    /// when the result is dropped.
    pub fn watch(&self, restart: u32, on_end: impl FnOnce(Notice) + Send + 'static) -> io::Result<Watch> {
        let stop = Arc::new(AtomicBool::new(false));
        let (store, stopped, node) = (self.store.clone(), stop.clone(), self.node);
        let watch = move || {
            while !stopped.load(Ordering::Relaxed) {
                let notice = match store.get(&end_key(restart), POLL) {
                    Ok(bytes) => Notice::from_bytes(&bytes).filter(|notice| notice.node != node),
                    Err(_) => store.lost().first().map(|lost| Notice::lost(lost.rank, &lost.why)),
                };
                match notice {
                    Some(notice) => return on_end(notice),
                    // This node's own notice is answered at once: do not spin on it.
                    None => std::thread::sleep(POLL / 10),
                }
            }
        };
        let thread = std::thread::Builder::new().name("nodes".to_owned()).spawn(watch)?;
        Ok(Watch { stop, thread: Some(thread) })
    }

    /// Waits until the attempt has ended on all nodes. Returns the job's outcome, and whether all nodes start
    /// it again.
    pub fn end_attempt(
        &self,
        restart: u32,
        outcome: Outcome,
        job: &Job,
        restarts_left: u32,
        events: &Events,
    ) -> (Outcome, bool) {
        let notice = Notice::of(&outcome, self.node, &self.host);
        let own = serde_json::to_vec(&End { notice, restarts_left }).expect("text and numbers");
        let ends = match self.exchange("end", restart, own, events) {
            ControlFlow::Continue(ends) => ends,
            ControlFlow::Break(interrupted) if matches!(outcome, Outcome::Success) => {
                return (interrupted, false);
            }
            ControlFlow::Break(_) => return (outcome, false),
        };
        let ends = ends.map(|all| all.iter().filter_map(|end| serde_json::from_slice(end).ok()).collect());
        let ends: Vec<End> = match ends {
            Ok(ends) => ends,
            // The ranks of this node have gone on without those of a lost one.
            Err(_) if job.keep_going => return (outcome, false),
            Err(error) => return (self.without_the_others(outcome, &error), false),
        };
        if ends.iter().filter_map(|end| end.notice.as_ref()).any(|notice| notice.starts_over) {
            return (outcome, true);
        }
        if job.keep_going
            && matches!(outcome, Outcome::Failed(_))
            && ends.iter().any(|end| end.notice.is_none())
        {
            return (Outcome::Success, false);
        }
        let counts = |notice: &Notice| !(job.keep_going && notice.may_restart);
        let failed = ends.iter().find_map(|end| end.notice.clone().filter(counts));
        let all_restart = ends
            .iter()
            .all(|end| end.restarts_left > 0 && end.notice.as_ref().is_none_or(|notice| notice.may_restart));
        match (outcome, failed) {
            (outcome, None) => (outcome, false),
            // This node's ranks had ended before another node failed.
            (Outcome::Success, Some(notice)) => (Outcome::OtherNode(notice), all_restart),
            (outcome, Some(_)) => (outcome, all_restart),
        }
    }

    /// The outcome if the exchange at the end failed, most likely because a node is lost.
    fn without_the_others(&self, outcome: Outcome, error: &anyhow::Error) -> Outcome {
        if !matches!(outcome, Outcome::Success) {
            return outcome;
        }
        let lost = self.store.lost().first().map(|lost| (lost.rank, lost.why.clone()));
        let (node, why) = lost.unwrap_or((self.node, error.to_string()));
        Outcome::OtherNode(Notice::lost(node, &why))
    }
}

/// [`SHARED_FROM`], or less in a test.
fn shared_from() -> usize {
    let less = std::env::var("PHALANX_TEST_SHARED_FROM").ok();
    less.and_then(|number| number.parse().ok()).unwrap_or(SHARED_FROM)
}

/// The store's key for the notice of the first node whose attempt ends before its time.
fn end_key(restart: u32) -> String {
    format!("ending {restart}")
}

/// A thread that waits for a notice, until it is dropped.
pub struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
