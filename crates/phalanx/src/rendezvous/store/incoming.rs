//! The receiving end of a session: frames, and the tables beside some of them.

use super::protocol::{Announcing, MAX_REPLY, Malformed};
use super::session::Key;
use super::table::{MAX_TABLE, Table};

pub struct Incoming<M> {
    key: Key,
    /// Decrypted bytes; those before `used` are handled.
    input: Vec<u8>,
    used: usize,
    /// A message whose table has not come yet, and what has come of it.
    incomplete: Option<(M, Vec<u8>)>,
}

impl<M: Announcing> Incoming<M> {
    pub fn new(key: Key, input: Vec<u8>) -> Incoming<M> {
        Incoming { key, input, used: 0, incomplete: None }
    }

    /// Where decrypted bytes are appended.
    pub fn input(&mut self) -> &mut Vec<u8> {
        &mut self.input
    }

    /// Whether a table is under way: its bytes are a sign of life.
    pub fn is_receiving(&self) -> bool {
        self.incomplete.is_some()
    }

    /// The next message, if it is complete.
    pub fn next(&mut self) -> Result<Option<M>, Malformed> {
        let message = self.advance()?;
        if message.is_none() {
            self.input.drain(..self.used);
            self.used = 0;
        }
        Ok(message)
    }

    fn advance(&mut self) -> Result<Option<M>, Malformed> {
        let (mut message, mut bytes) = match self.incomplete.take() {
            Some(incomplete) => incomplete,
            None => {
                let Some(opened) = self.key.open(&self.input[self.used..], MAX_REPLY)? else {
                    return Ok(None);
                };
                self.used += opened.taken;
                (M::decode(opened.message)?, Vec::new())
            }
        };
        let Some((summary, table)) = message.announced() else {
            return Ok(Some(message));
        };
        if summary.bytes() > MAX_TABLE {
            return Err(Malformed("the values are too long"));
        }
        bytes.reserve_exact(summary.bytes() - bytes.len());
        let rest = &self.input[self.used..];
        let taken = rest.len().min(summary.bytes() - bytes.len());
        bytes.extend_from_slice(&rest[..taken]);
        self.used += taken;
        if bytes.len() < summary.bytes() {
            self.incomplete = Some((message, bytes));
            return Ok(None);
        }
        *table = Some(Table::open(bytes, summary)?);
        Ok(Some(message))
    }
}
