//! How the processes of one host find each other: over a Unix socket that rank 0 opens.
//!
//! Each rank says who it is and hands over a handle to its process; when all have come, rank 0 gives each
//! the region's file and the handles of all. The socket's name is derived from the job's id, is abstract
//! (no file), and belongs to a user: both sides check with the kernel who is at the other end.

use super::environment::Place;
use crate::backend::host::{MAX_RANKS, NewChannel, World};
use crate::error::{BootstrapError, Error, Result};
use crate::os::{Address, Connection, CpuSet, Listener, Process, SharedFile, usable_cpus, user_id};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// First word of every message: the protocol and its version.
const MAGIC: u64 = u64::from_le_bytes(*b"PHALANX\x01");

/// How long a rank that has connected may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// How much longer the others wait than rank 0, which may have come later than they.
const GRACE: Duration = Duration::from_millis(700);

/// How long rank 0 goes on telling those who come that the meeting is over.
const FAREWELL: Duration = Duration::from_millis(150);

/// How often waiting ranks look around.
const TICK: Duration = Duration::from_millis(20);

/// The longest reason for a refusal.
const MAX_REASON: usize = 4096;

/// What a rank gets from the rendezvous.
pub(super) struct Met {
    pub world: Arc<World>,
    pub channel: NewChannel,
}

/// Meets the other ranks of the job.
pub(super) fn meet(place: &Place, timeout: Duration) -> Result<Met> {
    let deadline = Instant::now() + timeout;
    let job = hash(place.job.as_bytes());
    let name = format!("phalanx-{}-{job:032x}", user_id());
    let address = Address::new(&name).map_err(|e| refused("making the rendezvous address", e))?;
    if place.rank == 0 {
        host(place, job, &address, timeout, deadline)
    } else {
        visit(place, job, &address, timeout, deadline)
    }
}

fn refused(call: &'static str, error: io::Error) -> Error {
    Error::system(call, error, "the ranks meet over a Unix socket of this host")
}

/// FNV-1a, 128 bits: the same in every build. Not a secret: the kernel says who may connect.
fn hash(bytes: &[u8]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    bytes.iter().fold(BASIS, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
}

/// What a rank says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Hello {
    job: u128,
    rank: u32,
    world_size: u32,
    /// The cores it may use: a launcher may have bound each rank to one of its own.
    cpus: CpuSet,
}

const HELLO_LEN: usize = 32 + size_of::<CpuSet>();

impl Hello {
    fn to_bytes(self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.job.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.rank.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.world_size.to_le_bytes());
        for (word, cpus) in bytes[32..].chunks_exact_mut(8).zip(self.cpus) {
            word.copy_from_slice(&cpus.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; HELLO_LEN]) -> Option<Hello> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        if bytes[..8] != MAGIC.to_le_bytes() {
            return None;
        }
        let job = u128::from_le_bytes(bytes[8..24].try_into().expect("16 bytes"));
        let mut cpus = [0; size_of::<CpuSet>() / 8];
        for (cpus, word) in cpus.iter_mut().zip(bytes[32..].chunks_exact(8)) {
            *cpus = u64::from_le_bytes(word.try_into().expect("8 bytes"));
        }
        Some(Hello { job, rank: word(24), world_size: word(28), cpus })
    }
}

// --- rank 0 ---------------------------------------------------------------------------------------------

/// A rank that has come.
struct Guest {
    connection: Connection,
    process: Process,
    cpus: CpuSet,
}

fn host(place: &Place, job: u128, address: &Address, timeout: Duration, deadline: Instant) -> Result<Met> {
    let listener = loop {
        match address.listen() {
            Ok(listener) => break listener,
            // The job before, under the same id, may still be ending.
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(TICK);
            }
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                return Err(Error::bootstrap(
                    format!("another process is rank 0 of this job already ({})", place.launcher),
                    "give each job an id of its own, and each process a rank of its own",
                ));
            }
            Err(e) => return Err(refused("listening for the other ranks", e)),
        }
    };
    let mut guests: Vec<Option<Guest>> = (1..place.world_size).map(|_| None).collect();
    let outcome = loop {
        if guests.iter().all(Option::is_some) {
            break Ok(());
        }
        if let Some(rank) = first_ended(&guests) {
            break Err(Error::bootstrap(
                format!("rank {rank} ended while the ranks were meeting"),
                "see its own output",
            ));
        }
        if Instant::now() >= deadline {
            break Err(missing_ranks(&guests, timeout));
        }
        let connection = match listener.accept(TICK) {
            Ok(Some(connection)) => connection,
            Ok(None) => continue,
            Err(e) => break Err(refused("accepting a rank", e)),
        };
        if let Err(error) = receive_guest(place, job, connection, &mut guests) {
            break Err(error);
        }
    };
    match outcome.and_then(|()| welcome(place, &guests)) {
        Ok(met) => Ok(met),
        Err(error) => {
            // Nobody shall wait for what will not come.
            let reason = error.to_string();
            let missing = match &error {
                Error::Bootstrap(error) => error.missing.as_slice(),
                _ => &[],
            };
            for guest in guests.iter().flatten() {
                let _ = refuse(&guest.connection, &reason, missing);
            }
            let known = guests.iter().flatten().count();
            refuse_others(&listener, job, place.world_size - 1 - known, &reason, missing);
            Err(error)
        }
    }
}

