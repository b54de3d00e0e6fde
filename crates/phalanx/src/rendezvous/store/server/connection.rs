//! One connection of the store's server: its authentication, and its bytes in both directions.

use super::{Settings, is_not_now};
use crate::os::Wire;
use crate::rendezvous::store::cipher::{Cipher, Identity};
use crate::rendezvous::store::namespace::Group;
use crate::rendezvous::store::output::Output;
use crate::rendezvous::store::protocol::{
    Carried, End, Greeting, HEARTBEATS, MAX_EXCHANGE, MAX_JOIN, MAX_REQUEST, Malformed, Reply, Request, Role,
    Side, VERSION,
};
use crate::rendezvous::store::session;
use crate::rendezvous::store::session::Key;
use crate::rendezvous::store::table::Table;
use crate::rendezvous::store::token::Token;
use crate::watch::deadline::after;
use std::collections::BTreeSet;
use std::io::{self, Read};
use std::net::Shutdown;
use std::time::{Duration, Instant};

/// Most bytes queued for a member that does not read: two of the longest exchanges.
const MAX_UNSENT: usize = 2 * MAX_EXCHANGE;
/// Most bytes that it sends before the other connections have their turn: all of them hear from the store in time, also where
/// thousands get a table of megabytes.
const TURN: usize = 256 << 10;

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
    output: Output,
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
    /// Authenticated.
    Proved { from: Key, to: Key, members: Members },
}

/// The members of a connection.
enum Members {
    /// It is about to be admitted or refused.
    Undecided,
    /// The store above decides on it.
    Awaited(Group, u32),
    One(Group, u32),
    /// Ranks of a host.
    Carried(BTreeSet<u32>),
}

