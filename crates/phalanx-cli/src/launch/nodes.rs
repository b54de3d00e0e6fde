//! The launchers of a job's nodes, which meet in the store: they agree on numbers, tell each other how their
//! parts end, and notice when one of them is lost.

use super::job::Outcome;
use super::notice::Notice;
use super::part::{self, Part, StoreAt};
use super::signals;
use super::supervisor::{Event, Events};
use anyhow::{Context, Result, ensure};
use phalanx::store::{Host, Member, Rendezvous, Role, Server, Store, Token, server};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a launcher looks whether something has happened elsewhere.
const TICK: Duration = Duration::from_millis(200);
/// How long telling the others may take: whoever is still there answers sooner.
const TELLING: Duration = Duration::from_secs(5);
/// The other nodes may run on for as long as they like.
const FOR_EVER: Duration = Duration::MAX;
/// How long the others may take to end when this launcher was told to: longer than their ranks are given.
const PARTING: Duration = Duration::from_secs(10);

/// This launcher among the launchers.
pub struct Nodes {
    store: Arc<Store>,
    /// On node 0.
    server: Option<Server>,
    at: StoreAt,
    node: usize,
    nodes: usize,
    host: String,
}

/// What a launcher says before an attempt.
#[derive(Serialize, Deserialize)]
struct Beginning {
    ranks: usize,
    /// Node 0's choice.
    job: String,
}

/// What a launcher says after it.
#[derive(Serialize, Deserialize)]
struct End {
    notice: Option<Notice>,
    restarts_left: u32,
}

impl Nodes {
    /// Meets the other launchers; node 0 begins the store.
    pub fn meet(address: &str, token: Token, node: usize, nodes: usize, timeout: Duration) -> Result<Nodes> {
        let count = |n: usize| u32::try_from(n).context("too many nodes");
        let size = count(nodes)?;
        let settings = phalanx::store::Settings { nodes: Some(size), ..part::settings()? };
        let (host, epoch, encrypted) = (Host::Rank(0), 0, settings.encrypted);
        let server = if node == 0 {
            server::check_reachable(address)?;
            Some(Server::start(address, token.clone(), settings)?)
        } else {
            None
        };
        let address = address.to_owned();
        let rendezvous =
            Rendezvous { address: address.clone(), token: token.clone(), epoch, host, encrypted };
        let member = Member { role: Role::Node, rank: count(node)?, size };
        let store = Arc::new(Store::join(&rendezvous, member, timeout)?);
        store.exchange("nodes", b"", timeout)?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Ok(Nodes { store, server, at: StoreAt { address, token }, node, nodes, host })
    }

    /// Begins an attempt with the others: whose ranks have which numbers, and the attempt's id. Answers how the job
    /// ends instead, if a signal came.
    pub fn begin(&self, restart: u32, ranks: usize, events: &Events) -> Result<Result<Part, Outcome>> {
        if let Some(server) = &self.server {
            // Before the others can start ranks of the new epoch: they wait for this node below.
            server.begin_epoch(restart);
        }
        let own = serde_json::to_vec(&Beginning { ranks, job: part::job_id()? })?;
        let all = match self.exchange("begin", restart, own, events) {
            Ok(all) => all?,
            Err(interrupted) => return Ok(Err(interrupted)),
        };
        let all: Vec<Beginning> =
            all.iter().map(|bytes| serde_json::from_slice(bytes)).collect::<Result<_, _>>()?;
        let sum = |nodes: &[Beginning]| nodes.iter().map(|node| node.ranks).sum::<usize>();
        ensure!(all.len() == self.nodes, "{} of {} nodes answered", all.len(), self.nodes);
        Ok(Ok(Part {
            job: all[0].job.clone(),
            restart,
            first: sum(&all[..self.node]),
            ranks,
            world_size: sum(&all),
            node: self.node,
            nodes: self.nodes,
            store: Some(self.at.clone()),
        }))
    }

