//! The connection behind a [`Store`](super::Store): sending, and the thread that receives.

use super::connect::Session;
use super::{Member, Subscriber};
use crate::os::sync::lock;
use crate::os::{ThreadMark, Wire};
use crate::rendezvous::store::cipher::Cipher;
use crate::rendezvous::store::incoming::Incoming;
use crate::rendezvous::store::protocol::{End, HEARTBEATS, Malformed, Reply, Request};
use crate::rendezvous::store::session::Key;
use crate::rendezvous::store::stall::{StallDetector, StarvedStore};
use crate::rendezvous::store::{Host, Lost, Rendezvous};
use crate::types::error::{BootstrapError, Error, PeerEvent, Result};
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bound on sending the goodbye.
const LEAVING: Duration = Duration::from_secs(1);

/// How often a wait looks whether it goes on, if anything but the answer can end it.
const LOOK: Duration = Duration::from_millis(50);

/// How much longer than the store itself a request is waited for.
const ANSWER: Duration = Duration::from_millis(1400);

/// State that a store and its thread share.
pub struct Link {
    pub member: Member,
    /// The process that joined. A fork has the descriptor and must not use it.
    process: u32,
    pub rendezvous: Rendezvous,
    /// The process whose end is the store's.
    host: Mutex<Host>,
    silence: Duration,
    stream: Wire,
    sender: Mutex<Sender>,
    state: Mutex<State>,
    changed: Condvar,
    /// Length of `State::lost`, readable without the lock.
    lost: AtomicUsize,
    leaving: AtomicBool,
    inbox: Mutex<Inbox>,
}

/// The subscriber, and the messages that came before there was one.
#[derive(Default)]
struct Inbox {
    kept: Vec<(usize, Vec<u8>)>,
    subscriber: Option<Arc<dyn Subscriber>>,
}

/// One lock for encryption and sending, since encrypted bytes must be sent in order.
struct Sender {
    cipher: Cipher,
    key: Key,
    last: Instant,
    /// Why nothing can be sent any more.
    failure: Option<std::io::Error>,
}

#[derive(Default)]
struct State {
    requests: u64,
    /// Pending requests, and their replies.
    answers: HashMap<u64, Option<Reply>>,
    lost: Vec<Lost>,
    /// Why the members can never be complete. It answers every request.
    refused: Option<String>,
    /// The reason why the connection has ended.
    ended: Option<String>,
}

impl Link {
    /// Starts the receiving thread.
    pub fn start(
        rendezvous: &Rendezvous,
        member: Member,
        session: Session,
    ) -> Result<(Arc<Link>, JoinHandle<()>)> {
        let system =
            |call| move |e| Error::system(call, e, "the store needs a thread and a few file descriptors");
        let stream = session.stream.try_clone().map_err(system("dup"))?;
        stream.set_write_timeout(Some(session.silence)).map_err(system("setsockopt"))?;
        let Session { place: _, stream: read_half, cipher, to, from, silence, thread: store, rest } = session;
        let link = Arc::new(Link {
            member,
            process: std::process::id(),
            rendezvous: rendezvous.clone(),
            host: Mutex::new(rendezvous.host),
            silence,
            stream,
            sender: Mutex::new(Sender { cipher, key: to, last: Instant::now(), failure: None }),
            state: Mutex::default(),
            changed: Condvar::new(),
            lost: AtomicUsize::new(0),
            leaving: AtomicBool::new(false),
            inbox: Mutex::default(),
        });
        let thread = std::thread::Builder::new().name("phalanx-store-client".into());
        let shared = link.clone();
        let listener = thread
            .spawn(move || shared.listen(read_half, Incoming::new(from, rest), store))
            .map_err(system("starting the store's thread"))?;
        Ok((link, listener))
    }

    /// The process whose end is the store's.
    fn host(&self) -> Host {
        *lock(&self.host)
    }

    /// Sets it, where it is known only now.
    pub fn set_host(&self, host: Host) {
        *lock(&self.host) = host;
    }

    pub fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// See [`Store::lost`](super::Store::lost).
    pub fn lost(&self) -> Vec<Lost> {
        if self.lost.load(Ordering::Acquire) == 0 { Vec::new() } else { lock(&self.state).lost.clone() }
    }

    /// See [`Store::wait_for_loss`](super::Store::wait_for_loss).
    pub fn wait_for_loss(&self, known: usize, timeout: Duration) -> Vec<Lost> {
        let state = lock(&self.state);
        let waits = |state: &mut State| state.lost.len() <= known && state.ended.is_none();
        let waited = self.changed.wait_timeout_while(state, timeout, waits);
        waited.unwrap_or_else(PoisonError::into_inner).0.lost.clone()
    }

    pub fn has_ended(&self) -> bool {
        lock(&self.state).ended.is_some()
    }

