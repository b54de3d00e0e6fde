//! Connecting to the store: retries, the greeting, and the errors of a refusal.

use super::Member;
use crate::os::{ThreadMark, Wire, is_unreachable};
use crate::rendezvous::store::address::{AddressError, check, resolve};
use crate::rendezvous::store::cipher::{Binding, Cipher};
use crate::rendezvous::store::protocol::{
    Greeting, Growth, MAX_REPLY, Malformed, Reply, Request, Side, VERSION, shortened,
};
use crate::rendezvous::store::session::Key;
use crate::rendezvous::store::{Rendezvous, session};
use crate::types::error::{Error, Result, UnsupportedError};
use crate::watch::Reminder;
use crate::watch::deadline::after;
use std::fmt::Display;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// How long the first attempt to reach the store may take until it answers. Each further one may take twice as long, up to
/// [`LONGEST`].
const ATTEMPT: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(20);
/// How long to wait between attempts, at most.
const PAUSE: Duration = Duration::from_millis(200);
/// Attempts that end with a closed connection before joining fails for good.
const CLOSURES: u32 = 3;

/// An authenticated connection.
pub struct Session {
    /// The client's rank and the number of ranks, as the store has them.
    pub place: (u32, u32),
    pub stream: Wire,
    pub cipher: Cipher,
    pub to: Key,
    pub from: Key,
    pub silence: Duration,
    /// The store's thread.
    pub thread: Option<ThreadMark>,
    /// Received after the welcome.
    pub rest: Vec<u8>,
}

/// Why an attempt failed.
enum AttemptError {
    /// Nothing answers yet: why.
    Absent(String),
    /// The name has no address: a name server may get to know the store's host only after that has started.
    Unresolved(io::Error),
    /// The connection was closed before the welcome.
    Closed(io::Error),
    /// No communicator asks for new ranks.
    NoPlace,
    /// Retrying is useless.
    Final(Error),
}

/// Who joins.
#[derive(Clone, Copy)]
pub enum Client {
    Member(Member),
    /// A member of a communicator that grows, with its rank there.
    Growing(u32, Growth),
    /// A new rank.
    Newcomer,
    /// A connection that carries the ranks of a host.
    Carrier,
}

impl Client {
    fn first_request(self, rendezvous: &Rendezvous) -> Request {
        let (epoch, job) = (rendezvous.epoch, shortened(&rendezvous.job).to_owned());
        match self {
            Client::Member(Member { role, rank, size }) => Request::Join { role, rank, size, epoch, job },
            Client::Growing(rank, growth) => Request::Grow { growth, rank, epoch, job },
            Client::Newcomer => Request::Enter { epoch, job },
            Client::Carrier => Request::Carry { epoch, job },
        }
    }

    /// What it is, for messages.
    fn name(self) -> &'static str {
        match self {
            Client::Member(member) => member.role.name(),
            Client::Growing(..) | Client::Newcomer => "rank",
            Client::Carrier => "launcher",
        }
    }
}

impl Display for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Client::Member(member) => write!(f, "{} {}", self.name(), member.rank),
            Client::Growing(rank, _) => write!(f, "rank {rank} of a communicator that grows"),
            Client::Newcomer => f.write_str("a new rank"),
            Client::Carrier => f.write_str("the launcher that connects a host's ranks"),
        }
    }
}

/// Connects and joins; retries until `deadline` while nothing answers.
pub fn join(rendezvous: &Rendezvous, client: Client, deadline: Instant) -> Result<Session> {
    Ok(join_in_attempts(rendezvous, client, deadline, ATTEMPT)?.expect("only a new rank needs a place"))
}

/// [`join`] for a new rank; `None` if no communicator asks for any now.
pub fn enter(rendezvous: &Rendezvous, deadline: Instant) -> Result<Option<Session>> {
    join_in_attempts(rendezvous, Client::Newcomer, deadline, ATTEMPT)
}

