//! Work of the algorithms of this backend, for `phalanx plan`: what each file of `collective/` does, counted.

use super::choose::{Algorithm, Shape, choose, piece};
use crate::contract::work::{Count, Pairs, Placement, Planned, Traffic, Work};
use crate::contract::{Call, Flow, Operation, Who};

/// Work of an operation among ranks that share memory, as the host backend counts it.
type OnHost = fn(&Planned<'_>, &Placement) -> Option<Work>;

/// Work of an operation among ranks of any number of hosts; `None` if it has no algorithm here.
pub(crate) fn work(planned: &Planned<'_>, placement: &Placement, on_host: OnHost) -> Option<Work> {
    let ranks = placement.ranks;
    if ranks < 2 {
        return None;
    }
    if let Some((peers, active)) = planned.messages(ranks) {
        return Some(messages(planned.bytes(), peers, active, placement));
    }
    let call = planned.call()?;
    let flow = call.flow();
    let scene = Scene { call: &call, flow: &flow, placement, longest: flow.longest() };
    let through = Through { planned, placement, on_host };
    Some(match choose(&call, &flow, &shape(placement)) {
        Algorithm::OnHost => return on_host(planned, placement),
        Algorithm::ByHost => return through.leaders(call.operation),
        Algorithm::ByPlace => return through.places(call.operation),
        Algorithm::NearAndFar => return through.near_and_far(&scene),
        Algorithm::Direct => scene.direct(),
        Algorithm::TwoPhase => scene.two_phase(),
        Algorithm::BroadcastInParts => scene.broadcast_in_parts(),
        Algorithm::Tree if call.operation == Operation::Broadcast => scene.rounds("tree", ranks - 1),
        Algorithm::Tree => scene.passed_on("tree", ranks - 1, ranks * rounds(ranks) / 2, 1),
        Algorithm::Dissemination => {
            scene.passed_on("dissemination", ranks * rounds(ranks), ranks * (ranks - 1), ranks)
        }
    })
}

fn shape(placement: &Placement) -> Shape {
    let Placement { ranks, hosts, .. } = *placement;
    let are_equal = ranks.is_multiple_of(hosts);
    Shape { ranks, hosts, most: placement.on_a_host(), are_equal, in_order: true, reproducible: false }
}

/// Ranks of which some share a host.
struct Through<'a> {
    planned: &'a Planned<'a>,
    placement: &'a Placement,
    on_host: OnHost,
}

