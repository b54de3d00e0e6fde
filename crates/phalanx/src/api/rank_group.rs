//! [`RankGroup`]: a list of ranks as a value, and the communicator of these ranks.

use super::comm::Comm;
use crate::types::error::{Error, Result, UsageError};
use std::ops::Range;

/// Ranks of a communicator, each once, in the order that they will have in a communicator of their own. `MPI_Group`.
///
/// A value: making one needs no communication. [`Comm::split_group`] makes the communicator.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::RankGroup;
///
/// let even = RankGroup::new((0..8).step_by(2))?;
/// let low = RankGroup::from(0..4);
/// assert_eq!(even.union(&low).ranks(), [0, 2, 4, 6, 1, 3]);
/// assert_eq!(even.intersection(&low).ranks(), [0, 2]);
/// assert_eq!(even.difference(&low).ranks(), [4, 6]);
/// assert_eq!(even.place_of(4), Some(2));
/// # Ok(())
/// # }
/// ```
#[doc(alias = "MPI_Group")]
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct RankGroup {
    ranks: Vec<usize>,
}

impl From<Range<usize>> for RankGroup {
    fn from(ranks: Range<usize>) -> RankGroup {
        RankGroup { ranks: ranks.collect() }
    }
}

impl RankGroup {
    /// These ranks, in this order.
    ///
    /// # Errors
    /// [`UsageError::Setting`] for a rank that is there twice.
    pub fn new(ranks: impl IntoIterator<Item = usize>) -> Result<RankGroup> {
        let ranks: Vec<usize> = ranks.into_iter().collect();
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            None => Ok(RankGroup { ranks }),
            Some(pair) => Err(refused("ranks", format!("rank {} twice", pair[0]), "each rank once".into())),
        }
    }

    /// The ranks, in order.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The number of ranks. `MPI_Group_size`.
    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Whether it has no rank.
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Whether a rank is in the group.
    pub fn contains(&self, rank: usize) -> bool {
        self.ranks.contains(&rank)
    }

    /// A rank's place in the group: its rank in the communicator of the group. `MPI_Group_rank`.
    pub fn place_of(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|other| *other == rank)
    }

    /// The ranks at these places, in the order of the places. `MPI_Group_incl`.
    ///
    /// # Errors
    /// [`UsageError::Setting`] for a place that there is not, or one that is listed twice.
    pub fn include(&self, places: &[usize]) -> Result<RankGroup> {
        self.check_places(places)?;
        RankGroup::new(places.iter().map(|place| self.ranks[*place]))
    }

    /// The ranks at all other places. `MPI_Group_excl`.
    ///
    /// # Errors
    /// [`UsageError::Setting`] for a place that there is not.
    pub fn exclude(&self, places: &[usize]) -> Result<RankGroup> {
        self.check_places(places)?;
        let kept = (0..self.len()).filter(|place| !places.contains(place));
        Ok(RankGroup { ranks: kept.map(|place| self.ranks[place]).collect() })
    }

    /// The ranks of this group, then those that only the other one has. `MPI_Group_union`.
    pub fn union(&self, other: &RankGroup) -> RankGroup {
        let added = other.ranks.iter().filter(|rank| !self.contains(**rank));
        RankGroup { ranks: self.ranks.iter().chain(added).copied().collect() }
    }

    /// The ranks of this group that the other one has too. `MPI_Group_intersection`.
    pub fn intersection(&self, other: &RankGroup) -> RankGroup {
        self.filtered(|rank| other.contains(rank))
    }

    /// The ranks of this group that the other one has not. `MPI_Group_difference`.
    pub fn difference(&self, other: &RankGroup) -> RankGroup {
        self.filtered(|rank| !other.contains(rank))
    }

    /// The places in another group of the ranks at these places; `None` for a rank that the other has not.
    /// `MPI_Group_translate_ranks`.
    ///
    /// # Errors
    /// [`UsageError::Setting`] for a place that there is not.
    pub fn translate(&self, places: &[usize], other: &RankGroup) -> Result<Vec<Option<usize>>> {
        self.check_places(places)?;
        Ok(places.iter().map(|place| other.place_of(self.ranks[*place])).collect())
    }

    fn filtered(&self, is_kept: impl Fn(usize) -> bool) -> RankGroup {
        RankGroup { ranks: self.ranks.iter().copied().filter(|rank| is_kept(*rank)).collect() }
    }

    fn check_places(&self, places: &[usize]) -> Result<()> {
        match places.iter().find(|place| **place >= self.len()) {
            None => Ok(()),
            Some(place) => Err(refused(
                "places",
                place.to_string(),
                format!("places of a group of {} ranks", self.len()),
            )),
        }
    }

    /// A number that other groups do not have, all but surely. FNV-1a.
    fn fingerprint(&self) -> u64 {
        let step = |hash: u64, rank: &usize| (hash ^ (*rank as u64 + 1)).wrapping_mul(0x100_0000_01b3);
        self.ranks.iter().fold(0xcbf2_9ce4_8422_2325, step)
    }
}

fn refused(what: &str, value: String, expected: String) -> Error {
    UsageError::Setting { name: format!("RankGroup: {what}"), value, expected }.into()
}

impl Comm {
    /// All ranks of this communicator, as a group. `MPI_Comm_group`.
    pub fn rank_group(&self) -> RankGroup {
        RankGroup::from(0..self.world_size())
    }

