//! One connection of the store's server: its authentication, and its bytes in both directions.

use super::{Settings, is_not_now};
use crate::os::Wire;
use crate::rendezvous::store::cipher::{Cipher, Identity};
use crate::rendezvous::store::protocol::{
    End, Greeting, HEARTBEATS, MAX_JOIN, MAX_REPLY, MAX_REQUEST, Malformed, Reply, Request, Role, Side,
    VERSION,
};
use crate::rendezvous::store::session;
use crate::rendezvous::store::session::Key;
use crate::rendezvous::store::token::Token;
use crate::watch::deadline::after;
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

/// Most bytes queued for a member that does not read: two of the longest replies.
const MAX_UNSENT: usize = 2 * MAX_REPLY;

pub struct ServerConnection {
    stream: Wire,
    /// Its name in log messages.
    peer: String,
    phase: Phase,
    /// The store's TLS key, if the job encrypts.
    identity: Option<Identity>,
    cipher: Cipher,
    /// Received and not yet handled: at most the longest frame and one read.
    input: Vec<u8>,
    /// Encrypted bytes to be sent.
    output: Vec<u8>,
    /// When its phase began: a client has the same time for each.
    phase_began: Instant,
    /// When the last message came.
    last_received: Instant,
    last_sent: Instant,
    end: Option<End>,
    /// Why it was cut off, or refused.
    fault: Option<String>,
}

enum Phase {
    /// Waiting for the client's greeting.
    New,
    /// TLS handshake, if the job encrypts.
    Greeted { theirs: Greeting, ours: Greeting },
    /// Waiting for the first request, which proves that the client knows the token.
    Keyed { from: Key, to: Key },
    /// Authenticated: it has joined, or is about to be refused.
    Proved { from: Key, to: Key, member: Option<(Role, u32)> },
}

/// The next action for a connection.
pub enum Step {
    /// Nothing yet.
    Nothing,
    Join {
        role: Role,
        rank: u32,
        size: u32,
        epoch: u32,
        job: String,
    },
    Ask {
        role: Role,
        rank: u32,
        request: Request,
    },
}

impl ServerConnection {
    pub fn new(
        stream: Wire,
        peer: String,
        identity: Option<&Identity>,
        now: Instant,
    ) -> io::Result<ServerConnection> {
        stream.set_nonblocking(true)?;
        Ok(ServerConnection {
            stream,
            peer,
            phase: Phase::New,
            identity: identity.cloned(),
            cipher: Cipher::NONE,
            input: Vec::new(),
            output: Vec::new(),
            phase_began: now,
            last_received: now,
            last_sent: now,
            end: None,
            fault: None,
        })
    }

    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// The member, once it was admitted.
    pub fn member(&self) -> Option<(Role, u32)> {
        match &self.phase {
            Phase::Proved { member, .. } => *member,
            _ => None,
        }
    }

    /// Its socket, and whether there is something to send.
    pub fn interest(&self) -> (&Wire, bool) {
        (&self.stream, !self.output.is_empty())
    }

    pub fn admit(&mut self, role: Role, rank: u32) {
        if let Phase::Proved { member, .. } = &mut self.phase {
            *member = Some((role, rank));
        }
    }

    /// Marks it as ended; the next sweep removes it.
    pub fn break_off(&mut self, end: End) {
        self.end.get_or_insert(end);
    }

    /// Marks it as ended by its own fault.
    pub fn cut_off(&mut self, why: impl Into<String>) {
        self.fault.get_or_insert(why.into());
        self.break_off(End::Broken);
    }

    /// Why it was cut off; `None` if its end has other reasons.
    pub fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    /// Reads from the socket.
    pub fn receive(&mut self) {
        let mut bytes = [0; 16 << 10];
        match (&self.stream).read(&mut bytes) {
            Ok(0) => self.break_off(End::Closed),
            Ok(n) => self.take_in(&bytes[..n]),
            Err(e) if is_not_now(&e) => {}
            Err(_) => self.break_off(End::Closed),
        }
        self.flush();
    }

    fn take_in(&mut self, bytes: &[u8]) {
        if let Err(e) = self.cipher.open(bytes, &mut self.input, &mut self.output) {
            self.cut_off(e.to_string());
        }
    }

    /// The next request that has arrived.
    pub fn next_step(&mut self, token: &Token, now: Instant) -> Step {
        loop {
            match self.advance(token, now) {
                Ok(Some(Step::Nothing)) => {}
                Ok(Some(step)) => return step,
                Ok(None) => return Step::Nothing,
                Err(Malformed(why)) => {
                    self.cut_off(why);
                    self.input.clear();
                    return Step::Nothing;
                }
            }
        }
    }

