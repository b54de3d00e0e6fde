//! Work of the algorithms of this backend, for `phalanx plan`: what each file of `collective/` does, counted.

use super::choose::{Algorithm, Bulk, Topology, choose};
use super::grid::Grid;
use super::tunables::MESSAGE_COPIED;
use crate::contract::work::{Count, Pairs, Placement, Planned, Traffic, Work};
use crate::contract::{Flow, Operation, Who};
use crate::control::layout::{CONTRIBUTIONS, Layout, ONE_WAY};
use crate::types::MAX_HOST_RANKS;

/// Work of an operation among ranks that share memory; `None` if they are too many, or it has no algorithm here.
pub(crate) fn work(planned: &Planned<'_>, placement: &Placement) -> Option<Work> {
    let Placement { ranks, hosts, readable, .. } = *placement;
    if hosts != 1 || !(2..=MAX_HOST_RANKS).contains(&ranks) {
        return None;
    }
    if let Some((peers, active)) = planned.messages(ranks) {
        return Some(messages(planned.bytes(), peers, active, readable));
    }
    let call = planned.call()?;
    let flow = call.flow();
    let layout = Layout::new(ranks);
    let topology = Topology { ranks, crowded: placement.is_crowded(), shares_memory: true, layout: &layout };
    let scene = Scene { flow: &flow, placement, topology };
    Some(match choose(&call, &flow, topology) {
        Algorithm::Refused => return None,
        Algorithm::Grid => scene.grid(),
        Algorithm::Slots(_) => scene.blocks("slots", 1, true),
        Algorithm::Bulk(bulk) => scene.bulk(bulk, call.operation),
    })
}

/// Work of messages from each of `active` ranks to `peers` others.
fn messages(bytes: usize, peers: usize, active: usize, readable: bool) -> Work {
    let each = |number: usize| Count::each(number, active);
    let copies = !readable || bytes <= MESSAGE_COPIED;
    Work {
        algorithm: "messages",
        copied: if copies { each(peers * bytes) } else { Count::default() },
        host: Traffic { waits: 1.0, messages: each(2 * peers), bytes: each(peers * bytes) },
        ..Work::default()
    }
}

struct Scene<'a> {
    flow: &'a Flow<'a>,
    placement: &'a Placement,
    topology: Topology<'a>,
}

impl Scene<'_> {
    /// Every reader takes the blocks of all writers in so many steps. `copies`: writers put them where readers find them.
    fn blocks(&self, algorithm: &'static str, steps: usize, copies: bool) -> Work {
        let Scene { flow, placement, .. } = *self;
        let (ranks, longest) = (placement.ranks, flow.longest());
        let pairs = Pairs::of(flow, placement);
        // With one writer each reader has one block, not all of them.
        let most = if flow.readers == Who::All && flow.writers != Who::All { 1 } else { pairs.most };
        let (writers, readers) = (flow.writers.among(ranks).len(), flow.readers.among(ranks).len());
        let given = flow.given(ranks);
        let blocks = Count::new(most, pairs.all_near);
        Work {
            algorithm,
            copied: if copies { Count::each(given, writers) } else { Count::default() },
            reduced: self.combined(ranks * longest, readers),
            host: Traffic { waits: 1.0, messages: blocks.times(steps), bytes: blocks.times(longest) },
            ..Work::default()
        }
    }

    fn combined(&self, bytes: usize, ranks: usize) -> Count {
        if self.flow.reduced { Count::each(bytes, ranks) } else { Count::default() }
    }

    /// Three rounds of √n, n and √n slices, of which √n make a block.
    fn grid(&self) -> Work {
        let (ranks, block) = (self.placement.ranks, self.flow.longest());
        let Grid { rows, columns, .. } = Grid::new(0, ranks);
        let slice = block.div_ceil(columns);
        Work {
            algorithm: "grid",
            copied: Count::each(block + (columns + 1) * slice, ranks),
            reduced: Count::each(ranks * slice, ranks),
            host: Traffic {
                waits: 3.0,
                messages: Count::each(2 * (columns - 1) + rows - 1, ranks),
                bytes: Count::each((2 * columns + ranks) * slice, ranks),
            },
            ..Work::default()
        }
    }

    fn bulk(&self, bulk: Bulk, operation: Operation) -> Work {
        let readable = self.placement.readable;
        match bulk {
            Bulk::AllReduce { push: true, .. } if readable => self.two_phase("push", false),
            Bulk::AllReduce { one_phase: false, .. } => self.two_phase("two-phase", !readable),
            Bulk::AllReduce { .. } if readable => self.two_phase("two-phase", false),
            Bulk::AllToAll { pairwise: true, .. } if !readable => self.pairwise(),
            // A rooted operation without readers among its writers has nothing to share.
            _ if operation == Operation::Barrier => self.blocks("slots", 1, false),
            _ => self.blocks("one-phase", self.steps(), !readable),
        }
    }

    fn steps(&self) -> usize {
        let both_ways = self.flow.writers == Who::All && self.flow.readers == Who::All;
        let ring = if both_ways { CONTRIBUTIONS } else { ONE_WAY };
        let longest = self.flow.longest();
        longest.div_ceil(self.topology.step(ring, self.flow.scattered, longest)).max(1)
    }

    /// Each rank combines a part of the contributions, and all take the parts of the result, or are given them.
    fn two_phase(&self, algorithm: &'static str, copies: bool) -> Work {
        let (ranks, block) = (self.placement.ranks, self.flow.longest());
        let of_peers = block - block / ranks;
        let steps = self.steps();
        Work {
            algorithm,
            copied: if copies { Count::each(block + block / ranks, ranks) } else { Count::default() },
            reduced: Count::each(block, ranks),
            host: Traffic {
                waits: 2.0,
                messages: Count::each(2 * (ranks - 1) * steps, ranks),
                bytes: Count::each(2 * of_peers, ranks),
            },
            ..Work::default()
        }
    }

    /// One block at a time; the kernel may copy it, if a trial finds that faster.
    fn pairwise(&self) -> Work {
        let (ranks, block) = (self.placement.ranks, self.flow.longest());
        let steps = block.div_ceil(self.topology.pairwise_step());
        let bytes = Count::each((ranks - 1) * block, ranks);
        Work {
            algorithm: "pairwise",
            copied: bytes,
            host: Traffic {
                waits: (ranks - 1) as f64,
                messages: Count::each((ranks - 1) * steps, ranks),
                bytes,
            },
            ..Work::default()
        }
    }
}