/// Ranks that come while the meeting is ended, or just afterwards, are told why: they would wait for rank 0.
fn refuse_others(listener: &Listener, job: u128, count: usize, reason: &str, missing: &[usize]) {
    let end = Instant::now() + FAREWELL;
    let mut told = 0;
    while told < count && Instant::now() < end {
        let Ok(Some(connection)) = listener.accept(TICK) else { continue };
        let mut bytes = [0; HELLO_LEN];
        if connection.set_timeout(FAREWELL).is_ok()
            && connection.receive(&mut bytes).is_ok()
            && Hello::from_bytes(&bytes).is_some_and(|hello| hello.job == job)
            // All that it sends is taken, or it would find the connection broken before it reads.
            && connection.receive_process().is_ok()
            && refuse(&connection, reason, missing).is_ok()
        {
            told += 1;
        }
    }
}

fn first_ended(guests: &[Option<Guest>]) -> Option<usize> {
    let ended = |guest: &Option<Guest>| guest.as_ref().is_some_and(|guest| guest.process.has_exited());
    guests.iter().position(ended).map(|index| index + 1)
}

fn missing_ranks(guests: &[Option<Guest>], timeout: Duration) -> Error {
    let missing: Vec<usize> =
        guests.iter().enumerate().filter(|(_, guest)| guest.is_none()).map(|(i, _)| i + 1).collect();
    BootstrapError {
        problem: format!("after {timeout:.1?} these ranks have not come: {missing:?}"),
        remedy:
            "see whether they were started and with which variables; PHALANX_TIMEOUT sets how long to wait"
                .into(),
        missing,
    }
    .into()
}

/// Hears who has connected. A stranger is sent away; a rank that cannot be right ends the meeting.
fn receive_guest(
    place: &Place,
    job: u128,
    connection: Connection,
    guests: &mut [Option<Guest>],
) -> Result<()> {
    if connection.peer_user().ok() != Some(user_id()) || connection.set_timeout(HELLO_TIMEOUT).is_err() {
        tracing::warn!("another user's process tried to join the job");
        return Ok(());
    }
    let mut bytes = [0; HELLO_LEN];
    let hello = connection.receive(&mut bytes).ok().and_then(|()| Hello::from_bytes(&bytes));
    let Some(hello) = hello.filter(|hello| hello.job == job) else {
        tracing::warn!("a process that does not belong to the job tried to join it");
        let _ = refuse(&connection, "this is not the job, or the version of phalanx, that was expected", &[]);
        return Ok(());
    };
    let (rank, world_size) = (hello.rank as usize, hello.world_size as usize);
    let problem = if world_size != place.world_size {
        Some(format!(
            "rank {rank} was told that there are {world_size} ranks, rank 0 that there are {}",
            place.world_size
        ))
    } else if rank == 0 || rank >= place.world_size || guests[rank - 1].is_some() {
        Some(format!("two processes claim to be rank {rank}"))
    } else {
        None
    };
    if let Some(problem) = problem {
        let error =
            Error::bootstrap(problem, "give each process a rank of its own and the same number of ranks");
        let _ = refuse(&connection, &error.to_string(), &[]);
        return Err(error);
    }
    match connection.receive_process() {
        Ok(process) => guests[rank - 1] = Some(Guest { connection, process, cpus: hello.cpus }),
        // It may try again, or the deadline names it.
        Err(e) => tracing::warn!("rank {rank} could not hand over its process handle: {e}"),
    }
    Ok(())
}