    /// Handles one message; `None` if none is complete.
    fn advance(&mut self, token: &Token, now: Instant) -> Result<Option<Step>, Malformed> {
        match &mut self.phase {
            Phase::New => {
                let Some(bytes) = self.input.get(..Greeting::LEN) else {
                    return Ok(None);
                };
                let theirs = Greeting::decode(bytes)?;
                if theirs.side != Side::Client {
                    return Err(Malformed("it is no client"));
                }
                let nonce = session::nonce().map_err(|_| Malformed("there is no randomness"))?;
                let encrypted = self.identity.is_some();
                let ours = Greeting { side: Side::Server, version: VERSION, encrypted, nonce };
                let rest = self.input.split_off(Greeting::LEN);
                self.input.clear();
                self.phase = Phase::Greeted { theirs, ours };
                self.phase_began = now;
                self.output.extend_from_slice(&ours.encode());
                self.flush();
                // It has received ours, and can report the difference.
                if theirs.version != VERSION {
                    return Err(Malformed("it speaks another version"));
                }
                if theirs.encrypted != encrypted {
                    return Err(Malformed("one of the two encrypts and the other does not"));
                }
                if let Some(identity) = &self.identity {
                    self.cipher =
                        Cipher::server(identity).map_err(|_| Malformed("TLS cannot be set up for it"))?;
                }
                self.take_in(&rest);
                Ok(Some(Step::Nothing))
            }
            Phase::Greeted { theirs, ours } => {
                let Some(binding) = self.cipher.binding() else {
                    return Ok(None);
                };
                let (from, to) = session::keys(token, theirs, ours, &binding);
                self.phase = Phase::Keyed { from, to };
                self.phase_began = now;
                Ok(Some(Step::Nothing))
            }
            Phase::Keyed { from, .. } => {
                let opened = from.open(&self.input, MAX_JOIN);
                let opened = opened.map_err(|_| Malformed("it has another token, or knows none"))?;
                let Some(opened) = opened else {
                    return Ok(None);
                };
                let Request::Join { role, rank, size, epoch, job } = Request::decode(opened.message)? else {
                    return Err(Malformed("it does not say who it is"));
                };
                let taken = opened.taken;
                self.input.drain(..taken);
                self.last_received = now;
                let Phase::Keyed { from, to } = std::mem::replace(&mut self.phase, Phase::New) else {
                    unreachable!("the phase was matched above");
                };
                self.phase = Phase::Proved { from, to, member: None };
                Ok(Some(Step::Join { role, rank, size, epoch, job }))
            }
            Phase::Proved { from, member: Some((role, rank)), .. } if self.end.is_none() => {
                let Some(opened) = from.open(&self.input, MAX_REQUEST)? else {
                    return Ok(None);
                };
                let (request, taken) = (Request::decode(opened.message)?, opened.taken);
                let step = match request {
                    Request::Heartbeat => Step::Nothing,
                    Request::Goodbye => {
                        self.end = Some(End::Left);
                        Step::Nothing
                    }
                    Request::Deaf => {
                        self.end = Some(End::Deaf);
                        Step::Nothing
                    }
                    Request::Join { .. } => return Err(Malformed("it joins twice")),
                    request => Step::Ask { role: *role, rank: *rank, request },
                };
                self.input.drain(..taken);
                self.last_received = now;
                Ok(Some(step))
            }
            Phase::Proved { .. } => Ok(None),
        }
    }

    /// Queues a reply; [`flush`](ServerConnection::flush) sends it.
    pub fn send(&mut self, reply: &Reply) {
        if let Phase::Proved { to, .. } = &mut self.phase {
            let frame = to.seal(&reply.encode());
            if self.cipher.seal(&frame, &mut self.output).is_err() {
                self.break_off(End::Broken);
            }
            self.last_sent = Instant::now();
        }
    }

    /// Sends as much as the network takes.
    pub fn flush(&mut self) {
        let mut done = 0;
        while done < self.output.len() {
            match (&self.stream).write(&self.output[done..]) {
                Ok(n) => done += n,
                Err(e) if is_not_now(&e) => break,
                Err(_) => {
                    self.break_off(End::Closed);
                    done = self.output.len();
                }
            }
        }
        self.output.drain(..done);
    }

    /// Sends a heartbeat if nothing was sent for `interval`.
    pub fn keep_alive(&mut self, now: Instant, interval: Duration) {
        if self.member().is_some() && now.saturating_duration_since(self.last_sent) >= interval {
            self.send(&Reply::Heartbeat);
        }
    }

    /// Excludes time in which the server itself did not run from what the client may take.
    pub fn exclude(&mut self, held_up: Duration) {
        self.last_received += held_up;
        self.phase_began += held_up;
    }

    /// Notes that there is something to read from it.
    pub fn is_heard_of(&mut self, now: Instant) {
        self.last_received = self.last_received.max(now);
    }

    /// Whether it has said nothing for so long since it was accepted.
    pub fn is_silent(&self, now: Instant, limit: Duration) -> bool {
        let is_new = matches!(self.phase, Phase::New) && self.input.is_empty();
        is_new && now.saturating_duration_since(self.phase_began) >= limit
    }

    /// The next time at which it must be checked without new input.
    pub fn next_deadline(&self, settings: &Settings) -> Instant {
        match self.member() {
            Some(_) => {
                (self.last_sent + settings.silence / HEARTBEATS).min(self.last_received + settings.silence)
            }
            None => after(self.phase_began, settings.auth_timeout),
        }
    }

    /// Returns why it has ended or must end; `None` if it goes on.
    pub fn reason_to_end(&self, now: Instant, settings: &Settings) -> Option<End> {
        let silent = now.saturating_duration_since(self.last_received);
        if self.end.is_some() {
            self.end
        } else if self.member().is_none() {
            // A client cannot extend this time by sending a byte now and then.
            (now >= after(self.phase_began, settings.auth_timeout)).then_some(End::Broken)
        } else if silent >= settings.silence {
            Some(End::Silent(u32::try_from(silent.as_millis()).unwrap_or(u32::MAX)))
        } else {
            // It is alive but does not read: its replies would fill our memory.
            (self.output.len() > MAX_UNSENT).then_some(End::Broken)
        }
    }
}
