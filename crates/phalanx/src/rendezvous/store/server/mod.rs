//! The store's server: one thread, one listener (or given connections), and a connection for each member.
//!
//! A connection is cut off when it does not prove in time that it knows the token, sends malformed messages,
//! falls silent, or does not read its replies. The others are only notified which member is lost.

mod above;
mod admission;
mod connection;
mod groups;

use crate::os::{ThreadMark, Waker, Wire, poll_sockets};
use crate::rendezvous::store::address::{Listeners, host_and_port, literal_ip, look_up};
use crate::rendezvous::store::cipher::Identity;
use crate::rendezvous::store::client::Carrier;
use crate::rendezvous::store::namespace::{Group, Outbox};
use crate::rendezvous::store::protocol::{End, HEARTBEATS, Reply, Request};
use crate::rendezvous::store::stall::StallDetector;
use crate::rendezvous::store::token::Token;
use crate::types::error::{Error, Result, UsageError};
use crate::watch::deadline::after;
use crate::watch::{Reminder, say_missing};
use above::Above;
use connection::{ServerConnection, Step};
use groups::Groups;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Settings of a store.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Number of ranks. `None`: the first rank to join sets it.
    pub ranks: Option<u32>,
    /// Number of nodes. `None`: the first node to join sets it.
    pub nodes: Option<u32>,
    /// The job's name, as its ranks send it. `None`: the first rank to join sets it.
    pub ranks_job: Option<String>,
    /// The job's name, as its launchers send it. `None`: the first node to join sets it.
    pub nodes_job: Option<String>,
    /// Number of restarts of the job. Ranks of another epoch are refused.
    pub epoch: u32,
    /// A member that sends nothing for this long counts as lost.
    pub silence: Duration,
    /// A connection that has not authenticated within this time is closed.
    pub auth_timeout: Duration,
    /// Whether connections are encrypted.
    pub encrypted: bool,
}

/// Default of [`Settings::silence`]. A switch that fails over, a spanning tree or a virtual machine that moves to another host may cut a
/// network for 5 s, and the next retransmission of TCP may take as long again.
pub const SILENCE: Duration = Duration::from_secs(10);

/// [`Settings::silence`] from the value of `PHALANX_HEARTBEAT_TIMEOUT`, if it is set.
pub fn silence_from(value: Option<&str>) -> Result<Duration> {
    let Some(text) = value.filter(|text| !text.is_empty()) else {
        return Ok(SILENCE);
    };
    let seconds = text.trim().parse().ok().filter(|seconds: &f64| (0.1..=86400.0).contains(seconds));
    Ok(seconds.map(Duration::from_secs_f64).ok_or_else(|| UsageError::Setting {
        name: "PHALANX_HEARTBEAT_TIMEOUT".into(),
        value: text.into(),
        expected: "a number of seconds, 0.1 to 86400".into(),
    })?)
}

impl Default for Settings {
    fn default() -> Settings {
        let auth_timeout = Duration::from_secs(5);
        Settings {
            ranks: None,
            nodes: None,
            ranks_job: None,
            nodes_job: None,
            epoch: 0,
            silence: SILENCE,
            auth_timeout,
            encrypted: false,
        }
    }
}

/// Unauthenticated connections beyond the number of expected members from which silent ones are closed, the oldest first. A rank
/// says something at once.
const MAX_SILENT: usize = 64;
/// How long a connection may be silent then. A rank that has connected may wait for a core before it sends its greeting.
const SILENT_LIMIT: Duration = Duration::from_secs(1);
/// Most unauthenticated connections beyond the number of expected members. One more closes the oldest.
const MAX_UNAUTHENTICATED: usize = 1024;
/// Most connections accepted in a round: they are heard before more come.
const MAX_ACCEPTED: usize = 32;
/// Part of the silence that a round may take for requests: the members hear from the store in between.
const ROUNDS_OF_SILENCE: u32 = 16;
/// Most connections of which it says that it has turned them away: strangers must not fill the log.
const MAX_TURNED_AWAY: usize = 16;
/// Bound on sending the last replies at shutdown, and on waiting for members to close their connections.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(250);

/// A store that runs until it is dropped.
pub struct Server {
    address: Option<SocketAddr>,
    commands: Sender<Command>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
    /// The process that started it.
    process: u32,
}

enum Command {
    Epoch(u32),
    Stop,
}

