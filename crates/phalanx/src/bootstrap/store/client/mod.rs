//! A member's end of the store: requests with deadlines, and a thread that listens and shows signs of life.

mod connect;

use super::protocol::{End, Group, MAX_KEY, MAX_REPLY, MAX_VALUE, Malformed, Reply, Request};
use super::server::Server;
use super::session::Key;
use super::watch::Watch;
use super::{Host, Lost, Rendezvous};
use crate::error::{BootstrapError, Error, Result};
use crate::sync::lock;
use connect::Session;
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long leaving in good order may take.
const LEAVING: Duration = Duration::from_secs(1);

/// Who a client is.
#[derive(Debug, Clone, Copy)]
pub struct Member {
    /// Rank or node.
    pub group: Group,
    /// Its number.
    pub rank: u32,
    /// How many there are.
    pub size: u32,
}

/// A member's connection to the store. Dropping it leaves in good order.
///
/// Any thread may use it. After the connection has failed every call answers at once, with the reason.
pub struct Store {
    link: Arc<Link>,
    listener: Option<JoinHandle<()>>,
    /// If the store lives in this process: it ends after this member has left.
    _server: Option<Server>,
}

struct Link {
    member: Member,
    rendezvous: Rendezvous,
    silence: Duration,
    stream: TcpStream,
    sender: Mutex<Sender>,
    state: Mutex<State>,
    changed: Condvar,
    /// How many are in `State::lost`: looking is cheap.
    lost: AtomicUsize,
    leaving: AtomicBool,
}

struct Sender {
    key: Key,
    last: Instant,
}

#[derive(Default)]
struct State {
    requests: u64,
    /// Requests under way, and their answers.
    answers: HashMap<u64, Option<Reply>>,
    lost: Vec<Lost>,
    /// Why the connection is no more.
    ended: Option<String>,
}

impl Store {
    /// Joins the store as a rank, and waits for it to be there.
    ///
    /// # Errors
    /// [`Error::Bootstrap`]: nobody answers within `timeout`; the store has another token or version; it
    /// refuses this rank.
    pub fn connect(
        rendezvous: &Rendezvous,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Store> {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let member = Member { group: Group::Ranks, rank: number(rank), size: number(world_size) };
        Store::join(rendezvous, member, timeout)
    }

    /// Joins the store as any member.
    pub fn join(rendezvous: &Rendezvous, member: Member, timeout: Duration) -> Result<Store> {
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or(now + Duration::from_secs(365 * 24 * 3600));
        let session = connect::join(rendezvous, member, deadline)?;
        let system =
            |call| move |e| Error::system(call, e, "the store needs a thread and a few file descriptors");
        let stream = session.stream.try_clone().map_err(system("dup"))?;
        stream.set_write_timeout(Some(session.silence)).map_err(system("setsockopt"))?;
        let Session { stream: read_half, to, from, silence, rest } = session;
        let link = Arc::new(Link {
            member,
            rendezvous: rendezvous.clone(),
            silence,
            stream,
            sender: Mutex::new(Sender { key: to, last: Instant::now() }),
            state: Mutex::default(),
            changed: Condvar::new(),
            lost: AtomicUsize::new(0),
            leaving: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new().name("phalanx-store-client".into());
        let of_thread = link.clone();
        let listener = thread
            .spawn(move || of_thread.listen(read_half, from, rest))
            .map_err(system("starting the store's thread"))?;
        Ok(Store { link, listener: Some(listener), _server: None })
    }

    /// Keeps the store itself in this member, until it has left.
    pub fn hosting(mut self, server: Server) -> Store {
        self._server = Some(server);
        self
    }

    /// Gives `mine` and gets everybody's, in rank order. Collective over all members, once for each key; a key may be
    /// used again when the exchange is over. An empty value makes it a barrier.
    ///
    /// # Errors
    /// [`Error::Bootstrap`], with the ranks that are missing, when the deadline passes on any rank or a rank
    /// that is still needed is lost: the same verdict on all.
    pub fn exchange(&self, key: &str, mine: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let (key_text, value) = checked(key, mine)?;
        let what = format!("the exchange {key:?}");
        let wait = millis(timeout);
        let request = |id| Request::Exchange { id, key: key_text, value, wait };
        match self.link.ask(&what, timeout, request)? {
            Reply::All { values, .. } if values.len() == self.link.member.size as usize => Ok(values),
            reply => Err(self.link.unexpected(&what, timeout, reply)),
        }
    }

    /// Stores a value under a key, in the place of what was there.
    pub fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<()> {
        self.put(key, value, false, timeout).map(drop)
    }

    /// Stores a value unless there is one; answers the one that is there then. The first wins.
    pub fn set_first(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        self.put(key, value, true, timeout)
    }

    fn put(&self, key: &str, value: &[u8], keep: bool, timeout: Duration) -> Result<Vec<u8>> {
        let (key_text, value) = checked(key, value)?;
        let what = format!("storing {key:?}");
        match self.link.ask(&what, timeout, |id| Request::Set { id, key: key_text, value, keep })? {
            Reply::Value { value, .. } => Ok(value),
            reply => Err(self.link.unexpected(&what, timeout, reply)),
        }
    }

    /// The value of a key; waits until there is one.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let (key_text, _) = checked(key, &[])?;
        let what = format!("waiting for {key:?}");
        let wait = millis(timeout);
        match self.link.ask(&what, timeout, |id| Request::Get { id, key: key_text, wait })? {
            Reply::Value { value, .. } => Ok(value),
            reply => Err(self.link.unexpected(&what, timeout, reply)),
        }
    }

    /// Adds to a counter, which begins at 0; answers the sum.
    pub fn add(&self, key: &str, amount: i64, timeout: Duration) -> Result<i64> {
        let (key_text, _) = checked(key, &[])?;
        let what = format!("counting {key:?}");
        match self.link.ask(&what, timeout, |id| Request::Add { id, key: key_text, amount })? {
            Reply::Sum { value, .. } => Ok(value),
            reply => Err(self.link.unexpected(&what, timeout, reply)),
        }
    }

    /// The members that are lost, in the order in which that was learned. Costs one load while there are none.
    ///
    /// A member that cannot reach the store any more finds itself here, as the others do.
    pub fn lost(&self) -> Vec<Lost> {
        if self.link.lost.load(Ordering::Acquire) == 0 {
            Vec::new()
        } else {
            lock(&self.link.state).lost.clone()
        }
    }

    /// Waits until there are more than `known` lost members, or the connection has ended, or time is up.
    pub fn wait_for_loss(&self, known: usize, timeout: Duration) -> Vec<Lost> {
        let state = lock(&self.link.state);
        let waits = |state: &mut State| state.lost.len() <= known && state.ended.is_none();
        let waited = self.link.changed.wait_timeout_while(state, timeout, waits);
        waited.unwrap_or_else(PoisonError::into_inner).0.lost.clone()
    }
}

fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)
}

