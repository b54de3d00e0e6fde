//! The store's server: one thread, one listener (or given connections), and a connection for each member.
//!
//! A connection is cut off when it does not prove in time that it knows the token, sends malformed messages,
//! falls silent, or does not read its replies. The others are only notified which member is lost.

mod connection;

use crate::os::{Waker, Wire, poll_sockets};
use crate::rendezvous::store::cipher::Identity;
use crate::rendezvous::store::namespace::{Namespace, Outbox};
use crate::rendezvous::store::protocol::{End, Reply, Role};
use crate::rendezvous::store::session::Token;
use crate::rendezvous::store::stall::StallDetector;
use crate::types::error::{Error, Result, UsageError};
use connection::{ServerConnection, Step};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
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
    /// Number of restarts of the job. Ranks of another epoch are refused.
    pub epoch: u32,
    /// A member that sends nothing for this long counts as lost.
    pub silence: Duration,
    /// A connection that has not authenticated within this time is closed.
    pub auth_timeout: Duration,
    /// Whether connections are encrypted.
    pub encrypted: bool,
}

/// Default of [`Settings::silence`]: with it, detecting and reporting a loss takes less than two seconds.
pub const SILENCE: Duration = Duration::from_millis(1400);

/// [`Settings::silence`] from the value of `PHALANX_HEARTBEAT_TIMEOUT`, if it is set.
pub fn silence_from(value: Option<&str>) -> Result<Duration> {
    let Some(text) = value else {
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
        Settings { ranks: None, nodes: None, epoch: 0, silence: SILENCE, auth_timeout, encrypted: false }
    }
}

