//! The store's wire protocol: greetings, requests and replies as bytes.
//!
//! A connection begins with two greetings of fixed length, in the clear; after them everything is a frame
//! (`session.rs`) that holds one [`Request`] or one [`Reply`]. `decode` parses bytes from outside. It
//! allocates no more than the bytes that it is given, and refuses trailing bytes.

use super::table::{Summary, Table};
use crate::os::ThreadMark;
use crate::types::error::PeerEvent;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version of greetings and messages. Both sides must have the same.
pub const VERSION: u8 = 6;

/// How many heartbeats a side sends in the time of silence after which it counts as lost.
pub const HEARTBEATS: u32 = 4;

/// Most members of a role.
pub const MAX_MEMBERS: u32 = 1 << 16;
/// The longest key, in bytes.
pub const MAX_KEY: usize = 256;
/// The longest value, in bytes: ids, addresses and failures go through the store, never data.
pub const MAX_VALUE: usize = 64 << 10;
/// The most that an exchange gives to a rank, in bytes over all ranks.
pub const MAX_EXCHANGE: usize = 8 << 20;
/// The longest request. A longer one is not even read.
pub const MAX_REQUEST: usize = MAX_VALUE + MAX_KEY + 64;
/// The longest reply, without a table beside it: one that names all members.
pub const MAX_REPLY: usize = 16 * MAX_MEMBERS as usize;
/// The longest name of a job that a client sends, in bytes; of a longer one it sends the start.
pub const MAX_JOB: usize = 128;
/// The longest first request, from a client that has proved nothing yet.
pub const MAX_JOIN: usize = 64 + MAX_JOB;

/// The part of a job's name that is sent.
pub fn shortened(job: &str) -> &str {
    let fits = |end: &usize| job.is_char_boundary(*end);
    &job[..(0..=job.len().min(MAX_JOB)).rev().find(fits).unwrap_or(0)]
}

/// Bytes that are no message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a message of the store: {0}")]
pub struct Malformed(pub &'static str);

/// The role of a member. Ranks and nodes are numbered separately, and have separate keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// A rank.
    Rank,
    /// `phalanx launch`, once on each node.
    Node,
}

impl Role {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Role::Rank => "rank",
            Role::Node => "node",
        }
    }
}

/// A communicator that takes in new ranks: its members and they meet as the ranks of a group of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Growth {
    /// Random: the same for its members, and no other growth's.
    pub number: u64,
    /// Its members, which are the first ranks of the group.
    pub members: u32,
    /// With the new ranks.
    pub size: u32,
}

/// The first bytes of a connection, each way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// Which side speaks. A client that was connected to itself, or to another client, sees it here.
    pub side: Side,
    /// Its protocol version.
    pub version: u8,
    /// Whether TLS follows (`cipher.rs`). Both sides must say the same.
    pub encrypted: bool,
    /// Random, so that no two sessions have the same keys.
    pub nonce: [u8; 32],
}

/// An end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// A rank or a launcher.
    Client,
    /// The store.
    Server,
}

impl Side {
    const fn magic(self) -> &'static [u8; 8] {
        match self {
            Side::Client => b"PHALANXc",
            Side::Server => b"PHALANXs",
        }
    }
}

impl Greeting {
    /// Bytes of a greeting.
    pub const LEN: usize = 8 + 1 + 1 + 32;

    /// As bytes.
    pub fn encode(&self) -> [u8; Greeting::LEN] {
        let mut bytes = [0; Greeting::LEN];
        bytes[..8].copy_from_slice(self.side.magic());
        bytes[8..10].copy_from_slice(&[self.version, u8::from(self.encrypted)]);
        bytes[10..].copy_from_slice(&self.nonce);
        bytes
    }

    /// From bytes.
    pub fn decode(bytes: &[u8]) -> Result<Greeting, Malformed> {
        let bytes: &[u8; Greeting::LEN] = bytes.try_into().map_err(|_| Malformed("a greeting's length"))?;
        let side = [Side::Client, Side::Server].into_iter().find(|side| bytes.starts_with(side.magic()));
        let encrypted = match bytes[9] {
            0 => false,
            1 => true,
            _ => return Err(Malformed("it asks for an unknown encryption")),
        };
        let nonce = bytes[10..].try_into().expect("32 bytes");
        Ok(Greeting {
            side: side.ok_or(Malformed("it does not speak this protocol"))?,
            version: bytes[8],
            encrypted,
            nonce,
        })
    }
}