fn checked(key: &str, value: &[u8]) -> Result<(String, Vec<u8>)> {
    let (what, actual, limit) = if key.len() > MAX_KEY {
        ("key", key.len(), MAX_KEY)
    } else if value.len() > MAX_VALUE {
        ("value", value.len(), MAX_VALUE)
    } else {
        return Ok((key.to_owned(), value.to_vec()));
    };
    Err(Error::bootstrap(
        format!("a {what} of {actual} bytes does not go into the store: at most {limit}"),
        "the store is for ids and addresses; data goes through collectives",
    ))
}

impl Link {
    /// Sends a request and waits for its answer, until a little after the store should have given up.
    fn ask(&self, what: &str, timeout: Duration, request: impl FnOnce(u64) -> Request) -> Result<Reply> {
        let started = Instant::now();
        let id = {
            let mut state = lock(&self.state);
            state.requests += 1;
            let id = state.requests;
            state.answers.insert(id, None);
            id
        };
        self.send(&request(id));
        let patience = timeout.saturating_add(self.silence);
        let mut state = lock(&self.state);
        loop {
            if let Some(Some(_)) = state.answers.get(&id) {
                return Ok(state.answers.remove(&id).flatten().expect("it was there just now"));
            }
            let left = patience.saturating_sub(started.elapsed());
            if state.ended.is_some() || left.is_zero() {
                state.answers.remove(&id);
                let ended = state.ended.clone();
                let lost = state.lost.iter().map(|lost| lost.rank).collect();
                let problem = match ended {
                    Some(ended) => format!("{what}: {ended}"),
                    None => format!("{what}: the store did not answer within {:.1?}", started.elapsed()),
                };
                let remedy = format!("see what became of the store at {}", self.rendezvous.address);
                return Err(BootstrapError { problem, remedy, missing: lost }.into());
            }
            let wait = self.changed.wait_timeout(state, left.min(Duration::from_secs(3600)));
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The error that an answer without the wanted means.
    fn unexpected(&self, what: &str, timeout: Duration, reply: Reply) -> Error {
        let member = self.member.group.member();
        let (problem, remedy, missing) = match reply {
            Reply::TimedOut { missing, .. } if missing.is_empty() => (
                format!("{what}: nobody has set it within {timeout:.1?}"),
                "see whether the others run; PHALANX_TIMEOUT sets how long to wait",
                missing,
            ),
            Reply::TimedOut { missing, .. } => (
                format!("{what}: after {timeout:.1?} these {member}s have not come: {missing:?}"),
                "see whether they were started and with which variables; PHALANX_TIMEOUT sets how long to wait",
                missing,
            ),
            Reply::Gone { rank, end, .. } => {
                (format!("{what}: {member} {rank} will not come: {end}"), "see its own output", vec![rank])
            }
            Reply::Refused { reason, .. } => {
                (format!("{what}: {reason}"), "all members must ask for the same, each once", Vec::new())
            }
            _ => (format!("{what}: the store's answer makes no sense"), "report this error", Vec::new()),
        };
        let missing = missing.into_iter().map(|rank| rank as usize).collect();
        BootstrapError { problem, remedy: remedy.into(), missing }.into()
    }

    fn send(&self, request: &Request) {
        let mut sender = lock(&self.sender);
        let frame = sender.key.seal(&request.encode());
        // A part of a frame may be out: nothing can follow it.
        if let Err(e) = (&self.stream).write_all(&frame) {
            drop(sender);
            self.ended(&format!("the connection has failed ({e})"));
        } else {
            sender.last = Instant::now();
        }
    }

    /// The thread: takes in what the store says until the connection ends, and shows signs of life.
    fn listen(&self, mut stream: TcpStream, mut key: Key, mut input: Vec<u8>) {
        let mut bytes = vec![0; 64 << 10];
        let interval = self.silence / 8;
        let mut heard = Instant::now();
        let mut watch = Watch::new(self.silence);
        let mut leaving = None;
        loop {
            heard += watch.held_up(Instant::now());
            match self.take_in(&mut key, &mut input) {
                Ok(true) => heard = Instant::now(),
                Ok(false) => {}
                Err(Malformed(why)) => return self.ended(&format!("it sends what no store sends: {why}")),
            }
            if self.leaving.load(Ordering::Acquire) {
                // The store closes the connection when it has read the goodbye.
                if leaving.get_or_insert_with(Instant::now).elapsed() > LEAVING {
                    return;
                }
            } else if lock(&self.sender).last.elapsed() >= interval {
                self.send(&Request::Heartbeat);
            }
            // To the point at which silence becomes a loss.
            let left = self.silence.saturating_sub(heard.elapsed()).min(interval);
            let _ = stream.set_read_timeout(Some(left.max(Duration::from_millis(1))));
            match stream.read(&mut bytes) {
                Ok(0) => return self.ended("it closed the connection"),
                Ok(n) => input.extend_from_slice(&bytes[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    let silent = heard.elapsed();
                    if silent >= self.silence {
                        // The other direction may work.
                        self.send(&Request::Deaf);
                        let silent = u32::try_from(silent.as_millis()).unwrap_or(u32::MAX);
                        return self.ended(&End::Silent(silent).to_string());
                    }
                }
                Err(e) => return self.ended(&format!("the connection has failed ({e})")),
            }
        }
    }

    /// Uses up the complete messages of `input`; whether there was one.
    fn take_in(&self, key: &mut Key, input: &mut Vec<u8>) -> std::result::Result<bool, Malformed> {
        let mut used = 0;
        while let Some(opened) = key.open(&input[used..], MAX_REPLY)? {
            used += opened.taken;
            let reply = Reply::decode(opened.message)?;
            let mut state = lock(&self.state);
            match reply {
                Reply::Heartbeat | Reply::Welcome { .. } => {}
                Reply::Goodbye => {
                    let ended = format!("the store at {} has ended in good order", self.rendezvous.address);
                    state.ended.get_or_insert(ended);
                }
                Reply::Lost { rank, end } => self.note_loss(&mut state, rank, end.to_string()),
                reply => {
                    // One that nobody waits for any more came too late.
                    if let Some(slot) = reply.id().and_then(|id| state.answers.get_mut(&id)) {
                        *slot = Some(reply);
                    }
                }
            }
            self.changed.notify_all();
        }
        input.drain(..used);
        Ok(used > 0)
    }

    fn note_loss(&self, state: &mut State, rank: u32, why: String) {
        let rank = rank as usize;
        if state.lost.iter().all(|lost| lost.rank != rank) {
            state.lost.push(Lost { rank, why, since: Instant::now() });
            self.lost.store(state.lost.len(), Ordering::Release);
        }
    }

    /// The connection is no more. If it did not end in good order, somebody is lost: the rank that hosts the
    /// store, or, if that is a launcher, this member, which the others cannot reach either.
    fn ended(&self, why: &str) {
        let mut state = lock(&self.state);
        let cut_off = state.lost.iter().any(|lost| lost.rank == self.member.rank as usize);
        let already = state.ended.is_some() || cut_off || self.leaving.load(Ordering::Acquire);
        let address = &self.rendezvous.address;
        if !already {
            tracing::warn!("the store at {address} is lost: {why}");
            match self.rendezvous.host {
                Host::Rank(rank) => {
                    self.note_loss(&mut state, rank, format!("it hosts the store at {address}: {why}"));
                }
                Host::Launcher => {
                    let why = format!("it is cut off from the store at {address}: {why}");
                    self.note_loss(&mut state, self.member.rank, why);
                }
            }
        }
        state.ended.get_or_insert_with(|| format!("the store at {address} is lost: {why}"));
        // The store shall not take this member for one that is well.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.changed.notify_all();
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.link.leaving.store(true, Ordering::Release);
        self.link.send(&Request::Goodbye);
        // What is on its way out still arrives; the thread reads on until the store closes, because a
        // connection closed with unread bytes takes the goodbye with it.
        let _ = self.link.stream.shutdown(Shutdown::Write);
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}
