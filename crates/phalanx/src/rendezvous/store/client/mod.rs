//! A member's connection to the store: requests with deadlines, and a thread that receives and sends heartbeats.

mod connect;
mod link;

use crate::os::Wire;
use crate::rendezvous::store::protocol::{MAX_KEY, MAX_VALUE, Reply, Request, Role};
use crate::rendezvous::store::server::Server;
use crate::rendezvous::store::transport::Transport;
use crate::rendezvous::store::{Lost, Rendezvous};
use crate::types::error::{Error, Result};
use crate::watch::deadline::after;
use link::Link;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Identity of a client.
#[derive(Debug, Clone, Copy)]
pub struct Member {
    /// Rank or node.
    pub role: Role,
    /// Its number.
    pub rank: u32,
    /// How many there are.
    pub size: u32,
}

impl Member {
    fn of_ranks(rank: usize, world_size: usize) -> Member {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Member { role: Role::Rank, rank: number(rank), size: number(world_size) }
    }
}

/// Receives notifications of the store, on the receiving thread: it must not block.
pub trait Audience: Send + Sync {
    /// A message of a member, possibly this one.
    fn told(&self, from: usize, value: &[u8]);
    /// A member is lost, or the connection has ended.
    fn bereaved(&self, lost: &[Lost], has_ended: bool);
}

/// A member's connection to the store. Dropping it says goodbye.
///
/// Any thread may use it. After the connection has failed every call answers at once, with the reason.
pub struct Store {
    link: Arc<Link>,
    listener: Option<JoinHandle<()>>,
    /// The server, if this process hosts it. It ends after this member has left.
    server: Option<Server>,
    /// The transport, if something other than TCP carries the bytes. It ends after both.
    _transport: Option<Transport>,
}

