//! Replica groups: whole copies of a model, each on some ranks. A group that fails in a step drops out of that step's average, as in
//! torchft.
//!
//! ```
//! use phalanx_train::device::Host;
//! use phalanx_train::replicas::average;
//!
//! let means = phalanx::run(4, |comm| {
//!     let has_failed = comm.rank() == 3; // its data could not be read, say
//!     let mut gradient = vec![1.0f32; 5];
//!     let participants = average(&comm, &Host, &mut &mut gradient[..], !has_failed)?;
//!     Ok::<_, phalanx_train::Error>((participants, gradient[0]))
//! })?;
//! for mean in means {
//!     assert_eq!(mean?, (3, 1.0)); // not 0.75
//! }
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! When a rank is lost, [shrink](Comm::shrink) the communicator of all, and make the groups anew: the rest of the lost rank's group gets `None`.

use crate::Result;
use crate::device::{Device, Number};
use phalanx::{Comm, ReduceOp, Source};

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
    if !participate {
        device.fill(gradient, 0.0)?;
    }
    let mut participants = [u32::from(participate)];
    comm.all_reduce_in_place(&mut participants, ReduceOp::Sum)?;
    if D::reborrow(gradient).len() > 0 {
        comm.all_reduce_in_place(gradient, ReduceOp::Sum)?;
    }
    if participants[0] > 1 {
        device.scale(gradient, 1.0 / f64::from(participants[0]))?;
    }
    Ok(participants[0] as usize)
}
