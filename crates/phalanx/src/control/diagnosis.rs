//! Finds the rank that blocks an operation: a rank that has not arrived, or the end of a chain of ranks that wait for each other.
//! A rank may wait in another communicator, so each publishes where it waits to all ranks of the world.

use super::endpoint::Endpoint;
use super::endpoint::PendingOperation;
use super::record::CallRecord;
use super::world::RankStatus;
use crate::os::sync::{AtomicU64, Ordering};
use crate::os::{Halt, Process};
use crate::types::MAX_RANKS;

/// Words of a communicator's name that other ranks see: its last 48 bytes.
const NAME_WORDS: usize = 6;
/// Words of a published wait: the channel, the operation's number and record, and the communicator's name.
pub(crate) const WAIT_WORDS: usize = 5 + NAME_WORDS;

/// Where a rank waits, for error messages: words of two waits may be mixed if the rank goes on meanwhile.
struct Wait {
    channel: u64,
    sequence: u64,
    record: CallRecord,
    name: String,
}

impl Wait {
    fn read(words: &[AtomicU64; WAIT_WORDS]) -> Option<Wait> {
        let words = words.each_ref().map(|word| word.load(Ordering::Relaxed));
        let [channel, sequence, head, count, counts, name @ ..] = words;
        let name: Vec<u8> =
            name.iter().flat_map(|word| word.to_le_bytes()).filter(|byte| *byte != 0).collect();
        let name = String::from_utf8_lossy(&name).into_owned();
        Some(Wait { channel, sequence, record: CallRecord::from_words([head, count, counts])?, name })
    }
}

/// A communicator's name without the job's name in front, which may be a secret.
pub(crate) fn public_name(name: &str) -> &str {
    name.split_once('/').map_or("world", |(_, name)| name)
}

impl Endpoint {
    /// The ranks that block an operation: those that have not called the collective, else the awaited ones. A rank that waits itself
    /// is replaced by the end of its chain.
    pub fn missing(&self, awaited: &[usize], sequence: u64, record: &CallRecord) -> Vec<usize> {
        let is_absent =
            |rank: &usize| self.channel.state(*rank).last_announced().is_none_or(|(last, _)| last < sequence);
        let mut absent = Vec::new();
        if !is_message(record) {
            absent = (0..self.ranks).filter(is_absent).collect();
        }
        self.ends_of_chains(if absent.is_empty() { awaited } else { &absent })
    }

    /// The ranks that block a wait for these: a rank that waits itself is replaced by the end of its chain.
    pub fn ends_of_chains(&self, suspects: &[usize]) -> Vec<usize> {
        let mut missing: Vec<usize> =
            suspects.iter().map(|rank| self.end_of_chain(*rank).unwrap_or(*rank)).collect();
        missing.sort_unstable();
        missing.dedup();
        if self.world.sees_processes() {
            // Stopped ranks are the cause; the others may only be late.
            let stopped = missing.iter().copied().filter(|rank| self.halt(*rank).is_some());
            let stopped: Vec<usize> = stopped.collect();
            if !stopped.is_empty() {
                return stopped;
            }
        }
        missing
    }

    /// Follows the chain of waits, across communicators, to a rank that does not wait or is stopped; `None` if the chain is a circle.
    /// For a chain that leaves this channel, its last rank inside.
    pub fn end_of_chain(&self, rank: usize) -> Option<usize> {
        let (mut end, mut world_rank) = (rank, self.members()[rank]);
        let mut seen = [0u64; MAX_RANKS / 64];
        while seen[world_rank / 64] & 1 << (world_rank % 64) == 0 {
            seen[world_rank / 64] |= 1 << (world_rank % 64);
            if let Some(member) = self.members().iter().position(|member| *member == world_rank) {
                end = member;
            }
            let status = self.world.status(world_rank);
            if self.world.process(world_rank).is_some_and(|process| process.halt().is_some()) {
                return Some(end);
            }
            match status.waits_for.load(Ordering::Acquire) {
                0 => return Some(end),
                next => world_rank = next as usize - 1,
            }
            if world_rank == self.members()[self.rank] {
                return None;
            }
        }
        None
    }