fn join_in_attempts(
    rendezvous: &Rendezvous,
    client: Client,
    deadline: Instant,
    mut longest: Duration,
) -> Result<Option<Session>> {
    let started = Instant::now();
    let mut closures = 0;
    let mut pause = Duration::from_millis(10);
    let mut reminder = Reminder::start(started);
    loop {
        let error = match attempt(rendezvous, client, deadline, longest) {
            Ok(session) => return Ok(Some(session)),
            Err(AttemptError::NoPlace) => return Ok(None),
            Err(AttemptError::Final(error)) => return Err(error),
            Err(AttemptError::Unresolved(e)) => AddressError::Unresolved(e).into_error(&rendezvous.address),
            Err(AttemptError::Closed(e)) => {
                closures += 1;
                Error::bootstrap(
                    format!(
                        "the store at {} ends the connection without a welcome ({e})",
                        rendezvous.address
                    ),
                    "it has another token, or is no store: see that all ranks have the same PHALANX_TOKEN \
                     (or token file) and PHALANX_STORE",
                )
            }
            Err(AttemptError::Absent(why)) => Error::bootstrap(
                format!(
                    "after {:.1?} the store at {} cannot be reached ({why})",
                    started.elapsed(),
                    rendezvous.address
                ),
                "see that the launcher or the rank that hosts it runs, and that no firewall is in between",
            ),
        };
        let now = Instant::now();
        if closures >= CLOSURES || now >= deadline {
            return Err(error);
        }
        if reminder.due(now).is_some() {
            let address = &rendezvous.address;
            crate::os::log::say(format_args!("waiting for the store at {address}: {error}"));
        }
        std::thread::sleep(pause.min(deadline.saturating_duration_since(now)));
        pause = (pause * 2).min(PAUSE);
        longest = longest.saturating_mul(2).min(LONGEST);
    }
}

fn attempt(
    rendezvous: &Rendezvous,
    client: Client,
    deadline: Instant,
    longest: Duration,
) -> std::result::Result<Session, AttemptError> {
    let timeout_left = || {
        let left = deadline.saturating_duration_since(Instant::now());
        left.min(longest).max(Duration::from_millis(10))
    };
    let stream = open(&rendezvous.address, timeout_left)?;
    greet(stream, rendezvous, client, timeout_left(), deadline)
}

/// Joins over an existing connection.
pub fn join_over(wire: Wire, rendezvous: &Rendezvous, client: Client, timeout: Duration) -> Result<Session> {
    let timeout_left = timeout.max(Duration::from_millis(10));
    let deadline = after(Instant::now(), timeout_left);
    greet(wire, rendezvous, client, timeout_left, deadline).map_err(|failed| match failed {
        AttemptError::Final(error) => error,
        AttemptError::Absent(why) => no_answer(&rendezvous.address, &why),
        AttemptError::Unresolved(e) | AttemptError::Closed(e) => no_answer(&rendezvous.address, &e),
        AttemptError::NoPlace => unreachable!("only a new rank needs a place"),
    })
}

fn no_answer(address: &str, why: &dyn Display) -> Error {
    Error::bootstrap(
        format!("the store at {address} does not answer ({why})"),
        "see what became of that rank: its own output",
    )
}

