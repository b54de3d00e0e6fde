//! How the processes of one host find each other: over a Unix socket that rank 0 opens.
//!
//! Each rank says who it is, has a word for all others, and hands over a handle to its process; when all have come, rank 0
//! gives each the region's file, the handles and the words of all. The socket's name is derived from the job's id, is abstract
//! (no file), and belongs to a user: both sides check with the kernel who is at the other end.
//!
//! A communicator that grows meets in the same way once more, at an address of its own: its members come as the ranks that
//! they are, and to those who join rank 0 gives numbers.

use super::endpoint::NewChannel;
use super::world::World;
use crate::contract::BackendKind;
use crate::os::{Address, Connection, CpuSet, Listener, Process, SharedFile, usable_cpus, user_id};
use crate::rendezvous::environment::{Place, cores_from_environment};
use crate::types::MAX_RANKS;
use crate::types::error::{BootstrapError, Error, Result};
use crate::watch::deadline::after;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// First word of every message: the protocol and its version.
const MAGIC: u64 = u64::from_le_bytes(*b"PHALANX\x04");

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

/// The longest word of a rank.
const MAX_WORD: usize = 1 << 16;

/// What a rank gets from the rendezvous.
pub(crate) struct Met {
    pub world: Arc<World>,
    pub channel: NewChannel,
    pub rank: usize,
    pub world_size: usize,
    /// Of this meeting: no other has it.
    pub number: u64,
    /// What each rank has told all.
    pub words: Vec<Vec<u8>>,
}

/// In the place of a rank: whoever says it wants to be given one.
const JOINER: u32 = u32::MAX;

/// What the members of a job meet for.
struct Meeting<'a> {
    job: &'a str,
    /// Who sent the members here, for errors.
    sent_by: &'a str,
    address: Address,
    /// What members say, and what joiners say, to show that they belong here.
    members_key: u128,
    joiners_key: Option<u128>,
    rank: usize,
    world_size: usize,
    /// The last ranks are given to joiners.
    members: usize,
    number: u64,
    /// What this rank tells all.
    word: &'a [u8],
}

fn address_of(key: u128) -> Result<Address> {
    let name = format!("phalanx-{}-{key:032x}", user_id());
    Address::new(&name).map_err(|e| refused("making the rendezvous address", e))
}

/// Where joiners and those who grow meet.
fn growth_key(job: &str) -> u128 {
    hash(format!("{job} grows").as_bytes())
}

/// A communicator that takes in new ranks.
pub(crate) struct Growth {
    pub job: String,
    /// What carries its data, which joiners are told.
    pub backend: BackendKind,
    pub number: u64,
    pub rank: usize,
    pub members: usize,
    pub joiners: usize,
}

impl Growth {
    /// Meets the other members, and the joiners.
    pub fn meet(&self, timeout: Duration) -> Result<Met> {
        let key = growth_key(&self.job);
        let meeting = Meeting {
            job: &self.job,
            sent_by: "the communicator that grows",
            address: address_of(key)?,
            members_key: hash(format!("{} {}", self.job, self.number).as_bytes()),
            joiners_key: Some(key),
            rank: self.rank,
            world_size: self.members + self.joiners,
            members: self.members,
            number: self.number,
            word: self.backend.name().as_bytes(),
        };
        meeting.attend(timeout)
    }
}

/// Waits for a communicator of the job that grows, and becomes a rank of it.
pub(crate) fn join(place: &Place, timeout: Duration) -> Result<Met> {
    let key = growth_key(&place.job);
    let deadline = after(Instant::now(), timeout);
    let hello = Hello { job: key, rank: JOINER, world_size: 0, cpus: usable_cpus() };
    let nobody = || {
        Error::bootstrap(
            format!("for {timeout:.1?} no communicator of this job has asked for joiners"),
            "the others call grow or rebuild; see that this process has the variables of their job, on the same host \
             and of the same user (PHALANX_JOB, and after a restart those of the new attempt)",
        )
    };
    visit(&place.job, hello, &[], &address_of(key)?, deadline, nobody)
}

