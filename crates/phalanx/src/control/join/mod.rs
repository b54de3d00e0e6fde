//! Join: the processes of one host find each other over a Unix socket that rank 0 opens.
//!
//! Each rank sends a hello, a payload for all others, and a handle to its process. When all have come, rank 0 gives each the region's file,
//! the handles and all payloads. The socket's name is abstract (no file). It is derived from the user, and from the job's id and token
//! ([`Place::meeting`]), so that others cannot guess it where there is a token. Both sides check with the kernel which user is at the other
//! end.
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
use peer::{Patience, join_rank0};
use rank0::accept_ranks;
use sha2::{Digest, Sha256};
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
    /// See [`Place::meeting`].
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
    /// An error as soon as it is known that not all will come.
    check: &'a dyn Fn() -> Result<()>,
}

/// The name of the socket at which a job's ranks meet. Everybody on the host can list the names of open sockets, so it tells nothing of
/// the job or of the keys.
fn name_of(job: &str, purpose: &str) -> String {
    format!("phalanx-{}-{:032x}", user_id(), hash(&format!("name {purpose} {job}")))
}

fn address_of(job: &str, purpose: &str) -> Result<Address> {
    Address::new(&name_of(job, purpose)).map_err(|e| refused("making the rendezvous address", e))
}

/// For the names of sockets: the ranks of a job meet at its start, and when a communicator grows.
const START: &str = "start";
const GROWTH: &str = "growth";

/// Key that joiners show to a growing communicator.
fn growth_key(job: &str) -> u128 {
    hash(&format!("{job} grows"))
}

/// The remedy for a name that a process of another user has.
const NAME_TAKEN: &str = "set PHALANX_TOKEN (or PHALANX_TOKEN_FILE) to a secret, the same for all ranks, from which the name is then derived; \
                          or end that process";

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
        let parameters = JoinParameters {
            job: &self.job,
            sent_by: "the communicator that grows",
            address: address_of(&self.job, GROWTH)?,
            members_key: hash(&format!("{} {}", self.job, self.number)),
            joiners_key: Some(growth_key(&self.job)),
            rank: self.rank,
            world_size: self.members + self.joiners,
            members: self.members,
            number: self.number,
            payload: self.backend.name().as_bytes(),
            check: &|| Ok(()),
        };
        parameters.run(timeout)
    }
}

/// Becomes a rank of a communicator of the job that grows on this host; `None` if none does now.
pub(crate) fn enter(place: &Place, timeout: Duration) -> Result<Option<Joined>> {
    let now = Instant::now();
    let hello = Hello { job: growth_key(&place.meeting), rank: JOINER, world_size: 0, cpus: usable_cpus() };
    let patience = Patience { for_rank0: now, deadline: after(now, timeout), check: &|| Ok(()) };
    join_rank0(&place.meeting, hello, &[], &address_of(&place.meeting, GROWTH)?, &patience)
}

/// Joins the other ranks of the job, and exchanges a payload with them. `check` answers an error as soon as it is known that not all will
/// come.
pub(crate) fn meet(
    place: &Place,
    payload: &[u8],
    timeout: Duration,
    check: &dyn Fn() -> Result<()>,
) -> Result<Joined> {
    let parameters = JoinParameters {
        job: &place.meeting,
        sent_by: place.launcher,
        address: address_of(&place.meeting, START)?,
        members_key: hash(&place.meeting),
        joiners_key: None,
        rank: place.rank,
        world_size: place.world_size,
        members: place.world_size,
        number: 0,
        payload,
        check,
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
        let patience = Patience { for_rank0: deadline, deadline, check: self.check };
        let joined = join_rank0(self.job, hello, self.payload, &self.address, &patience)?;
        joined.ok_or_else(|| {
            BootstrapError {
                problem: format!("after {timeout:.1?} rank 0 has not come"),
                remedy: "see whether it was started on this host, by this user, with the same job id and token (PHALANX_TOKEN); ranks of \
                         several hosts, or of containers with networks of their own, need PHALANX_STORE"
                    .into(),
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

/// 128 bits of SHA-256: the same in every build, and nothing of the text can be told from it.
fn hash(text: &str) -> u128 {
    let digest = Sha256::digest(text.as_bytes());
    u128::from_le_bytes(*digest.first_chunk().expect("32 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place_of(rank: usize, job: String) -> Place {
        Place {
            rank,
            world_size: 2,
            meeting: job.clone(),
            known_as: job.clone(),
            job,
            launcher: "a test",
            one_host: true,
        }
    }

    /// A rank 0 that is stopped accepts nobody.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_queue_of_connections_ends_with_the_deadline() {
        use rustix::net::{
            AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
        };
        let job = format!("a full queue of {}", std::process::id());
        let place = place_of(1, job);
        let name = name_of(&place.meeting, START);
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let socket = |flags| socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let listener = socket(SocketFlags::CLOEXEC);
        bind(&listener, &address).unwrap();
        listen(&listener, 1).unwrap();
        let mut waiting = Vec::new();
        loop {
            let client = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
            if connect(&client, &address).is_err() {
                break;
            }
            waiting.push(client);
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let error = meet(&place, &[], Duration::from_millis(200), &|| Ok(()))
                .err()
                .map(|error| error.to_string());
            sender.send(error)
        });
        let error = receiver.recv_timeout(Duration::from_secs(20)).expect("an end").expect("an error");
        assert!(error.contains("accepts no connection"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn who_came_to_the_meeting_before_is_at_the_next() {
        let place = |rank| place_of(rank, format!("the next meeting of {}", std::process::id()));
        let before = address_of(&place(0).meeting, START).unwrap().listen().unwrap();
        let timeout = Duration::from_secs(10);
        let [first, second] = [0, 1].map(|rank| {
            let place = place(rank);
            std::thread::spawn(move || {
                meet(&place, &[rank as u8; 3], timeout, &|| Ok(()))
                    .map(|joined| (joined.rank, joined.payloads))
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