    /// See [`Store::send`](super::Store::send).
    pub fn post(&self, request: Request) -> Result<()> {
        if self.is_forked() {
            return Err(Error::bootstrap(
                "this process is a fork of the one that joined the store",
                "use the communicator in the process that made it",
            ));
        }
        self.send(&request);
        match &lock(&self.state).ended {
            None => Ok(()),
            Some(ended) => Err(Error::bootstrap(ended, "see what became of the store")),
        }
    }

    /// See [`Store::set_subscriber`](super::Store::set_subscriber).
    pub fn set_subscriber(&self, subscriber: Arc<dyn Subscriber>) {
        let mut inbox = lock(&self.inbox);
        for (from, value) in inbox.kept.drain(..) {
            subscriber.on_message(from, &value);
        }
        inbox.subscriber = Some(subscriber);
        drop(inbox);
        self.report_losses();
    }

    fn deliver(&self, from: usize, value: Vec<u8>) {
        let mut inbox = lock(&self.inbox);
        match &inbox.subscriber {
            Some(subscriber) => subscriber.on_message(from, &value),
            None => inbox.kept.push((from, value)),
        }
    }

    fn report_losses(&self) {
        let (lost, has_ended) = {
            let state = lock(&self.state);
            (state.lost.clone(), state.ended.is_some())
        };
        if let Some(subscriber) =
            lock(&self.inbox).subscriber.as_ref().filter(|_| has_ended || !lost.is_empty())
        {
            subscriber.on_loss(&lost, has_ended);
        }
    }

    /// Says goodbye: the thread ends soon.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
        self.send(&Request::Goodbye);
        // The thread reads until the store closes: closing a socket with unread bytes would discard the
        // goodbye.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Sends a request and waits for its reply, a little longer than the store itself waits.
    pub fn ask(&self, what: &str, timeout: Duration, request: impl FnOnce(u64) -> Request) -> Result<Reply> {
        self.ask_while(what, timeout, None, request)
    }

    /// The same, but an error of `goes_on`, if there is one, ends the wait.
    pub fn ask_while(
        &self,
        what: &str,
        timeout: Duration,
        goes_on: Option<&dyn Fn() -> Result<()>>,
        request: impl FnOnce(u64) -> Request,
    ) -> Result<Reply> {
        if self.is_forked() {
            return Err(Error::bootstrap(
                format!("{what}: this process is a fork of the one that joined the store"),
                "use the communicator in the process that made it",
            ));
        }
        let started = Instant::now();
        let id = {
            let mut state = lock(&self.state);
            state.requests += 1;
            let id = state.requests;
            state.answers.insert(id, None);
            id
        };
        self.send(&request(id));
        let answer_timeout = timeout.saturating_add(ANSWER);
        let (mut state, mut is_over) = (lock(&self.state), Ok(()));
        loop {
            if let Some(Some(_)) = state.answers.get(&id) {
                return Ok(state.answers.remove(&id).flatten().expect("it was there just now"));
            }
            if let Some(reason) = state.refused.clone() {
                state.answers.remove(&id);
                return Ok(Reply::Refused { id, reason });
            }
            if let Err(error) = is_over {
                state.answers.remove(&id);
                return Err(error);
            }
            let left = answer_timeout.saturating_sub(started.elapsed());
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
            let longest = if goes_on.is_some() { LOOK } else { Duration::from_secs(3600) };
            let wait = self.changed.wait_timeout(state, left.min(longest));
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
            if let Some(goes_on) = goes_on {
                drop(state);
                is_over = goes_on();
                state = lock(&self.state);
            }
        }
    }