impl Through<'_> {
    /// A step inside each host.
    fn inside(&self, operation: &str, count: usize) -> Option<Work> {
        let Placement { hosts, .. } = *self.placement;
        let here = Placement { ranks: self.placement.on_a_host(), hosts: 1, ..*self.placement };
        let step = Planned { operation, count, root: 0, ..*self.planned };
        Some((self.on_host)(&step, &here)?.in_parallel(hosts))
    }

    /// A step of `groups` groups of one rank of each host, which share the hosts' connections.
    fn between(&self, count: usize, groups: usize) -> Option<Work> {
        let Placement { hosts, .. } = *self.placement;
        let across = Placement { ranks: hosts, hosts, ..*self.placement };
        let step = Planned { count, root: 0, ..*self.planned };
        let mut work = work(&step, &across, self.on_host)?.in_parallel(groups);
        work.switch.bytes.most *= groups as f64;
        Some(work)
    }

    /// As `collective/by_host.rs` does it with a leader of each host.
    fn leaders(&self, operation: Operation) -> Option<Work> {
        let (count, local) = (self.planned.count, self.placement.on_a_host());
        let steps = match operation {
            Operation::Broadcast => vec![self.between(count, 1), self.inside("broadcast", count)],
            Operation::Reduce => vec![self.inside("reduce", count), self.between(count, 1)],
            Operation::AllReduce => {
                vec![self.inside("reduce", count), self.between(count, 1), self.inside("broadcast", count)]
            }
            Operation::AllGather => {
                let rest = (self.placement.ranks - local) * count;
                vec![
                    self.inside("all_gather", count),
                    self.between(local * count, 1),
                    self.inside("broadcast", rest),
                ]
            }
            Operation::Gather => vec![self.inside("gather", count), self.between(local * count, 1)],
            Operation::Scatter => vec![self.between(local * count, 1), self.inside("scatter", count)],
            Operation::AllToAll => {
                let of_a_rank = self.placement.ranks * count;
                vec![
                    self.inside("gather", of_a_rank),
                    self.between(local * local * count, 1),
                    self.inside("scatter", of_a_rank),
                ]
            }
            _ => vec![self.inside("barrier", 0), self.between(0, 1), self.inside("barrier", 0)],
        };
        sum("by host", steps)
    }

    /// As it does it with all ranks of each host.
    fn places(&self, operation: Operation) -> Option<Work> {
        let (count, local) = (self.planned.count, self.placement.on_a_host());
        let steps = match operation {
            Operation::ReduceScatter => {
                let of_each_host = self.inside("reduce_scatter", count);
                let mut steps = vec![of_each_host; self.placement.hosts];
                steps.push(self.between(count, local));
                steps
            }
            Operation::AllGather => {
                let mut steps = vec![self.inside("all_gather", count); self.placement.hosts];
                steps.push(self.between(count, local));
                steps
            }
            _ => {
                let part = count / local;
                vec![
                    self.inside("reduce_scatter", part),
                    self.between(part, local),
                    self.inside("all_gather", part),
                ]
            }
        };
        sum("by place", steps)
    }

    /// As `collective/near_and_far.rs` does it. With a root, one host has something to do inside.
    fn near_and_far(&self, scene: &Scene<'_>) -> Option<Work> {
        let here = Placement { ranks: self.placement.on_a_host(), hosts: 1, ..*self.placement };
        let step = Planned { root: 0, ..*self.planned };
        let inside = (self.on_host)(&step, &here)?;
        let groups = if scene.both_ways() { self.placement.hosts } else { 1 };
        let far = Pairs { near: 0, all_near: 0, ..Pairs::of(scene.flow, self.placement) };
        let mut work = exchanged(&far, 1, scene.longest, scene.sharing());
        work.add(&inside.in_parallel(groups));
        Some(Work { algorithm: "near and far", ..work })
    }
}

/// Steps one after the other.
fn sum(algorithm: &'static str, steps: Vec<Option<Work>>) -> Option<Work> {
    let mut all = Work { algorithm, ..Work::default() };
    for step in steps {
        all.add(&step?);
    }
    Some(all)
}

/// Rounds in which each rank that has something passes it to one other, until all have it.
fn rounds(ranks: usize) -> usize {
    ranks.next_power_of_two().ilog2() as usize
}

/// Messages from each of `active` ranks to `peers` others, near ones first.
fn messages(bytes: usize, peers: usize, active: usize, placement: &Placement) -> Work {
    let local = placement.on_a_host();
    // The last rank of a host sends to the next host, and so does one rank of each host if all send to the next.
    let far = if peers == 1 {
        usize::from(placement.hosts > 1 && (active > 1 || local == 1))
    } else {
        peers + 1 - local
    };
    let near = if peers == 1 { usize::from(local > 1) } else { local - 1 };
    let senders = if peers == 1 { placement.hosts.min(active) } else { active };
    let sending = if peers == 1 { 1 } else { local };
    let pairs =
        Pairs { most: peers, near, far, all_near: active * peers - senders * far, all_far: senders * far };
    Work { algorithm: "messages", ..exchanged(&pairs, 1, bytes, sending) }
}

/// Work of sending and receiving blocks of so many bytes between pairs, in so many messages each. So many ranks of a host share its
/// connection.
fn exchanged(pairs: &Pairs, pieces: usize, bytes: usize, sharing: usize) -> Work {
    let traffic = |most: usize, all: usize, sharing: usize| Traffic {
        waits: 0.0,
        // Each is sent by one rank and received by another.
        messages: Count::new(most, all).times(2 * pieces),
        bytes: Count::new(sharing * most, all).times(bytes),
    };
    let mut work = Work {
        host: traffic(pairs.near, pairs.all_near, 1),
        switch: traffic(pairs.far, pairs.all_far, sharing),
        ..Work::default()
    };
    work.wait(1, pairs.far > 0);
    work
}

