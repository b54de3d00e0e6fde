//! A namespace of the store: members of one role (ranks or nodes), their values, and their pending requests.
//!
//! It has no sockets and no clocks, so it is tested without either: requests and the time come in, replies go
//! out.

use crate::rendezvous::store::protocol::{End, MAX_EXCHANGE, MAX_MEMBERS, Reply, Request, Role, shortened};
use crate::rendezvous::store::table::Table;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// Most bytes that a namespace stores, keys included.
const MAX_STORED: usize = 64 << 20;
/// Bytes counted for a key beside its own.
const KEY_COST: usize = 128;

/// A group of members, which has a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Group {
    /// The ranks that the job began with.
    Ranks,
    /// The launchers.
    Nodes,
    /// The ranks of a communicator that has grown, by the growth's number.
    Grown(u64),
}

impl Group {
    /// The group of a job's first members with a role.
    pub fn of(role: Role) -> Group {
        match role {
            Role::Rank => Group::Ranks,
            Role::Node => Group::Nodes,
        }
    }

    /// What its members are.
    pub fn role(self) -> Role {
        match self {
            Group::Ranks | Group::Grown(_) => Role::Rank,
            Group::Nodes => Role::Node,
        }
    }
}

/// Replies, each with the ranks it is for.
pub type Outbox = Vec<Letter>;

/// A reply, and the ranks it is for.
#[derive(Debug, PartialEq, Eq)]
pub struct Letter {
    pub to: Vec<u32>,
    pub reply: Reply,
}

impl Letter {
    pub fn to(rank: u32, reply: Reply) -> Letter {
        Letter { to: vec![rank], reply }
    }
}

/// The store's state for one role.
pub struct Namespace {
    role: Role,
    /// Number of members: given at the start, or by the first to join.
    size: Option<u32>,
    /// The job's name: given at the start, or by the first to join.
    job: Option<String>,
    /// The members that are connected.
    here: BTreeSet<u32>,
    /// The members that were.
    ended: BTreeMap<u32, End>,
    /// A contradiction between two members, found before all had joined. All requests are refused from then
    /// on.
    conflict: Option<String>,
    values: HashMap<String, Vec<u8>>,
    exchanges: HashMap<String, Exchange>,
    /// Pending `Get` requests.
    readers: Vec<Waiter>,
    stored: usize,
}

struct Waiter {
    rank: u32,
    id: u64,
    key: String,
    until: Option<Instant>,
}

impl Waiter {
    fn is_late(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}

#[derive(Default)]
struct Exchange {
    given: BTreeMap<u32, Vec<u8>>,
    waiting: Vec<Waiter>,
    /// Why it failed. Kept for late members: all get the same answer.
    failed: Option<ExchangeFailure>,
}

#[derive(Clone)]
enum ExchangeFailure {
    TimedOut(Vec<u32>),
    Gone(u32, End),
}

impl ExchangeFailure {
    fn reply(&self, id: u64) -> Reply {
        match self {
            ExchangeFailure::TimedOut(missing) => Reply::TimedOut { id, missing: missing.clone() },
            ExchangeFailure::Gone(rank, end) => Reply::Gone { id, rank: *rank, end: *end },
        }
    }
}

impl Namespace {
    pub fn new(role: Role, size: Option<u32>, job: Option<String>) -> Namespace {
        Namespace {
            role,
            size,
            job: job.map(|job| shortened(&job).to_owned()),
            here: BTreeSet::new(),
            ended: BTreeMap::new(),
            conflict: None,
            values: HashMap::new(),
            exchanges: HashMap::new(),
            readers: Vec::new(),
            stored: 0,
        }
    }

    /// The number of members, once it is known.
    pub fn size(&self) -> Option<u32> {
        self.size
    }

