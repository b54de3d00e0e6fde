//! Replica groups: whole copies of a model, each on some ranks. A group that fails in a step drops out of that step's average, as in
//! torchft.
//!
//! ```
//! use phalanx_train::device::Host;
//! use phalanx_train::replicas::average;
//!
//! let means = phalanx::try_run(4, |comm| {
//!     let has_failed = comm.rank() == 3; // its data could not be read, say
//!     let mut gradient = vec![1.0f32; 5];
//!     let participants = average(&comm, &Host, &mut &mut gradient[..], !has_failed)?;
//!     Ok::<_, phalanx_train::Error>((participants, gradient[0]))
//! })?;
//! assert_eq!(means, [(3, 1.0); 4]); // not 0.75
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! When a rank is lost, [shrink](Comm::shrink) the communicator of all, and make the groups anew: the rest of the lost rank's group gets `None`.
//!
//! Or [rebuild](Comm::rebuild) it with new processes: [`ReplicaGroups::refill`] gives each a place, and [`catch_up`](ReplicaGroups::catch_up) brings
//! the group to the state of the others, over the network and not from disk.

use crate::device::{Device, Number};
use crate::{Error, Result};
use phalanx::{Comm, ReduceOp, Source};

/// In the place of a group's steps: its ranks have made different ones.
const BEHIND: u64 = u64::MAX;

/// Whole copies of the model, each on a group of ranks.
#[derive(Debug)]
pub struct ReplicaGroups {
    /// The ranks of this rank's group, for sharding and the like.
    pub within: Comm,
    /// The ranks with the same place in each group, for averages.
    pub across: Comm,
}

impl ReplicaGroups {
    /// Groups of `size` ranks: this rank is in group `group`, in the order of `comm`. Collective. A group that has lost a rank gets `None`,
    /// because the rest of it has not the whole model: its ranks end, or wait to be replaced.
    ///
    /// # Errors
    /// Errors of `comm`.
    pub fn new(comm: &Comm, group: u32, size: usize) -> Result<Option<ReplicaGroups>> {
        let mut groups = vec![0u32; comm.world_size()];
        comm.all_gather(&[group], &mut groups)?;
        let members = groups.iter().filter(|other| **other == group).count();
        let place = groups[..comm.rank()].iter().filter(|other| **other == group).count() as u32;
        let complete = members == size;
        let within = comm.split(complete.then_some(group), 0)?;
        let across = comm.split(complete.then_some(place), i64::from(group))?;
        Ok(within.zip(across).map(|(within, across)| ReplicaGroups { within, across }))
    }

    /// Groups 0 to `groups` - 1 of `size` ranks, of a communicator that has new ranks in the place of lost ones. A rank that had a group gives
    /// its number, a new one `None`: it fills up a group that lacks a rank. Collective. The answer has this rank's group.
    ///
    /// # Errors
    /// [`Error::Usage`] on all ranks if there are other than `groups` × `size` ranks, or more than `size` in a group.
    pub fn refill(
        comm: &Comm,
        group: Option<u32>,
        groups: usize,
        size: usize,
    ) -> Result<(u32, ReplicaGroups)> {
        const NEW: u32 = u32::MAX;
        let mut all = vec![NEW; comm.world_size()];
        comm.all_gather(&[group.unwrap_or(NEW)], &mut all)?;
        for group in 0..groups as u32 {
            let members = all.iter().filter(|other| **other == group).count();
            for free in all.iter_mut().filter(|other| **other == NEW).take(size.saturating_sub(members)) {
                *free = group;
            }
        }
        let fits = |group| all.iter().filter(|other| **other == group).count() == size;
        if all.len() != groups * size || !(0..groups as u32).all(fits) {
            return Err(Error::usage(format!(
                "{} ranks cannot be {groups} groups of {size}: with new ranks in the free places, the groups are {all:?}",
                all.len()
            )));
        }
        let own = all[comm.rank()];
        let made = ReplicaGroups::new(comm, own, size)?;
        Ok((own, made.expect("the groups are complete")))
    }

