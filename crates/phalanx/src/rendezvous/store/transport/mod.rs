//! Transports: connections to the store whose bytes travel as messages of something that already connects the
//! ranks (MPI), so that the store needs no port.
//!
//! Each end of the store has a socket in its own process; the transport's thread has the other end. It sends
//! what it reads from the socket to the peer's transport, which writes it into the peer's socket. An empty
//! message ends a direction. A rank has a line to the rank that hosts the store, and that rank has a line to
//! each.

use crate::os::{Waker, Wire, poll_sockets};
use crate::types::error::{Error, Result};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most bytes of a message: short enough to be sent eagerly, without a rendezvous with the receiver.
const PIECE: usize = 4096;

/// Messages to one peer that are under way, at most. Then its socket fills up, and the store sees that it
/// does not read.
const MOST_UNSENT: usize = 256;

/// Pauses between polls, at least and at most, since messages cannot wake the thread.
const MIN_PAUSE: Duration = Duration::from_micros(20);
const MAX_PAUSE: Duration = Duration::from_millis(2);

/// Bound on sending the last bytes to a silent peer.
const FLUSH_SILENT: Duration = Duration::from_secs(2);
/// Bound on sending the last bytes to a peer that still answers.
const FLUSH_LIMIT: Duration = Duration::from_secs(10);

/// Messages between ranks. No method blocks. Messages of one sender arrive in order.
pub trait MessageTransport: Send + 'static {
    /// Sends a message. An error means that this peer is out of reach.
    fn send(&mut self, to: usize, bytes: &[u8]) -> std::result::Result<(), String>;
    /// Unsent messages to a peer at the last progress.
    fn unsent(&self, to: usize) -> usize;
    /// Makes progress; whether all messages are sent.
    fn flush(&mut self) -> bool;
    /// Makes progress, and returns a message that has arrived, with its sender. After an error no more
    /// arrive; the last messages can still be sent.
    fn receive(&mut self) -> std::result::Result<Option<(usize, Vec<u8>)>, String>;
    /// Called last, if some messages were not exchanged: a peer may be lost.
    fn give_up(&mut self);
}

/// A thread that carries the bytes of connections. After the drop it ends with them, or after a timeout.
pub struct Transport {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// The process that started it.
    process: u32,
}

struct Shared {
    is_ending: AtomicBool,
    waker: Waker,
}

/// One connection: a socket of this process, and the rank at the other end.
struct Line {
    peer: usize,
    wire: Wire,
    /// Received from the peer and not yet written to the socket.
    input: Vec<u8>,
    /// When the last message arrived.
    last_received: Instant,
    /// The socket has ended: nothing more goes to the peer.
    has_socket_ended: bool,
    /// The peer has ended: nothing more goes to the socket.
    has_peer_ended: bool,
}

