//! Communicators of some of the ranks: the first rank of each makes its channel, the others open it.

use super::endpoint::{Endpoint, NewChannel};
use super::host_channel::HostChannel;
use crate::contract::{Direction, RankGrid};
use crate::os::random_number;
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

    fn attach(self, channel: NewChannel, parent: &dyn HostChannel) -> Result<Box<dyn HostChannel>> {
        let rank = self.members.iter().position(|rank| *rank == self.parent.rank).expect("one of them");
        let world_ranks = self.members.iter().map(|rank| self.parent.members()[*rank]).collect();
        let world = self.parent.world.clone();
        parent.over(Endpoint::attach(world, channel, rank, world_ranks, parent.timeout()))
    }

    fn failed(&self, rank: usize, to: &str) -> Error {
        Error::from(UnsupportedError {
            what: self.operation.into(),
            why: format!("rank {rank} could not {to} the new communicator's memory"),
            remedy: "see that rank's error".into(),
        })
    }
}

/// A split by colours and keys.
///
/// # Safety
/// As for [`Backend::split`](crate::contract::Backend::split).
pub(crate) unsafe fn split_by_color(
    parent: &dyn HostChannel,
    color: Option<u32>,
    key: i64,
) -> Result<Option<Box<dyn HostChannel>>> {
    let (endpoint, ranks) = (parent.endpoint(), parent.world_size());
    // Who goes where.
    let own = [u64::from(color.is_some()), color.unwrap_or(0).into(), key as u64];
    let mut all = vec![[0u64; 3]; ranks];
    // SAFETY: the caller's contract.
    unsafe { parent.all_gather_words(&own, all.as_flattened_mut()) }?;
    let mut part = color.map(|_| {
        let mut members: Vec<usize> = (0..ranks).filter(|rank| all[*rank][..2] == own[..2]).collect();
        members.sort_by_key(|rank| (all[*rank][2] as i64, *rank));
        Part::new("split", endpoint, members)
    });
    let mut ids = vec![0u64; ranks];
    // SAFETY: as above.
    unsafe { parent.all_gather_words(&[part.as_ref().map_or(0, Part::id)], &mut ids) }?;
    let opened = part.as_mut().map(|part| part.open(ids[part.members[0]]));
    // Nobody leaves before all have opened the channel, or failed to.
    let is_open = !matches!(opened, Some(Err(_)));
    let mut all_opened = vec![0u64; ranks];
    // SAFETY: as above.
    unsafe { parent.all_gather_words(&[u64::from(is_open)], &mut all_opened) }?;
    let (Some(part), Some(channel)) = (part, opened.transpose()?) else { return Ok(None) };
    match part.members.iter().find(|rank| all_opened[**rank] == 0) {
        Some(rank) => Err(part.failed(*rank, "open")),
        None => part.attach(channel, parent).map(Some),
    }
}

/// The members alone make it, by messages with the first of them: it tells the channel, hears who has opened it, and tells whether all
/// have. The number is random.
pub(crate) fn split_among(
    parent: &dyn HostChannel,
    members: &[usize],
) -> Result<(Box<dyn HostChannel>, u64)> {
    let endpoint = parent.endpoint();
    endpoint.check()?;
    let mut part = Part::new("split_members", endpoint, members.to_vec());
    let (first, others) = (members[0], &members[1..]);
    let is_first = first == endpoint.rank;
    let number = random_number("each communicator needs a number of its own")?;
    let mut told = [part.id(), number];
    match is_first {
        true => others.iter().try_for_each(|rank| tell(parent, *rank, told))?,
        false => told = hear_from(parent, first)?,
    }
    let opened = part.open(told[0]);
    // The first that could not open it, or the number of ranks.
    let mut failed = if opened.is_ok() { endpoint.ranks } else { endpoint.rank };
    if is_first {
        for rank in others {
            failed = failed.min(hear_from(parent, *rank)?[0] as usize);
        }
        others.iter().try_for_each(|rank| tell(parent, *rank, [failed as u64, 0]))?;
    } else {
        tell(parent, first, [failed as u64, 0])?;
        failed = hear_from(parent, first)?[0] as usize;
    }
    let channel = opened?;
    if failed < endpoint.ranks {
        return Err(part.failed(failed, "open"));
    }
    Ok((part.attach(channel, parent)?, told[1]))
}

fn tell(parent: &dyn HostChannel, rank: usize, words: [u64; 2]) -> Result<()> {
    let direction = Direction::Send(words.as_ptr().cast());
    // SAFETY: the words are there until the message is sent, when this returns.
    unsafe { parent.exchange_words(direction, rank) }
}

fn hear_from(parent: &dyn HostChannel, rank: usize) -> Result<[u64; 2]> {
    let mut words = [0u64; 2];
    // SAFETY: the words are written until this returns, and not read before.
    unsafe { parent.exchange_words(Direction::Recv(words.as_mut_ptr().cast()), rank) }?;
    Ok(words)
}

/// Every rank knows the members of every part, so what remains to be told are the channels: one exchange, and one that says that all
/// have opened theirs. If a rank cannot, all ranks get an error.
///
/// # Safety
/// As for [`Backend::split`](crate::contract::Backend::split).
pub(crate) unsafe fn split_in_grid(
    parent: &dyn HostChannel,
    grid: &RankGrid<'_>,
) -> Result<Vec<Box<dyn HostChannel>>> {
    let endpoint = parent.endpoint();
    let (rank, ranks, groups) = (endpoint.rank, endpoint.ranks, grid.groups.len());
    let call = grid.call();
    let part = |group: &&[usize]| Part::new("split_grid", endpoint, grid.members(group, rank));
    let mut parts: Vec<Part<'_>> = grid.groups.iter().map(part).collect();
    let own: Vec<u64> = parts.iter().map(Part::id).collect();
    let mut ids = vec![0u64; groups * ranks];
    // SAFETY: the caller's contract.
    unsafe { parent.all_gather_words_in(call, &own, &mut ids) }?;
    let opened: Result<Vec<NewChannel>> = parts
        .iter_mut()
        .enumerate()
        .map(|(number, part)| part.open(ids[part.members[0] * groups + number]))
        .collect();
    let mut all_opened = vec![0u64; ranks];
    // SAFETY: as above.
    unsafe { parent.all_gather_words_in(call, &[u64::from(opened.is_ok())], &mut all_opened) }?;
    let opened = opened?;
    if let (Some(part), Some(other)) = (parts.first(), all_opened.iter().position(|opened| *opened == 0)) {
        return Err(part.failed(other, "open"));
    }
    parts.into_iter().zip(opened).map(|(part, channel)| part.attach(channel, parent)).collect()
}
