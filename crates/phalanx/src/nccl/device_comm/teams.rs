//! Teams of a communicator's ranks, and the numbers of ranks in them.

use crate::contract::Shape;
use crate::nccl::Nccl;
use crate::types::error::{Error, Result, UnsupportedError};
use phalanx_sys::nccl::{cft_team, ncclComm_t, ncclResult_t, ncclTeam_t};
use std::ffi::c_int;

/// A team: ranks of the communicator at a fixed stride (`ncclTeam_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Team {
    /// Number of ranks in the team.
    pub ranks: usize,
    /// This rank's number in the team.
    pub rank: usize,
    /// Difference of two neighbours' ranks in the communicator.
    pub stride: usize,
}

/// Kind of a communicator's team.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TeamKind {
    /// All ranks.
    World,
    /// Ranks that load from and store to each other's memory, as over NVLink.
    Lsa,
    /// Ranks with the same number in their `Lsa` teams: one rank of each.
    Rail,
    /// Ranks that reach each other by logical endpoints, flat (`NCCL_CFT_TEAM_FLAT`, 2.31).
    Cft,
    /// Ranks that reach each other by logical endpoints, hierarchically over multicast teams
    /// (`NCCL_CFT_TEAM_HIER_MULTIMEM`, 2.31).
    CftOverMultimem,
    /// Ranks that reach each other by logical endpoints, hierarchically over `Lsa` teams
    /// (`NCCL_CFT_TEAM_HIER_LSA`, 2.31).
    CftOverLsa,
    /// Ranks that a multicast endpoint reaches (2.31).
    CftMultimem,
}

impl Team {
    pub(super) fn raw(&self) -> ncclTeam_t {
        let number = |value: usize| c_int::try_from(value).unwrap_or(c_int::MAX);
        ncclTeam_t { nRanks: number(self.ranks), rank: number(self.rank), stride: number(self.stride) }
    }
}

impl Nccl<'_> {
    /// Returns one of the communicator's teams (`ncclTeamWorld`, `ncclTeamLsa`, `ncclTeamRail`, 2.28.3;
    /// `ncclTeamCft`, `ncclTeamCftMultimem`, 2.31). Not collective.
    ///
    /// # Errors
    /// [`Error::MissingFunction`](crate::Error::MissingFunction) if the library is too old for it;
    /// [`Error::Unsupported`](crate::Error::Unsupported) if there is no such team, as where the ranks cannot
    /// have symmetric memory.
    pub fn team(&self, kind: TeamKind) -> Result<Team> {
        let communicator = &self.comm.communicator;
        let library = communicator.library;
        let cft = |mode| {
            let team = library.need(library.ncclTeamCft, "ncclTeamCft")?;
            // SAFETY: a usable communicator.
            self.raw_team("ncclTeamCft", move |comm| unsafe { team(comm, mode) })
        };
        let (function, name) = match kind {
            TeamKind::World => (library.ncclTeamWorld, "ncclTeamWorld"),
            TeamKind::Lsa => (library.ncclTeamLsa, "ncclTeamLsa"),
            TeamKind::Rail => (library.ncclTeamRail, "ncclTeamRail"),
            TeamKind::CftMultimem => (library.ncclTeamCftMultimem, "ncclTeamCftMultimem"),
            TeamKind::Cft => return cft(cft_team::FLAT),
            TeamKind::CftOverMultimem => return cft(cft_team::HIER_MULTIMEM),
            TeamKind::CftOverLsa => return cft(cft_team::HIER_LSA),
        };
        let team = library.need(function, name)?;
        // SAFETY: as above.
        self.raw_team(name, move |comm| unsafe { team(comm) })
    }

    fn raw_team(&self, name: &'static str, get: impl FnOnce(ncclComm_t) -> ncclTeam_t) -> Result<Team> {
        let mut team = ncclTeam_t::default();
        self.comm.communicator.call(name, |comm| {
            team = get(comm);
            ncclResult_t::Success
        })?;
        // Instead of an error, the library returns a team without ranks.
        if team.nRanks < 1 || !(0..team.nRanks).contains(&team.rank) {
            return Err(Error::from(UnsupportedError {
                what: format!("a team ({name})"),
                why: format!("{} has none for this communicator", self.comm.communicator.library.name()),
                remedy: "look at Nccl::properties, and NCCL_DEBUG=INFO".into(),
            }));
        }
        Ok(Team {
            ranks: team.nRanks as usize,
            rank: team.rank as usize,
            stride: usize::try_from(team.stride).unwrap_or(0),
        })
    }

    /// Converts a rank of a team to its rank in the communicator (`ncclTeamRankToWorld`, 2.28.3).
    ///
    /// # Errors
    /// [`UsageError::Rank`](crate::UsageError::Rank) if the team has no such rank.
    pub fn rank_in_world(&self, team: Team, rank: usize) -> Result<usize> {
        let library = self.comm.communicator.library;
        self.rank_in(library.ncclTeamRankToWorld, "ncclTeamRankToWorld", team, rank)
    }

    /// Converts a rank of a team to its rank in the [`Lsa`](crate::nccl::TeamKind::Lsa) team
    /// (`ncclTeamRankToLsa`, 2.28.3).
    ///
    /// # Errors
    /// [`UsageError::Rank`](crate::UsageError::Rank) if the team has no such rank. A rank outside of the
    /// `Lsa` team has no number there: the result is not one of its ranks.
    pub fn rank_in_lsa(&self, team: Team, rank: usize) -> Result<usize> {
        let library = self.comm.communicator.library;
        self.rank_in(library.ncclTeamRankToLsa, "ncclTeamRankToLsa", team, rank)
    }

    fn rank_in(
        &self,
        function: Option<unsafe extern "C" fn(ncclComm_t, ncclTeam_t, c_int) -> c_int>,
        name: &'static str,
        team: Team,
        rank: usize,
    ) -> Result<usize> {
        let communicator = &self.comm.communicator;
        let function = communicator.library.need(function, name)?;
        let size = Shape { rank: team.rank, world_size: team.ranks };
        size.check_rank("a rank of a team", "rank", rank)?;
        let mut number = 0;
        communicator.call(name, |comm| {
            // SAFETY: a usable communicator, and a rank of the team.
            number = unsafe { function(comm, team.raw(), rank as c_int) };
            ncclResult_t::Success
        })?;
        Ok(usize::try_from(number).unwrap_or(usize::MAX))
    }
}
