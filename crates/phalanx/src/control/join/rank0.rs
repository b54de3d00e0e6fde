//! Rank 0's side of a join: it listens, accepts the other ranks, makes the region and gives it to all of them.

use super::peer::taken_by;
use super::wire::{HELLO_LEN, Hello, JOINER, framed, receive_payload, refuse};
use super::{JoinParameters, Joined, TICK, refused};
use crate::control::endpoint::NewChannel;
use crate::control::world::World;
use crate::os::{CpuSet, Listener, LocalConnection, Process, SharedFile, usable_cpus, user_id};
use crate::rendezvous::environment::cores_from_environment;
use crate::types::error::{BootstrapError, Error, Result};
use crate::watch::{Reminder, say_missing};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a connected rank may take to send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the name at which the ranks meet may be taken before rank 0 looks by which user.
const PREVIOUS: Duration = Duration::from_millis(250);

/// How long rank 0 goes on refusing late ranks after the join has failed.
const FAREWELL: Duration = Duration::from_millis(150);

/// A rank that has connected.
struct JoiningRank {
    connection: LocalConnection,
    process: Process,
    cpus: CpuSet,
    payload: Vec<u8>,
}

pub(super) fn accept_ranks(
    parameters: &JoinParameters<'_>,
    timeout: Duration,
    deadline: Instant,
) -> Result<Joined> {
    let mut taken: Option<Instant> = None;
    let listener = loop {
        match parameters.address.listen() {
            Ok(listener) => break listener,
            // The job before, under the same id, may still be ending.
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                let now = Instant::now();
                // Asked once, since it costs that job a connection.
                if *taken.get_or_insert(now + PREVIOUS) <= now {
                    taken = Some(deadline);
                    let owner = parameters.address.connect().and_then(|connection| connection.peer());
                    if let Some(owner) = owner.ok().filter(|owner| owner.user != user_id()) {
                        return Err(taken_by(owner));
                    }
                }
                std::thread::sleep(TICK);
            }
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                return Err(Error::bootstrap(
                    format!("another process is rank 0 of this job already ({})", parameters.sent_by),
                    "give each job an id of its own, and each process a rank of its own",
                ));
            }
            Err(e) => return Err(refused("listening for the other ranks", e)),
        }
    };
    let mut arrivals: Vec<Option<JoiningRank>> = (1..parameters.world_size).map(|_| None).collect();
    let mut reminder = Reminder::start(Instant::now());
    let outcome = loop {
        if arrivals.iter().all(Option::is_some) {
            break Ok(());
        }
        if let Some(waited) = reminder.due(Instant::now()) {
            say_missing("rank", &missing(&arrivals), waited);
        }
        if let Some(rank) = first_ended(&arrivals) {
            break Err(BootstrapError {
                problem: format!("rank {rank} ended while the ranks were meeting"),
                remedy: "see its own output".into(),
                missing: vec![rank],
            }
            .into());
        }
        if let Err(error) = (parameters.check)() {
            break Err(error);
        }
        if Instant::now() >= deadline {
            break Err(missing_ranks(&arrivals, timeout));
        }
        let connection = match listener.accept(TICK) {
            Ok(Some(connection)) => connection,
            Ok(None) => continue,
            Err(e) => break Err(refused("accepting a rank", e)),
        };
        // A silent connection must not use up the deadline.
        let timeout_left = HELLO_TIMEOUT.min(deadline.saturating_duration_since(Instant::now()) / 2);
        if let Err(error) = receive_arrival(parameters, connection, timeout_left, &mut arrivals) {
            break Err(error);
        }
    };
    match outcome.and_then(|()| send_welcome(parameters, &arrivals, deadline)) {
        Ok(joined) => Ok(joined),
        Err(error) => {
            // Refuse all ranks, so that none waits.
            let reason = error.to_string();
            let missing = match &error {
                Error::Bootstrap(error) => error.missing.as_slice(),
                _ => &[],
            };
            for arrival in arrivals.iter().flatten() {
                let _ = refuse(&arrival.connection, &reason, missing);
            }
            let known = arrivals.iter().flatten().count();
            refuse_others(&listener, parameters, parameters.world_size - 1 - known, &reason, missing);
            Err(error)
        }
    }
}