    /// Brings groups that are behind to the newest step: their ranks get the state of the rank with the same place in a group that has made
    /// it. `steps` are those that this rank has made (0 for a new process); the answer is what all ranks have then. Collective.
    ///
    /// A group with a new rank is behind as a whole, since its other ranks may have other places than before. `state` is replaced only on
    /// ranks that are behind.
    ///
    /// # Errors
    /// [`Error::Mismatch`] on all ranks if no group has made its steps on all of its ranks: load a checkpoint. Errors of the communicators.
    pub fn catch_up(&self, steps: u64, state: &mut Vec<u8>) -> Result<u64> {
        let mut group = vec![0; self.within.world_size()];
        self.within.all_gather(&[steps], &mut group)?;
        let own = if group.iter().all(|other| *other == steps) { steps } else { BEHIND };
        let mut all = vec![0; self.across.world_size()];
        self.across.all_gather(&[own], &mut all)?;
        let newest = all.iter().copied().filter(|steps| *steps != BEHIND).max().unwrap_or(0);
        if all.iter().all(|other| *other == newest) {
            return Ok(newest);
        }
        if newest == 0 {
            let what = "no group has made the same steps on all of its ranks: load a checkpoint";
            return Err(Error::Mismatch(what.into()));
        }
        let source = all.iter().position(|other| *other == newest).expect("the newest is one of them");
        let mut len = [state.len() as u64];
        self.across.broadcast_in_place(&mut len, source)?;
        // Into a copy: a rank that is up to date keeps its own.
        let mut received = if self.across.rank() == source { std::mem::take(state) } else { Vec::new() };
        received.resize(len[0] as usize, 0);
        let sent = self.across.broadcast_in_place(&mut received, source);
        if self.across.rank() == source || (sent.is_ok() && own != newest) {
            *state = received;
        }
        sent?;
        Ok(newest)
    }
}

/// The mean of the gradients of those ranks that `participate`; how many they are. Collective: a rank that does not take part calls it, too,
/// and gets the mean. What it has in `gradient`, also NaN, counts for nothing. If no rank takes part, the mean is 0.
///
/// # Errors
/// Errors of `comm` and of the device.
pub fn average<D: Device, T: Number>(
    comm: &Comm,
    device: &D,
    gradient: &mut D::ViewMut<'_, T>,
    participate: bool,
) -> Result<usize> {
    sum(comm, device, gradient, participate, |participants| participants)
}

/// [`average`] that divides by the number of ranks with which the training began. A rank that does not take part, or is lost, then counts as
/// one with gradient 0: the step is shorter by as much as the batch is smaller.
///
/// # Errors
/// [`Error::Usage`] for 0 ranks. Errors of `comm` and of the device.
pub fn average_over<D: Device, T: Number>(
    comm: &Comm,
    device: &D,
    gradient: &mut D::ViewMut<'_, T>,
    participate: bool,
    initial_ranks: usize,
) -> Result<usize> {
    if initial_ranks == 0 {
        return Err(Error::usage("a mean over 0 ranks: give the number with which the training began"));
    }
    sum(comm, device, gradient, participate, |_| initial_ranks)
}

/// The sum over those that participate, divided by what their number gives.
fn sum<D: Device, T: Number>(
    comm: &Comm,
    device: &D,
    gradient: &mut D::ViewMut<'_, T>,
    participate: bool,
    divisor: impl FnOnce(usize) -> usize,
) -> Result<usize> {
    if !participate {
        device.fill(gradient, 0.0)?;
    }
    let mut participants = [u32::from(participate)];
    comm.all_reduce_in_place(&mut participants, ReduceOp::Sum)?;
    if D::reborrow(gradient).len() > 0 {
        comm.all_reduce_in_place(gradient, ReduceOp::Sum)?;
    }
    let participants = participants[0] as usize;
    let divisor = divisor(participants);
    if divisor > 1 {
        device.scale(gradient, 1.0 / divisor as f64)?;
    }
    Ok(participants)
}