/// Meets the other ranks of the job, and tells them a word.
pub(crate) fn meet(place: &Place, word: &[u8], timeout: Duration) -> Result<Met> {
    let key = hash(place.job.as_bytes());
    let meeting = Meeting {
        job: &place.job,
        sent_by: place.launcher,
        address: address_of(key)?,
        members_key: key,
        joiners_key: None,
        rank: place.rank,
        world_size: place.world_size,
        members: place.world_size,
        number: 0,
        word,
    };
    meeting.attend(timeout)
}

impl Meeting<'_> {
    fn attend(&self, timeout: Duration) -> Result<Met> {
        let deadline = after(Instant::now(), timeout);
        if self.rank == 0 {
            return host(self, timeout, deadline);
        }
        let (rank, world_size) = (self.rank as u32, self.world_size as u32);
        let hello = Hello { job: self.members_key, rank, world_size, cpus: usable_cpus() };
        visit(self.job, hello, self.word, &self.address, deadline, || {
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
    word: Vec<u8>,
}

fn host(meeting: &Meeting<'_>, timeout: Duration, deadline: Instant) -> Result<Met> {
    let listener = loop {
        match meeting.address.listen() {
            Ok(listener) => break listener,
            // The job before, under the same id, may still be ending.
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(TICK);
            }
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                return Err(Error::bootstrap(
                    format!("another process is rank 0 of this job already ({})", meeting.sent_by),
                    "give each job an id of its own, and each process a rank of its own",
                ));
            }
            Err(e) => return Err(refused("listening for the other ranks", e)),
        }
    };
    let mut guests: Vec<Option<Guest>> = (1..meeting.world_size).map(|_| None).collect();
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
        // One that connects and says nothing must not take all the time that there is.
        let patience = HELLO_TIMEOUT.min(deadline.saturating_duration_since(Instant::now()) / 2);
        if let Err(error) = receive_guest(meeting, connection, patience, &mut guests) {
            break Err(error);
        }
    };
    match outcome.and_then(|()| welcome(meeting, &guests, deadline)) {
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
            refuse_others(&listener, meeting, meeting.world_size - 1 - known, &reason, missing);
            Err(error)
        }
    }
}

