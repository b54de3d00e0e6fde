//! What an operation costs, counted: waits, messages and bytes, along the algorithm that a backend takes. `phalanx plan` gives them times.

use super::{Blocks, Call, Flow, Operation, Who};
use crate::types::dtype::DType;

/// The place of an operation: how many ranks are where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// The number of ranks.
    pub ranks: usize,
    /// Each has about as many ranks as every other; ranks of a host are neighbours.
    pub hosts: usize,
    /// Cores of a host that its ranks may use.
    pub cores: usize,
    /// Ranks of a host read each other's buffers, as threads do.
    pub readable: bool,
}

impl Placement {
    /// The most ranks of a host.
    pub fn on_a_host(&self) -> usize {
        self.ranks.div_ceil(self.hosts)
    }

    pub(crate) fn is_crowded(&self) -> bool {
        self.on_a_host() > self.cores
    }
}

/// A number of things, on the rank that has most of them and on all ranks together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Count {
    /// On the rank that has most.
    pub most: f64,
    /// On all ranks.
    pub all: f64,
}

impl Count {
    pub(crate) fn new(most: usize, all: usize) -> Count {
        Count { most: most as f64, all: all as f64 }
    }

    /// The same number on so many ranks.
    pub(crate) fn each(most: usize, ranks: usize) -> Count {
        Count::new(most, ranks).scaled(1, most)
    }

    /// So many of each. Bytes between all pairs of many ranks are more than an integer holds.
    pub(crate) fn times(self, number: usize) -> Count {
        self.scaled(number, number)
    }

    fn scaled(self, most: usize, all: usize) -> Count {
        Count { most: self.most * most as f64, all: self.all * all as f64 }
    }
}

/// What goes between ranks at one level.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Waits for another rank, one after the other.
    pub waits: f64,
    /// Messages that are sent, received or polled for.
    pub messages: Count,
    /// Bytes that a rank gets or sends, whichever is more. Between hosts, `most` is of a host and not of a rank.
    pub bytes: Count,
}

/// The work of one operation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// The algorithm that the backend takes.
    pub algorithm: &'static str,
    /// Bytes that ranks copy from their own buffers to memory that others read.
    pub copied: Count,
    /// Bytes of contributions that are combined.
    pub reduced: Count,
    /// Between ranks of a host.
    pub host: Traffic,
    /// Between hosts.
    pub switch: Traffic,
}

impl Work {
    /// Adds what is done afterwards.
    pub(crate) fn add(&mut self, other: &Work) {
        let sum = |one: &mut Count, other: Count| {
            one.most += other.most;
            one.all += other.all;
        };
        sum(&mut self.copied, other.copied);
        sum(&mut self.reduced, other.reduced);
        for (one, other) in [(&mut self.host, other.host), (&mut self.switch, other.switch)] {
            one.waits += other.waits;
            sum(&mut one.messages, other.messages);
            sum(&mut one.bytes, other.bytes);
        }
    }

    /// Done by so many groups of ranks at once.
    pub(crate) fn in_parallel(mut self, groups: usize) -> Work {
        let counts = [&mut self.copied, &mut self.reduced];
        let traffic = [&mut self.host, &mut self.switch]
            .into_iter()
            .flat_map(|level| [&mut level.messages, &mut level.bytes]);
        for count in counts.into_iter().chain(traffic) {
            count.all *= groups as f64;
        }
        self
    }

    /// Adds waits for ranks of which some are on other hosts, or none.
    pub(crate) fn wait(&mut self, number: usize, far: bool) {
        let level = if far { &mut self.switch } else { &mut self.host };
        level.waits += number as f64;
    }
}

/// An operation whose work is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned<'a> {
    /// The name of a collective with blocks of one length, `all_to_all_v` with equal blocks, `send_recv` (each rank sends to the next) or
    /// `ping_pong` (one message from rank 0 to rank 1).
    pub operation: &'a str,
    /// The type of the elements.
    pub dtype: DType,
    /// Elements of a block, or of a message.
    pub count: usize,
    /// The root, of an operation that has one.
    pub root: usize,
}

impl Planned<'_> {
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// The call, if it is one of a collective that an algorithm is chosen for.
    pub(crate) fn call(&self) -> Option<Call<'static>> {
        let operation = Operation::from_name(self.operation)?;
        let blocks = match operation {
            Operation::Barrier => Blocks::Equal(0),
            _ if operation.is_empty_handed() || operation.has_counts() => return None,
            _ => Blocks::Equal(self.count),
        };
        Some(Call {
            dtype: self.dtype,
            root: self.root,
            blocks,
            recv_blocks: blocks,
            ..Call::empty(operation)
        })
    }

    /// The messages of rank 0, if it is an operation made of messages: to how many ranks, and how many ranks do the same.
    pub(crate) fn messages(&self, ranks: usize) -> Option<(usize, usize)> {
        match self.operation {
            "ping_pong" => Some((1, 1)),
            "send_recv" => Some((1, ranks)),
            "all_to_all_v" => Some((ranks - 1, ranks)),
            _ => None,
        }
    }
}

/// Blocks that go from one rank to another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pairs {
    /// The most that one rank gets or gives.
    pub most: usize,
    /// Between the ranks of a host, and between hosts, of the rank that has most.
    pub near: usize,
    pub far: usize,
    /// Of all ranks, near and far.
    pub all_near: usize,
    pub all_far: usize,
}

impl Pairs {
    /// The blocks of a collective's pattern, each from a writer to a reader.
    pub fn of(flow: &Flow<'_>, placement: &Placement) -> Pairs {
        let (ranks, local) = (placement.ranks, placement.on_a_host());
        let (near, far) = (local - 1, ranks - local);
        // With one writer or one reader, it is that rank which has most.
        let active = if flow.writers == Who::All && flow.readers == Who::All { ranks } else { 1 };
        Pairs { most: ranks - 1, near, far, all_near: active * near, all_far: active * far }
    }
}
