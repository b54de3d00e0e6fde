//! What waits to be sent on a non-blocking connection.
//!
//! Bytes are encrypted only when the network takes them, and a table is shared by all connections that send it: a job's values take
//! the memory of one copy, however many connections are slow.

use super::cipher::Cipher;
use super::table::Table;
use crate::os::Wire;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};

/// Bytes that are encrypted at a time.
const PART: usize = 64 << 10;

#[derive(Default)]
pub struct Output {
    /// For the network as they are: encrypted, or of a handshake.
    pub wire: Vec<u8>,
    queue: VecDeque<Piece>,
    /// Bytes of the first piece that are out, or in `wire`.
    done: usize,
    /// Bytes of all pieces.
    queued: usize,
}

enum Piece {
    Own(Vec<u8>),
    Shared(Table),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Piece::Own(bytes) => bytes,
            Piece::Shared(table) => table.bytes(),
        }
    }
}

impl Output {
    pub fn is_empty(&self) -> bool {
        self.wire.is_empty() && self.queue.is_empty()
    }

    /// Bytes that wait.
    pub fn len(&self) -> usize {
        self.wire.len() + self.queued - self.done
    }

    /// Queues a frame.
    pub fn push(&mut self, frame: Vec<u8>) {
        self.queued += frame.len();
        match self.queue.back_mut() {
            Some(Piece::Own(bytes)) => bytes.extend_from_slice(&frame),
            _ => self.queue.push_back(Piece::Own(frame)),
        }
    }

    /// Queues a table behind the frame that announces it.
    pub fn push_table(&mut self, table: Table) {
        self.queued += table.bytes().len();
        self.queue.push_back(Piece::Shared(table));
    }

    /// Sends as much as the network takes, up to about `most` bytes. After an error nothing is left to be sent.
    pub fn flush(&mut self, stream: &Wire, cipher: &mut Cipher, most: usize) -> io::Result<()> {
        let sent = self.send(stream, cipher, most);
        if sent.is_err() {
            *self = Output::default();
        }
        sent
    }

    fn send(&mut self, stream: &Wire, cipher: &mut Cipher, most: usize) -> io::Result<()> {
        let mut left = most;
        loop {
            let sent = some_of(stream, &self.wire)?;
            self.wire.drain(..sent);
            let Some(piece) = self.queue.front().filter(|_| self.wire.is_empty() && left > 0) else {
                return Ok(());
            };
            let rest = &piece.bytes()[self.done..];
            let rest = &rest[..rest.len().min(left)];
            let taken = if cipher.encrypts() {
                let part = &rest[..rest.len().min(PART)];
                cipher.seal(part, &mut self.wire)?;
                part.len()
            } else {
                some_of(stream, rest)?
            };
            self.done += taken;
            left -= taken;
            if self.done == piece.bytes().len() {
                self.queued -= self.done;
                self.done = 0;
                self.queue.pop_front();
            } else if taken == 0 {
                return Ok(());
            }
        }
    }
}

/// Sends what the network takes now; the number of bytes.
fn some_of(mut stream: &Wire, bytes: &[u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match stream.write(&bytes[done..]) {
            Ok(n) => done += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}