impl Transport {
    /// Starts to carry the bytes of these connections; `wires` is sorted by peer.
    pub fn start(messages: impl MessageTransport, wires: Vec<(usize, Wire)>) -> Result<Transport> {
        let refused =
            |call| move |e| Error::system(call, e, "the store needs a thread and a few file descriptors");
        let waker = Waker::new().map_err(refused("preparing the store's transport"))?;
        let shared = Arc::new(Shared { is_ending: AtomicBool::new(false), waker });
        let line = |(peer, wire): (usize, Wire)| {
            wire.set_nonblocking(true)?;
            let last_received = Instant::now();
            Ok(Line {
                peer,
                wire,
                input: Vec::new(),
                last_received,
                has_socket_ended: false,
                has_peer_ended: false,
            })
        };
        let lines: io::Result<Vec<Line>> = wires.into_iter().map(line).collect();
        let lines = lines.map_err(refused("preparing the store's transport"))?;
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("phalanx-transport".into());
        let thread = thread.spawn(move || carry(messages, lines, &of_thread));
        let thread = Some(thread.map_err(refused("starting the store's transport"))?);
        Ok(Transport { shared, thread, process: std::process::id() })
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if std::process::id() != self.process {
            // The thread is the parent's; a fork has none.
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
fn carry(mut messages: impl MessageTransport, mut lines: Vec<Line>, shared: &Shared) {
    let mut pause = MIN_PAUSE;
    let mut ending = None;
    let mut late = Vec::new();
    while !lines.iter().all(Line::is_over) {
        if shared.is_ending.load(Ordering::Acquire) {
            let since = *ending.get_or_insert_with(Instant::now);
            // Other lines are served meanwhile.
            for line in lines.iter_mut().filter(|line| line.is_late(since)) {
                line.break_off();
                late.push(line.peer);
            }
        }
        let received = deliver(&mut messages, &mut lines);
        let sent: usize = lines.iter_mut().map(|line| line.collect(&mut messages)).sum();
        let moved = match received {
            Ok(received) => received + sent > 0,
            Err(why) => {
                // Both ends of each connection find it closed.
                crate::os::log::warn!("nothing more comes to this rank: {why}");
                break;
            }
        };
        pause = if moved { MIN_PAUSE } else { (pause * 2).min(MAX_PAUSE) };
        let open =
            lines.iter().filter(|line| !line.has_socket_ended && messages.unsent(line.peer) < MOST_UNSENT);
        let sockets: Vec<(&Wire, bool)> = open.map(|line| (&line.wire, !line.input.is_empty())).collect();
        poll_sockets(&[], &shared.waker, &sockets, Some(pause));
        shared.waker.clear();
    }
    // The last messages may still be under way.
    let until = Instant::now() + FLUSH_SILENT;
    let is_awaited = |line: &Line| !late.contains(&line.peer);
    while !messages.flush() && lines.iter().any(|line| is_awaited(line) && messages.unsent(line.peer) > 0) {
        if Instant::now() >= until {
            return messages.give_up();
        }
        std::thread::sleep(MIN_PAUSE);
    }
    if !late.is_empty() {
        crate::os::log::warn!("the store's connections did not end in good order: ranks {late:?}");
        messages.give_up();
    }
}

/// Receives messages into their lines; returns how many.
fn deliver(messages: &mut impl MessageTransport, lines: &mut [Line]) -> std::result::Result<usize, String> {
    let mut received = 0;
    while let Some((from, bytes)) = messages.receive()? {
        received += 1;
        if let Ok(index) = lines.binary_search_by_key(&from, |line| line.peer) {
            let line = &mut lines[index];
            line.last_received = Instant::now();
            line.has_peer_ended |= bytes.is_empty();
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
        self.has_socket_ended && self.has_peer_ended && self.input.is_empty()
    }

    /// Whether the peer's time for the last bytes is over.
    fn is_late(&self, since: Instant) -> bool {
        let is_silent = since.max(self.last_received).elapsed() >= FLUSH_SILENT;
        !self.is_over() && (is_silent || since.elapsed() >= FLUSH_LIMIT)
    }

    /// Writes to the socket without blocking.
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
        if self.has_peer_ended && self.input.is_empty() {
            // The end of this direction; the other may have more to say.
            let _ = self.wire.shutdown(Shutdown::Write);
        }
    }

    /// Sends bytes of the socket to the peer; returns the number of messages.
    fn collect(&mut self, messages: &mut impl MessageTransport) -> usize {
        let (mut sent, mut bytes) = (0, [0; PIECE]);
        while !self.has_socket_ended && messages.unsent(self.peer) < MOST_UNSENT {
            let read = match (&self.wire).read(&mut bytes) {
                Ok(read) => read,
                Err(e) if is_not_now(&e) => break,
                Err(_) => 0,
            };
            sent += 1;
            self.has_socket_ended = read == 0;
            if let Err(why) = messages.send(self.peer, &bytes[..read]) {
                crate::os::log::warn!("rank {} is out of reach: {why}", self.peer);
                self.break_off();
            }
        }
        sent
    }

    /// Ends the line: this end finds the connection closed.
    fn break_off(&mut self) {
        (self.has_socket_ended, self.has_peer_ended) = (true, true);
        self.input.clear();
        let _ = self.wire.shutdown(Shutdown::Both);
    }
}

fn is_not_now(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