struct Scene<'a> {
    call: &'a Call<'static>,
    flow: &'a Flow<'a>,
    placement: &'a Placement,
    longest: usize,
}

impl Scene<'_> {
    fn both_ways(&self) -> bool {
        self.flow.writers == Who::All && self.flow.readers == Who::All
    }

    /// Ranks of a host that use its connection at once.
    fn sharing(&self) -> usize {
        if self.both_ways() { self.placement.on_a_host() } else { 1 }
    }

    fn direct(&self) -> Work {
        let Scene { flow, placement, longest, .. } = *self;
        let pairs = Pairs::of(flow, placement);
        let pieces = match flow.reduced {
            true => self.call.blocks.longest().div_ceil(piece(flow.size)).max(1),
            false => 1,
        };
        let readers = flow.readers.among(placement.ranks).len();
        Work {
            algorithm: "direct",
            reduced: match flow.reduced {
                true => Count::each(placement.ranks * longest, readers),
                false => Count::default(),
            },
            ..exchanged(&pairs, pieces, longest, self.sharing())
        }
    }

    /// All exchange parts of the contributions, and those that get the result its parts.
    fn two_phase(&self) -> Work {
        let Scene { flow, placement, longest, .. } = *self;
        let (ranks, local) = (placement.ranks, placement.on_a_host());
        let all = Pairs {
            most: ranks - 1,
            near: local - 1,
            far: ranks - local,
            all_near: ranks * (local - 1),
            all_far: ranks * (ranks - local),
        };
        let chunks = self.call.blocks.longest().div_ceil(piece(flow.size) * ranks).max(1);
        // A part of a chunk is a message.
        let part = longest.div_ceil(ranks);
        let mut work = exchanged(&all, chunks, part, local);
        let results = exchanged(&Pairs::of(flow, placement), chunks, part, self.sharing());
        work.add(&results);
        // The next chunk is under way while one is combined.
        work.wait(chunks - 1, all.far > 0);
        Work { algorithm: "two-phase", reduced: Count::each(longest, ranks), ..work }
    }

    /// The root sends parts, which are passed on to all others.
    fn broadcast_in_parts(&self) -> Work {
        let Scene { placement, longest, .. } = *self;
        let (ranks, local) = (placement.ranks, placement.on_a_host());
        let part = longest / (ranks - 1);
        let mut work = exchanged(&Pairs::of(self.flow, placement), 1, part, 1);
        let others = Pairs {
            most: ranks - 2,
            near: (local - 1).min(ranks - 2),
            far: (ranks - local).min(ranks - 2),
            all_near: (ranks - 1) * (local - 1).min(ranks - 2),
            all_far: (ranks - 1) * (ranks - local).min(ranks - 2),
        };
        work.add(&exchanged(&others, 1, part, local));
        Work { algorithm: "in parts", ..work }
    }

    /// Rounds of one message for each rank, one after the other; `all` is the number of messages. The nearest ranks are of one host.
    fn rounds(&self, algorithm: &'static str, all: usize) -> Work {
        let Placement { ranks, hosts, .. } = *self.placement;
        let far = rounds(hosts);
        let near = rounds(ranks) - far;
        let all_far = if ranks == 1 { 0 } else { all * far / (near + far) };
        let pairs = Pairs { most: near + far, near, far, all_near: all - all_far, all_far };
        let mut work = exchanged(&pairs, 1, self.longest, 1);
        (work.host.waits, work.switch.waits) = (near as f64, far as f64);
        Work { algorithm, ..work }
    }

    /// The same, if the blocks that a rank passes on double with each round. All ranks together pass on so many, and `readers` have them
    /// all in the end.
    fn passed_on(&self, algorithm: &'static str, messages: usize, blocks: usize, readers: usize) -> Work {
        let Scene { flow, placement, longest, .. } = *self;
        let (ranks, local) = (placement.ranks, placement.on_a_host());
        let mut work = self.rounds(algorithm, messages);
        let all_near = blocks * (local - 1) / (ranks - 1);
        work.host.bytes = Count::new(local - 1, all_near).times(longest);
        work.switch.bytes = Count::new(ranks - local, blocks - all_near).times(longest);
        if flow.reduced {
            work.reduced = Count::each(ranks * longest, readers);
        }
        work
    }
}
