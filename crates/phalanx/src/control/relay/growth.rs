//! Growth on several hosts: the members of a communicator and new ranks meet in the job's store, as a group of their own.
//!
//! 1. The members connect to the store again, with a number that they agree on before. New ranks get the places behind them.
//! 2. All introduce themselves ([`Relay::meet_joiners`], [`enter`]), and so learn which ranks share hosts.
//! 3. Each makes its end of the new communicator.
//! 4. All say that they have one ([`Relay::settle_growth`]). The store answers all of them
//!    alike: the communicator counts, or nobody goes on with it.

use super::Relay;
use crate::contract::BackendKind;
use crate::contract::hosts::{HostIdentity, HostTopology};
use crate::rendezvous::store::protocol::Growth;
use crate::rendezvous::store::{Rendezvous, Store};
use crate::types::MAX_RANKS;
use crate::types::error::{Error, Result, UsageError};
use crate::watch::deadline::after;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// The keys of the exchanges.
const INTRODUCTIONS: &str = "phalanx/growth";
const SETTLED: &str = "phalanx/grown";

/// What a rank tells the others.
#[derive(Serialize, Deserialize)]
struct Introduction {
    identity: HostIdentity,
    /// Whether the store runs in its process.
    hosts_store: bool,
    /// `None` for a new rank.
    member: Option<Member>,
}

/// What new ranks learn of the members.
#[derive(Serialize, Deserialize)]
struct Member {
    number: u64,
    backend: String,
    reproducible: bool,
}

/// A communicator that grows, as a member of it knows it.
pub(crate) struct Growing {
    pub number: u64,
    pub backend: BackendKind,
    /// Contributions are combined in rank order.
    pub reproducible: bool,
    pub rank: usize,
    pub members: usize,
    pub joiners: usize,
}

/// The ranks that have met.
pub(crate) struct Met {
    pub store: Store,
    pub rank: usize,
    pub topology: HostTopology,
    /// The growth's number.
    pub number: u64,
    /// Name of the members' backend.
    pub backend: String,
    pub reproducible: bool,
}

impl Relay {
    /// An error if so many ranks cannot take in so many others.
    pub fn check_growth(&self, ranks: usize, joiners: usize) -> Result<()> {
        let world_size = ranks.saturating_add(joiners);
        if world_size > MAX_RANKS {
            return Err(UsageError::WorldSize { world_size, limit: MAX_RANKS }.into());
        }
        self.shared.store.check_growth()
    }

    /// Meets the other members, and the new ranks. `check` says whether the members still are a communicator: one of them may be lost before
    /// it comes here, where nobody knows it then.
    pub fn meet_joiners(
        &self,
        growing: &Growing,
        timeout: Duration,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Met> {
        let deadline = after(Instant::now(), timeout);
        let number = |n: usize| u32::try_from(n).expect("checked before");
        let Growing { number: id, rank, members, joiners, .. } = *growing;
        let growth = Growth { number: id, members: number(members), size: number(members + joiners) };
        let store = self.shared.store.grow(growth, number(rank), timeout)?;
        let backend = growing.backend.name().to_owned();
        let member = Member { number: id, backend, reproducible: growing.reproducible };
        introduce(store, Some(member), deadline.saturating_duration_since(Instant::now()), Some(check))
    }

    /// Waits until all ranks of a grown communicator have it, or one is lost: the same answer for all.
    pub fn settle_growth(&self, timeout: Duration) -> Result<()> {
        self.shared.store.exchange(SETTLED, &[], timeout).map(drop)
    }
}

/// A new rank's meeting with a communicator of the job that grows; `None` if none does now.
pub(crate) fn enter(rendezvous: &Rendezvous, timeout: Duration) -> Result<Option<Met>> {
    let deadline = after(Instant::now(), timeout);
    let Some(store) = Store::enter(rendezvous, timeout)? else { return Ok(None) };
    introduce(store, None, deadline.saturating_duration_since(Instant::now()), None).map(Some)
}

fn introduce(
    store: Store,
    member: Option<Member>,
    timeout: Duration,
    check: Option<&dyn Fn() -> Result<()>>,
) -> Result<Met> {
    let hosts_store = store.is_hosted_here();
    let own = Introduction { identity: HostIdentity::own(), hosts_store, member };
    let own = postcard::to_allocvec(&own).expect("plain data");
    let all = store.exchange_while(INTRODUCTIONS, &own, timeout, check)?;
    let understood: postcard::Result<Vec<Introduction>> =
        all.iter().map(|bytes| postcard::from_bytes(bytes)).collect();
    let not_understood = || {
        Error::bootstrap(
            "the ranks of a communicator that grows do not understand each other",
            "use one version of phalanx in all processes of the job",
        )
    };
    let mut all = understood.map_err(|_| not_understood())?;
    if let Some(host) = all.iter().position(|rank| rank.hosts_store) {
        store.set_host(host);
    }
    let Member { number, backend, reproducible } = all[0].member.take().ok_or_else(not_understood)?;
    let identities: Vec<HostIdentity> = all.into_iter().map(|rank| rank.identity).collect();
    let (rank, topology) = (store.rank(), HostTopology::of(&identities));
    Ok(Met { store, rank, topology, number, backend, reproducible })
}
