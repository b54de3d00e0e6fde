//! A member's connection to the store: requests with deadlines, and a thread that receives and sends
//! heartbeats.

mod carrier;
mod connect;
mod link;

use crate::os::Wire;
use crate::rendezvous::store::protocol::{Growth, MAX_KEY, MAX_VALUE, Reply, Request, Role};
use crate::rendezvous::store::server::Server;
use crate::rendezvous::store::transport::Transport;
use crate::rendezvous::store::{Host, Lost, Rendezvous};
use crate::types::error::{Error, Result, UnsupportedError};
use crate::watch::deadline::after;
pub use carrier::Carrier;
use connect::{Client, Session};
use link::Link;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Identity of a client.
#[derive(Debug, Clone, Copy)]
pub struct Member {
    /// Rank or node.
    pub role: Role,
    /// The rank, or the node's number.
    pub rank: u32,
    /// The number of members with this role.
    pub size: u32,
}

impl Member {
    fn of_ranks(rank: usize, world_size: usize) -> Member {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Member { role: Role::Rank, rank: number(rank), size: number(world_size) }
    }
}

/// Receives the store's notifications. Both functions run on the receiving thread and must not block.
pub trait Subscriber: Send + Sync {
    /// Called for each message of a member, this one included.
    fn on_message(&self, from: usize, value: &[u8]);
    /// Called when a member is lost or the connection has ended, with all losses so far.
    fn on_loss(&self, lost: &[Lost], has_ended: bool);
}

/// A member's connection to the store. Dropping it says goodbye.
///
/// Any thread may use it. Once the connection has failed, each call returns that error at once.
pub struct Store {
    link: Arc<Link>,
    listener: Option<JoinHandle<()>>,
    /// The server, if this process hosts it. It ends after its last member of this process has left.
    server: Option<Arc<Server>>,
    /// The transport, if something other than TCP carries the bytes. It ends after both.
    _transport: Option<Transport>,
    /// Whether another connection to the store can be made.
    can_connect: bool,
}

impl Store {
    /// Connects to the store as a rank. Retries until a store answers or `timeout` has passed.
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

    /// As [`connect`](Store::connect), over an existing connection to the store.
    pub(crate) fn over(
        wire: Wire,
        transport: Option<Transport>,
        rendezvous: &Rendezvous,
        rank: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Result<Store> {
        let member = Member::of_ranks(rank, world_size);
        let session = connect::join_over(wire, rendezvous, Client::Member(member), timeout)?;
        let (link, listener) = Link::start(rendezvous, member, session)?;
        Ok(Store { link, listener: Some(listener), server: None, _transport: transport, can_connect: false })
    }

    /// As [`connect`](Store::connect), for a rank or a node.
    pub fn join(rendezvous: &Rendezvous, member: Member, timeout: Duration) -> Result<Store> {
        let session = connect::join(rendezvous, Client::Member(member), after(Instant::now(), timeout))?;
        Store::start(rendezvous, member, session)
    }

    fn start(rendezvous: &Rendezvous, member: Member, session: Session) -> Result<Store> {
        let (link, listener) = Link::start(rendezvous, member, session)?;
        Ok(Store { link, listener: Some(listener), server: None, _transport: None, can_connect: true })
    }

    /// An error if the ranks of this store cannot grow in number.
    pub(crate) fn check_growth(&self) -> Result<()> {
        match self.can_connect {
            true => Ok(()),
            false => Err(Error::from(UnsupportedError {
                what: "grow".into(),
                why: "the ranks meet over an MPI, which takes in no others".into(),
                remedy: "start the job again with more ranks, or with `phalanx launch`".into(),
            })),
        }
    }

    /// Another connection to the store, as rank `rank` of a communicator that grows. New ranks [`enter`](Store::enter) beside.
    pub(crate) fn grow(&self, growth: Growth, rank: u32, timeout: Duration) -> Result<Store> {
        // Which rank hosts the store is known when they have met.
        let rendezvous = Rendezvous { host: Host::Launcher, ..self.link.rendezvous.clone() };
        let deadline = after(Instant::now(), timeout);
        let session = connect::join(&rendezvous, Client::Growing(rank, growth), deadline)?;
        let member = Member { role: Role::Rank, rank, size: growth.size };
        let mut grown = Store::start(&rendezvous, member, session)?;
        grown.server.clone_from(&self.server);
        Ok(grown)
    }

    /// Connects as a new rank, in the next place of a communicator of the job that grows; `None` if none does now.
    pub(crate) fn enter(rendezvous: &Rendezvous, timeout: Duration) -> Result<Option<Store>> {
        let rendezvous = Rendezvous { host: Host::Launcher, ..rendezvous.clone() };
        let Some(session) = connect::enter(&rendezvous, after(Instant::now(), timeout))? else {
            return Ok(None);
        };
        let (rank, size) = session.place;
        Store::start(&rendezvous, Member { role: Role::Rank, rank, size }, session).map(Some)
    }

    /// This member's rank.
    pub(crate) fn rank(&self) -> usize {
        self.link.member.rank as usize
    }

    /// Whether the store runs in this process.
    pub(crate) fn is_hosted_here(&self) -> bool {
        self.server.is_some()
    }

    /// Tells it which rank's process hosts the store.
    pub(crate) fn set_host(&self, rank: usize) {
        self.link.set_host(Host::Rank(u32::try_from(rank).unwrap_or(u32::MAX)));
    }

    /// Hosts the server in this member, until the member has left.
    pub fn hosting(mut self, server: Server) -> Store {
        self.server = Some(Arc::new(server));
        self
    }

    /// Gathers a value from each member, in rank order. Collective over all members, once for each key; a key
    /// may be used again when the exchange is over. With empty values it is a barrier.
    ///
    /// # Errors
    /// [`Error::Bootstrap`], with the ranks that are missing, when the deadline passes on any rank or a rank
    /// that is still needed is lost: the same verdict on all.
    pub fn exchange(&self, key: &str, mine: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.exchange_while(key, mine, timeout, None)
    }

    /// The same, but an error of `goes_on`, which is asked often if there is one, ends the wait. The exchange fails then when this member leaves.
    pub(crate) fn exchange_while(
        &self,
        key: &str,
        mine: &[u8],
        timeout: Duration,
        goes_on: Option<&dyn Fn() -> Result<()>>,
    ) -> Result<Vec<Vec<u8>>> {
        let (key_text, value) = checked(key, mine)?;
        let what = format!("the exchange {key:?}");
        let wait = millis(timeout);
        let request = |id| Request::Exchange { id, key: key_text, value, wait };
        match self.link.ask_while(&what, timeout, goes_on, request)? {
            Reply::All { table: Some(table), .. } if table.count() == self.link.member.size as usize => {
                Ok(table.values().map(<[u8]>::to_vec).collect())
            }
            reply => Err(self.link.unexpected(&what, timeout, reply)),
        }
    }

    /// Stores a value under a key, and replaces an earlier one.
    pub fn set(&self, key: &str, value: &[u8], timeout: Duration) -> Result<()> {
        self.put(key, value, false, timeout).map(drop)
    }

    /// Stores a value if the key has none. Returns the key's value: the first one that was stored.
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

    /// Returns the value of a key. Waits until one is stored.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let (key_text, _) = checked(key, &[])?;
        let what = format!("waiting for {key:?}");
        let wait = millis(timeout);
        match self.link.ask(&what, timeout, |id| Request::Get { id, key: key_text, wait })? {
            Reply::Value { value, .. } => Ok(value),
            reply => Err(self.link.unexpected(&what, timeout, reply)),
        }
    }