    /// Returns why a client, with this name, is none of this job's, if its job has another name.
    pub fn check_job(&self, client: &str, job: &str) -> Result<(), String> {
        match &self.job {
            Some(own) if own != job => {
                Err(format!("{client} belongs to the job {job:?}, and this is the store of {own:?}"))
            }
            _ => Ok(()),
        }
    }

    /// Admits a member, or returns why not. If the namespace can then never be complete, `out` tells those who
    /// are there, whether they have asked for something or not.
    pub fn join(&mut self, rank: u32, size: u32, job: &str, out: &mut Outbox) -> Result<(), String> {
        let problem = self.problem_with(rank, size);
        let Some(problem) = problem else {
            self.size.get_or_insert(size);
            self.job.get_or_insert_with(|| job.to_owned());
            self.here.insert(rank);
            return Ok(());
        };
        // Once all have joined, a stray process is only refused.
        if !self.is_complete() && self.conflict.is_none() {
            self.conflict = Some(problem.clone());
            self.exchanges.clear();
            self.readers.clear();
            out.push(Letter { to: self.present(), reply: Reply::Refused { id: 0, reason: problem.clone() } });
        }
        Err(problem)
    }

    fn problem_with(&self, rank: u32, size: u32) -> Option<String> {
        let member = self.role.name();
        let expected = self.size.unwrap_or(size);
        if !(1..=MAX_MEMBERS).contains(&expected) {
            return Some(format!("{expected} {member}s are not possible: 1 to {MAX_MEMBERS} are"));
        }
        if let Some(conflict) = &self.conflict {
            return Some(conflict.clone());
        }
        if size != expected {
            return Some(format!(
                "{member} {rank} was told that there are {size} {member}s, the store expects {expected}"
            ));
        }
        if rank >= size {
            return Some(format!("there is no {member} {rank}: the {member}s are 0 to {}", size - 1));
        }
        if self.here.contains(&rank) {
            return Some(format!("two processes claim to be {member} {rank}"));
        }
        self.ended.get(&rank).map(|end| format!("{member} {rank} was here already, and is gone: {end}"))
    }

    fn is_complete(&self) -> bool {
        self.size.is_some_and(|size| self.joined() == size as usize)
    }

    /// The number of members that have come, those that are gone included.
    fn joined(&self) -> usize {
        self.here.len() + self.ended.len()
    }

    /// Whether some members are here and others have not come.
    pub fn is_incomplete(&self) -> bool {
        !self.is_empty() && !self.is_complete()
    }

    /// Gives up on what members wait for, since one has ended before all had come, and nobody else may take its place.
    pub fn give_up(&mut self, rank: u32, end: End, out: &mut Outbox) {
        if !self.is_complete() {
            self.exchanges
                .values_mut()
                .for_each(|exchange| exchange.fail(ExchangeFailure::Gone(rank, end), out));
        }
    }

    /// Whether no member is connected.
    pub fn is_empty(&self) -> bool {
        self.here.is_empty()
    }

    /// The first of the last members, from `first` on, that nobody has been yet. `None` also where a member is gone: the others will not
    /// go on with the rest.
    pub fn free_place(&self, first: u32) -> Option<u32> {
        let free = || (first..self.size?).find(|rank| !self.here.contains(rank));
        free().filter(|_| self.ended.is_empty())
    }

    /// The members that have not come.
    pub fn missing(&self) -> Vec<u32> {
        let has_come = |rank: &u32| self.here.contains(rank) || self.ended.contains_key(rank);
        (0..self.size.unwrap_or(0)).filter(|rank| !has_come(rank)).collect()
    }

    /// The members that are connected.
    fn present(&self) -> Vec<u32> {
        self.here.iter().copied().collect()
    }

    /// The members that are lost, without those that said goodbye.
    pub fn lost(&self) -> impl Iterator<Item = (u32, End)> {
        self.ended.iter().filter(|(_, end)| **end != End::Left).map(|(rank, end)| (*rank, *end))
    }

