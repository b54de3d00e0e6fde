//! A message between ranks, and its encoding.

use std::io::{self, Read, Write};

/// Where a process listens: the name of its socket.
pub type Address = String;

/// What a message is about. Together with the sender it identifies the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tag {
    /// To the root: a rank has arrived.
    Hello,
    /// From the root: where all ranks are.
    Table,
    /// A contribution to the n-th collective.
    Collective(u64),
    /// The n-th message from the sender to the receiver.
    Send(u64),
    /// An acknowledgement of the sender's n-th message.
    Received(u64),
    /// A contribution to the n-th exchange beside operations, such as those of split and of windows.
    Exchange(u64),
    /// The sender has finalized the communicator.
    Ended,
    /// The sender's end of the first message from it (1), or to it (0), has come.
    Connect(u64),
    /// Data for a window, and a signal.
    Put { window: u64, offset: u64, signal: i32, context: i32 },
    /// A signal.
    Signal { signal: i32, context: i32 },
}

/// A message between two ranks.
#[derive(Debug)]
pub struct Message {
    pub communicator: u64,
    pub from: u32,
    pub to: u32,
    pub tag: Tag,
    pub body: Vec<u8>,
}

const WORDS: usize = 8;

impl Tag {
    fn encode(self) -> [u64; 5] {
        let pair = |signal: i32, context: i32| (u64::from(signal as u32) << 32) | u64::from(context as u32);
        match self {
            Tag::Hello => [0, 0, 0, 0, 0],
            Tag::Table => [1, 0, 0, 0, 0],
            Tag::Collective(n) => [2, n, 0, 0, 0],
            Tag::Send(n) => [3, n, 0, 0, 0],
            Tag::Received(n) => [4, n, 0, 0, 0],
            Tag::Exchange(n) => [5, n, 0, 0, 0],
            Tag::Ended => [6, 0, 0, 0, 0],
            Tag::Connect(sends) => [9, sends, 0, 0, 0],
            Tag::Put { window, offset, signal, context } => [7, window, offset, pair(signal, context), 0],
            Tag::Signal { signal, context } => [8, 0, 0, pair(signal, context), 0],
        }
    }

    fn decode([kind, a, b, c, _]: [u64; 5]) -> io::Result<Tag> {
        let (signal, context) = ((c >> 32) as i32, c as i32);
        Ok(match kind {
            0 => Tag::Hello,
            1 => Tag::Table,
            2 => Tag::Collective(a),
            3 => Tag::Send(a),
            4 => Tag::Received(a),
            5 => Tag::Exchange(a),
            6 => Tag::Ended,
            9 => Tag::Connect(a),
            7 => Tag::Put { window: a, offset: b, signal, context },
            8 => Tag::Signal { signal, context },
            _ => return Err(io::ErrorKind::InvalidData.into()),
        })
    }
}

impl Message {
    /// Its encoding: a header of words, then the body.
    pub fn encode(&self) -> Vec<u8> {
        let ranks = (u64::from(self.from) << 32) | u64::from(self.to);
        let [kind, a, b, c, d] = self.tag.encode();
        let header: [u64; WORDS] = [self.communicator, ranks, kind, a, b, c, d, self.body.len() as u64];
        let mut bytes = numbers(&header);
        bytes.extend(&self.body);
        bytes
    }

    /// Reads the next message of a connection.
    pub fn read(from: &mut impl Read) -> io::Result<Message> {
        let mut header = [0; WORDS * 8];
        from.read_exact(&mut header)?;
        let [communicator, ranks, kind, a, b, c, d, len] = words(&header);
        let mut body = vec![0; len as usize];
        from.read_exact(&mut body)?;
        let tag = Tag::decode([kind, a, b, c, d])?;
        Ok(Message { communicator, from: (ranks >> 32) as u32, to: ranks as u32, tag, body })
    }
}

/// The bytes of numbers.
pub fn numbers(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The numbers at the start of bytes.
pub fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    std::array::from_fn(|n| u64::from_le_bytes(bytes[n * 8..n * 8 + 8].try_into().expect("8 bytes")))
}

/// Writes a string with its length.
pub fn write_text(to: &mut impl Write, text: &str) -> io::Result<()> {
    to.write_all(&(text.len() as u64).to_le_bytes())?;
    to.write_all(text.as_bytes())
}

/// Reads a string with its length.
pub fn read_text(from: &mut impl Read) -> io::Result<String> {
    let mut len = [0; 8];
    from.read_exact(&mut len)?;
    let mut text = vec![0; u64::from_le_bytes(len) as usize];
    from.read_exact(&mut text)?;
    String::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData.into())
}
