//! Teams of the library for the ranks of a communicator. Without a team the library does not reduce.

use super::NvshmemComm;
use super::pe::strided;
use crate::contract::Backend;
use crate::types::error::Result;
use phalanx_sys::nvshmem::{nvshmem_team_t, team};
use std::sync::atomic::Ordering;

/// Most teams of a process at a time. The library has 128 (`NVSHMEM_MAX_TEAMS`), its own among them; with
/// NVLink multicast fewer ([`Limits::teams`](super::pe::Limits::teams)).
const MOST: usize = 16;

/// A team whose PEs are the ranks, in their order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TeamHandle {
    pub team: nvshmem_team_t,
    /// Whether it was made for this communicator, and ends with it.
    is_own: bool,
}

impl TeamHandle {
    pub const WORLD: TeamHandle = TeamHandle { team: team::WORLD, is_own: false };
}

impl NvshmemComm {
    /// The team for this rank's part of a split; `None` where the library cannot make one: a team is a
    /// strided subset of its parent's PEs, in their order. Collective over this communicator, since all its
    /// ranks make each of the teams.
    pub(crate) fn split_team(&self, color: Option<u32>, key: i64) -> Result<Option<TeamHandle>> {
        let Some(parent) = self.team else { return Ok(None) };
        let (rank, ranks) = (self.rank(), self.pes.len());
        let has = self.process.teams.load(Ordering::Relaxed);
        let own = [u64::from(color.is_some()), color.unwrap_or(0).into(), key as u64, has as u64];
        let mut all = vec![[0u64; 4]; ranks];
        // SAFETY: one thread at a time is in a collective.
        self.on_host_channel(|channel| unsafe { channel.all_gather_words(&own, all.as_flattened_mut()) })?;
        let mut colors: Vec<u64> = all.iter().filter(|words| words[0] == 1).map(|words| words[1]).collect();
        colors.sort_unstable();
        colors.dedup();
        let most = MOST.min(self.process.limits.teams()) as u64;
        let mut mine = None;
        for color in colors {
            let mut members: Vec<usize> = (0..ranks).filter(|rank| all[*rank][..2] == [1, color]).collect();
            members.sort_by_key(|rank| (all[*rank][2] as i64, *rank));
            let Some(stride) = stride(&members) else { continue };
            let made = if members.len() == ranks {
                Some(TeamHandle { is_own: false, ..parent })
            } else if members.iter().any(|rank| all[*rank][3] >= most) {
                None
            } else {
                self.make_team(parent.team, members[0], stride, members.len())?
            };
            if members.contains(&rank) {
                mine = made;
            }
        }
        Ok(mine)
    }

    /// `None` on ranks outside the team, and where the library has no more teams.
    fn make_team(
        &self,
        parent: nvshmem_team_t,
        start: usize,
        stride: usize,
        size: usize,
    ) -> Result<Option<TeamHandle>> {
        let turn = self.process.enter()?;
        let context = turn.context()?;
        context.drain()?;
        // SAFETY: initialised; the team of this communicator, all of whose ranks are here.
        let call = unsafe { strided(self.process.library, parent, start, stride, size) }?;
        let (_, team) = context.bounded("nvshmem_team_split_strided".into(), call)?;
        Ok((team != team::INVALID).then(|| {
            self.process.teams.fetch_add(1, Ordering::Relaxed);
            TeamHandle { team, is_own: true }
        }))
    }

    /// Destroys the team, if it was made for this communicator. Collective.
    pub(crate) fn end_team(&self) -> Result<()> {
        let Some(TeamHandle { team, is_own: true }) = self.team else { return Ok(()) };
        let turn = self.process.enter()?;
        let context = turn.context()?;
        let library = self.process.library;
        let destroy = library.need(library.nvshmem_team_destroy, "nvshmem_team_destroy")?;
        context.drain()?;
        // SAFETY: made for this communicator, which ends; destroyed once.
        context.bounded("nvshmem_team_destroy".into(), move || unsafe { destroy(team) })?;
        self.process.teams.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}

/// The distance between consecutive members, if it is constant.
fn stride(members: &[usize]) -> Option<usize> {
    let Some((first, second)) = members.first().zip(members.get(1)) else { return Some(1) };
    let stride = second.checked_sub(*first)?;
    members.windows(2).all(|pair| pair[0] + stride == pair[1]).then_some(stride)
}
