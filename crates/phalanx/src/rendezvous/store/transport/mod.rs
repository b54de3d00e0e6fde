//! Connections whose bytes travel as messages of something that connects the ranks already (MPI: `backend/mpi/mail.rs`), so that
//! the store needs no port.
//!
//! The store's ends are as ever; each has a socket in its own process, and a thread there, the transport, has the other end of it.
//! What it reads from the socket it sends to the peer's transport, which writes it into the peer's socket; a message without bytes
//! is the end of that direction. A rank has a line to the rank with the store, and that one has a line to each.

use crate::os::{Waker, Wire, poll_sockets};
use crate::types::error::{Error, Result};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of a message, at most: so short that whoever carries it need not ask the receiver first.
const PIECE: usize = 4096;

/// Messages to one peer that are under way, at most. Then its socket fills up, and the store sees that it does not read.
const MOST_UNSENT: usize = 256;

/// Messages cannot wake anybody: how soon a transport looks again after something has come or gone, and when nothing does.
const SOON: Duration = Duration::from_micros(20);
const LATER: Duration = Duration::from_millis(2);

/// How long the last words may take, to a peer that may be gone: nothing was heard from it for this time, ...
const LAST_WORDS: Duration = Duration::from_secs(2);
/// ... or, from one that is still heard, for this time.
const LAST_WORDS_HEARD: Duration = Duration::from_secs(10);

/// What has the messages. Nothing here waits. Messages of one sender arrive in order.
pub trait MessageTransport: Send + 'static {
    /// Sends a message. An error means that this peer is out of reach.
    fn send(&mut self, to: usize, bytes: &[u8]) -> std::result::Result<(), String>;
    /// How many messages to a peer were not on their way when it was looked last.
    fn unsent(&self, to: usize) -> usize;
    /// Looks whether all messages are on their way.
    fn flush(&mut self) -> bool;
    /// Looks after what is sent, and for a message that has come: what it is, and from whom. An error means that no more will
    /// come; the last words can be sent yet.
    fn receive(&mut self) -> std::result::Result<Option<(usize, Vec<u8>)>, String>;
    /// The last call, if not all has been said and heard: somebody may be gone.
    fn give_up(&mut self);
}

/// A thread that carries the bytes of connections. Dropped, it ends when these have ended, or soon.
pub struct Transport {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// The process that began it.
    process: u32,
}

struct Shared {
    is_ending: AtomicBool,
    waker: Waker,
}

/// One connection: a socket of this process, and whose the other end is.
struct Line {
    peer: usize,
    wire: Wire,
    /// Came from the peer, and is not written yet.
    input: Vec<u8>,
    /// When something came last.
    heard: Instant,
    /// Whether this end has said all, ...
    has_said_all: bool,
    /// ... and the peer.
    has_heard_all: bool,
}