/// A request of a client. `id` comes back in the reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// The first request: introduces the client.
    Join {
        /// Rank or node.
        role: Role,
        /// Its number.
        rank: u32,
        /// The number of members with this role, by the client's settings.
        size: u32,
        /// How often the job was restarted.
        epoch: u32,
        /// The job's name, the same for all its members; empty if it has none.
        job: String,
    },
    /// Stores a value under a key. The reply has the value that is stored afterwards.
    Set {
        /// Of the request.
        id: u64,
        /// Where.
        key: String,
        /// What.
        value: Vec<u8>,
        /// Keep a value that is already stored.
        keep: bool,
    },
    /// Asks for the value of a key, and waits until there is one.
    Get {
        /// Of the request.
        id: u64,
        /// Where.
        key: String,
        /// How long to wait, in milliseconds.
        wait: u64,
    },
    /// Adds to a counter, which starts at 0. The reply has the sum.
    Add {
        /// Of the request.
        id: u64,
        /// Where.
        key: String,
        /// What to add.
        amount: i64,
    },
    /// Contributes a value and waits for the values of all members.
    Exchange {
        /// Of the request.
        id: u64,
        /// The name of this exchange.
        key: String,
        /// This member's value.
        value: Vec<u8>,
        /// How long to wait, in milliseconds.
        wait: u64,
    },
    /// Sends a message to other members. There is no reply. All members receive all messages in one order;
    /// the sender receives its own, if `to` includes it.
    Send {
        /// The receivers. An empty list means all connected members.
        to: Vec<u32>,
        /// What.
        value: Vec<u8>,
    },
    /// Sign of life.
    Heartbeat,
    /// The client has received nothing for too long, and gives up.
    Deaf,
    /// The client leaves normally.
    Goodbye,
    /// The first request of a client that carries members: from then on all messages are [`Carried`].
    Carry {
        /// How often the job was restarted.
        epoch: u32,
        /// The job's name.
        job: String,
    },
    /// A carried member has ended.
    Ended {
        /// How.
        end: End,
    },
    /// The first request of a member of a communicator that grows.
    Grow {
        /// Which.
        growth: Growth,
        /// Its rank there.
        rank: u32,
        /// How often the job was restarted.
        epoch: u32,
        /// The job's name.
        job: String,
    },
    /// The first request of a new rank: asks for the next place in a communicator that grows.
    Enter {
        /// How often the job was restarted.
        epoch: u32,
        /// The job's name.
        job: String,
    },
}

/// A message on a connection that carries several members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried<M> {
    /// From which member, or to which; empty for the carrier itself.
    pub ranks: Vec<u32>,
    /// What.
    pub message: M,
}

/// A reply or a notification of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To `Join`, `Grow` and `Enter`: welcome.
    Welcome {
        /// The client's rank, or the node's number.
        rank: u32,
        /// The number of members.
        size: u32,
        /// A side that sends nothing for this long, in milliseconds, counts as lost.
        silence: u32,
        /// The store's thread.
        thread: Option<ThreadMark>,
    },
    /// The request is impossible. With id 0 it answers `Join`, and the connection ends; to a member, it answers
    /// every request from now on: the members can never be complete.
    Refused {
        /// Of the request.
        id: u64,
        /// Why.
        reason: String,
    },
    /// To `Set` and `Get`.
    Value {
        /// Of the request.
        id: u64,
        /// What is under the key.
        value: Vec<u8>,
    },
    /// To `Add`.
    Sum {
        /// Of the request.
        id: u64,
        /// The counter's.
        value: i64,
    },
    /// To `Exchange`: the values in the order of ranks, as a table that follows the frame. All members get the same.
    All {
        /// Of the requests: of each member to which the reply goes.
        ids: Vec<u64>,
        /// Of the table.
        summary: Summary,
        /// The table, once it has come.
        #[serde(skip)]
        table: Option<Table>,
    },
    /// To `Get` and `Exchange`: the deadline has passed.
    TimedOut {
        /// Of the request.
        id: u64,
        /// Members that have not given their value.
        missing: Vec<u32>,
    },
    /// To `Exchange`: a member that has not contributed is lost.
    Gone {
        /// Of the request.
        id: u64,
        /// The lost member.
        rank: u32,
        /// How it ended.
        end: End,
    },
    /// A member's message.
    Message {
        /// The sender.
        from: u32,
        /// What.
        value: Vec<u8>,
    },
    /// A member with the client's role is lost.
    Lost {
        /// The lost member.
        rank: u32,
        /// How it ended.
        end: End,
    },
    /// Still alive.
    Heartbeat,
    /// The store shuts down normally.
    Goodbye,
    /// To `Enter`: no communicator asks for new ranks now. The connection ends.
    NoPlace,
}

/// How a member ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// It said goodbye.
    Left,
    /// Its connection was closed without a goodbye.
    Closed,
    /// It sent nothing for this many milliseconds.
    Silent(u32),
    /// It gave up because it received nothing from the store.
    Deaf,
    /// It violated the protocol.
    Broken,
}

