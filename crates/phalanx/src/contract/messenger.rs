//! [`Messenger`]: messages of host memory between the ranks of a communicator on several hosts, for a backend that stages other memory through it.
//!
//! Two kinds of messages: *notes*, short and in order, which come unasked; and *data*, which goes to where a receive of its number was posted.
//! One thread uses a messenger.

use crate::types::error::Result;
use serde::{Deserialize, Serialize};

/// Where a rank's messenger is, and the secret without which a message to it does not count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MessengerAddress {
    pub key: [u64; 2],
    pub worker: Vec<u8>,
}

/// Makes the messenger of a rank among so many. An error says how to get the library.
pub(crate) type MakeMessenger = fn(rank: usize, ranks: usize) -> Result<Box<dyn Messenger>>;

/// A send or a receive that was posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Posted(pub usize);

/// Sends and takes messages. Dropping it hands over what was sent, with a bounded wait, and closes the connections.
pub(crate) trait Messenger: Send {
    fn address(&self) -> &MessengerAddress;

    /// Learns where a rank is. Nothing is sent to a rank before.
    fn meet(&mut self, rank: usize, address: &MessengerAddress);

    /// Lets the library work.
    fn progress(&mut self);

    /// Sends a note of at most [`LONGEST_NOTE`] bytes.
    fn send_note(&mut self, to: usize, note: Vec<u8>);

    /// The next note that has come, and its sender.
    fn take_note(&mut self) -> Option<(usize, Vec<u8>)>;

    /// Posts a send of data with a number.
    ///
    /// # Safety
    /// `len` bytes stay as they are until it is over.
    unsafe fn send(&mut self, to: usize, number: u64, data: *const u8, len: usize) -> Posted;

    /// Posts a receive of data with this number.
    ///
    /// # Safety
    /// There is room for `len` bytes, which nothing else touches until it is over.
    unsafe fn receive(&mut self, from: usize, number: u64, target: *mut u8, len: usize) -> Posted;

    /// Whether it is over, and if so, whether all went well. It is forgotten then.
    fn outcome(&mut self, posted: Posted) -> Option<bool>;

    /// Gives it up; false while the library still uses the memory: the connection is closed then, and it is soon over.
    fn give_up(&mut self, posted: Posted) -> bool;

    /// What the library says of the connection to a rank, if that has broken.
    fn failure(&self, rank: usize) -> Option<String>;
}

/// Most bytes of a note.
pub(crate) const LONGEST_NOTE: usize = 32 << 10;
