//! Rank 0's side of a join: it listens, accepts the other ranks, makes the region and gives it to all of them.

use super::wire::{HELLO_LEN, Hello, JOINER, framed, receive_word, refuse};
use super::{Meeting, Met, TICK, refused};
use crate::control::endpoint::NewChannel;
use crate::control::world::World;
use crate::os::{Connection, CpuSet, Listener, Process, SharedFile, usable_cpus, user_id};
use crate::rendezvous::environment::cores_from_environment;
use crate::types::error::{BootstrapError, Error, Result};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a rank that has connected may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// How long rank 0 goes on telling those who come that the meeting is over.
const FAREWELL: Duration = Duration::from_millis(150);

/// A rank that has come.
struct Guest {
    connection: Connection,
    process: Process,
    cpus: CpuSet,
    word: Vec<u8>,
}

pub(super) fn accept_ranks(meeting: &Meeting<'_>, timeout: Duration, deadline: Instant) -> Result<Met> {
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

/// Who has connected, if it belongs to the meeting, and its word.
fn receive_hello(connection: &Connection, meeting: &Meeting<'_>) -> Option<(Hello, Vec<u8>)> {
    let mut bytes = [0; HELLO_LEN];
    connection.receive(&mut bytes).ok()?;
    let hello = Hello::from_bytes(&bytes).filter(|hello| meeting.expects(hello))?;
    Some((hello, receive_word(connection).ok()?))
}