/// Refuses ranks that connect late, with the reason: they would wait for rank 0.
fn refuse_others(
    listener: &Listener,
    parameters: &JoinParameters<'_>,
    count: usize,
    reason: &str,
    missing: &[usize],
) {
    let end = Instant::now() + FAREWELL;
    let mut refused_ranks = 0;
    while refused_ranks < count && Instant::now() < end {
        let Ok(Some(connection)) = listener.accept(TICK) else { continue };
        if connection.set_timeout(FAREWELL).is_ok()
            && receive_hello(&connection, parameters).is_some()
            // Everything it sends is read, or it would find the connection broken before it reads the answer.
            && connection.receive_process().is_ok()
            && refuse(&connection, reason, missing).is_ok()
        {
            refused_ranks += 1;
        }
    }
}

fn first_ended(arrivals: &[Option<JoiningRank>]) -> Option<usize> {
    let ended =
        |arrival: &Option<JoiningRank>| arrival.as_ref().is_some_and(|arrival| arrival.process.has_exited());
    arrivals.iter().position(ended).map(|index| index + 1)
}

fn missing(arrivals: &[Option<JoiningRank>]) -> Vec<usize> {
    arrivals.iter().enumerate().filter(|(_, arrival)| arrival.is_none()).map(|(i, _)| i + 1).collect()
}

fn missing_ranks(arrivals: &[Option<JoiningRank>], timeout: Duration) -> Error {
    let missing = missing(arrivals);
    BootstrapError {
        problem: format!("after {timeout:.1?} these ranks have not come: {missing:?}"),
        remedy:
            "see whether they were started and with which variables; PHALANX_TIMEOUT sets how long to wait"
                .into(),
        missing,
    }
    .into()
}

/// Receives a rank's hello and handle. Strangers are refused; a contradiction between ranks ends the join.
fn receive_arrival(
    parameters: &JoinParameters<'_>,
    connection: LocalConnection,
    timeout_left: Duration,
    arrivals: &mut [Option<JoiningRank>],
) -> Result<()> {
    if connection.peer().ok().map(|peer| peer.user) != Some(user_id())
        || connection.set_timeout(timeout_left.max(TICK)).is_err()
    {
        crate::os::log::warn!("another user's process tried to join the job");
        return Ok(());
    }
    let Some((hello, payload)) = receive_hello(&connection, parameters) else {
        crate::os::log::warn!("a process that does not belong to the job tried to join it");
        let _ = refuse(&connection, "this is not the job, or the version of phalanx, that was expected", &[]);
        return Ok(());
    };
    let rank = match parameters.rank_of(&hello, arrivals) {
        Ok(rank) => rank,
        Err(error) if hello.rank == JOINER => {
            // Everything it sends is read, or it would find the connection broken before it reads the answer.
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
        Ok(process) => {
            arrivals[rank - 1] = Some(JoiningRank { connection, process, cpus: hello.cpus, payload })
        }
        // Another may come in its place, or the deadline names it.
        Err(e) => {
            let reason = format!("rank {rank} could not hand over its process handle: {e}");
            crate::os::log::warn!("{reason}");
            let _ = refuse(&connection, &reason, &[]);
        }
    }
    Ok(())
}

impl JoinParameters<'_> {
    /// Whether a hello belongs to this join.
    fn expects(&self, hello: &Hello) -> bool {
        let key = if hello.rank == JOINER { self.joiners_key } else { Some(self.members_key) };
        key == Some(hello.job)
    }

    /// The rank that a hello claims, or that a joiner gets.
    fn rank_of(&self, hello: &Hello, arrivals: &[Option<JoiningRank>]) -> Result<usize> {
        let (rank, world_size) = (hello.rank as usize, hello.world_size as usize);
        if hello.rank == JOINER {
            let free = (self.members..self.world_size).find(|rank| arrivals[rank - 1].is_none());
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
        } else if rank == 0 || rank >= self.members || arrivals[rank - 1].is_some() {
            format!("two processes claim to be rank {rank}")
        } else {
            return Ok(rank);
        };
        Err(Error::bootstrap(problem, "give each process a rank of its own and the same number of ranks"))
    }
}