impl Transport {
    /// Begins to carry what these wires have for and from those peers, which are in order.
    pub fn start(mail: impl MessageTransport, wires: Vec<(usize, Wire)>) -> Result<Transport> {
        let refused =
            |call| move |e| Error::system(call, e, "the store needs a thread and a few file descriptors");
        let waker = Waker::new().map_err(refused("preparing the store's transport"))?;
        let shared = Arc::new(Shared { is_ending: AtomicBool::new(false), waker });
        let line = |(peer, wire): (usize, Wire)| {
            wire.set_nonblocking(true)?;
            let heard = Instant::now();
            Ok(Line { peer, wire, input: Vec::new(), heard, has_said_all: false, has_heard_all: false })
        };
        let lines: io::Result<Vec<Line>> = wires.into_iter().map(line).collect();
        let lines = lines.map_err(refused("preparing the store's transport"))?;
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("phalanx-transport".into());
        let thread = thread.spawn(move || carry(mail, lines, &of_thread));
        let thread = Some(thread.map_err(refused("starting the store's transport"))?);
        Ok(Transport { shared, thread, process: std::process::id() })
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if std::process::id() != self.process {
            // A fork has no such thread, and the parent's goes on.
            return std::mem::forget(thread);
        }
        self.shared.is_ending.store(true, Ordering::Release);
        self.shared.waker.wake();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// The thread.
fn carry(mut mail: impl MessageTransport, mut lines: Vec<Line>, shared: &Shared) {
    let mut pause = SOON;
    let mut ending = None;
    let mut late = Vec::new();
    while !lines.iter().all(Line::is_over) {
        if shared.is_ending.load(Ordering::Acquire) {
            let since = *ending.get_or_insert_with(Instant::now);
            // The others have their time yet.
            for line in lines.iter_mut().filter(|line| line.is_late(since)) {
                line.break_off();
                late.push(line.peer);
            }
        }
        let received = deliver(&mut mail, &mut lines);
        let sent: usize = lines.iter_mut().map(|line| line.collect(&mut mail)).sum();
        let moved = match received {
            Ok(received) => received + sent > 0,
            Err(why) => {
                // Both ends of each connection find it closed.
                tracing::warn!("nothing more comes to this rank: {why}");
                break;
            }
        };
        pause = if moved { SOON } else { (pause * 2).min(LATER) };
        let open = lines.iter().filter(|line| !line.has_said_all && mail.unsent(line.peer) < MOST_UNSENT);
        let sockets: Vec<(&Wire, bool)> = open.map(|line| (&line.wire, !line.input.is_empty())).collect();
        poll_sockets(None, &shared.waker, &sockets, Some(pause));
        shared.waker.clear();
    }
    // What was said last may still be under way.
    let until = Instant::now() + LAST_WORDS;
    let is_awaited = |line: &Line| !late.contains(&line.peer);
    while !mail.flush() && lines.iter().any(|line| is_awaited(line) && mail.unsent(line.peer) > 0) {
        if Instant::now() >= until {
            return mail.give_up();
        }
        std::thread::sleep(SOON);
    }
    if !late.is_empty() {
        tracing::warn!("the store's connections did not end in good order: ranks {late:?}");
        mail.give_up();
    }
}

/// Gives their lines what has come: how many messages.
fn deliver(mail: &mut impl MessageTransport, lines: &mut [Line]) -> std::result::Result<usize, String> {
    let mut received = 0;
    while let Some((from, bytes)) = mail.receive()? {
        received += 1;
        if let Ok(index) = lines.binary_search_by_key(&from, |line| line.peer) {
            let line = &mut lines[index];
            line.heard = Instant::now();
            line.has_heard_all |= bytes.is_empty();
            line.input.extend(bytes);
        }
    }
    for line in lines {
        line.write();
    }
    Ok(received)
}

impl Line {
    fn is_over(&self) -> bool {
        self.has_said_all && self.has_heard_all && self.input.is_empty()
    }

    /// Whether the peer has had its time for the last words, since the end began.
    fn is_late(&self, since: Instant) -> bool {
        let is_silent = since.max(self.heard).elapsed() >= LAST_WORDS;
        !self.is_over() && (is_silent || since.elapsed() >= LAST_WORDS_HEARD)
    }

    /// Writes to the socket what it takes.
    fn write(&mut self) {
        let mut done = 0;
        while done < self.input.len() {
            match (&self.wire).write(&self.input[done..]) {
                Ok(n) => done += n,
                Err(e) if is_not_now(&e) => break,
                // Nobody reads it any more.
                Err(_) => done = self.input.len(),
            }
        }
        self.input.drain(..done);
        if self.has_heard_all && self.input.is_empty() {
            // The end of this direction; the other may have more to say.
            let _ = self.wire.shutdown(Shutdown::Write);
        }
    }

    /// Sends to the peer what the socket has: how many messages.
    fn collect(&mut self, mail: &mut impl MessageTransport) -> usize {
        let (mut sent, mut bytes) = (0, [0; PIECE]);
        while !self.has_said_all && mail.unsent(self.peer) < MOST_UNSENT {
            let read = match (&self.wire).read(&mut bytes) {
                Ok(read) => read,
                Err(e) if is_not_now(&e) => break,
                Err(_) => 0,
            };
            sent += 1;
            self.has_said_all = read == 0;
            if let Err(why) = mail.send(self.peer, &bytes[..read]) {
                tracing::warn!("rank {} is out of reach: {why}", self.peer);
                self.break_off();
            }
        }
        sent
    }

    /// It is over: this end finds the connection closed.
    fn break_off(&mut self) {
        (self.has_said_all, self.has_heard_all) = (true, true);
        self.input.clear();
        let _ = self.wire.shutdown(Shutdown::Both);
    }
}

fn is_not_now(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
