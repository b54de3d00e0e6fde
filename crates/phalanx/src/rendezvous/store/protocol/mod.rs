//! The store's wire protocol: greetings, requests and replies as bytes.
//!
//! A connection begins with two greetings of fixed length, in the clear; after them everything is a frame
//! (`session.rs`) that holds one [`Request`] or one [`Reply`]. Each type has one function that makes a value
//! of bytes from outside, `decode`. It allocates no more than the bytes it is given, and refuses what is
//! left over.

use crate::types::error::PeerEvent;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version of greetings and messages. Both sides must have the same.
pub const VERSION: u8 = 2;

/// The longest key, in bytes.
pub const MAX_KEY: usize = 256;
/// The longest value, in bytes: ids, addresses and failures go through the store, never data.
pub const MAX_VALUE: usize = 64 << 10;
/// The most that an exchange gives to a rank, in bytes over all ranks.
pub const MAX_EXCHANGE: usize = 8 << 20;
/// The longest request. A longer one is not even read.
pub const MAX_REQUEST: usize = MAX_VALUE + MAX_KEY + 64;
/// The longest reply.
pub const MAX_REPLY: usize = MAX_EXCHANGE + (64 << 10);
/// The longest first request, from a client that has proved nothing yet.
pub const MAX_JOIN: usize = 64;

/// Bytes that are no message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a message of the store: {0}")]
pub struct Malformed(pub &'static str);

/// What a member of the job is. Ranks and nodes are counted, and keep their values, apart.
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
    /// The first request: who this is.
    Join {
        /// What it is.
        role: Role,
        /// Its number.
        rank: u32,
        /// How many there are, by the client's settings.
        size: u32,
        /// How often the job was restarted.
        epoch: u32,
    },
    /// Stores a value under a key; answered with the value that is there then.
    Set {
        /// Of the request.
        id: u64,
        /// Where.
        key: String,
        /// What.
        value: Vec<u8>,
        /// A value that is there already stays.
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
    /// Adds to a counter (0 at first); answered with the sum.
    Add {
        /// Of the request.
        id: u64,
        /// Where.
        key: String,
        /// What to add.
        amount: i64,
    },
    /// Gives a value and waits for those of all members.
    Exchange {
        /// Of the request.
        id: u64,
        /// Tells exchanges apart.
        key: String,
        /// This member's.
        value: Vec<u8>,
        /// How long to wait, in milliseconds.
        wait: u64,
    },
    /// Tells other members something. Not answered. What members tell arrives everywhere in one order, the sender's own
    /// words at the sender too, if it names itself.
    Tell {
        /// Whom; nobody: all that are connected.
        to: Vec<u32>,
        /// What.
        value: Vec<u8>,
    },
    /// Still alive.
    Heartbeat,
    /// Has received nothing for too long, and gives up.
    Deaf,
    /// Leaves in good order.
    Goodbye,
}

/// A reply or a notification of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To `Join`: welcome.
    Welcome {
        /// After so many milliseconds of silence a side is taken for lost.
        silence: u32,
    },
    /// The request is impossible. To `Join`: with id 0, and the connection ends.
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
    /// To `Exchange`: the values in the order of ranks.
    All {
        /// Of the request.
        id: u64,
        /// One for each member.
        values: Vec<Vec<u8>>,
    },
    /// To `Get` and `Exchange`: not in time.
    TimedOut {
        /// Of the request.
        id: u64,
        /// Members that have not given their value.
        missing: Vec<u32>,
    },
    /// To `Exchange`: it cannot be completed any more.
    Gone {
        /// Of the request.
        id: u64,
        /// The member that will not come.
        rank: u32,
        /// What became of it.
        end: End,
    },
    /// A member's message.
    Told {
        /// Which.
        from: u32,
        /// What.
        value: Vec<u8>,
    },
    /// A member with the client's role is lost.
    Lost {
        /// Which.
        rank: u32,
        /// What became of it.
        end: End,
    },
    /// Still alive.
    Heartbeat,
    /// The store ends in good order.
    Goodbye,
}

/// How a member ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// It said goodbye.
    Left,
    /// Its connection was closed without a goodbye.
    Closed,
    /// It sent nothing for so many milliseconds.
    Silent(u32),
    /// It gave up because it received nothing from the store.
    Deaf,
    /// It sent what no client sends.
    Broken,
}

impl End {
    /// The same as an event of a communicator.
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
        let request = decode(bytes, MAX_REQUEST)?;
        let (key, value): (&str, &[u8]) = match &request {
            Request::Set { key, value, .. } | Request::Exchange { key, value, .. } => (key, value),
            Request::Get { key, .. } | Request::Add { key, .. } => (key, &[]),
            Request::Tell { value, .. } => ("", value),
            Request::Join { .. } | Request::Heartbeat | Request::Deaf | Request::Goodbye => ("", &[]),
        };
        if key.len() > MAX_KEY {
            return Err(Malformed("the key is too long"));
        }
        if value.len() > MAX_VALUE {
            return Err(Malformed("the value is too long"));
        }
        Ok(request)
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

    /// The request it answers, if it answers one.
    pub fn id(&self) -> Option<u64> {
        match self {
            Reply::Refused { id, .. }
            | Reply::Value { id, .. }
            | Reply::Sum { id, .. }
            | Reply::All { id, .. }
            | Reply::TimedOut { id, .. }
            | Reply::Gone { id, .. } => Some(*id),
            Reply::Welcome { .. }
            | Reply::Told { .. }
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