/// Creates the region and gives it to all ranks.
fn send_welcome(
    parameters: &JoinParameters<'_>,
    arrivals: &[Option<JoiningRank>],
    deadline: Instant,
) -> Result<Joined> {
    let own = Process::current()?;
    let file = SharedFile::create()?;
    let arrivals: Vec<&JoiningRank> = arrivals.iter().flatten().collect();
    let everyone: Vec<&Process> = std::iter::once(&own).chain(arrivals.iter().map(|g| &g.process)).collect();
    // The region exists before any other rank can map it.
    let counted = || count_cores(arrivals.iter().map(|arrival| arrival.cpus));
    let cores = cores_from_environment()?.unwrap_or_else(counted);
    let world = World::processes(parameters.job, file.try_clone()?, Vec::new(), cores)?;
    let world_size = parameters.world_size;
    let channel = NewChannel::create(&world, world_size)?;
    let payloads =
        std::iter::once(parameters.payload).chain(arrivals.iter().map(|arrival| &*arrival.payload));
    let payloads: Vec<Vec<u8>> = payloads.map(<[u8]>::to_vec).collect();
    let all_payloads: Vec<u8> = payloads.iter().flat_map(|payload| framed(payload)).collect();
    for (index, arrival) in arrivals.iter().enumerate() {
        // The channel's id is never 0, which is a refusal.
        let rank = index + 1;
        let welcome = [channel.id(), cores as u64, rank as u64, world_size as u64, parameters.number];
        let message = [&welcome.map(u64::to_le_bytes).concat(), &all_payloads[..]].concat();
        let connection = &arrival.connection;
        let sent = connection
            .send(&message)
            .and_then(|()| connection.send_handles(Some(&file), &everyone, deadline));
        sent.map_err(|e| {
            Error::bootstrap(
                format!("rank {rank} cannot be given the region: {e}"),
                "see its own output; each rank needs a file descriptor per rank (`ulimit -n`)",
            )
        })?;
    }
    // No rank begins before all have the region. A rank that ends before this fails the join, one that ends later is a
    // peer that died.
    for arrival in &arrivals {
        let _ = arrival.connection.send(&channel.id().to_le_bytes());
    }
    drop(everyone);
    let processes = std::iter::once(Ok(own))
        .chain(arrivals.iter().map(|arrival| arrival.process.try_clone()))
        .collect::<Result<Vec<_>>>()?;
    let world = Arc::new(world.with_processes(processes));
    Ok(Joined { world, channel, rank: 0, world_size, number: parameters.number, payloads })
}

/// How many cores the ranks have between them: the union of theirs, within this process's CPU quota.
fn count_cores(others: impl Iterator<Item = CpuSet>) -> usize {
    let own = usable_cpus();
    let count = |set: &CpuSet| set.iter().map(|payload| payload.count_ones() as usize).sum::<usize>();
    let quota = std::thread::available_parallelism().map_or(1, usize::from);
    let union = others.fold(own, |union, set| std::array::from_fn(|i| union[i] | set[i]));
    if quota < count(&own) { quota } else { count(&union).max(1) }
}

/// A hello, if it belongs to this join, and its payload.
fn receive_hello(connection: &LocalConnection, parameters: &JoinParameters<'_>) -> Option<(Hello, Vec<u8>)> {
    let mut bytes = [0; HELLO_LEN];
    connection.receive(&mut bytes).ok()?;
    let hello = Hello::from_bytes(&bytes).filter(|hello| parameters.expects(hello))?;
    Some((hello, receive_payload(connection).ok()?))
}
