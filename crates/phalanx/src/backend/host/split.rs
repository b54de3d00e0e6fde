//! Communicators of some of the ranks: the first rank of each makes its channel, the others open it.

use super::HostComm;
use crate::contract::{Backend, RankGrid};
use crate::control::endpoint::{Endpoint, NewChannel};
use crate::control::host_channel::HostChannel;
use crate::types::error::{Error, Result, UnsupportedError};

/// A new communicator of which this rank is a member.
struct Part<'a> {
    operation: &'static str,
    parent: &'a Endpoint,
    /// Ranks of the parent, in the order of the new communicator.
    members: Vec<usize>,
    /// Where this rank is the first member.
    made: Option<Result<NewChannel>>,
}

impl<'a> Part<'a> {
    fn new(operation: &'static str, parent: &'a Endpoint, members: Vec<usize>) -> Part<'a> {
        let is_first = members[0] == parent.rank;
        let made = is_first.then(|| NewChannel::create(&parent.world, members.len()));
        Part { operation, parent, members, made }
    }

    /// What the other members need to open it; 0 where this rank has nothing to tell.
    fn id(&self) -> u64 {
        self.made.as_ref().and_then(|made| made.as_ref().ok()).map_or(0, NewChannel::id)
    }

    /// Opens it; `id` is what its first member told.
    fn open(&mut self, id: u64) -> Result<NewChannel> {
        match self.made.take() {
            Some(made) => made,
            None if id == 0 => Err(self.failed(self.members[0], "make")),
            None => NewChannel::open(&self.parent.world, id),
        }
    }

    fn attach(self, channel: NewChannel, timeout: std::time::Duration) -> Box<dyn HostChannel> {
        let rank = self.members.iter().position(|rank| *rank == self.parent.rank).expect("one of them");
        let world_ranks = self.members.iter().map(|rank| self.parent.members()[*rank]).collect();
        let world = self.parent.world.clone();
        Box::new(HostComm::new(Endpoint::attach(world, channel, rank, world_ranks, timeout)))
    }

    fn failed(&self, rank: usize, to: &str) -> Error {
        Error::from(UnsupportedError {
            what: self.operation.into(),
            why: format!("rank {rank} could not {to} the new communicator's memory"),
            remedy: "see that rank's error".into(),
        })
    }
}

impl HostComm {
    /// # Safety
    /// As for [`Backend::split`].
    pub(super) unsafe fn split_by_color(
        &self,
        color: Option<u32>,
        key: i64,
    ) -> Result<Option<Box<dyn HostChannel>>> {
        let ranks = self.endpoint.ranks;
        // Who goes where.
        let own = [u64::from(color.is_some()), color.unwrap_or(0).into(), key as u64];
        let mut all = vec![[0u64; 3]; ranks];
        // SAFETY: the caller's contract.
        unsafe { self.all_gather_words(&own, all.as_flattened_mut()) }?;
        let mut part = color.map(|_| {
            let mut members: Vec<usize> = (0..ranks).filter(|rank| all[*rank][..2] == own[..2]).collect();
            members.sort_by_key(|rank| (all[*rank][2] as i64, *rank));
            Part::new("split", &self.endpoint, members)
        });
        let mut ids = vec![0u64; ranks];
        // SAFETY: as above.
        unsafe { self.all_gather_words(&[part.as_ref().map_or(0, Part::id)], &mut ids) }?;
        let opened = part.as_mut().map(|part| part.open(ids[part.members[0]]));
        // Nobody leaves before all have opened the channel, or failed to.
        let is_open = !matches!(opened, Some(Err(_)));
        let mut all_opened = vec![0u64; ranks];
        // SAFETY: as above.
        unsafe { self.all_gather_words(&[u64::from(is_open)], &mut all_opened) }?;
        let (Some(part), Some(channel)) = (part, opened.transpose()?) else { return Ok(None) };
        match part.members.iter().find(|rank| all_opened[**rank] == 0) {
            Some(rank) => Err(part.failed(*rank, "open")),
            None => Ok(Some(part.attach(channel, self.timeout()))),
        }
    }

    /// Every rank knows the members of every part, so what remains to be told are the channels: one exchange, and one that says that all
    /// have opened theirs. If a rank cannot, all ranks get an error.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    pub(super) unsafe fn split_in_grid(&self, grid: &RankGrid<'_>) -> Result<Vec<Box<dyn HostChannel>>> {
        let (rank, ranks, groups) = (self.endpoint.rank, self.endpoint.ranks, grid.groups.len());
        let call = grid.call();
        let part = |group: &&[usize]| Part::new("split_grid", &self.endpoint, grid.members(group, rank));
        let mut parts: Vec<Part<'_>> = grid.groups.iter().map(part).collect();
        let own: Vec<u64> = parts.iter().map(Part::id).collect();
        let mut ids = vec![0u64; groups * ranks];
        // SAFETY: the caller's contract.
        unsafe { self.all_gather_words_in(call, &own, &mut ids) }?;
        let opened: Result<Vec<NewChannel>> = parts
            .iter_mut()
            .enumerate()
            .map(|(number, part)| part.open(ids[part.members[0] * groups + number]))
            .collect();
        let mut all_opened = vec![0u64; ranks];
        // SAFETY: as above.
        unsafe { self.all_gather_words_in(call, &[u64::from(opened.is_ok())], &mut all_opened) }?;
        let opened = opened?;
        if let (Some(part), Some(other)) = (parts.first(), all_opened.iter().position(|opened| *opened == 0))
        {
            return Err(part.failed(other, "open"));
        }
        let timeout = self.timeout();
        Ok(parts.into_iter().zip(opened).map(|(part, channel)| part.attach(channel, timeout)).collect())
    }
}
