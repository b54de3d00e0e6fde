//! One connection to the store for all ranks of a host.
//!
//! A reply that goes to several of them comes once, and so do the values of an exchange.

use super::connect::{self, Client, Session};
use crate::os::Wire;
use crate::rendezvous::store::Rendezvous;
use crate::rendezvous::store::cipher::Cipher;
use crate::rendezvous::store::incoming::Incoming;
use crate::rendezvous::store::output::Output;
use crate::rendezvous::store::protocol::{Carried, HEARTBEATS, Reply, Request};
use crate::rendezvous::store::session::Key;
use crate::rendezvous::store::stall::{StallDetector, StarvedStore};
use crate::types::error::{Error, Result};
use crate::watch::deadline::after;
use std::io::{self, ErrorKind, Read};
use std::time::{Duration, Instant};

/// A connection that carries the requests of a host's ranks. Dropping it without [`leave`](Carrier::leave) loses them.
pub struct Carrier {
    stream: Wire,
    cipher: Cipher,
    key: Key,
    incoming: Incoming<Carried<Reply>>,
    output: Output,
    silence: Duration,
    stalls: StallDetector,
    store: StarvedStore,
    last_sent: Instant,
    last_received: Instant,
    buffer: Vec<u8>,
}

impl Carrier {
    /// Connects to the store. Retries until a store answers or `timeout` has passed.
    ///
    /// # Errors
    /// Those of [`Store::connect`](super::Store::connect).
    pub fn connect(rendezvous: &Rendezvous, timeout: Duration) -> Result<Carrier> {
        let now = Instant::now();
        let session = connect::join(rendezvous, Client::Carrier, after(now, timeout))?;
        let Session { place: _, stream, cipher, to: key, from, silence, thread, rest } = session;
        let prepared = stream.set_read_timeout(Some(silence / 8));
        let prepared = prepared.and_then(|()| stream.set_write_timeout(Some(silence)));
        prepared.map_err(|e| Error::system("setsockopt", e, "the store needs a socket with timeouts"))?;
        Ok(Carrier {
            stream,
            cipher,
            key,
            incoming: Incoming::new(from, rest),
            output: Output::default(),
            silence,
            stalls: StallDetector::new(silence),
            store: StarvedStore::new(thread, silence),
            last_sent: now,
            last_received: Instant::now(),
            buffer: vec![0; 64 << 10],
        })
    }

    /// From now on [`receive`](Carrier::receive) and [`flush`](Carrier::flush) do not wait.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        self.stream.set_nonblocking(true)
    }

    /// Its socket, and whether there is something to send.
    pub(crate) fn interest(&self) -> (&Wire, bool) {
        (&self.stream, !self.output.is_empty())
    }

    /// Queues a request of a rank.
    pub fn post(&mut self, rank: u32, request: Request) {
        self.queue(vec![rank], request);
    }

    fn queue(&mut self, ranks: Vec<u32>, message: Request) {
        let frame = self.key.seal(&Carried { ranks, message }.encode());
        self.output.push(frame);
        self.last_sent = Instant::now();
    }

    /// Sends what is queued.
    pub fn flush(&mut self) -> io::Result<()> {
        self.output.flush(&self.stream, &mut self.cipher, usize::MAX)
    }

    /// Receives replies, each with the ranks it is for, once there are some or an eighth of the silence has passed. Sends a
    /// heartbeat if it is time.
    ///
    /// # Errors
    /// The connection has ended, or the store has been silent for too long.
    pub fn receive(&mut self) -> io::Result<Vec<Carried<Reply>>> {
        let mut replies = self.complete()?;
        if replies.is_empty() {
            // A connection on which nothing can be sent has ended. Reading says so, behind what the store said last: its goodbye, perhaps.
            let _ = self.flush();
            match (&self.stream).read(&mut self.buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => {
                    let (bytes, wire) = (&self.buffer[..n], &mut self.output.wire);
                    self.cipher.open(bytes, self.incoming.input(), wire)?;
                    if self.incoming.is_receiving() {
                        self.last_received = Instant::now();
                    }
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
            replies = self.complete()?;
        }
        self.keep_alive()?;
        Ok(replies)
    }

    fn complete(&mut self) -> io::Result<Vec<Carried<Reply>>> {
        let mut replies = Vec::new();
        while let Some(reply) = self.incoming.next().map_err(|e| io::Error::new(ErrorKind::InvalidData, e))? {
            replies.push(reply);
        }
        if !replies.is_empty() {
            self.last_received = Instant::now();
            self.store.heard();
        }
        Ok(replies)
    }

    fn keep_alive(&mut self) -> io::Result<()> {
        let now = Instant::now();
        self.last_received += self.stalls.held_up(now);
        let is_silent = now.saturating_duration_since(self.last_received) >= self.silence;
        if is_silent && self.store.is_excused(self.silence / 8) {
            self.last_received += self.silence / 8;
        } else if is_silent {
            self.queue(Vec::new(), Request::Deaf);
            let _ = self.flush();
            return Err(ErrorKind::TimedOut.into());
        }
        if self.last_sent.elapsed() >= self.silence / HEARTBEATS {
            self.queue(Vec::new(), Request::Heartbeat);
        }
        let _ = self.flush();
        Ok(())
    }

    /// Says goodbye.
    pub fn leave(mut self) {
        let _ = self.stream.set_nonblocking(false);
        self.queue(Vec::new(), Request::Goodbye);
        let _ = self.flush();
        // Closing a socket with unread bytes would discard the goodbye.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
        let until = Instant::now() + Duration::from_secs(1);
        let _ = self.stream.set_read_timeout(Some(Duration::from_secs(1)));
        while Instant::now() < until && (&self.stream).read(&mut self.buffer).is_ok_and(|n| n > 0) {}
    }
}