/// Joins over a connection. The store has `first_answer` for its greeting; after that it is known to run, and has up to the
/// `deadline`: it may have many ranks to greet.
fn greet(
    stream: Wire,
    rendezvous: &Rendezvous,
    client: Client,
    first_answer: Duration,
    deadline: Instant,
) -> std::result::Result<Session, AttemptError> {
    stream
        .set_read_timeout(Some(first_answer))
        .and_then(|()| stream.set_write_timeout(Some(first_answer)))
        .map_err(AttemptError::Closed)?;

    let nonce = session::nonce().map_err(AttemptError::Closed)?;
    let encrypted = rendezvous.encrypted;
    let ours = Greeting { side: Side::Client, version: VERSION, encrypted, nonce };
    let mut bytes = [0; Greeting::LEN];
    (&stream).write_all(&ours.encode()).and_then(|()| (&stream).read_exact(&mut bytes)).map_err(|e| {
        match e.kind() {
            // The kernel accepts connections to a store that is bound and does not run yet: that of a
            // `UniqueId`.
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                AttemptError::Absent("it is connected, and says nothing".to_owned())
            }
            _ => AttemptError::Closed(e),
        }
    })?;
    let left = deadline.saturating_duration_since(Instant::now()).max(first_answer);
    stream.set_read_timeout(Some(left)).map_err(AttemptError::Closed)?;
    let stranger = |Malformed(why): Malformed| {
        AttemptError::Final(Error::bootstrap(
            format!("what answers at {} is no store of phalanx: {why}", rendezvous.address),
            "another program has the port: choose another (PHALANX_STORE)",
        ))
    };
    let theirs = Greeting::decode(&bytes).map_err(stranger)?;
    if theirs.side != Side::Server {
        return Err(stranger(Malformed("it is a client, too")));
    }
    if theirs.version != VERSION {
        return Err(AttemptError::Final(Error::bootstrap(
            format!(
                "the store at {} speaks version {} of the protocol, this {} version {VERSION}",
                rendezvous.address,
                theirs.version,
                client.name(),
            ),
            "use one version of phalanx in all processes of the job",
        )));
    }
    if theirs.encrypted != encrypted {
        let (it, this) = if encrypted { ("does not encrypt", "does") } else { ("encrypts", "does not") };
        return Err(AttemptError::Final(Error::bootstrap(
            format!("the store at {} {it}, and this {} {this}", rendezvous.address, client.name()),
            "set PHALANX_STORE_TLS to the same (0 or 1) for all processes of the job, launchers included",
        )));
    }
    let mut rest = Vec::new();
    let (mut cipher, binding) = encryption(&stream, encrypted, &mut rest).map_err(AttemptError::Closed)?;
    let (mut to, mut from) = session::keys(&rendezvous.token, &ours, &theirs, &binding);
    let join = client.first_request(rendezvous);
    let mut wire = Vec::new();
    let sealed = cipher.seal(&to.seal(&join.encode()), &mut wire);
    sealed.and_then(|()| (&stream).write_all(&wire)).map_err(AttemptError::Closed)?;

    let reply = first_reply(&stream, &mut cipher, &mut from, &mut rest, rendezvous)?;
    match reply {
        Reply::Welcome { rank, size, silence, thread } => {
            let silence = Duration::from_millis(silence.into());
            Ok(Session { place: (rank, size), stream, cipher, to, from, silence, thread, rest })
        }
        Reply::NoPlace if matches!(client, Client::Newcomer) => Err(AttemptError::NoPlace),
        // The members would only try again.
        Reply::Refused { reason, .. } if matches!(client, Client::Growing(..)) => {
            Err(AttemptError::Final(Error::from(UnsupportedError {
                what: "grow".into(),
                why: format!("the store at {} refuses {client}: {reason}", rendezvous.address),
                remedy: "start the job again with more ranks".into(),
            })))
        }
        Reply::Refused { reason, .. } => Err(AttemptError::Final(Error::bootstrap(
            format!("the store at {} refuses {client}: {reason}", rendezvous.address),
            "give each process a number of its own, and all the same size, job and restart count",
        ))),
        _ => Err(stranger(Malformed("it answers without a welcome"))),
    }
}

fn open(address: &str, timeout_left: impl Fn() -> Duration) -> std::result::Result<Wire, AttemptError> {
    let final_error = |error: AddressError| AttemptError::Final(error.into_error(address));
    check(address).map_err(final_error)?;
    let addresses = resolve(address).map_err(|error| match error {
        AddressError::Unresolved(e) => AttemptError::Unresolved(e),
        error => final_error(error),
    })?;
    let (mut may_come, mut tried) = (false, Vec::new());
    for address in addresses {
        let error = match TcpStream::connect_timeout(&address, timeout_left()) {
            // While nobody listens on a port, the kernel may give that very port to the client, which then
            // is connected to itself and keeps the store from binding it.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                ErrorKind::ConnectionRefused.into()
            }
            Ok(stream) => return Wire::tcp(stream).map_err(|e| AttemptError::Absent(e.to_string())),
            Err(e) => e,
        };
        let is_hopeless =
            is_unreachable(&error) || (error.kind() == ErrorKind::AddrNotAvailable && address.is_ipv6());
        may_come |= !is_hopeless;
        tried.push(format!("{address}: {error}"));
    }
    let tried = tried.join(", ");
    Err(match may_come {
        true => AttemptError::Absent(tried),
        false => final_error(AddressError::Hopeless(format!("this host cannot reach it ({tried})"))),
    })
}