    /// Records that a member has left or is lost. All are notified of a loss, the lost one included, if it is
    /// still connected.
    pub fn ended(&mut self, rank: u32, end: End, out: &mut Outbox) {
        if end != End::Left {
            out.push(Letter { to: self.present(), reply: Reply::Lost { rank, end } });
        }
        self.here.remove(&rank);
        self.ended.insert(rank, end);
        self.readers.retain(|waiting| waiting.rank != rank);
        for exchange in self.exchanges.values_mut() {
            exchange.waiting.retain(|waiting| waiting.rank != rank);
            if !exchange.given.contains_key(&rank) {
                exchange.fail(ExchangeFailure::Gone(rank, end), out);
            }
        }
    }

    /// Carries out a request of a member.
    pub fn handle(&mut self, rank: u32, request: Request, now: Instant, out: &mut Outbox) {
        let until = |wait: u64| now.checked_add(Duration::from_millis(wait));
        match request {
            Request::Set { id, key, value, keep } => {
                let reply = match self.values.get(&key).filter(|_| keep) {
                    Some(value) => Reply::Value { id, value: value.clone() },
                    None => match self.store(&key, value.clone(), out) {
                        Ok(()) => Reply::Value { id, value },
                        Err(reason) => Reply::Refused { id, reason },
                    },
                };
                out.push(Letter::to(rank, reply));
            }
            Request::Get { id, key, wait } => match self.values.get(&key) {
                Some(value) => out.push(Letter::to(rank, Reply::Value { id, value: value.clone() })),
                None => self.readers.push(Waiter { rank, id, key, until: until(wait) }),
            },
            Request::Add { id, key, amount } => {
                let reply = match self.add(&key, amount, out) {
                    Ok(value) => Reply::Sum { id, value },
                    Err(reason) => Reply::Refused { id, reason },
                };
                out.push(Letter::to(rank, reply));
            }
            Request::Exchange { id, key, value, wait } => {
                let waiting = Waiter { rank, id, key, until: until(wait) };
                if let Err(reason) = self.exchange(waiting, value, out) {
                    out.push(Letter::to(rank, Reply::Refused { id, reason }));
                }
            }
            Request::Send { to, value } => {
                let mut to = if to.is_empty() { self.present() } else { to };
                to.retain(|member| self.here.contains(member));
                out.push(Letter { to, reply: Reply::Message { from: rank, value } });
            }
            Request::Join { .. }
            | Request::Grow { .. }
            | Request::Enter { .. }
            | Request::Heartbeat
            | Request::Deaf
            | Request::Goodbye
            | Request::Carry { .. }
            | Request::Ended { .. } => {}
        }
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), String> {
        if self.stored + bytes > MAX_STORED {
            let (stored, limit) = (self.stored >> 10, MAX_STORED >> 20);
            return Err(format!("the store is full: it has {stored} KiB of at most {limit} MiB"));
        }
        self.stored += bytes;
        Ok(())
    }

    fn store(&mut self, key: &str, value: Vec<u8>, out: &mut Outbox) -> Result<(), String> {
        let before = self.values.get(key).map_or(0, |value| cost(key, value));
        self.reserve(cost(key, &value))?;
        self.stored -= before;
        self.readers.retain(|waiting| {
            let fits = waiting.key == key;
            if fits {
                let reply = Reply::Value { id: waiting.id, value: value.clone() };
                out.push(Letter::to(waiting.rank, reply));
            }
            !fits
        });
        self.values.insert(key.to_owned(), value);
        Ok(())
    }

    fn add(&mut self, key: &str, amount: i64, out: &mut Outbox) -> Result<i64, String> {
        let before = match self.values.get(key) {
            None => 0,
            Some(value) => value
                .as_slice()
                .try_into()
                .map(i64::from_le_bytes)
                .map_err(|_| format!("{key:?} is no counter: its value has {} bytes", value.len()))?,
        };
        let sum = before.checked_add(amount).ok_or_else(|| format!("the counter {key:?} overflows"))?;
        self.store(key, sum.to_le_bytes().to_vec(), out)?;
        Ok(sum)
    }

