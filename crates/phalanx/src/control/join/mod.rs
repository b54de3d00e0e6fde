//! Join: the processes of one host find each other over a Unix socket that rank 0 opens.
//!
//! Each rank sends a hello, a payload for all others, and a handle to its process. When all have come, rank 0 gives each the region's file,
//! the handles and all payloads. The socket's name is derived from the job's id and the user, and is abstract (no file). Both sides check
//! with the kernel which user is at the other end.
//!
//! A communicator that grows joins in the same way again, at an address of its own. Its members come with their ranks; rank 0 gives ranks to
//! the joiners.

mod peer;
mod rank0;
mod wire;

use super::endpoint::NewChannel;
use super::world::World;
use crate::contract::BackendKind;
use crate::os::{Address, usable_cpus, user_id};
use crate::rendezvous::environment::Place;
use crate::types::error::{BootstrapError, Error, Result};
use crate::watch::deadline::after;
use peer::join_rank0;
use rank0::accept_ranks;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::{Hello, JOINER};

/// Time between two polls of a waiting rank.
const TICK: Duration = Duration::from_millis(20);

/// The result of a join.
pub(crate) struct Joined {
    pub world: Arc<World>,
    pub channel: NewChannel,
    pub rank: usize,
    pub world_size: usize,
    /// Number of this join, unique in the job.
    pub number: u64,
    /// The payload of each rank.
    pub payloads: Vec<Vec<u8>>,
}

/// The parameters of a join.
struct JoinParameters<'a> {
    job: &'a str,
    /// The launcher or communicator behind the join, for errors.
    sent_by: &'a str,
    address: Address,
    /// Keys that members, and joiners, show to be let in.
    members_key: u128,
    joiners_key: Option<u128>,
    rank: usize,
    world_size: usize,
    /// The last ranks are given to joiners.
    members: usize,
    number: u64,
    /// This rank's payload for all others.
    payload: &'a [u8],
}

fn address_of(key: u128) -> Result<Address> {
    let name = format!("phalanx-{}-{key:032x}", user_id());
    Address::new(&name).map_err(|e| refused("making the rendezvous address", e))
}

/// Key of the address at which a growing communicator and its joiners meet.
fn growth_key(job: &str) -> u128 {
    hash(format!("{job} grows").as_bytes())
}

/// A communicator that takes in new ranks.
pub(crate) struct Growth {
    pub job: String,
    /// Its backend, which joiners are told.
    pub backend: BackendKind,
    pub number: u64,
    pub rank: usize,
    pub members: usize,
    pub joiners: usize,
}

impl Growth {
    /// Meets the other members, and the joiners.
    pub fn meet(&self, timeout: Duration) -> Result<Joined> {
        let key = growth_key(&self.job);
        let parameters = JoinParameters {
            job: &self.job,
            sent_by: "the communicator that grows",
            address: address_of(key)?,
            members_key: hash(format!("{} {}", self.job, self.number).as_bytes()),
            joiners_key: Some(key),
            rank: self.rank,
            world_size: self.members + self.joiners,
            members: self.members,
            number: self.number,
            payload: self.backend.name().as_bytes(),
        };
        parameters.run(timeout)
    }
}

/// Waits for a communicator of the job that grows, and becomes a rank of it.
pub(crate) fn join(place: &Place, timeout: Duration) -> Result<Joined> {
    let key = growth_key(&place.job);
    let deadline = after(Instant::now(), timeout);
    let hello = Hello { job: key, rank: JOINER, world_size: 0, cpus: usable_cpus() };
    let no_rank0 = || {
        Error::bootstrap(
            format!("for {timeout:.1?} no communicator of this job has asked for joiners"),
            "the others call grow or rebuild; see that this process has the variables of their job, on the same host \
             and of the same user (PHALANX_JOB, and after a restart those of the new attempt)",
        )
    };
    join_rank0(&place.job, hello, &[], &address_of(key)?, deadline, no_rank0)
}

/// Joins the other ranks of the job, and exchanges a payload with them.
pub(crate) fn meet(place: &Place, payload: &[u8], timeout: Duration) -> Result<Joined> {
    let key = hash(place.job.as_bytes());
    let parameters = JoinParameters {
        job: &place.job,
        sent_by: place.launcher,
        address: address_of(key)?,
        members_key: key,
        joiners_key: None,
        rank: place.rank,
        world_size: place.world_size,
        members: place.world_size,
        number: 0,
        payload,
    };
    parameters.run(timeout)
}

impl JoinParameters<'_> {
    fn run(&self, timeout: Duration) -> Result<Joined> {
        let deadline = after(Instant::now(), timeout);
        if self.rank == 0 {
            return accept_ranks(self, timeout, deadline);
        }
        let (rank, world_size) = (self.rank as u32, self.world_size as u32);
        let hello = Hello { job: self.members_key, rank, world_size, cpus: usable_cpus() };
        join_rank0(self.job, hello, self.payload, &self.address, deadline, || {
            BootstrapError {
                problem: format!("after {timeout:.1?} rank 0 has not come"),
                remedy: "see whether it was started on this host, by this user, with the same job id".into(),
                missing: vec![0],
            }
            .into()
        })
    }
}

fn refused(call: &'static str, error: io::Error) -> Error {
    Error::system(
        call,
        error,
        "the ranks meet over a Unix socket of this host; each needs a few file descriptors (`ulimit -n`)",
    )
}

/// FNV-1a, 128 bits: the same in every build. Not a secret: the kernel says who may connect.
fn hash(bytes: &[u8]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    bytes.iter().fold(BASIS, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn who_came_to_the_meeting_before_is_at_the_next() {
        let place = |rank| Place {
            rank,
            world_size: 2,
            job: format!("the next meeting of {}", std::process::id()),
            launcher: "a test",
            one_host: true,
        };
        let before = address_of(hash(place(0).job.as_bytes())).unwrap().listen().unwrap();
        let timeout = Duration::from_secs(10);
        let [first, second] = [0, 1].map(|rank| {
            let place = place(rank);
            std::thread::spawn(move || {
                meet(&place, &[rank as u8; 3], timeout).map(|joined| (joined.rank, joined.payloads))
            })
        });
        // Rank 1 has come to it (or, on a slow machine, is late for it), and rank 0 cannot begin its own.
        std::thread::sleep(Duration::from_secs(1));
        drop(before);
        let payloads = vec![vec![0; 3], vec![1; 3]];
        let joined = [first, second].map(|rank| rank.join().unwrap().unwrap());
        assert_eq!(joined, [(0, payloads.clone()), (1, payloads)]);
    }
}