impl End {
    /// Converts to the event that a communicator reports.
    pub fn event(self) -> PeerEvent {
        match self {
            End::Left => PeerEvent::Left,
            End::Closed | End::Broken => PeerEvent::Died,
            End::Silent(_) | End::Deaf => PeerEvent::Unreachable,
        }
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Left => f.write_str("it has left"),
            End::Closed => f.write_str(
                "its connection to the store was closed without a goodbye (killed, crashed or exited)",
            ),
            End::Silent(ms) => write!(
                f,
                "nothing was heard of it for {:.1} s (stopped, or cut off from the network)",
                f64::from(*ms) / 1000.0
            ),
            End::Deaf => f.write_str("it could not hear the store any more (its network is cut one way)"),
            End::Broken => f.write_str("it sent what no rank sends, and was cut off"),
        }
    }
}

impl Request {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// From bytes from outside.
    pub fn decode(bytes: &[u8]) -> Result<Request, Malformed> {
        decode::<Request>(bytes, MAX_REQUEST)?.checked()
    }

    fn checked(self) -> Result<Request, Malformed> {
        let (key, value): (&str, &[u8]) = match &self {
            Request::Set { key, value, .. } | Request::Exchange { key, value, .. } => (key, value),
            Request::Get { key, .. } | Request::Add { key, .. } => (key, &[]),
            Request::Send { value, .. } => ("", value),
            Request::Join { .. }
            | Request::Grow { .. }
            | Request::Enter { .. }
            | Request::Heartbeat
            | Request::Deaf
            | Request::Goodbye
            | Request::Carry { .. }
            | Request::Ended { .. } => ("", &[]),
        };
        if key.len() > MAX_KEY {
            return Err(Malformed("the key is too long"));
        }
        if value.len() > MAX_VALUE {
            return Err(Malformed("the value is too long"));
        }
        Ok(self)
    }
}

impl Carried<Request> {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// From bytes from outside.
    pub fn decode(bytes: &[u8]) -> Result<Carried<Request>, Malformed> {
        let Carried { ranks, message } = decode::<Carried<Request>>(bytes, MAX_REQUEST)?;
        Ok(Carried { ranks, message: message.checked()? })
    }
}

impl Carried<Reply> {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }
}

/// A message that may announce a table.
pub trait Announcing: Sized {
    /// From bytes from outside.
    fn decode(bytes: &[u8]) -> Result<Self, Malformed>;
    /// The announcement, and where the table belongs.
    fn announced(&mut self) -> Option<(&Summary, &mut Option<Table>)>;
}

impl Announcing for Reply {
    fn decode(bytes: &[u8]) -> Result<Reply, Malformed> {
        decode(bytes, MAX_REPLY)
    }

    fn announced(&mut self) -> Option<(&Summary, &mut Option<Table>)> {
        match self {
            Reply::All { summary, table, .. } => Some((summary, table)),
            _ => None,
        }
    }
}

impl Announcing for Carried<Reply> {
    fn decode(bytes: &[u8]) -> Result<Carried<Reply>, Malformed> {
        decode(bytes, MAX_REPLY)
    }

    fn announced(&mut self) -> Option<(&Summary, &mut Option<Table>)> {
        self.message.announced()
    }
}

impl Reply {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// From bytes from outside.
    pub fn decode(bytes: &[u8]) -> Result<Reply, Malformed> {
        decode(bytes, MAX_REPLY)
    }

    /// The same for some of the members to which it goes, by their places.
    pub fn for_some(&self, places: &[usize]) -> Reply {
        match self {
            Reply::All { ids, summary, table } => {
                let ids = places.iter().map(|place| ids[*place]).collect();
                Reply::All { ids, summary: summary.clone(), table: table.clone() }
            }
            reply => reply.clone(),
        }
    }

    /// The request it answers, if it answers one.
    pub fn id(&self) -> Option<u64> {
        match self {
            Reply::Refused { id, .. }
            | Reply::Value { id, .. }
            | Reply::Sum { id, .. }
            | Reply::TimedOut { id, .. }
            | Reply::Gone { id, .. } => Some(*id),
            Reply::All { ids, .. } => ids.first().copied(),
            Reply::Welcome { .. }
            | Reply::NoPlace
            | Reply::Message { .. }
            | Reply::Lost { .. }
            | Reply::Heartbeat
            | Reply::Goodbye => None,
        }
    }
}

fn encode(message: &impl Serialize) -> Vec<u8> {
    postcard::to_allocvec(message).expect("messages are plain data, and memory is never short by an error")
}

fn decode<T: DeserializeOwned>(bytes: &[u8], limit: usize) -> Result<T, Malformed> {
    if bytes.len() > limit {
        return Err(Malformed("it is too long"));
    }
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(Malformed("bytes are left over")),
        Err(_) => Err(Malformed("it is cut short, or no message at all")),
    }
}

#[cfg(test)]
mod tests;