    /// The error for a reply that is not the expected one.
    pub fn unexpected(&self, what: &str, timeout: Duration, reply: Reply) -> Error {
        let member = self.member.role.name();
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
        if sender.failure.is_some() {
            return;
        }
        let frame = sender.key.seal(&request.encode());
        let mut wire = Vec::new();
        let sent = sender.cipher.seal(&frame, &mut wire).and_then(|()| (&self.stream).write_all(&wire));
        sender.last = Instant::now();
        // A part of a frame may be out: nothing can follow it. The thread still reads what the store said last, perhaps its goodbye.
        if let Err(e) = sent {
            sender.failure = Some(e);
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }

    /// Why the connection has ended, once there is nothing to read.
    fn why_closed(&self) -> String {
        match &lock(&self.sender).failure {
            Some(e) => format!("the connection has failed ({e})"),
            None => "it closed the connection".to_owned(),
        }
    }

    /// The thread: receives until the connection ends, and sends heartbeats.
    fn listen(&self, stream: Wire, mut incoming: Incoming<Reply>, store: Option<ThreadMark>) {
        let mut bytes = vec![0; 64 << 10];
        let interval = self.silence / 8;
        let mut store = StarvedStore::new(store, self.silence);
        let mut last_received = Instant::now();
        let mut stalls = StallDetector::new(self.silence);
        let mut leaving = None;
        loop {
            last_received += stalls.held_up(Instant::now());
            match self.take_in(&mut incoming) {
                Ok(true) => {
                    last_received = Instant::now();
                    store.heard();
                }
                Ok(false) => {}
                Err(Malformed(why)) => {
                    return self
                        .ended(&format!("it sends what no store sends: {why}"), PeerEvent::Unreachable);
                }
            }
            if self.leaving.load(Ordering::Acquire) {
                // The store closes the connection when it has read the goodbye.
                if leaving.get_or_insert_with(Instant::now).elapsed() > LEAVING {
                    return;
                }
            } else if lock(&self.sender).last.elapsed() >= self.silence / HEARTBEATS {
                self.send(&Request::Heartbeat);
            }
            // To the point at which silence becomes a loss.
            let left = self.silence.saturating_sub(last_received.elapsed()).min(interval);
            let _ = stream.set_read_timeout(Some(left.max(Duration::from_millis(1))));
            match (&stream).read(&mut bytes) {
                Ok(0) => return self.ended(&self.why_closed(), PeerEvent::Died),
                Ok(n) => {
                    if let Err(e) = self.decipher(&bytes[..n], incoming.input()) {
                        return self.ended(&format!("the connection has failed ({e})"), PeerEvent::Died);
                    }
                    if incoming.is_receiving() {
                        last_received = Instant::now();
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    let silent = last_received.elapsed();
                    if silent >= self.silence && store.is_excused(interval) {
                        last_received += interval;
                    } else if silent >= self.silence {
                        // The other direction may work.
                        self.send(&Request::Deaf);
                        let silent = u32::try_from(silent.as_millis()).unwrap_or(u32::MAX);
                        return self.ended(&End::Silent(silent).to_string(), PeerEvent::Unreachable);
                    }
                }
                Err(e) => return self.ended(&format!("the connection has failed ({e})"), PeerEvent::Died),
            }
        }
    }

    /// Decrypts received bytes and appends them to `input`.
    fn decipher(&self, bytes: &[u8], input: &mut Vec<u8>) -> std::io::Result<()> {
        let (mut sender, mut wire) = (lock(&self.sender), Vec::new());
        sender.cipher.open(bytes, input, &mut wire)?;
        (&self.stream).write_all(&wire)
    }

    /// Handles the complete messages; whether there was one.
    fn take_in(&self, incoming: &mut Incoming<Reply>) -> std::result::Result<bool, Malformed> {
        let mut was_one = false;
        while let Some(reply) = incoming.next()? {
            was_one = true;
            let mut is_loss = false;
            let reply = match reply {
                Reply::Message { from, value } => {
                    self.deliver(from as usize, value);
                    continue;
                }
                reply => reply,
            };
            let mut state = lock(&self.state);
            match reply {
                Reply::Heartbeat | Reply::Welcome { .. } | Reply::NoPlace => {}
                Reply::Goodbye => {
                    let ended = format!("the store at {} has ended in good order", self.rendezvous.address);
                    state.ended.get_or_insert(ended);
                    is_loss = true;
                }
                Reply::Lost { rank, end } => {
                    self.note_loss(&mut state, rank, end.event(), end.to_string());
                    is_loss = true;
                }
                Reply::Refused { id: 0, reason } => state.refused = Some(reason),
                reply => {
                    // A reply to a request that has timed out is dropped.
                    if let Some(slot) = reply.id().and_then(|id| state.answers.get_mut(&id)) {
                        *slot = Some(reply);
                    }
                }
            }
            self.changed.notify_all();
            drop(state);
            if is_loss {
                self.report_losses();
            }
        }
        Ok(was_one)
    }

    fn note_loss(&self, state: &mut State, rank: u32, event: PeerEvent, why: String) {
        let rank = rank as usize;
        if state.lost.iter().all(|lost| lost.rank != rank) {
            state.lost.push(Lost { rank, event, why, since: Instant::now() });
            self.lost.store(state.lost.len(), Ordering::Release);
        }
    }

    /// Records the end of the connection. Without a goodbye, a member is lost: the rank that hosts the store,
    /// or, if a launcher hosts it, this member, which is cut off from the others.
    fn ended(&self, why: &str, event: PeerEvent) {
        let mut state = lock(&self.state);
        let cut_off = state.lost.iter().any(|lost| lost.rank == self.member.rank as usize);
        let already = state.ended.is_some() || cut_off || self.leaving.load(Ordering::Acquire);
        let address = &self.rendezvous.address;
        if !already {
            crate::os::log::warn!("the store at {address} is lost: {why}");
            match self.host() {
                Host::Rank(rank) => {
                    let why = format!("it hosts the store at {address}: {why}");
                    self.note_loss(&mut state, rank, event, why);
                }
                Host::Launcher => {
                    let why = format!("it is cut off from the store at {address}: {why}");
                    self.note_loss(&mut state, self.member.rank, PeerEvent::Unreachable, why);
                }
            }
        }
        state.ended.get_or_insert_with(|| format!("the store at {address} is lost: {why}"));
        // Without it the store would still count this member as alive.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.changed.notify_all();
        drop(state);
        self.report_losses();
    }
}