impl Store {
    /// Joins the store as a rank, and waits for it to be there.
    ///
    /// # Errors
    /// [`Error::Bootstrap`]: nobody answers within `timeout`; the store has another token or version; it
    /// refuses this rank.
    pub fn connect(
        rendezvous: &Rendezvous,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Store> {
        Store::join(rendezvous, Member::of_ranks(rank, world_size), timeout)
    }

    /// The same over a wire whose other end, with or without a transport in between, the store has.
    pub(crate) fn over(
        wire: Wire,
        transport: Option<Transport>,
        rendezvous: &Rendezvous,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Store> {
        let member = Member::of_ranks(rank, world_size);
        let session = connect::join_over(wire, rendezvous, member, timeout)?;
        let (link, listener) = Link::start(rendezvous, member, session)?;
        Ok(Store { link, listener: Some(listener), server: None, _transport: transport })
    }

    /// Joins the store as any member.
    pub fn join(rendezvous: &Rendezvous, member: Member, timeout: Duration) -> Result<Store> {
        let session = connect::join(rendezvous, member, after(Instant::now(), timeout))?;
        let (link, listener) = Link::start(rendezvous, member, session)?;
        Ok(Store { link, listener: Some(listener), server: None, _transport: None })
    }

    /// Keeps the store itself in this member, until it has left.
    pub fn hosting(mut self, server: Server) -> Store {
        self.server = Some(server);
        self
    }

    /// Gathers a value from each member, in rank order. Collective over all members, once for each key; a key may be
    /// used again when the exchange is over. An empty value makes it a barrier.
    ///
    /// # Errors
    /// [`Error::Bootstrap`], with the ranks that are missing, when the deadline passes on any rank or a rank
    /// that is still needed is lost: the same verdict on all.
    pub fn exchange(&self, key: &str, mine: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let (key_text, value) = checked(key, mine)?;
        let what = format!("the exchange {key:?}");
        let wait = millis(timeout);
        let request = |id| Request::Exchange { id, key: key_text, value, wait };
        match self.link.ask(&what, timeout, request)? {
            Reply::All { values, .. } if values.len() == self.link.member.size as usize => Ok(values),
            reply => Err(self.link.unexpected(&what, timeout, reply)),
        }
    }

    /// Stores a value under a key, in the place of what was there.
    pub fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<()> {
        self.put(key, value, false, timeout).map(drop)
    }

    /// Stores a value unless there is one; answers the one that is there then. The first wins.
    pub fn set_first(&self, key: &str, value: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        self.put(key, value, true, timeout)
    }

    fn put(&self, key: &str, value: &[u8], keep: bool, timeout: Duration) -> Result<Vec<u8>> {
        let (key_text, value) = checked(key, value)?;
        let what = format!("storing {key:?}");
        match self.link.ask(&what, timeout, |id| Request::Set { id, key: key_text, value, keep })? {
            Reply::Value { value, .. } => Ok(value),
            reply => Err(self.link.unexpected(&what, timeout, reply)),
        }
    }

    /// The value of a key; waits until there is one.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let (key_text, _) = checked(key, &[])?;
        let what = format!("waiting for {key:?}");
        let wait = millis(timeout);
        match self.link.ask(&what, timeout, |id| Request::Get { id, key: key_text, wait })? {
            Reply::Value { value, .. } => Ok(value),
            reply => Err(self.link.unexpected(&what, timeout, reply)),
        }
    }

    /// Adds to a counter, which begins at 0; answers the sum.
    pub fn add(&self, key: &str, amount: i64, timeout: Duration) -> Result<i64> {
        let (key_text, _) = checked(key, &[])?;
        let what = format!("counting {key:?}");
        match self.link.ask(&what, timeout, |id| Request::Add { id, key: key_text, amount })? {
            Reply::Sum { value, .. } => Ok(value),
            reply => Err(self.link.unexpected(&what, timeout, reply)),
        }
    }

    /// Sends a message to other members; does not wait. Messages arrive everywhere in one order. An empty `to` means all connected
    /// members, the sender included.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if the value is too long, or the connection has ended.
    pub fn tell(&self, to: &[u32], value: &[u8]) -> Result<()> {
        let (_, value) = checked("", value)?;
        self.link.tell(Request::Tell { to: to.to_vec(), value })
    }

    /// Sets the receiver of messages; earlier messages were kept and are delivered now.
    pub fn set_audience(&self, audience: Arc<dyn Audience>) {
        self.link.set_audience(audience);
    }

    /// A member's last call. The member that hosts the store waits, at most for the timeout, until the others have called it or are
    /// lost, so that they have the store to their end.
    pub fn finish(&self, timeout: Duration) {
        const KEY: &str = "phalanx/finish";
        if self.server.is_some() {
            let _ = self.exchange(KEY, &[], timeout);
        } else {
            let wait = millis(timeout);
            let _ = self.link.tell(Request::Exchange { id: 0, key: KEY.into(), value: Vec::new(), wait });
        }
    }

    /// Whether the connection has ended.
    pub fn has_ended(&self) -> bool {
        self.link.has_ended()
    }

    /// The members that are lost, in the order in which that was learned. Costs one load while there are none.
    ///
    /// A member that cannot reach the store any more finds itself here, as the others do.
    pub fn lost(&self) -> Vec<Lost> {
        self.link.lost()
    }

    /// Waits until there are more than `known` lost members, or the connection has ended, or time is up.
    pub fn wait_for_loss(&self, known: usize, timeout: Duration) -> Vec<Lost> {
        self.link.wait_for_loss(known, timeout)
    }
}

fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)
}

fn checked(key: &str, value: &[u8]) -> Result<(String, Vec<u8>)> {
    let (what, actual, limit) = if key.len() > MAX_KEY {
        ("key", key.len(), MAX_KEY)
    } else if value.len() > MAX_VALUE {
        ("value", value.len(), MAX_VALUE)
    } else {
        return Ok((key.to_owned(), value.to_vec()));
    };
    Err(Error::bootstrap(
        format!("a {what} of {actual} bytes does not go into the store: at most {limit}"),
        "the store is for ids and addresses; data goes through collectives",
    ))
}

impl Drop for Store {
    fn drop(&mut self) {
        let listener = self.listener.take();
        if self.link.is_forked() {
            // The connection and its thread are the parent's.
            return std::mem::forget(listener);
        }
        self.link.leave();
        if let Some(listener) = listener {
            let _ = listener.join();
        }
    }
}
