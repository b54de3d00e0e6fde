//! The hosts of a communicator's ranks, and its part on this one: a channel of the host backend, which moves what stays here.

use super::UcxComm;
use super::choose::Shape;
use super::tunables::RECORDS_COME;
use crate::contract::hosts::HostTopology;
use crate::contract::{Blocks, Direction};
use crate::control::endpoint::{Endpoint, NewChannel};
use crate::control::failure::ChannelFailure;
use crate::control::host_channel::HostChannel;
use crate::control::outer::{Outer, Wait};
use crate::control::record::CallRecord;
use crate::os::RunInstant;
use crate::types::error::{Error, Result};
use std::ops::Range;

/// Where the ranks are, and the channel of those of this host.
pub(super) struct Hosts {
    topology: HostTopology,
    /// This rank's host, and its place among the ranks of it.
    pub own: usize,
    pub place: usize,
    /// The ranks in this place of each host, if all hosts have as many.
    pub across: Vec<usize>,
    /// `None` if this rank is alone on its host.
    pub channel: Option<Box<dyn HostChannel>>,
}

impl Hosts {
    /// The ranks of this host.
    pub fn of_own(&self) -> &[usize] {
        self.topology.ranks_of(self.own)
    }

    /// The number of ranks of each host.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.topology.num_hosts()).map(|host| self.topology.ranks_of(host).len())
    }

    /// The ranks of each host, if those of a host follow each other.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.sizes().scan(0, |first, size| {
            let start = std::mem::replace(first, *first + size);
            Some(start..start + size)
        })
    }

    /// The elements of each host's blocks, if its ranks follow each other.
    pub fn counts<'a>(&'a self, blocks: Blocks<'a>) -> impl Iterator<Item = usize> + 'a {
        self.ranges().map(move |ranks| blocks.offset(ranks.end) - blocks.offset(ranks.start))
    }

    /// The place of a rank of this host among those of it.
    pub fn place_of(&self, rank: usize) -> usize {
        self.of_own().iter().position(|other| *other == rank).expect("a rank of this host")
    }

    /// A rank of each host: the root, or the first. Answers the root's host.
    pub fn leaders(&self, root: Option<usize>, leaders: &mut Vec<usize>) -> usize {
        leaders.clear();
        leaders.extend((0..self.topology.num_hosts()).map(|host| self.topology.ranks_of(host)[0]));
        let Some(root) = root else { return 0 };
        let host = self.topology.host_of(root);
        leaders[host] = root;
        host
    }

    fn shape(&self, reproducible: bool) -> Shape {
        let (hosts, ranks) = (self.topology.num_hosts(), self.topology.world_size());
        let most = self.sizes().max().unwrap_or(1);
        let are_equal = self.sizes().all(|size| size == most);
        let mut next = 0..;
        let in_order =
            (0..hosts).flat_map(|host| self.topology.ranks_of(host)).all(|rank| next.next() == Some(*rank));
        Shape { ranks, hosts, most, are_equal, in_order, reproducible }
    }
}

impl UcxComm {
    /// Opens the part of the communicator on this host, if ranks share hosts. All ranks call it, before anything else goes through it.
    pub(super) fn join_host(mut self) -> Result<UcxComm> {
        let Some(here) = &self.link.world.here else { return Ok(self) };
        let topology = here.topology.of_members(self.endpoint.members());
        let (rank, hosts) = (self.endpoint.rank, topology.num_hosts());
        let own = topology.host_of(rank);
        let mates = topology.ranks_of(own).to_vec();
        let place = mates.iter().position(|mate| *mate == rank).expect("a rank is on its host");
        let across = (0..hosts).filter_map(|host| topology.ranks_of(host).get(place).copied()).collect();
        let channel = match &here.channel {
            Some(base) if mates.len() > 1 => Some(self.open_on_host(&**base, &mates, place)?),
            _ => None,
        };
        let hosts = Hosts { topology, own, place, across, channel };
        self.shape = hosts.shape(self.link.world.reproducible);
        self.hosts = Some(hosts);
        Ok(self)
    }

    /// The first rank of a host makes the channel, and tells the others.
    fn open_on_host(
        &self,
        base: &dyn HostChannel,
        mates: &[usize],
        place: usize,
    ) -> Result<Box<dyn HostChannel>> {
        let world = &base.endpoint().world;
        let mut words = [0u64; 2];
        let channel = if place == 0 {
            let made = NewChannel::create(world, mates.len());
            words[0] = made.as_ref().map_or(0, NewChannel::id);
            for mate in &mates[1..] {
                // SAFETY: the words are there until this returns.
                unsafe { self.exchange_internal(Direction::Send(words.as_ptr().cast()), *mate) }?;
            }
            made?
        } else {
            // SAFETY: the words are written until this returns, and not read before.
            unsafe { self.exchange_internal(Direction::Recv(words.as_mut_ptr().cast()), mates[0]) }?;
            if words[0] == 0 {
                return Err(self.endpoint.fail(&ChannelFailure::Aborted { rank: mates[0] }));
            }
            NewChannel::open(world, words[0])?
        };
        let ranks = self.link.world.here.as_ref().map(|here| &here.ranks).expect("asked by the caller");
        let in_base = |mate: &usize| {
            let member = self.endpoint.members()[*mate];
            ranks.iter().position(|rank| *rank == member).expect("a rank of this host")
        };
        let members = mates.iter().map(in_base).collect();
        let part = Endpoint::attach(world.clone(), channel, place, members, self.endpoint.timeout());
        let world = self.link.world.clone();
        let advance = Box::new(move |wait| {
            let mut worker = world.worker();
            worker.progress();
            if wait == Wait::Long {
                worker.fetch_aside();
            }
        });
        part.belong_to(Outer { endpoint: self.endpoint.clone(), ranks: mates.to_vec(), advance });
        base.over(part)
    }

    /// The error of the communicator for one of its part on this host, in operation number `sequence` if that is a collective.
    #[cold]
    pub(super) fn failed_on_host(&self, hosts: &Hosts, error: Error, sequence: Option<u64>) -> Error {
        let Some(part) = hosts.channel.as_ref().filter(|_| error.is_fatal()) else { return error };
        let mates = hosts.of_own();
        match (part.endpoint().reason(), sequence) {
            (Some(ChannelFailure::Mismatch { lower, higher, .. }), Some(sequence)) => {
                let peer = match hosts.place {
                    place if place == lower.0 => Some(higher.0),
                    place if place == higher.0 => Some(lower.0),
                    _ => None,
                };
                if let Some(peer) = peer {
                    return self.fail_mismatch(mates[peer], sequence);
                }
            }
            (Some(ChannelFailure::Mismatch { sequence, lower, higher }), None) => {
                let outer = |(place, record): (usize, CallRecord)| {
                    let root = mates.get(record.root as usize).map_or(record.root, |rank| *rank as u32);
                    (mates[place], CallRecord { root, ..record })
                };
                let (lower, higher) = (outer(lower), outer(higher));
                return self.endpoint.fail(&ChannelFailure::Mismatch { sequence, lower, higher });
            }
            (Some(ChannelFailure::Peer { rank, event, mut context }), _) => {
                context.reporter = mates[context.reporter];
                return self.endpoint.fail(&ChannelFailure::Peer { rank: mates[rank], event, context });
            }
            _ => {}
        }
        // Another rank of this host has found the reason.
        let since = RunInstant::now();
        while !self.endpoint.has_failed() && since.elapsed() < RECORDS_COME {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        self.endpoint.fail(&ChannelFailure::Aborted { rank: self.endpoint.rank })
    }
}