/// Performs the TLS handshake, if the job encrypts. Bytes received after it are appended to `input`.
fn encryption(mut stream: &Wire, encrypted: bool, input: &mut Vec<u8>) -> io::Result<(Cipher, Binding)> {
    let mut cipher = if encrypted { Cipher::client()? } else { Cipher::NONE };
    let mut wire = Vec::new();
    cipher.flush(&mut wire)?;
    loop {
        stream.write_all(&wire)?;
        wire.clear();
        if let Some(binding) = cipher.binding() {
            return Ok((cipher, binding));
        }
        cipher.open(read_some(stream, &mut [0; 4096])?, input, &mut wire)?;
    }
}

fn read_some<'a>(mut stream: &Wire, bytes: &'a mut [u8]) -> io::Result<&'a [u8]> {
    match stream.read(bytes)? {
        0 => Err(ErrorKind::UnexpectedEof.into()),
        n => Ok(&bytes[..n]),
    }
}

/// The first reply; bytes after it stay in `input`.
fn first_reply(
    mut stream: &Wire,
    cipher: &mut Cipher,
    from: &mut Key,
    input: &mut Vec<u8>,
    rendezvous: &Rendezvous,
) -> std::result::Result<Reply, AttemptError> {
    let mut wire = Vec::new();
    loop {
        let mut bytes = [0; 4096];
        let read = read_some(stream, &mut bytes);
        let opened = read.and_then(|bytes| cipher.open(bytes, input, &mut wire));
        opened.and_then(|()| stream.write_all(&wire)).map_err(AttemptError::Closed)?;
        wire.clear();
        let opened = from.open(input, MAX_REPLY).and_then(|opened| {
            opened.map(|opened| Ok((Reply::decode(opened.message)?, opened.taken))).transpose()
        });
        match opened {
            Ok(None) => {}
            Ok(Some((reply, taken))) => {
                input.drain(..taken);
                return Ok(reply);
            }
            Err(Malformed(why)) => {
                return Err(AttemptError::Final(Error::bootstrap(
                    format!(
                        "what answers at {} does not prove that it is this job's store: {why}",
                        rendezvous.address
                    ),
                    "see that the address is right (PHALANX_STORE), and that nobody stands in between",
                )));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::store::address::Listeners;
    use crate::rendezvous::store::{Host, Server, Settings, Token};

    #[test]
    fn a_store_that_is_bound_and_does_not_run_yet_is_waited_for() {
        let listener = Listeners::bind("127.0.0.1:0").unwrap();
        let rendezvous = Rendezvous {
            address: listener.address().unwrap().to_string(),
            token: Token::random().unwrap(),
            job: String::new(),
            epoch: 0,
            host: Host::Rank(0),
            encrypted: false,
        };
        let joined = |rank: usize, timeout: Duration| {
            let (member, deadline) = (Client::Member(Member::of_ranks(rank, 2)), Instant::now() + timeout);
            join_in_attempts(&rendezvous, member, deadline, Duration::from_millis(100))
        };
        let error = joined(1, Duration::from_millis(800)).err().expect("nobody is there").to_string();
        assert!(error.contains("cannot be reached") && error.contains("says nothing"), "{error}");
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| scope.spawn(move || joined(rank, Duration::from_secs(20))));
            // Attempts enough for the kernel to have connections that were given up, and that the store then
            // finds.
            std::thread::sleep(Duration::from_millis(800));
            let settings = Settings { ranks: Some(2), ..Settings::default() };
            let _server = Server::on(listener, rendezvous.token.clone(), settings).unwrap();
            for rank in ranks {
                rank.join().unwrap().map(drop).unwrap();
            }
        });
    }
}