    /// Makes the communicator of a group of ranks of this one; the others get `None`. `MPI_Comm_create`.
    ///
    /// Collective. All ranks of a group pass this group, whose order is the order of the new ranks. Groups without a common rank can be
    /// made in one call. A rank outside of all groups passes one of them, or an empty one.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx::RankGroup;
    ///
    /// phalanx::try_run(5, |comm| -> phalanx::Result<()> {
    ///     let odd = RankGroup::new([1, 3])?;
    ///     let even = comm.rank_group().difference(&odd);
    ///     let own = if odd.contains(comm.rank()) { &odd } else { &even };
    ///     let part = comm.split_group(own)?.expect("this rank is in its group");
    ///     assert_eq!(part.all_gather_value(comm.rank())?, own.ranks());
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`UsageError`]: a rank that there is not; or, the same on every rank, two ranks of a group that pass different ones. The communicator
    /// works on.
    #[doc(alias = "MPI_Comm_create")]
    pub fn split_group(&self, group: &RankGroup) -> Result<Option<Comm>> {
        let operation = "split_group";
        group.ranks().iter().try_for_each(|rank| self.shape().check_rank(operation, "member", *rank))?;
        let all = self.all_gather_value(group.fingerprint())?;
        let mut color = 0;
        if all.iter().any(|other| *other != all[0]) {
            let differing = group.ranks().iter().find(|member| all[**member] != all[self.rank()]);
            let differing = self.all_gather_value(differing.map_or(NOBODY, |member| *member as u64))?;
            if let Some(rank) = differing.iter().position(|member| *member != NOBODY) {
                let other = differing[rank];
                let expected =
                    format!("the same group on all ranks of it: those of ranks {rank} and {other} differ");
                let (name, value) = (format!("{operation}: group"), format!("{:?}", group.ranks()));
                return Err(UsageError::Setting { name, value, expected }.into());
            }
            // Groups without a common rank have different smallest ranks.
            color = group.ranks().iter().min().map_or(0, |rank| *rank as u32);
        }
        let place = group.place_of(self.rank());
        self.split(place.map(|_| color), place.unwrap_or(0) as i64)
    }
}

/// Stands for no rank.
const NOBODY: u64 = u64::MAX;

impl Comm {
    /// Makes the communicator of a group of ranks, which alone call it. `MPI_Comm_create_group`.
    ///
    /// The members pass the same group. They call it in the order of their other calls with each other; ranks of two groups make them in
    /// the same order. The group's order is the order of the new ranks. On host memory and MPI.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx::RankGroup;
    ///
    /// phalanx::try_run(5, |comm| -> phalanx::Result<()> {
    ///     if comm.rank() % 2 == 1 {
    ///         return comm.barrier(); // The odd ranks know nothing of it.
    ///     }
    ///     let even = comm.split_members(&RankGroup::new([4, 0, 2])?)?;
    ///     assert_eq!(even.all_gather_value(comm.rank() as u64)?, [4, 0, 2]);
    ///     comm.barrier()
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`UsageError`]: a rank that there is not, or a group without this rank. [`Error::Unsupported`] on other backends. A member that does
    /// not come is a timeout.
    #[doc(alias = "MPI_Comm_create_group")]
    pub fn split_members(&self, group: &RankGroup) -> Result<Comm> {
        let operation = "split_members";
        group.ranks().iter().try_for_each(|rank| self.shape().check_rank(operation, "member", *rank))?;
        if group.place_of(self.rank()).is_none() {
            let expected = format!("a group with the calling rank, {}", self.rank());
            let (name, value) = (format!("{operation}: group"), format!("{:?}", group.ranks()));
            return Err(UsageError::Setting { name, value, expected }.into());
        }
        self.requests.wait_for_collectives();
        let _limited = self.limited();
        let split = self.backend.split_members(group.ranks());
        let (backend, number) = self.recorder.noted(split)?;
        let name = format!("{}/members-{number:016x}", self.recorder.name());
        Ok(self.derived(backend.into(), name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_made_of_groups_as_in_mpi() {
        let group = RankGroup::new([5, 3, 8]).unwrap();
        assert_eq!(group.include(&[2, 0]).unwrap().ranks(), [8, 5]);
        assert_eq!(group.exclude(&[1]).unwrap().ranks(), [5, 8]);
        let other = RankGroup::from(3..6);
        assert_eq!(group.union(&other).ranks(), [5, 3, 8, 4]);
        assert_eq!(group.intersection(&other).ranks(), [5, 3]);
        assert_eq!(group.difference(&other).ranks(), [8]);
        assert_eq!(group.translate(&[0, 1, 2], &other).unwrap(), [Some(2), Some(0), None]);
        assert!(RankGroup::default().is_empty() && RankGroup::default().union(&group) == group);
    }

    #[test]
    fn what_makes_no_group_is_refused() {
        let text = |result: Result<RankGroup>| result.unwrap_err().to_string();
        assert!(text(RankGroup::new([1, 2, 1])).contains("rank 1 twice"));
        let group = RankGroup::from(0..3);
        assert!(text(group.include(&[3])).contains("places of a group of 3 ranks"));
        assert!(text(group.include(&[0, 0])).contains("twice"));
        assert!(text(group.exclude(&[7])).contains('7'));
        assert!(group.translate(&[3], &group).is_err());
    }
}