    /// Publishes where this rank waits, for the ranks that wait for it in other communicators.
    pub fn publish_wait(&self, (sequence, record): PendingOperation) {
        let mut bytes = [0; 8 * NAME_WORDS];
        let name = self.name().as_bytes();
        let end = &name[name.len().saturating_sub(bytes.len())..];
        bytes[..end.len()].copy_from_slice(end);
        let (name, _) = bytes.as_chunks();
        let name = name.iter().map(|word| u64::from_le_bytes(*word));
        let all = [self.segment.id, sequence].into_iter().chain(record.words()).chain(name);
        let words = &self.status(self.rank).wait;
        words.iter().zip(all).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
    }

    /// Where a rank waits, if that is in another communicator than this one.
    fn waits_elsewhere(&self, rank: usize) -> Option<String> {
        let status = self.status(rank);
        let waits = status.waits_for.load(Ordering::Acquire) != 0;
        let Wait { channel, sequence, record, name } = Wait::read(&status.wait).filter(|_| waits)?;
        let ours = self.name();
        // Without a name it is not a communicator, but a channel that one uses for something else.
        let is_elsewhere = channel != self.segment.id && !name.is_empty() && !ours.is_empty() && name != ours;
        is_elsewhere.then(|| format!(
            "it waits in {record}, operation number {sequence}, of communicator {name}, not of communicator {ours}"
        ))
    }

    /// Names the communicator after an operation, if the program has given it a name.
    pub fn of_communicator(&self) -> String {
        self.given_name.get().map_or_else(String::new, |_| format!(" of communicator {}", self.name()))
    }

    /// The communicator's name, as the program gave it or without the job's name in front. Empty if it has none.
    fn name(&self) -> &str {
        let name = || self.name.get().map(|name| public_name(name));
        self.given_name.get().map(String::as_str).or_else(name).unwrap_or_default()
    }

    pub fn status(&self, rank: usize) -> &RankStatus {
        self.world.status(self.members()[rank])
    }

    /// A rank's last call and the state of its process, for error messages.
    pub fn last_seen(&self, rank: usize) -> String {
        let state = self.channel.state(rank);
        let pid = self.pid(rank);
        let message = state.last_message();
        let mut text = match state.last_announced() {
            _ if pid == 0 => return "it has not joined".into(),
            None if message.is_none() => "it has made no call yet".into(),
            None => "it has called no collective".into(),
            Some((sequence, record)) if state.done_operation.get() >= sequence => {
                format!("it has completed {record}, operation number {sequence}, and called nothing since")
            }
            Some((sequence, record)) => format!("it is in {record}, operation number {sequence}"),
        };
        if let Some(message) = message {
            text.push_str(&format!(", and its last message is {message}"));
        }
        if let Some(elsewhere) = self.waits_elsewhere(rank) {
            text.push_str(&format!("; {elsewhere}"));
        }
        if let Some(topology) = self.world.topology() {
            let host = topology.host_of(self.members()[rank]);
            text.push_str(&format!(", process {pid} on {}", topology.name_of(host)));
        }
        if self.world.is_processes() {
            text.push_str(&format!(", process {}", self.id_here(rank)));
            match self.halt(rank) {
                Some(Halt::Stopped) => text.push_str(", which is stopped"),
                Some(Halt::Traced) => text.push_str(", which is stopped by a debugger"),
                None => {}
            }
        }
        text
    }

    /// A rank's process, by its id in that process's own PID namespace.
    pub fn pid(&self, rank: usize) -> u32 {
        self.channel.state(rank).life.pid.load(Ordering::Relaxed)
    }

    /// A rank's process, by its id in this process's PID namespace where it has one.
    pub fn id_here(&self, rank: usize) -> u32 {
        self.world.process(self.members()[rank]).and_then(Process::id).unwrap_or_else(|| self.pid(rank))
    }

    /// Why a rank's process does not run, if that can be seen.
    pub fn halt(&self, rank: usize) -> Option<Halt> {
        self.world.process(self.members()[rank])?.halt()
    }
}

pub(crate) fn is_message(record: &CallRecord) -> bool {
    use crate::contract::Operation::{Recv, Send};
    matches!(record.operation, Send | Recv)
}
