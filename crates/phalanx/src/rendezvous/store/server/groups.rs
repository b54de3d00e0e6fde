//! The groups of a store's members: the ranks that the job began with, its launchers, and the ranks of communicators that grow.

use super::Settings;
use crate::rendezvous::store::namespace::{Group, Namespace};
use crate::rendezvous::store::protocol::{Growth, MAX_MEMBERS, Role};
use std::time::Instant;

/// The groups, each with its namespace.
pub struct Groups {
    ranks: Namespace,
    nodes: Namespace,
    /// In the order in which they were opened.
    grown: Vec<(Growth, Namespace)>,
}

impl Groups {
    pub fn new(settings: &Settings) -> Groups {
        let nodes = Namespace::new(Role::Node, settings.nodes, settings.nodes_job.clone());
        Groups { ranks: first_ranks(settings), nodes, grown: Vec::new() }
    }

    /// Forgets all ranks, and what they stored.
    pub fn forget_ranks(&mut self, settings: &Settings) {
        self.ranks = first_ranks(settings);
        self.grown.clear();
    }

    /// The namespace of a group. A grown group lasts as long as it has members that are connected.
    pub fn of(&mut self, group: Group) -> &mut Namespace {
        match group {
            Group::Ranks => &mut self.ranks,
            Group::Nodes => &mut self.nodes,
            Group::Grown(number) => {
                let found = self.grown.iter_mut().find(|(growth, _)| growth.number == number);
                &mut found.expect("it has members").1
            }
        }
    }

    /// All groups.
    pub fn all(&self) -> Vec<Group> {
        let grown = self.grown.iter().map(|(growth, _)| Group::Grown(growth.number));
        [Group::Ranks, Group::Nodes].into_iter().chain(grown).collect()
    }

    fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        [&self.ranks, &self.nodes].into_iter().chain(self.grown.iter().map(|(_, namespace)| namespace))
    }

    /// The next time at which a request of a member is late.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.namespaces().filter_map(Namespace::next_deadline).min()
    }

    /// The number of members that are expected, as far as it is known.
    pub fn expected(&self) -> usize {
        self.namespaces().map(|namespace| namespace.size().unwrap_or(0) as usize).sum()
    }

    /// The group of a growth, opened if it is new; or why its member `rank` cannot be right.
    pub fn open(&mut self, growth: Growth, rank: u32) -> Result<Group, String> {
        let Growth { number, members, size } = growth;
        if !(rank < members && members < size && size <= MAX_MEMBERS) {
            return Err(format!("rank {rank} of {members} cannot grow to {size} ranks"));
        }
        match self.grown.iter().find(|(other, _)| other.number == number) {
            Some((other, _)) if *other != growth => {
                return Err(format!(
                    "rank {rank} grows from {members} ranks to {size}, and others from {} to {}",
                    other.members, other.size
                ));
            }
            Some(_) => {}
            None => {
                // Whoever was in these has gone on, or is gone.
                self.grown.retain(|(_, namespace)| !namespace.is_empty());
                self.grown.push((growth, Namespace::new(Role::Rank, Some(size), None)));
            }
        }
        Ok(Group::Grown(number))
    }

    /// The next place for a new rank, in the communicator that has asked for the longest time.
    pub fn free_place(&self) -> Option<(Group, u32)> {
        self.grown.iter().find_map(|(growth, namespace)| {
            let rank = namespace.free_place(growth.members)?;
            (!namespace.is_empty()).then_some((Group::Grown(growth.number), rank))
        })
    }
}

fn first_ranks(settings: &Settings) -> Namespace {
    Namespace::new(Role::Rank, settings.ranks, settings.ranks_job.clone())
}
