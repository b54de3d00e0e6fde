//! The store: where the members of a job meet when they do not share memory.
//!
//! One process (the launcher, or rank 0) listens on a TCP port; everybody else connects to it and stays
//! connected. Under MPI there is no port: MPI carries the bytes. The store keeps small values, gathers one from each (`exchange`), and watches: a connection
//! that closes without a goodbye, or says nothing for longer than the limit, means a lost member, and all others are
//! told. What members tell each other beside that arrives everywhere in one order: so the ranks of several hosts agree on what
//! has become of a communicator (`control/relay/`). Data never goes through it.
//!
//! | file | what it has |
//! |---|---|
//! | `protocol/` | messages and their bytes |
//! | `session.rs` | token, keys, authenticated frames |
//! | `cipher.rs` | encryption, if the job wants it |
//! | `stall.rs` | pauses of this process, which are no silence of the others |
//! | `namespace/` | values, exchanges, who is there: without sockets and clocks |
//! | `server/` | the listener's thread |
//! | `client/` | a member's end |
//! | `transport/` | connections whose bytes travel as messages of something else |
//!
//! What it defends against, and what not: `docs/security.md`.

pub mod cipher;
pub mod client;
mod namespace;
pub mod protocol;
pub mod server;
pub mod session;
mod stall;
mod transport;

pub use client::{Audience, Member, Store};
pub use protocol::Role;
pub use server::{Server, Settings};
pub use session::Token;
pub(crate) use transport::{MessageTransport, Transport};

use crate::types::error::PeerEvent;
use std::time::Instant;

/// How to find a job's store.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// `host:port`; of a store that has no port, what it is called in messages.
    pub address: String,
    /// The job's.
    pub token: Token,
    /// How often the job was restarted.
    pub epoch: u32,
    /// In whose process it is.
    pub host: Host,
    /// Whether its connections are encrypted; the same for all.
    pub encrypted: bool,
}

/// In whose process a store is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Host {
    /// `phalanx launch`.
    Launcher,
    /// A rank.
    Rank(u32),
}

/// A member that is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Which.
    pub rank: usize,
    /// What became of it, ...
    pub event: PeerEvent,
    /// ... in more words.
    pub why: String,
    /// When this member learned of it.
    pub since: Instant,
}