/// The next action for a connection.
pub enum Step {
    /// Nothing yet.
    Nothing,
    /// It says who it is, or which member it carries from now on: `Join`, `Grow`, `Enter` or `Carry`.
    Introduction(Request),
    Ask {
        group: Group,
        rank: u32,
        request: Request,
    },
    /// One of the members that it carries has ended.
    Ended {
        rank: u32,
        end: End,
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
            output: Output::default(),
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

    /// Whether it has proved that it belongs to the job.
    pub fn is_trusted(&self) -> bool {
        !matches!(self.phase, Phase::New | Phase::Greeted { .. } | Phase::Keyed { .. })
            && !matches!(self.phase, Phase::Proved { members: Members::Undecided, .. })
    }

    /// Its members.
    pub fn members(&self) -> Vec<(Group, u32)> {
        match self.joined() {
            Some(Members::Awaited(group, rank) | Members::One(group, rank)) => vec![(*group, *rank)],
            Some(Members::Carried(ranks)) => ranks.iter().map(|rank| (Group::Ranks, *rank)).collect(),
            _ => Vec::new(),
        }
    }

    fn joined(&self) -> Option<&Members> {
        match &self.phase {
            Phase::Proved { members, .. } => Some(members),
            _ => None,
        }
    }

    /// Whether it carries members.
    pub fn carries(&self) -> bool {
        matches!(self.joined(), Some(Members::Carried(_)))
    }

    /// Whether the store above decides on its member.
    pub fn is_awaited(&self) -> bool {
        matches!(self.joined(), Some(Members::Awaited(..)))
    }

    /// Its socket, and whether there is something to send.
    pub fn interest(&self) -> (&Wire, bool) {
        (&self.stream, !self.output.is_empty())
    }

    /// Notes that the store above decides on its member.
    pub fn wait_for(&mut self, group: Group, rank: u32) {
        self.set_members(Members::Awaited(group, rank));
    }

    /// Admits its member, or one that it carries.
    pub fn admit(&mut self, group: Group, rank: u32) {
        match &mut self.phase {
            Phase::Proved { members: Members::Carried(ranks), .. } => drop(ranks.insert(rank)),
            _ => self.set_members(Members::One(group, rank)),
        }
    }

    /// From now on its messages are those of members that it carries.
    pub fn carry(&mut self) {
        self.set_members(Members::Carried(BTreeSet::new()));
    }

    fn set_members(&mut self, new: Members) {
        if let Phase::Proved { members, .. } = &mut self.phase {
            *members = new;
        }
    }

    /// Forgets a member that it carries; whether it had it.
    pub fn forget(&mut self, rank: u32) -> bool {
        match &mut self.phase {
            Phase::Proved { members: Members::Carried(ranks), .. } => ranks.remove(&rank),
            _ => false,
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
        if let Err(e) = self.cipher.open(bytes, &mut self.input, &mut self.output.wire) {
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
                self.output.wire.extend_from_slice(&ours.encode());
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
                let request = Request::decode(opened.message)?;
                if !is_introduction(&request) {
                    return Err(Malformed("it does not say who it is"));
                }
                let taken = opened.taken;
                self.input.drain(..taken);
                self.last_received = now;
                let Phase::Keyed { from, to } = std::mem::replace(&mut self.phase, Phase::New) else {
                    unreachable!("the phase was matched above");
                };
                self.phase = Phase::Proved { from, to, members: Members::Undecided };
                Ok(Some(Step::Introduction(request)))
            }
            Phase::Proved { from, members, .. } if self.end.is_none() => {
                if matches!(members, Members::Undecided | Members::Awaited(..)) {
                    return Ok(None);
                }
                let Some(opened) = from.open(&self.input, MAX_REQUEST)? else {
                    return Ok(None);
                };
                let taken = opened.taken;
                let step = match members {
                    Members::Carried(ranks) => {
                        let request = Carried::<Request>::decode(opened.message)?;
                        carried_step(ranks, request, &mut self.end)?
                    }
                    Members::One(group, rank) => {
                        let request = Request::decode(opened.message)?;
                        own_step(Some((*group, *rank)), request, &mut self.end)?
                    }
                    Members::Undecided | Members::Awaited(..) => return Ok(None),
                };
                self.input.drain(..taken);
                self.last_received = now;
                Ok(Some(step))
            }
            Phase::Proved { .. } => Ok(None),
        }
    }

    /// Queues a reply to its member, or to those that it carries; [`flush`](ServerConnection::flush) sends it.
    pub fn send(&mut self, ranks: &[u32], reply: Reply) {
        let Phase::Proved { to, members, .. } = &mut self.phase else {
            return;
        };
        let (bytes, table) = match members {
            Members::Carried(_) => {
                let mut carried = Carried { ranks: ranks.to_vec(), message: reply };
                (carried.encode(), take_table(&mut carried.message))
            }
            _ => {
                let mut reply = reply;
                (reply.encode(), take_table(&mut reply))
            }
        };
        self.output.push(to.seal(&bytes));
        if let Some(table) = table {
            self.output.push_table(table);
        }
        self.last_sent = Instant::now();
    }

    /// Sends as much as the network takes and its turn allows.
    pub fn flush(&mut self) {
        if self.output.flush(&self.stream, &mut self.cipher, TURN).is_err() {
            self.break_off(End::Closed);
        }
    }

    /// Sends the rest of what is queued and nothing more; whether its member has closed the connection, too.
    pub fn is_finished(&mut self) -> bool {
        self.flush();
        if self.output.is_empty() {
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        let mut unread = [0; 16 << 10];
        match (&self.stream).read(&mut unread) {
            Ok(n) => n == 0,
            Err(e) => !is_not_now(&e),
        }
    }

    /// Sends a heartbeat if nothing was sent for `interval`.
    pub fn keep_alive(&mut self, now: Instant, interval: Duration) {
        if self.is_trusted()
            && !self.is_awaited()
            && now.saturating_duration_since(self.last_sent) >= interval
        {
            self.send(&[], Reply::Heartbeat);
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
        match self.is_trusted() {
            true => {
                (self.last_sent + settings.silence / HEARTBEATS).min(self.last_received + settings.silence)
            }
            false => after(self.phase_began, settings.auth_timeout),
        }
    }

    /// Returns why it has ended or must end; `None` if it goes on.
    pub fn reason_to_end(&self, now: Instant, settings: &Settings) -> Option<End> {
        let silent = now.saturating_duration_since(self.last_received);
        if self.end.is_some() {
            self.end
        } else if self.is_awaited() {
            // It waits for its welcome, and says nothing.
            None
        } else if !self.is_trusted() {
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

/// The step for a request of a connection's own: of its member, or of the carrier itself.
fn own_step(
    member: Option<(Group, u32)>,
    request: Request,
    end: &mut Option<End>,
) -> Result<Step, Malformed> {
    match (request, member) {
        (Request::Heartbeat, _) => {}
        (Request::Goodbye, _) => *end = Some(End::Left),
        (Request::Deaf, _) => *end = Some(End::Deaf),
        (request, _) if is_introduction(&request) => return Err(Malformed("it joins twice")),
        (Request::Ended { .. }, _) | (_, None) => return Err(Malformed("it carries no such member")),
        (request, Some((group, rank))) => return Ok(Step::Ask { group, rank, request }),
    }
    Ok(Step::Nothing)
}

/// The step for a request of a member that a connection carries, or of the carrier itself.
fn carried_step(
    members: &BTreeSet<u32>,
    Carried { ranks, message }: Carried<Request>,
    end: &mut Option<End>,
) -> Result<Step, Malformed> {
    let rank = match ranks[..] {
        [] => return own_step(None, message, end),
        [rank] => rank,
        _ => return Err(Malformed("it asks for several members at once")),
    };
    match message {
        Request::Join { rank: joining, role: Role::Rank, .. } if joining == rank => {
            Ok(Step::Introduction(message))
        }
        // A member that was refused may have asked or ended before it knew.
        _ if !members.contains(&rank) => Ok(Step::Nothing),
        Request::Ended { end } => Ok(Step::Ended { rank, end }),
        request if is_introduction(&request) => Err(Malformed("it joins twice")),
        request => Ok(Step::Ask { group: Group::Ranks, rank, request }),
    }
}

/// Whether a request can only be a client's first.
fn is_introduction(request: &Request) -> bool {
    use Request::{Carry, Enter, Grow, Join};
    matches!(request, Join { .. } | Grow { .. } | Enter { .. } | Carry { .. })
}

/// Takes a reply's table out: it is sent beside it.
fn take_table(reply: &mut Reply) -> Option<Table> {
    match reply {
        Reply::All { table, .. } => table.take(),
        _ => None,
    }
}
