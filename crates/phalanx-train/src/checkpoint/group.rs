//! Groups of sharded parameters: [`ShardedGroup`] in a checkpoint.

use super::{Checkpoint, State};
use crate::device::{Number, Overlap};
use crate::sharding::ShardedGroup;
use crate::{Error, Result};

/// What a parameter's state is called: the master parameters have the parameter's own name.
fn tensor_name(parameter: &str, part: usize) -> String {
    if part == 0 { parameter.into() } else { format!("{parameter}.state{part}") }
}

impl<'a> State<'a> {
    /// A group's master parameters under their names, the optimizer's states as `name.state1` and so on, and the steps made as the value
    /// `prefix.steps`. Padding is left out.
    ///
    /// If ranks have parts of matrices (tensor parallelism), make the group's layout with [`FlatLayout::placed`](crate::sharding::FlatLayout::placed).
    pub fn group<D: Overlap, T: Number, M: Number>(
        &mut self,
        prefix: &str,
        group: &'a ShardedGroup<D, T, M>,
    ) {
        self.value(format!("{prefix}.steps"), group.steps());
        for (at, part) in group.parts().enumerate() {
            for (name, piece, range) in group.layout().pieces(group.rank()) {
                let device = group.device();
                let view = device.view(part, range);
                let (shape, ranges) = group.layout().in_whole(name, &piece);
                self.tensor::<D, M>(tensor_name(name, at), &shape, &ranges, device, view);
            }
        }
    }
}

impl Checkpoint {
    /// Reads what [`State::group`] saved, from any number of ranks. Not collective.
    ///
    /// # Errors
    /// As [`read`](Checkpoint::read).
    pub fn load_group<D: Overlap, T: Number, M: Number>(
        &self,
        prefix: &str,
        group: &mut ShardedGroup<D, T, M>,
    ) -> Result<()> {
        let name = format!("{prefix}.steps");
        // In a pipeline, not every rank has the group.
        let mut saved = (0..self.ranks()).filter_map(|rank| self.value(&name, rank)?.as_u64());
        let steps = saved.next().ok_or_else(|| {
            Error::usage(format!(
                "no value {name:?} in {}: give the prefix of saving",
                self.folder().display()
            ))
        })?;
        let (device, layout, rank) = (group.device().clone(), group.layout().clone(), group.rank());
        for (at, part) in group.restore(steps).enumerate() {
            for (name, piece, range) in layout.pieces(rank) {
                let mut view = device.view_mut(part, range);
                let (_, ranges) = layout.in_whole(name, &piece);
                self.load::<D, M>(&tensor_name(name, at), &ranges, &device, &mut view)?;
            }
        }
        Ok(())
    }
}