impl Server {
    /// Listens on `address` (`host:port`; port 0 takes a free one): on all addresses that the name has on this host.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if the address is taken, is none of this host's, or can never work.
    pub fn start(address: &str, token: Token, settings: Settings) -> Result<Server> {
        let listeners = Listeners::bind(address).map_err(|e| e.into_error(address))?;
        Server::on(listeners, token, settings)
    }

    /// Listens for members on other hosts. As [`start`](Server::start), but waits up to `timeout` for the name to get an address,
    /// and some seconds for an earlier job's store to close.
    ///
    /// # Errors
    /// Those of `start`, and a name that is a loopback address here.
    pub fn for_hosts(address: &str, token: Token, settings: Settings, timeout: Duration) -> Result<Server> {
        let deadline = after(Instant::now(), timeout);
        let listeners = Listeners::bind_by(address, deadline).map_err(|e| e.into_error(address))?;
        check_reachable(address)?;
        Server::on(listeners, token, settings)
    }

    /// Serves existing listeners.
    pub(crate) fn on(listeners: Listeners, token: Token, settings: Settings) -> Result<Server> {
        let bound = listeners.address().map_err(refused("asking for the store's address"))?;
        let listeners = listeners.into_nonblocking().map_err(refused("preparing the store's listener"))?;
        Server::run(Some(bound), listeners, Vec::new(), token, settings, None)
    }

    /// Serves only the given connections, each with its name for messages.
    pub(crate) fn over(wires: Vec<(String, Wire)>, token: Token, settings: Settings) -> Result<Server> {
        Server::run(None, Vec::new(), wires, token, settings, None)
    }

    fn run(
        address: Option<SocketAddr>,
        listeners: Vec<TcpListener>,
        wires: Vec<(String, Wire)>,
        token: Token,
        settings: Settings,
        above: Option<Carrier>,
    ) -> Result<Server> {
        let waker = Arc::new(Waker::new().map_err(refused("preparing the store's thread"))?);
        let identity = settings.encrypted.then(Identity::new).transpose();
        let identity = identity.map_err(refused("making the store's key"))?;
        let (commands, received) = mpsc::channel();
        let mut service = Service {
            listeners,
            waker: waker.clone(),
            commands: received,
            token,
            above,
            identity,
            groups: Groups::new(&settings),
            reminders: HashMap::new(),
            turned_away: HashSet::new(),
            settings,
            connections: BTreeMap::new(),
            members: HashMap::new(),
            accepted: 0,
            next_served: 0,
            thread: None,
        };
        for (peer, wire) in wires {
            service.begin_with(wire, peer, Instant::now()).map_err(refused("preparing a socket"))?;
        }
        let thread = std::thread::Builder::new().name("phalanx-store".into());
        let thread = thread.spawn(move || service.run()).map_err(refused("starting the store's thread"))?;
        Ok(Server { address, commands, waker, thread: Some(thread), process: std::process::id() })
    }

    /// Returns the address on which it listens.
    ///
    /// # Panics
    /// If it serves given connections only.
    pub fn address(&self) -> SocketAddr {
        self.address.expect("it listens")
    }

    /// Starts a new epoch: disconnects the ranks of the earlier one and deletes their values.
    pub fn begin_epoch(&self, epoch: u32) {
        self.command(Command::Epoch(epoch));
    }