/// Most unauthenticated connections beyond the number of expected members. One more closes the oldest.
const MAX_UNAUTHENTICATED: usize = 64;
/// Bound on sending the last replies at shutdown.
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
    /// Listens on `address` (`host:port`; port 0 takes a free one).
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if the address is taken or is none of this host's.
    pub fn start(address: &str, token: Token, settings: Settings) -> Result<Server> {
        Server::on(bind(address)?, token, settings)
    }

    /// Serves an existing listener.
    pub(crate) fn on(listener: TcpListener, token: Token, settings: Settings) -> Result<Server> {
        listener.set_nonblocking(true).map_err(refused("preparing the store's listener"))?;
        let bound = listener.local_addr().map_err(refused("asking for the store's address"))?;
        Server::run(Some(bound), Some(listener), Vec::new(), token, settings)
    }

    /// Serves only the given connections, each with its name for messages.
    pub(crate) fn over(wires: Vec<(String, Wire)>, token: Token, settings: Settings) -> Result<Server> {
        Server::run(None, None, wires, token, settings)
    }

    fn run(
        address: Option<SocketAddr>,
        listener: Option<TcpListener>,
        wires: Vec<(String, Wire)>,
        token: Token,
        settings: Settings,
    ) -> Result<Server> {
        let waker = Arc::new(Waker::new().map_err(refused("preparing the store's thread"))?);
        let identity = settings.encrypted.then(Identity::new).transpose();
        let identity = identity.map_err(refused("making the store's key"))?;
        let (commands, received) = mpsc::channel();
        let mut service = Service {
            listener,
            waker: waker.clone(),
            commands: received,
            token,
            identity,
            ranks: Namespace::new(Role::Rank, settings.ranks),
            nodes: Namespace::new(Role::Node, settings.nodes),
            settings,
            connections: BTreeMap::new(),
            members: HashMap::new(),
            accepted: 0,
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
pub fn check_reachable(address: &str) -> Result<()> {
    let name = address.rsplit_once(':').map_or(address, |(name, _)| name);
    let means_it = name == "localhost" || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    let mut addresses = address.to_socket_addrs().into_iter().flatten().peekable();
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

/// Binds a listener.
pub(crate) fn bind(address: &str) -> Result<TcpListener> {
    let problem = |problem: String| {
        Error::bootstrap(problem, "give the store an address of this host with a free port (host:port)")
    };
    let addresses =
        address.to_socket_addrs().map_err(|e| problem(format!("the store's address {address:?}: {e}")))?;
    TcpListener::bind(&addresses.collect::<Vec<_>>()[..]).map_err(|e| match e.kind() {
        ErrorKind::AddrInUse => problem(format!("the store's address {address} is taken by another program")),
        ErrorKind::AddrNotAvailable => {
            problem(format!("the store's address {address} is none of this host's"))
        }
        _ => problem(format!("the store cannot listen on {address}: {e}")),
    })
}

/// State of the server's thread.
struct Service {
    listener: Option<TcpListener>,
    waker: Arc<Waker>,
    commands: Receiver<Command>,
    token: Token,
    /// The TLS key, if the job encrypts.
    identity: Option<Identity>,
    settings: Settings,
    ranks: Namespace,
    nodes: Namespace,
    /// In the order in which they were accepted.
    connections: BTreeMap<u64, ServerConnection>,
    members: HashMap<(Role, u32), u64>,
    accepted: u64,
}

impl Service {
    fn run(mut self) {
        let mut stalls = StallDetector::new(self.settings.silence);
        loop {
            let ready = self.wait();
            // Silence is measured up to the end of the wait, without time in which this thread did not run.
            let now = Instant::now();
            let held_up = stalls.held_up(now);
            self.connections.values_mut().for_each(|connection| connection.extend_silence(held_up));
            self.waker.clear();
            while let Ok(command) = self.commands.try_recv() {
                match command {
                    Command::Epoch(epoch) => self.begin_epoch(epoch),
                    Command::Stop => return self.stop(),
                }
            }
            for id in ready {
                self.read(id, now);
            }
            self.accept(now);
            for role in [Role::Rank, Role::Node] {
                let mut out = Vec::new();
                self.namespace(role).expire(now, &mut out);
                self.deliver(role, out);
            }
            let interval = self.settings.silence / 8;
            for connection in self.connections.values_mut() {
                connection.keep_alive(now, interval);
            }
            // One write for each connection and round.
            self.flush();
            self.sweep(now);
        }
    }

    fn flush(&mut self) {
        self.connections.values_mut().for_each(ServerConnection::flush);
    }

    /// Waits for events; returns the connections that can be read.
    fn wait(&self) -> Vec<u64> {
        let now = Instant::now();
        let namespaces = [self.ranks.next_deadline(), self.nodes.next_deadline()];
        let connections =
            self.connections.values().map(|connection| connection.next_deadline(&self.settings));
        let next = namespaces.into_iter().flatten().chain(connections).min();
        // With a connection to watch, poll eight times per silence.
        let timeout = next.map(|next| next.saturating_duration_since(now).min(self.settings.silence / 8));
        let streams: Vec<_> = self.connections.values().map(ServerConnection::interest).collect();
        let ready = poll_sockets(self.listener.as_ref(), &self.waker, &streams, timeout);
        self.connections.keys().zip(ready).filter(|(_, ready)| *ready).map(|(id, _)| *id).collect()
    }

    fn namespace(&mut self, role: Role) -> &mut Namespace {
        match role {
            Role::Rank => &mut self.ranks,
            Role::Node => &mut self.nodes,
        }
    }

    fn accept(&mut self, now: Instant) {
        let expected = self.settings.ranks.unwrap_or(0) + self.settings.nodes.unwrap_or(0);
        loop {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok((stream, peer)) => {
                    let strangers = self.connections.iter().filter(|(_, c)| c.member().is_none());
                    let (oldest, count) =
                        strangers.fold((None, 0), |(oldest, n), (id, _)| (oldest.or(Some(*id)), n + 1));
                    if let Some(oldest) = oldest.filter(|_| count >= MAX_UNAUTHENTICATED + expected as usize)
                    {
                        crate::os::log::warn!(
                            "too many connections that prove nothing: the oldest is cut off"
                        );
                        self.connections.remove(&oldest);
                    }
                    let served =
                        Wire::tcp(stream).and_then(|wire| self.begin_with(wire, peer.to_string(), now));
                    if let Err(e) = served {
                        crate::os::log::warn!("{peer} could not be served: {e}");
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(e) => {
                    // Out of descriptors, most likely. The listener stays ready: do not spin on it.
                    crate::os::log::warn!("the store cannot accept a connection: {e}");
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            }
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
                Step::Join { role, rank, size, epoch } => self.join(id, role, rank, size, epoch),
                Step::Ask { role, rank, request } => {
                    let mut out = Vec::new();
                    self.namespace(role).handle(rank, request, now, &mut out);
                    self.deliver(role, out);
                }
            }
        }
    }

    fn join(&mut self, id: u64, role: Role, rank: u32, size: u32, epoch: u32) {
        let mut out = Vec::new();
        let current = self.settings.epoch;
        let outcome = if role == Role::Rank && epoch != current {
            Err(format!(
                "{role} {rank} is of epoch {epoch}, and the job is in epoch {current}",
                role = role.name()
            ))
        } else {
            self.namespace(role).join(rank, size, &mut out)
        };
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        match outcome {
            Ok(()) => {
                self.members.insert((role, rank), id);
                let silence = u32::try_from(self.settings.silence.as_millis()).unwrap_or(u32::MAX);
                connection.admit(role, rank);
                connection.send(&Reply::Welcome { silence });
                // Notify it of members lost before it joined.
                let lost: Vec<_> = self.namespace(role).lost().collect();
                out.extend(lost.into_iter().map(|(lost, end)| (rank, Reply::Lost { rank: lost, end })));
            }
            Err(reason) => {
                crate::os::log::warn!("the store refuses {}: {reason}", connection.peer());
                connection.send(&Reply::Refused { id: 0, reason });
                connection.break_off(End::Broken);
            }
        }
        self.deliver(role, out);
    }

    fn deliver(&mut self, role: Role, out: Outbox) {
        for (rank, reply) in out {
            let id = self.members.get(&(role, rank));
            if let Some(connection) = id.and_then(|id| self.connections.get_mut(id)) {
                connection.send(&reply);
            }
        }
    }

    /// Removes the connections that have ended or must end. Notifying the others may end more.
    fn sweep(&mut self, now: Instant) {
        loop {
            let doomed = self.connections.iter().find_map(|(id, connection)| {
                connection.reason_to_end(now, &self.settings).map(|end| (*id, connection.member(), end))
            });
            let Some((id, member, end)) = doomed else {
                return;
            };
            if let Some((role, rank)) = member {
                if end != End::Left {
                    crate::os::log::warn!("{} {rank} is lost: {end}", role.name());
                }
                let mut out = Vec::new();
                self.namespace(role).ended(rank, end, &mut out);
                self.deliver(role, out);
                self.flush();
                self.members.remove(&(role, rank));
            }
            self.connections.remove(&id);
        }
    }

    fn begin_epoch(&mut self, epoch: u32) {
        self.settings.epoch = epoch;
        self.ranks = Namespace::new(Role::Rank, self.settings.ranks);
        self.members.retain(|(role, _), _| *role != Role::Rank);
        self.connections.retain(|_, connection| !matches!(connection.member(), Some((Role::Rank, _))));
    }

    fn stop(mut self) {
        for connection in self.connections.values_mut().filter(|c| c.member().is_some()) {
            connection.send(&Reply::Goodbye);
        }
        self.flush();
        let until = Instant::now() + FLUSH_TIMEOUT;
        while Instant::now() < until && self.connections.values().any(|c| c.interest().1) {
            std::thread::sleep(Duration::from_millis(5));
            self.flush();
        }
    }
}

/// Whether a non-blocking call should be repeated later.
fn is_not_now(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
