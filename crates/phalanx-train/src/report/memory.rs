//! A rank's memory, from the shapes of the parameters.

use super::bytes;
use crate::mesh::{Axis, MeshShape, Plan};
use crate::sharding::FlatLayout;
use crate::{Error, Result};
use phalanx::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What is divided along [`Axis::Shard`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Sharding {
    /// Nothing: [gradient buckets](crate::buckets).
    #[default]
    None,
    /// The optimizer's state (ZeRO-1).
    Optimizer,
    /// And gradients (ZeRO-2).
    Gradients,
    /// And parameters (ZeRO-3).
    Parameters,
}

/// What a model's memory depends on.
///
/// ```
/// use phalanx::DType;
/// use phalanx_train::mesh::{Axis, MeshShape, Plan};
/// use phalanx_train::report::{MemoryPlan, Sharding};
///
/// let mesh = MeshShape::new(&[(Axis::Shard, 8)])?;
/// let layer = [("weight", vec![1024, 1024])];
/// let layers = vec![&layer[..]; 24];
/// let mut plan = MemoryPlan::new(&mesh, Sharding::None);
/// plan.parameters = DType::Bf16;
/// let whole = plan.of_rank(0, &Plan::new(), &layers)?;
/// plan.sharding = Sharding::Parameters;
/// let sharded = plan.of_rank(0, &Plan::new(), &layers)?;
/// assert_eq!(whole.optimizer, 24 * (1 << 20) * 12); // f32: a master copy and two moments
/// assert_eq!(sharded.optimizer, whole.optimizer / 8);
/// // In bf16: the layer in use, the next one, and the part of it that this rank sends.
/// assert_eq!(sharded.parameters, (2 * (1 << 20) + (1 << 20) / 8) * 2);
/// # Ok::<(), phalanx_train::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct MemoryPlan<'a> {
    /// The ranks. Along [`Axis::Shard`] state is divided; [`Axis::Data`] replicates it (hybrid sharding); along the others the plan divides
    /// parameters.
    pub mesh: &'a MeshShape,
    /// What is divided.
    pub sharding: Sharding,
    /// Type of parameters and gradients in computations; default f32.
    pub parameters: DType,
    /// Type of master parameters, moments and summed gradients; default f32.
    pub master: DType,
    /// Moments of the optimizer: 2 for AdamW (default), 1 for SGD with momentum and Muon.
    pub moments: usize,
    /// Bytes of kept activations, which only the program knows; default 0.
    pub activations: u64,
}

/// Bytes of one rank, by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Parameters that are computed with.
    pub parameters: u64,
    /// Master parameters, where they are kept apart, and moments.
    pub optimizer: u64,
    /// Gradients that stay until the step.
    pub gradients: u64,
    /// While a group's gradient is reduced: the gradient, and its sum in the master's type.
    pub reducing: u64,
    /// Activations.
    pub activations: u64,
}

impl Memory {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.parameters + self.optimizer + self.gradients + self.reducing + self.activations
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: parameters {}, optimizer {}, gradients {}, reducing {}, activations {}",
            bytes(self.total()),
            bytes(self.parameters),
            bytes(self.optimizer),
            bytes(self.gradients),
            bytes(self.reducing),
            bytes(self.activations),
        )
    }
}

impl<'a> MemoryPlan<'a> {
    /// All in f32, with two moments, and without activations.
    pub fn new(mesh: &'a MeshShape, sharding: Sharding) -> MemoryPlan<'a> {
        let dtype = DType::F32;
        MemoryPlan { mesh, sharding, parameters: dtype, master: dtype, moments: 2, activations: 0 }
    }

    /// The memory of a rank that uses these groups of parameters: one [`ShardedGroup`](crate::sharding::ShardedGroup) each, by names and whole
    /// shapes. In a pipeline these are the groups of the rank's stages.
    ///
    /// With [`Sharding::Parameters`], the two largest groups are there in full: one in use, and the next on its way. It does not count what
    /// a [`Device`](crate::device::Device) or the communicator takes.
    ///
    /// # Errors
    /// [`Error::Usage`] if there is no such rank, a name comes twice in a group, or as for [`Layout::block`](crate::mesh::Layout::block).
    pub fn of_rank<N: AsRef<str>, S: AsRef<[usize]>>(
        &self,
        rank: usize,
        plan: &Plan,
        groups: &[&[(N, S)]],
    ) -> Result<Memory> {
        if rank >= self.mesh.ranks() {
            return Err(Error::usage(format!("rank {rank} of a mesh of {} ranks", self.mesh.ranks())));
        }
        let ranks = if self.sharding == Sharding::None { 1 } else { self.mesh.size(Axis::Shard) };
        let layouts = groups.iter().map(|group| self.layout(rank, plan, group, ranks));
        let layouts = layouts.collect::<Result<Vec<FlatLayout>>>()?;
        let sum = |of: &dyn Fn(&FlatLayout) -> usize| layouts.iter().map(of).sum::<usize>() as u64;
        let (whole, part) = (sum(&FlatLayout::len), sum(&FlatLayout::part_len));
        let mut longest: Vec<u64> = layouts.iter().map(|layout| layout.len() as u64).collect();
        longest.sort_unstable_by(|a, b| b.cmp(a));
        let (small, large) = (self.parameters.size() as u64, self.master.size() as u64);
        let moments = self.moments as u64;
        let largest = longest.first().copied().unwrap_or(0);
        let own = largest / ranks as u64;
        let reduced = Memory {
            parameters: whole * small,
            optimizer: part * large * (1 + moments),
            gradients: part * large,
            reducing: largest * (small + large) + own * large,
            activations: self.activations,
        };
        Ok(match self.sharding {
            Sharding::None => Memory {
                // Buckets sum in place; a master copy is needed only of parameters in another type.
                optimizer: whole * large * (moments + u64::from(self.parameters != self.master)),
                gradients: whole * large,
                reducing: largest * small,
                ..reduced
            },
            Sharding::Optimizer => Memory { gradients: whole * small + part * large, reducing: 0, ..reduced },
            Sharding::Gradients => reduced,
            Sharding::Parameters => {
                let gathered = longest.iter().take(2).sum::<u64>() + own;
                Memory { parameters: gathered * small, ..reduced }
            }
        })
    }

    /// The parameters of a group, as far as this rank's coordinates on the other axes give them to it.
    fn layout<N: AsRef<str>, S: AsRef<[usize]>>(
        &self,
        rank: usize,
        plan: &Plan,
        group: &[(N, S)],
        ranks: usize,
    ) -> Result<FlatLayout> {
        if ranks > 1 {
            return FlatLayout::placed(plan, self.mesh, rank, group);
        }
        let local = group.iter().map(|(name, shape)| {
            let layout = plan.layout(name.as_ref(), shape.as_ref())?;
            Ok((name.as_ref(), layout.block(self.mesh, rank)?.shape()))
        });
        FlatLayout::new(&local.collect::<Result<Vec<_>>>()?, 1)
    }
}