    fn command(&self, command: Command) {
        // The thread ends only after `Stop`, which is the last command.
        let _ = self.commands.send(command);
        self.waker.wake();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if std::process::id() != self.process {
            // The thread is the parent's; a fork has none.
            return std::mem::forget(thread);
        }
        self.command(Command::Stop);
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

fn refused(call: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |e| Error::system(call, e, "the store needs a thread and a few file descriptors")
}

/// Checks that other hosts can reach a store at this address of this host.
///
/// Many hosts resolve their own name to a loopback address, which others cannot reach.
pub(crate) fn check_reachable(address: &str) -> Result<()> {
    let Ok((name, _)) = host_and_port(address) else { return Ok(()) };
    let means_it = name == "localhost" || literal_ip(name).is_some();
    let mut addresses = look_up(address).into_iter().flatten().peekable();
    if means_it || addresses.peek().is_none() || !addresses.all(|address| address.ip().is_loopback()) {
        return Ok(());
    }
    Err(Error::bootstrap(
        format!(
            "on this host, {name} is a loopback address: no other host would reach the store at {address}"
        ),
        "set the store's address to one of this host that the others know (IP:port), for all ranks",
    ))
}

/// State of the server's thread.
struct Service {
    listeners: Vec<TcpListener>,
    waker: Arc<Waker>,
    commands: Receiver<Command>,
    token: Token,
    /// The connection to the job's store, if this server passes on.
    above: Option<Carrier>,
    /// The TLS key, if the job encrypts.
    identity: Option<Identity>,
    settings: Settings,
    groups: Groups,
    /// In the order in which they were accepted.
    connections: BTreeMap<u64, ServerConnection>,
    members: HashMap<(Group, u32), u64>,
    /// When to say which members have not come.
    reminders: HashMap<Group, Reminder>,
    /// Whom it has said to have turned away: host and reason.
    turned_away: HashSet<(String, String)>,
    accepted: u64,
    /// The connection that is served first in the next round.
    next_served: u64,
    /// This thread, for members who ask themselves whether it has a core.
    thread: Option<ThreadMark>,
}

impl Service {
    fn run(mut self) {
        let mut stalls = StallDetector::new(self.settings.silence);
        self.thread = ThreadMark::own();
        loop {
            let ready = self.wait();
            // Silence is measured up to the end of the wait, without time in which this thread did not run.
            let now = Instant::now();
            let held_up = stalls.held_up(now);
            self.connections.values_mut().for_each(|connection| connection.exclude(held_up));
            self.waker.clear();
            while let Ok(command) = self.commands.try_recv() {
                match command {
                    Command::Epoch(epoch) => self.begin_epoch(epoch),
                    Command::Stop => return self.stop(),
                }
            }
            self.serve(ready, now);
            match self.hear_above() {
                Above::Goes => {}
                Above::Left => return self.stop(),
                // Its members find their connections closed, as those of the store itself would.
                Above::Lost => return,
            }
            self.accept(now);
            for group in self.groups.all() {
                let mut out = Vec::new();
                self.groups.of(group).expire(now, &mut out);
                self.deliver(group, out);
            }
            self.show_life(now);
            // One write for each connection and round.
            self.flush();
            self.close_silent(now);
            self.sweep(now);
            self.remind(now);
        }
    }

    /// Sends a heartbeat to members that have heard nothing for a while.
    fn show_life(&mut self, now: Instant) {
        let interval = self.settings.silence / HEARTBEATS;
        self.connections.values_mut().for_each(|connection| connection.keep_alive(now, interval));
    }

    /// Reads connections in turn, for a part of the silence: the rest are still ready in the next round.
    fn serve(&mut self, mut ready: Vec<u64>, now: Instant) {
        let longest = self.settings.silence / ROUNDS_OF_SILENCE;
        let next = ready.partition_point(|id| *id < self.next_served);
        ready.rotate_left(next);
        let mut ready = ready.into_iter();
        for id in ready.by_ref() {
            self.next_served = id + 1;
            self.read(id, now);
            if now.elapsed() >= longest {
                break;
            }
        }
        // They have said something, which is only not read yet.
        for id in ready {
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.is_heard_of(now);
            }
        }
    }

    /// Says which members have not come while others wait for them.
    fn remind(&mut self, now: Instant) {
        let groups = self.groups.all();
        self.reminders.retain(|group, _| groups.contains(group));
        for group in groups {
            if !self.groups.of(group).is_incomplete() {
                self.reminders.remove(&group);
                continue;
            }
            let reminder = self.reminders.entry(group).or_insert_with(|| Reminder::start(now));
            if let Some(waited) = reminder.due(now) {
                say_missing(group.role().name(), &self.groups.of(group).missing(), waited);
            }
        }
    }

    /// Says that a connection is turned away, once for each host and reason.
    fn say_turned_away(&mut self, peer: &str, why: &str) {
        let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
        let is_room = self.turned_away.len() < MAX_TURNED_AWAY;
        if is_room && self.turned_away.insert((host.to_owned(), why.to_owned())) {
            crate::os::log::say(format_args!("the store has turned away {peer}: {why}"));
        }
    }

    fn flush(&mut self) {
        self.connections.values_mut().for_each(ServerConnection::flush);
    }

    /// Waits for events; returns the connections that can be read.
    fn wait(&self) -> Vec<u64> {
        let now = Instant::now();
        let connections = self.connections.values().filter(|connection| !connection.is_awaited());
        let connections = connections.map(|connection| connection.next_deadline(&self.settings));
        let above = self.above.as_ref().map(|_| now + self.settings.silence);
        let next = self.groups.next_deadline().into_iter().chain(connections).chain(above).min();
        // With a connection to watch, poll eight times per silence.
        let timeout = next.map(|next| next.saturating_duration_since(now).min(self.settings.silence / 8));
        let mut streams: Vec<_> = self.connections.values().map(ServerConnection::interest).collect();
        streams.extend(self.above.as_ref().map(Carrier::interest));
        let ready = poll_sockets(&self.listeners, &self.waker, &streams, timeout);
        self.connections.keys().zip(ready).filter(|(_, ready)| *ready).map(|(id, _)| *id).collect()
    }

    /// Accepts connections, and reads what they have sent already.
    fn accept(&mut self, now: Instant) {
        let mut accepted = Vec::new();
        for listener in &self.listeners {
            for _ in 0..MAX_ACCEPTED {
                match listener.accept() {
                    Ok(connection) => accepted.push(connection),
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                    Err(e) => {
                        // Out of descriptors, most likely. The listener stays ready: do not spin on it.
                        crate::os::log::warn!("the store cannot accept a connection: {e}");
                        std::thread::sleep(Duration::from_millis(10));
                        break;
                    }
                }
            }
        }
        for (stream, peer) in accepted {
            let (oldest, count) = self.strangers();
            if let Some(oldest) = oldest.filter(|_| count >= self.groups.expected() + MAX_UNAUTHENTICATED) {
                crate::os::log::warn!("too many connections that prove nothing: the oldest is cut off");
                self.connections.remove(&oldest);
            }
            let id = self.accepted;
            match Wire::tcp(stream).and_then(|wire| self.begin_with(wire, peer.to_string(), now)) {
                Ok(()) => self.read(id, now),
                Err(e) => crate::os::log::warn!("{peer} could not be served: {e}"),
            }
        }
    }

    /// The oldest connection that has not proved that it belongs to the job, and the number of these.
    fn strangers(&self) -> (Option<u64>, usize) {
        let mut strangers = self.connections.iter().filter(|(_, connection)| !connection.is_trusted());
        let oldest = strangers.next().map(|(id, _)| *id);
        (oldest, oldest.map_or(0, |_| 1 + strangers.count()))
    }

    /// Closes connections that have said nothing, if there are more than the members need.
    fn close_silent(&mut self, now: Instant) {
        let surplus = self.strangers().1.saturating_sub(self.groups.expected() + MAX_SILENT);
        if surplus == 0 {
            return;
        }
        let silent =
            self.connections.iter().filter(|(_, connection)| connection.is_silent(now, SILENT_LIMIT));
        let doomed: Vec<u64> = silent.map(|(id, _)| *id).take(surplus).collect();
        if !doomed.is_empty() {
            crate::os::log::warn!("{} of the connections that say nothing are cut off", doomed.len());
        }
        for id in doomed {
            self.connections.remove(&id);
        }
    }

    fn begin_with(&mut self, wire: Wire, peer: String, now: Instant) -> io::Result<()> {
        let connection = ServerConnection::new(wire, peer, self.identity.as_ref(), now)?;
        self.connections.insert(self.accepted, connection);
        self.accepted += 1;
        Ok(())
    }

    /// Reads a connection, and carries out its requests.
    fn read(&mut self, id: u64, now: Instant) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.receive();
        }
        // A request may end this connection, when its reply cannot be sent.
        while let Some(connection) = self.connections.get_mut(&id) {
            match connection.next_step(&self.token, now) {
                Step::Nothing => return,
                Step::Introduction(join @ Request::Join { role, rank, .. }) if self.above.is_some() => {
                    if let Some(problem) = self.ask_above(id, role, rank, join) {
                        self.answer_join(id, Group::of(role), rank, Err(problem));
                    }
                    return;
                }
                Step::Introduction(request) => self.introduced(id, request),
                Step::Ended { rank, end } => {
                    if connection.forget(rank) {
                        self.end_member(Group::Ranks, rank, end);
                    }
                }
                Step::Ask { group: _, rank, request } if self.above.is_some() => {
                    if let Some(above) = &mut self.above {
                        above.post(rank, request);
                    }
                }
                Step::Ask { group, rank, request } => {
                    let mut out = Vec::new();
                    self.groups.of(group).handle(rank, request, now, &mut out);
                    self.deliver(group, out);
                }
            }
        }
    }

    /// Queues replies, each once for every connection. While there are many, the members without one hear that the store is alive.
    fn deliver(&mut self, group: Group, out: Outbox) {
        let longest = self.settings.silence / ROUNDS_OF_SILENCE;
        let mut began = Instant::now();
        for letter in out {
            for (id, places) in self.connections_of(group, &letter.to) {
                if began.elapsed() >= longest {
                    began = Instant::now();
                    self.show_life(began);
                    self.flush();
                }
                if let Some(connection) = self.connections.get_mut(&id) {
                    let ranks: Vec<u32> = places.iter().map(|place| letter.to[*place]).collect();
                    connection.send(&ranks, letter.reply.for_some(&places));
                }
            }
        }
    }

    /// The connections of some members, each with their places in `ranks`.
    fn connections_of(&self, group: Group, ranks: &[u32]) -> BTreeMap<u64, Vec<usize>> {
        let mut found = BTreeMap::<u64, Vec<usize>>::new();
        for (place, rank) in ranks.iter().enumerate() {
            if let Some(id) = self.members.get(&(group, *rank)) {
                found.entry(*id).or_default().push(place);
            }
        }
        found
    }

    /// Removes the connections that have ended or must end. Notifying the others may end more.
    fn sweep(&mut self, now: Instant) {
        loop {
            let doomed = self.connections.iter().filter_map(|(id, connection)| {
                connection.reason_to_end(now, &self.settings).map(|end| (*id, connection.members(), end))
            });
            let doomed: Vec<_> = doomed.collect();
            if doomed.is_empty() {
                return;
            }
            // Each hears of its own end and not of the others': where all end at once, that would be all of all.
            for member in doomed.iter().flat_map(|(_, members, _)| members) {
                self.members.remove(member);
            }
            for (id, members, end) in doomed {
                self.end_connection(id, members, end);
            }
        }
    }

    fn end_connection(&mut self, id: u64, members: Vec<(Group, u32)>, end: End) {
        let is_stranger = members.is_empty();
        let carries = self.connections.get(&id).is_some_and(ServerConnection::carries);
        for (group, rank) in members {
            // A carrier that leaves lets those down whom it still has.
            let end = if carries && end == End::Left { End::Closed } else { end };
            self.members.insert((group, rank), id);
            self.end_member(group, rank, end);
        }
        let removed = self.connections.remove(&id);
        let fault = removed.as_ref().and_then(|gone| Some((gone.peer(), gone.fault()?)));
        match fault {
            Some((peer, why)) if is_stranger => self.say_turned_away(peer, why),
            Some((peer, why)) => crate::os::log::warn!("{peer} is cut off by the store: {why}"),
            None => {}
        }
    }

    /// Records the end of a member, and notifies the others.
    fn end_member(&mut self, group: Group, rank: u32, end: End) {
        if self.above.is_some() {
            self.members.remove(&(group, rank));
            return self.end_above(rank, end);
        }
        if end != End::Left {
            crate::os::log::warn!("{} {rank} is lost: {end}", group.role().name());
        }
        let mut out = Vec::new();
        self.groups.of(group).ended(rank, end, &mut out);
        if matches!(group, Group::Grown(_)) {
            self.groups.of(group).give_up(rank, end, &mut out);
        }
        self.deliver(group, out);
        self.flush();
        self.members.remove(&(group, rank));
    }

    fn begin_epoch(&mut self, epoch: u32) {
        self.settings.epoch = epoch;
        self.groups.forget_ranks(&self.settings);
        self.members.retain(|(group, _), _| *group == Group::Nodes);
        let is_old = |connection: &ServerConnection| {
            connection.carries() || connection.members().iter().any(|(group, _)| *group != Group::Nodes)
        };
        for connection in self.connections.values_mut().filter(|connection| connection.carries()) {
            connection.send(&[], Reply::Goodbye);
            connection.flush();
        }
        self.connections.retain(|_, connection| !is_old(connection));
    }

    fn stop(mut self) {
        self.connections.retain(|_, connection| connection.is_trusted());
        for connection in self.connections.values_mut() {
            connection.send(&[], Reply::Goodbye);
        }
        // Closing a socket with unread bytes would discard the goodbye: each member closes its own first.
        let until = Instant::now() + FLUSH_TIMEOUT;
        loop {
            self.connections.retain(|_, connection| !connection.is_finished());
            if self.connections.is_empty() || Instant::now() >= until {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(above) = self.above.take() {
            above.leave();
        }
    }
}

/// Whether a non-blocking call should be repeated later.
fn is_not_now(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