/// A refusal: a zero, the reason, and the ranks that are missing.
fn refuse(connection: &Connection, reason: &str, missing: &[usize]) -> io::Result<()> {
    let reason = &reason.as_bytes()[..reason.len().min(MAX_REASON)];
    let mut bytes = Vec::with_capacity(16 + reason.len() + 4 * missing.len());
    bytes.extend_from_slice(&0u64.to_le_bytes());
    bytes.extend_from_slice(&(reason.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(missing.len() as u32).to_le_bytes());
    bytes.extend_from_slice(reason);
    for rank in missing {
        bytes.extend_from_slice(&(*rank as u32).to_le_bytes());
    }
    connection.send(&bytes)
}

/// All have come: makes the region and gives it to them.
fn welcome(place: &Place, guests: &[Option<Guest>]) -> Result<Met> {
    let own = Process::current()?;
    let file = SharedFile::create()?;
    let guests: Vec<&Guest> = guests.iter().flatten().collect();
    let everyone: Vec<&Process> = std::iter::once(&own).chain(guests.iter().map(|g| &g.process)).collect();
    // The region exists before anybody can look into it.
    let cores = count_cores(guests.iter().map(|guest| guest.cpus));
    let world = World::processes(file.try_clone()?, Vec::new(), cores)?;
    let channel = NewChannel::create(&world, place.world_size)?;
    for (index, guest) in guests.iter().enumerate() {
        // The channel's id is never 0, which is a refusal.
        let sent = guest
            .connection
            .send(&[channel.id(), cores as u64].map(u64::to_le_bytes).concat())
            .and_then(|()| guest.connection.send_handles(Some(&file), &everyone));
        sent.map_err(|e| {
            Error::bootstrap(
                format!("rank {} cannot be given the region: {e}", index + 1),
                "see its own output; each rank needs a file descriptor per rank (`ulimit -n`)",
            )
        })?;
    }
    drop(everyone);
    let processes = std::iter::once(Ok(own))
        .chain(guests.iter().map(|guest| guest.process.try_clone()))
        .collect::<Result<Vec<_>>>()?;
    Ok(Met { world: Arc::new(world.with_processes(processes)), channel })
}

/// How many cores the ranks have between them: the union of theirs, within this process's CPU quota.
fn count_cores(others: impl Iterator<Item = CpuSet>) -> usize {
    let own = usable_cpus();
    let count = |set: &CpuSet| set.iter().map(|word| word.count_ones() as usize).sum::<usize>();
    let quota = std::thread::available_parallelism().map_or(1, usize::from);
    let union = others.fold(own, |union, set| std::array::from_fn(|i| union[i] | set[i]));
    if quota < count(&own) { quota } else { count(&union).max(1) }
}

// --- the others -----------------------------------------------------------------------------------------

fn visit(place: &Place, job: u128, address: &Address, timeout: Duration, deadline: Instant) -> Result<Met> {
    let connection = loop {
        match address.connect() {
            Ok(connection) => break connection,
            Err(e)
                if matches!(e.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock)
                    && Instant::now() < deadline =>
            {
                std::thread::sleep(TICK);
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                return Err(BootstrapError {
                    problem: format!("after {timeout:.1?} rank 0 has not come"),
                    remedy: "see whether it was started on this host, by this user, with the same job id"
                        .into(),
                    missing: vec![0],
                }
                .into());
            }
            Err(e) => return Err(refused("connecting to rank 0", e)),
        }
    };
    let user = connection.peer_user().map_err(|e| refused("asking who rank 0 is", e))?;
    if user != user_id() {
        return Err(Error::bootstrap(
            format!("the process that answers for rank 0 belongs to user {user}, not to {}", user_id()),
            "start all ranks as one user",
        ));
    }
    // A little longer than rank 0 waits, so that its reason arrives.
    let patience = deadline.saturating_duration_since(Instant::now()) + GRACE;
    let own = Process::current()?;
    let hello =
        Hello { job, rank: place.rank as u32, world_size: place.world_size as u32, cpus: usable_cpus() };
    let lost = |e: io::Error| {
        Error::bootstrap(
            format!("the connection to rank 0 broke while the ranks were meeting ({e})"),
            "see rank 0's own output",
        )
    };
    connection.set_timeout(patience).map_err(lost)?;
    connection.send(&hello.to_bytes()).map_err(lost)?;
    connection.send_handles(None, &[&own]).map_err(lost)?;
    let mut id = [0; 8];
    connection.receive(&mut id).map_err(lost)?;
    let id = u64::from_le_bytes(id);
    if id == 0 {
        return Err(refusal(&connection).map_err(lost)?);
    }
    let mut cores = [0; 8];
    connection.receive(&mut cores).map_err(lost)?;
    let cores = u64::from_le_bytes(cores) as usize;
    let (file, processes) = connection.receive_world(place.world_size).map_err(lost)?;
    let world = Arc::new(World::processes(file, processes, cores)?);
    let channel = NewChannel::open(&world, id)?;
    Ok(Met { world, channel })
}

fn refusal(connection: &Connection) -> io::Result<Error> {
    let number = || -> io::Result<usize> {
        let mut bytes = [0; 4];
        connection.receive(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes) as usize)
    };
    let (reason_len, missing_len) = (number()?, number()?);
    let mut reason = vec![0; reason_len.min(MAX_REASON)];
    connection.receive(&mut reason)?;
    let missing = (0..missing_len.min(MAX_RANKS)).map(|_| number()).collect::<io::Result<_>>()?;
    Ok(BootstrapError {
        problem: format!("rank 0 says: {}", String::from_utf8_lossy(&reason)),
        remedy: "all ranks have ended the attempt".into(),
        missing,
    }
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_survives_the_wire_and_garbage_does_not() {
        let hello = Hello { job: hash(b"job"), rank: 3, world_size: 7, cpus: [5; 16] };
        assert_eq!(Hello::from_bytes(&hello.to_bytes()), Some(hello));
        assert_eq!(Hello::from_bytes(&[0; HELLO_LEN]), None);
        assert_eq!(Hello::from_bytes(&[0xff; HELLO_LEN]), None);
        assert_ne!(hash(b"job"), hash(b"job "));
    }
}