/// Ranks that come while the meeting is ended, or just afterwards, are told why: they would wait for rank 0.
fn refuse_others(listener: &Listener, meeting: &Meeting<'_>, count: usize, reason: &str, missing: &[usize]) {
    let end = Instant::now() + FAREWELL;
    let mut told = 0;
    while told < count && Instant::now() < end {
        let Ok(Some(connection)) = listener.accept(TICK) else { continue };
        if connection.set_timeout(FAREWELL).is_ok()
            && receive_hello(&connection, meeting).is_some()
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
    meeting: &Meeting<'_>,
    connection: Connection,
    patience: Duration,
    guests: &mut [Option<Guest>],
) -> Result<()> {
    if connection.peer_user().ok() != Some(user_id()) || connection.set_timeout(patience.max(TICK)).is_err() {
        tracing::warn!("another user's process tried to join the job");
        return Ok(());
    }
    let Some((hello, word)) = receive_hello(&connection, meeting) else {
        tracing::warn!("a process that does not belong to the job tried to join it");
        let _ = refuse(&connection, "this is not the job, or the version of phalanx, that was expected", &[]);
        return Ok(());
    };
    let rank = match meeting.rank_of(&hello, guests) {
        Ok(rank) => rank,
        Err(error) if hello.rank == JOINER => {
            // All that it sends is taken, or it would find the connection broken before it reads.
            let _ = connection.receive_process();
            let _ = refuse(&connection, &error.to_string(), &[]);
            return Ok(());
        }
        Err(error) => {
            let _ = refuse(&connection, &error.to_string(), &[]);
            return Err(error);
        }
    };
    match connection.receive_process() {
        Ok(process) => guests[rank - 1] = Some(Guest { connection, process, cpus: hello.cpus, word }),
        // Another may come in its place, or the deadline names it.
        Err(e) => {
            let reason = format!("rank {rank} could not hand over its process handle: {e}");
            tracing::warn!("{reason}");
            let _ = refuse(&connection, &reason, &[]);
        }
    }
    Ok(())
}

/// Who has connected, if it belongs to the meeting, and its word.
fn receive_hello(connection: &Connection, meeting: &Meeting<'_>) -> Option<(Hello, Vec<u8>)> {
    let mut bytes = [0; HELLO_LEN];
    connection.receive(&mut bytes).ok()?;
    let hello = Hello::from_bytes(&bytes).filter(|hello| meeting.expects(hello))?;
    Some((hello, receive_word(connection).ok()?))
}

/// A word as it is sent: its length, and its bytes.
fn framed(word: &[u8]) -> Vec<u8> {
    assert!(word.len() <= MAX_WORD, "a word of {} bytes", word.len());
    [&(word.len() as u32).to_le_bytes(), word].concat()
}

fn receive_word(connection: &Connection) -> io::Result<Vec<u8>> {
    let mut len = [0; 4];
    connection.receive(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_WORD {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut word = vec![0; len];
    connection.receive(&mut word)?;
    Ok(word)
}

impl Meeting<'_> {
    /// Whether it belongs to the job, and to this meeting.
    fn expects(&self, hello: &Hello) -> bool {
        let key = if hello.rank == JOINER { self.joiners_key } else { Some(self.members_key) };
        key == Some(hello.job)
    }

    /// The rank of somebody who has come.
    fn rank_of(&self, hello: &Hello, guests: &[Option<Guest>]) -> Result<usize> {
        let (rank, world_size) = (hello.rank as usize, hello.world_size as usize);
        if hello.rank == JOINER {
            let free = (self.members..self.world_size).find(|rank| guests[rank - 1].is_none());
            return free.ok_or_else(|| {
                let joiners = self.world_size - self.members;
                Error::bootstrap(
                    format!("{joiners} joiners were asked for, and as many have come"),
                    "start as many as the others pass to grow, or as ranks are gone",
                )
            });
        }
        let problem = if world_size != self.world_size {
            format!(
                "rank {rank} was told that there are {world_size} ranks, rank 0 that there are {}",
                self.world_size
            )
        } else if rank == 0 || rank >= self.members || guests[rank - 1].is_some() {
            format!("two processes claim to be rank {rank}")
        } else {
            return Ok(rank);
        };
        Err(Error::bootstrap(problem, "give each process a rank of its own and the same number of ranks"))
    }
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
fn welcome(meeting: &Meeting<'_>, guests: &[Option<Guest>], deadline: Instant) -> Result<Met> {
    let own = Process::current()?;
    let file = SharedFile::create()?;
    let guests: Vec<&Guest> = guests.iter().flatten().collect();
    let everyone: Vec<&Process> = std::iter::once(&own).chain(guests.iter().map(|g| &g.process)).collect();
    // The region exists before anybody can look into it.
    let counted = || count_cores(guests.iter().map(|guest| guest.cpus));
    let cores = cores_from_environment()?.unwrap_or_else(counted);
    let world = World::processes(meeting.job, file.try_clone()?, Vec::new(), cores)?;
    let world_size = meeting.world_size;
    let channel = NewChannel::create(&world, world_size)?;
    let words = std::iter::once(meeting.word).chain(guests.iter().map(|guest| &*guest.word));
    let words: Vec<Vec<u8>> = words.map(<[u8]>::to_vec).collect();
    let all_words: Vec<u8> = words.iter().flat_map(|word| framed(word)).collect();
    for (index, guest) in guests.iter().enumerate() {
        // The channel's id is never 0, which is a refusal.
        let rank = index + 1;
        let welcome = [channel.id(), cores as u64, rank as u64, world_size as u64, meeting.number];
        let told = [&welcome.map(u64::to_le_bytes).concat(), &all_words[..]].concat();
        let connection = &guest.connection;
        let sent =
            connection.send(&told).and_then(|()| connection.send_handles(Some(&file), &everyone, deadline));
        sent.map_err(|e| {
            Error::bootstrap(
                format!("rank {rank} cannot be given the region: {e}"),
                "see its own output; each rank needs a file descriptor per rank (`ulimit -n`)",
            )
        })?;
    }
    // Nobody begins before all have it: who is told of an end here has seen nothing of the region yet. One that ends
    // from here on is a rank that dies.
    for guest in &guests {
        let _ = guest.connection.send(&channel.id().to_le_bytes());
    }
    drop(everyone);
    let processes = std::iter::once(Ok(own))
        .chain(guests.iter().map(|guest| guest.process.try_clone()))
        .collect::<Result<Vec<_>>>()?;
    let world = Arc::new(world.with_processes(processes));
    Ok(Met { world, channel, rank: 0, world_size, number: meeting.number, words })
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

/// `nobody` is the error when no rank 0 has been there.
fn visit(
    job: &str,
    hello: Hello,
    word: &[u8],
    address: &Address,
    deadline: Instant,
    nobody: impl Fn() -> Error,
) -> Result<Met> {
    let own = Process::current()?;
    let (connection, id) = loop {
        let connection = connect(address, deadline, &nobody)?;
        match introduce(&connection, hello, word, &own, deadline) {
            Ok(id) => break (connection, id),
            // The meeting that it came to ended before it was heard: that of the job's communicator before this one.
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
    if rank >= world_size || world_size > MAX_RANKS {
        return Err(lost(io::ErrorKind::InvalidData.into()));
    }
    let words =
        (0..world_size).map(|_| receive_word(&connection)).collect::<io::Result<_>>().map_err(lost)?;
    let (file, processes) = connection.receive_world(world_size).map_err(lost)?;
    // All have been given it.
    accepted(receive_id(&connection).map_err(lost)?)?;
    let world = Arc::new(World::processes(job, file, processes, cores)?);
    let channel = NewChannel::open(&world, id)?;
    Ok(Met { world, channel, rank, world_size, number: number(3), words })
}

fn lost(e: io::Error) -> Error {
    Error::bootstrap(
        format!("the connection to rank 0 broke while the ranks were meeting ({e})"),
        "see rank 0's own output",
    )
}

fn connect(address: &Address, deadline: Instant, nobody: &impl Fn() -> Error) -> Result<Connection> {
    let connection = loop {
        match address.connect() {
            Ok(connection) => break connection,
            Err(e)
                if matches!(e.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock)
                    && Instant::now() < deadline =>
            {
                std::thread::sleep(TICK);
            }
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => return Err(nobody()),
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
    Ok(connection)
}

/// Says who this is, and waits for the first word of the answer.
fn introduce(
    connection: &Connection,
    hello: Hello,
    word: &[u8],
    own: &Process,
    deadline: Instant,
) -> io::Result<u64> {
    // A little longer than rank 0 waits, so that its reason arrives.
    connection.set_timeout(deadline.saturating_duration_since(Instant::now()) + GRACE)?;
    connection.send(&[&hello.to_bytes()[..], &framed(word)].concat())?;
    connection.send_handles(None, &[own], deadline)?;
    receive_id(connection)
}

fn receive_id(connection: &Connection) -> io::Result<u64> {
    let mut id = [0; 8];
    connection.receive(&mut id)?;
    Ok(u64::from_le_bytes(id))
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
                meet(&place, &[rank as u8; 3], timeout).map(|met| (met.rank, met.words))
            })
        });
        // Rank 1 has come to it (or, on a slow machine, is late for it), and rank 0 cannot begin its own.
        std::thread::sleep(Duration::from_secs(1));
        drop(before);
        let words = vec![vec![0; 3], vec![1; 3]];
        let met = [first, second].map(|rank| rank.join().unwrap().unwrap());
        assert_eq!(met, [(0, words.clone()), (1, words)]);
    }

    #[test]
    fn hello_survives_the_wire_and_garbage_does_not() {
        let hello = Hello { job: hash(b"job"), rank: 3, world_size: 7, cpus: [5; 16] };
        assert_eq!(Hello::from_bytes(&hello.to_bytes()), Some(hello));
        assert_eq!(Hello::from_bytes(&[0; HELLO_LEN]), None);
        assert_eq!(Hello::from_bytes(&[0xff; HELLO_LEN]), None);
        assert_ne!(hash(b"job"), hash(b"job "));
    }
}
