//! The store: a key-value server through which the members of a job on several hosts find each other.
//!
//! One process (the launcher, or rank 0) listens on a TCP port; all others connect to it and stay connected.
//! Under MPI there is no port: MPI carries the bytes. The store has these functions:
//! - It keeps small values, and gathers one from each member (`exchange`).
//! - It detects loss: a connection that closes without a goodbye, or is silent for too long, is a lost
//!   member, and all others are notified.
//! - It forwards messages between members in one order, the same everywhere. Ranks of several hosts use that
//!   to agree on the state of a communicator (`control/relay/`).
//!
//! Data never goes through the store.
//!
//! | file | what |
//! |---|---|
//! | `address.rs` | where a store is, and listening there |
//! | `protocol/` | messages and their bytes |
//! | `token.rs` | the secret of the job |
//! | `session.rs` | keys, authenticated frames |
//! | `cipher.rs`, `no_cipher.rs` | optional encryption |
//! | `table.rs` | the values of an exchange, as bytes that all connections share |
//! | `output.rs`, `incoming.rs` | what waits to be sent; what has been received |
//! | `stall.rs` | pauses of this process |
//! | `namespace/` | values, exchanges and members, without sockets and clocks |
//! | `server/` | the server: one thread; on each host of a large job another, which passes on (`above.rs`) |
//! | `client/` | a member's connection; a host's, for all its ranks |
//! | `transport/` | connections whose bytes travel as messages of something else |
//!
//! Threat model: `docs/security.md`.

pub(crate) mod address;
#[cfg(feature = "multi-host")]
pub mod cipher;
#[cfg(not(feature = "multi-host"))]
#[path = "no_cipher.rs"]
pub mod cipher;
pub mod client;
mod incoming;
mod namespace;
mod output;
pub mod protocol;
pub mod server;
pub mod session;
mod stall;
pub mod table;
pub(crate) mod token;
mod transport;

pub use client::{Carrier, Member, Store, Subscriber};
pub use protocol::Role;
pub use server::{Server, Settings};
pub use token::Token;
pub(crate) use transport::{MessageTransport, Transport};

use crate::types::error::PeerEvent;
use std::time::Instant;

/// How to find a job's store.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// `host:port`; for a store without a port, its name in messages.
    pub address: String,
    /// The job's token.
    pub token: Token,
    /// The job's name, for jobs that have the same token; may be empty. The same on all hosts.
    pub job: String,
    /// Number of restarts of the job.
    pub epoch: u32,
    /// The process that hosts it.
    pub host: Host,
    /// Whether its connections are encrypted; the same for all.
    pub encrypted: bool,
}

/// The process that hosts a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Host {
    /// `phalanx launch`.
    Launcher,
    /// A rank.
    Rank(u32),
}

/// A lost member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Its rank.
    pub rank: usize,
    /// What happened to it.
    pub event: PeerEvent,
    /// The cause as text.
    pub why: String,
    /// Time of the notification.
    pub since: Instant,
}