    /// Adds to a counter, which starts at 0. Returns the sum.
    pub fn add(&self, key: &str, amount: i64, timeout: Duration) -> Result<i64> {
        let (key_text, _) = checked(key, &[])?;
        let what = format!("counting {key:?}");
        match self.link.ask(&what, timeout, |id| Request::Add { id, key: key_text, amount })? {
            Reply::Sum { value, .. } => Ok(value),
            reply => Err(self.link.unexpected(&what, timeout, reply)),
        }
    }

    /// Sends a message to other members, without waiting. All members receive messages in the same order. An
    /// empty `to` means all connected members, the sender included.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if the value is too long, or the connection has ended.
    pub fn send(&self, to: &[u32], value: &[u8]) -> Result<()> {
        let (_, value) = checked("", value)?;
        self.link.post(Request::Send { to: to.to_vec(), value })
    }

    /// Sets the receiver of notifications. Messages that came earlier are delivered now.
    pub fn set_subscriber(&self, subscriber: Arc<dyn Subscriber>) {
        self.link.set_subscriber(subscriber);
    }

    /// Leaves the job; a member's last call. The member that hosts the store waits here until the others have
    /// called it or are lost, at most for the timeout: they need the store until then. If this process is a member in another group, too,
    /// the store goes on, and nobody waits.
    pub fn finish(&self, timeout: Duration) {
        const KEY: &str = "phalanx/finish";
        if self.server.as_ref().is_some_and(|server| Arc::strong_count(server) == 1) {
            let _ = self.exchange(KEY, &[], timeout);
        } else {
            let wait = millis(timeout);
            let _ = self.link.post(Request::Exchange { id: 0, key: KEY.into(), value: Vec::new(), wait });
        }
    }

    /// Whether the connection has ended.
    pub fn has_ended(&self) -> bool {
        self.link.has_ended()
    }

    /// Returns the lost members, in the order of notification. Costs one load while there are none.
    ///
    /// A member that cannot reach the store any more is in its own list.
    pub fn lost(&self) -> Vec<Lost> {
        self.link.lost()
    }

    /// Waits until more than `known` members are lost, the connection has ended, or the timeout has passed.
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