    fn exchange(&mut self, waiting: Waiter, value: Vec<u8>, out: &mut Outbox) -> Result<(), String> {
        if let Some(conflict) = &self.conflict {
            return Err(conflict.clone());
        }
        let size = self.size.unwrap_or(0) as usize;
        let (rank, key) = (waiting.rank, waiting.key.clone());
        if let Some(exchange) = self.exchanges.get(&key).filter(|e| e.given.contains_key(&rank)) {
            let Some(failed) = &exchange.failed else {
                let member = self.role.name();
                return Err(format!("{member} {rank} takes part in the exchange {key:?} twice"));
            };
            out.push(Letter::to(rank, failed.reply(waiting.id)));
            return Ok(());
        }
        if value.len() * size > MAX_EXCHANGE {
            return Err(format!(
                "{} bytes of each of {size} are too much for an exchange: at most {MAX_EXCHANGE} in all",
                value.len()
            ));
        }
        self.reserve(cost(&key, &value))?;
        let exchange = self.exchanges.entry(key.clone()).or_default();
        exchange.given.insert(rank, value);
        exchange.waiting.push(waiting);

        let absent = self.ended.iter().find(|(rank, _)| !exchange.given.contains_key(rank));
        let absent = absent.map(|(rank, end)| (*rank, *end));
        if let Some(failed) = exchange.failed.clone() {
            exchange.fail(failed, out);
        } else if let Some((rank, end)) = absent {
            exchange.fail(ExchangeFailure::Gone(rank, end), out);
        }
        if exchange.given.len() == size {
            // All members have their answer, so the key may be used again.
            let exchange = self.exchanges.remove(&key).expect("it was there just now");
            self.stored -= exchange.given.values().map(|value| cost(&key, value)).sum::<usize>();
            let table = Table::of(exchange.given.values().map(Vec::as_slice));
            let to = exchange.waiting.iter().map(|waiting| waiting.rank).collect();
            let ids = exchange.waiting.iter().map(|waiting| waiting.id).collect();
            let reply = Reply::All { ids, summary: table.summary(), table: Some(table) };
            out.push(Letter { to, reply });
        }
        Ok(())
    }

    /// Answers the requests that have timed out.
    pub fn expire(&mut self, now: Instant, out: &mut Outbox) {
        self.readers.retain(|waiting| {
            let late = waiting.is_late(now);
            if late {
                let reply = Reply::TimedOut { id: waiting.id, missing: Vec::new() };
                out.push(Letter::to(waiting.rank, reply));
            }
            !late
        });
        let size = self.size.unwrap_or(0);
        for exchange in self.exchanges.values_mut() {
            if exchange.waiting.iter().any(|waiting| waiting.is_late(now)) {
                let missing = (0..size).filter(|rank| !exchange.given.contains_key(rank)).collect();
                exchange.fail(ExchangeFailure::TimedOut(missing), out);
            }
        }
    }

    /// The next time at which [`expire`](Namespace::expire) must run.
    pub fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.exchanges.values().flat_map(|exchange| &exchange.waiting);
        waiting.chain(&self.readers).filter_map(|waiting| waiting.until).min()
    }
}

impl Exchange {
    /// Fails all pending requests of the exchange; the first reason stays.
    fn fail(&mut self, reason: ExchangeFailure, out: &mut Outbox) {
        let failed = self.failed.get_or_insert(reason);
        for waiting in self.waiting.drain(..) {
            out.push(Letter::to(waiting.rank, failed.reply(waiting.id)));
        }
    }
}

fn cost(key: &str, value: &[u8]) -> usize {
    KEY_COST + key.len() + value.len()
}

#[cfg(test)]
mod tests;