    /// Exchanges something with the other launchers, however long they take. If a signal comes that ends the job, they
    /// are told and given a moment to end, which a second signal ends; answers then how the job ends.
    fn exchange(
        &self,
        what: &str,
        restart: u32,
        own: Vec<u8>,
        events: &Events,
    ) -> Result<Result<Vec<Vec<u8>>>, Outcome> {
        let (store, sender, name) = (self.store.clone(), events.sender(), format!("{what} {restart}"));
        std::thread::spawn(move || {
            let all = store.exchange(&name, &own, FOR_EVER).map_err(Into::into);
            let _ = sender.send(Event::Exchanged(all));
        });
        let mut parting: Option<(Outcome, Instant)> = None;
        loop {
            match (events.next(parting.as_ref().map(|(_, until)| *until)), parting.take()) {
                (Some(Event::Exchanged(all)), None) => return Ok(all),
                (Some(Event::Signal(signal)), None) if signals::is_ending(signal) => {
                    let interrupted = Outcome::Interrupted { signal };
                    let counts = self.tell(restart, &interrupted).unwrap_or(interrupted);
                    parting = Some((counts, Instant::now() + PARTING));
                }
                (Some(Event::Exchanged(_)) | None, Some((outcome, _))) => return Err(outcome),
                (Some(Event::Signal(signal)), Some((outcome, _))) if signals::is_ending(signal) => {
                    return Err(outcome);
                }
                (Some(Event::Signal(signals::STOP)), waiting) => {
                    signals::stand_still();
                    parting = waiting;
                }
                (_, waiting) => parting = waiting,
            }
        }
    }

    /// Tells the others that this node's part ends before its time. If another node's did so first, answers
    /// what that one said.
    pub fn tell(&self, restart: u32, outcome: &Outcome) -> Option<Outcome> {
        let own = Notice::of(outcome, self.node, &self.host)?;
        if matches!(outcome, Outcome::Elsewhere(_)) {
            return None;
        }
        let first = self.store.set_first(&key(restart), &own.to_bytes(), TELLING).ok()?;
        Notice::from_bytes(&first).filter(|first| *first != own).map(Outcome::Elsewhere)
    }

    /// Calls `heard` when another node's part ends before its time, or a node is lost; until the answer is
    /// dropped.
    pub fn listen(&self, restart: u32, heard: impl FnOnce(Notice) + Send + 'static) -> Listening {
        let stop = Arc::new(AtomicBool::new(false));
        let (store, stopped, node) = (self.store.clone(), stop.clone(), self.node);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let notice = match store.get(&key(restart), TICK) {
                    Ok(bytes) => Notice::from_bytes(&bytes).filter(|notice| notice.node != node),
                    Err(_) => store.lost().first().map(|lost| Notice::lost(lost.rank, &lost.why)),
                };
                match notice {
                    Some(notice) => return heard(notice),
                    // What this node has said itself stays there: do not ask for it without a pause.
                    None => std::thread::sleep(TICK / 10),
                }
            }
        });
        Listening { stop, thread: Some(thread) }
    }

    /// Waits until the attempt has ended on all nodes. Answers how it ended for the job, and whether it is to
    /// be started again; the same on all nodes.
    pub fn conclude(
        &self,
        restart: u32,
        outcome: Outcome,
        restarts_left: u32,
        events: &Events,
    ) -> (Outcome, bool) {
        let notice = Notice::of(&outcome, self.node, &self.host);
        let own = serde_json::to_vec(&End { notice, restarts_left }).expect("text and numbers");
        let ends = match self.exchange("end", restart, own, events) {
            Ok(ends) => ends,
            Err(interrupted) if matches!(outcome, Outcome::Success) => return (interrupted, false),
            Err(_) => return (outcome, false),
        };
        let ends = ends.map(|all| all.iter().filter_map(|end| serde_json::from_slice(end).ok()).collect());
        let ends: Vec<End> = match ends {
            Ok(ends) => ends,
            Err(error) => {
                let lost = self.store.lost().first().map(|lost| (lost.rank, lost.why.clone()));
                let (node, why) = lost.unwrap_or((self.node, error.to_string()));
                let news = matches!(outcome, Outcome::Success);
                return (if news { Outcome::Elsewhere(Notice::lost(node, &why)) } else { outcome }, false);
            }
        };
        let failed = ends.iter().find_map(|end| end.notice.clone());
        let all_may = ends
            .iter()
            .all(|end| end.restarts_left > 0 && end.notice.as_ref().is_none_or(|notice| notice.may_restart));
        match (outcome, failed) {
            (outcome, None) => (outcome, false),
            // The others have failed in the very last moment.
            (Outcome::Success, Some(notice)) => (Outcome::Elsewhere(notice), all_may),
            (outcome, Some(_)) => (outcome, all_may),
        }
    }
}

fn key(restart: u32) -> String {
    format!("ending {restart}")
}

/// Listens until it is dropped.
pub struct Listening {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
