//! The other ranks' side of a join: connect to rank 0, introduce themselves and map the region.

use super::wire::{Hello, framed, receive_id, receive_payload, refusal};
use super::{Joined, NAME_TAKEN, TICK, refused};
use crate::control::endpoint::NewChannel;
use crate::control::world::World;
use crate::os::{Address, LocalConnection, PeerProcess, Process, user_id};
use crate::types::MAX_HOST_RANKS;
use crate::types::error::{Error, Result};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How much longer the others wait than rank 0, which may have started later.
const GRACE: Duration = Duration::from_millis(700);

/// How long a rank waits.
pub(super) struct Patience<'a> {
    /// For rank 0 to listen.
    pub for_rank0: Instant,
    /// For everything.
    pub deadline: Instant,
    /// An error as soon as it is known that not all will come.
    pub check: &'a dyn Fn() -> Result<()>,
}

/// Joins over rank 0's socket; `None` if rank 0 does not appear.
pub(super) fn join_rank0(
    job: &str,
    hello: Hello,
    payload: &[u8],
    address: &Address,
    patience: &Patience<'_>,
) -> Result<Option<Joined>> {
    let (own, deadline) = (Process::current()?, patience.deadline);
    let (connection, id) = loop {
        let Some(connection) = connect(address, patience)? else { return Ok(None) };
        match introduce(&connection, hello, payload, &own, deadline) {
            Ok(id) => break (connection, id),
            // It reached the join of the job's previous communicator, which was just ending.
            Err(e)
                if matches!(e.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
                    && Instant::now() < deadline =>
            {
                std::thread::sleep(TICK);
            }
            Err(e) => return Err(lost(e)),
        }
    };
    // The channel's id, or a zero and the reason for a refusal.
    let accepted = |id: u64| if id == 0 { Err(refusal(&connection).map_err(lost)?) } else { Ok(()) };
    accepted(id)?;
    let mut rest = [0; 32];
    connection.receive(&mut rest).map_err(lost)?;
    let number = |at: usize| u64::from_le_bytes(rest[8 * at..8 * at + 8].try_into().expect("8 bytes"));
    let [cores, rank, world_size] = [0, 1, 2].map(|at| number(at) as usize);
    if rank >= world_size || world_size > MAX_HOST_RANKS {
        return Err(lost(io::ErrorKind::InvalidData.into()));
    }
    let payloads =
        (0..world_size).map(|_| receive_payload(&connection)).collect::<io::Result<_>>().map_err(lost)?;
    let (file, processes) = connection.receive_world(world_size).map_err(lost)?;
    // All have been given it.
    accepted(receive_id(&connection).map_err(lost)?)?;
    let world = Arc::new(World::processes(job, file, processes, cores)?);
    let channel = NewChannel::open(&world, id)?;
    Ok(Some(Joined { world, channel, rank, world_size, number: number(3), payloads }))
}

fn lost(e: io::Error) -> Error {
    Error::bootstrap(
        format!("the connection to rank 0 broke while the ranks were meeting ({e})"),
        "see rank 0's own output",
    )
}

fn connect(address: &Address, patience: &Patience<'_>) -> Result<Option<LocalConnection>> {
    let connection = loop {
        let now = Instant::now();
        match address.connect() {
            Ok(connection) => break connection,
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && now >= patience.for_rank0 => {
                return Ok(None);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && now >= patience.deadline => {
                return Err(Error::bootstrap(
                    "rank 0 is there and accepts no connection: as many as its socket queues are waiting",
                    "see whether it is stopped (SIGSTOP, a debugger), and its own output",
                ));
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock) => {
                (patience.check)()?;
                std::thread::sleep(TICK);
            }
            Err(e) => return Err(refused("connecting to rank 0", e)),
        }
    };
    let peer = connection.peer().map_err(|e| refused("asking who rank 0 is", e))?;
    if peer.user != user_id() {
        return Err(taken_by(peer));
    }
    Ok(Some(connection))
}

/// The error if a process of another user has the name at which the ranks meet.
pub(super) fn taken_by(peer: PeerProcess) -> Error {
    let process = peer.process.map_or(String::new(), |process| format!(" (process {process})"));
    Error::bootstrap(
        format!(
            "the name at which the ranks of this job meet is taken by user {}{process}, and this is user {}",
            peer.user,
            user_id()
        ),
        NAME_TAKEN,
    )
}

/// Sends the hello, and waits for the first word of the answer.
fn introduce(
    connection: &LocalConnection,
    hello: Hello,
    payload: &[u8],
    own: &Process,
    deadline: Instant,
) -> io::Result<u64> {
    // A little longer than rank 0 waits, so that its reason arrives.
    connection.set_timeout(deadline.saturating_duration_since(Instant::now()) + GRACE)?;
    connection.send(&[&hello.to_bytes()[..], &framed(payload)].concat())?;
    connection.send_handles(None, &[own], deadline)?;
    receive_id(connection)
}
