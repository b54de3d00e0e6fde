//! Mesh: the ranks as a grid with named axes, and where each parameter lies on it.
//!
//! ```
//! use phalanx_train::mesh::{Axis, Mesh, Placement, Plan};
//!
//! let sums = phalanx::try_run(4, |comm| {
//!     // Ranks 0 and 1 share one copy of the model, ranks 2 and 3 another.
//!     let mesh = Mesh::new(&comm, &[(Axis::Data, 2), (Axis::Tensor, 2)])?;
//!     let plan = Plan::new().rule("layers.*.up.weight", &[(Axis::Tensor, Placement::Split(0))]);
//!     let layout = plan.layout("layers.3.up.weight", &[5, 2])?;
//!
//!     // This rank's part: rows 0..3 at tensor coordinate 0, rows 3..5 at 1.
//!     let block = layout.local(&mesh)?;
//!     assert_eq!(block.ranges[0], if mesh.coordinate(Axis::Tensor) == 0 { 0..3 } else { 3..5 });
//!     assert_eq!((block.copy, block.copies), (mesh.coordinate(Axis::Data), 2));
//!
//!     // Each element counted once among all ranks.
//!     let mut elements = [if block.is_counted() { block.len() as u64 } else { 0 }];
//!     mesh.world().all_reduce_in_place(&mut elements, phalanx::ReduceOp::Sum)?;
//!     Ok::<_, phalanx_train::Error>(elements[0])
//! })?;
//! assert_eq!(sums, [10; 4]);
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! - [`Mesh`] has a communicator for each axis: of the ranks that differ in that coordinate alone.
//! - [`Placement`] says what becomes of a parameter along an axis; [`Layout`] says it for all axes, and answers which [`Block`] of the
//!   parameter a rank holds, and as which of how many copies. Norms, checkpoints and exchange count copy 0.
//! - [`Plan`] gives layouts by the names of parameters.
//! - [`Init`] fills a block with random numbers that depend on the element's place in the whole parameter, so every mesh begins with the same
//!   model.

mod init;
pub(crate) mod layout;
mod plan;

pub use init::Init;
pub use layout::{Block, Layout, Placement, copies_of_heads, part};
pub use plan::{Plan, Unmatched};

use crate::{Error, Result};
use phalanx::Comm;

/// An axis of a mesh. The order here is the usual one, outermost first: ranks that differ in the last one are neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Copies of the model that see different samples.
    Data,
    /// Stages of the model, one behind the other.
    Pipeline,
    /// Ranks that see different samples and share the memory for the model's parameters, gradients or optimizer.
    Shard,
    /// Parts of each sequence.
    Sequence,
    /// Groups of experts.
    Expert,
    /// Parts of each matrix.
    Tensor,
}

impl Axis {
    /// All axes, outermost first.
    pub const ALL: [Axis; 6] =
        [Axis::Data, Axis::Pipeline, Axis::Shard, Axis::Sequence, Axis::Expert, Axis::Tensor];
}

/// Sizes of a mesh, without communicators: enough to ask which block any rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshShape {
    dims: Vec<(Axis, usize)>,
}

impl MeshShape {
    /// Axes and their sizes, outermost first. An axis that is not listed has size 1.
    ///
    /// # Errors
    /// [`Error::Usage`] for an axis that is listed twice, a size of 0, or more ranks than a `usize` counts.
    pub fn new(dims: &[(Axis, usize)]) -> Result<MeshShape> {
        for (place, (axis, size)) in dims.iter().enumerate() {
            if *size == 0 {
                return Err(Error::usage(format!("axis {axis:?} has size 0; give 1, or leave it out")));
            }
            if dims[..place].iter().any(|(other, _)| other == axis) {
                return Err(Error::usage(format!("axis {axis:?} is listed twice; list it once")));
            }
        }
        if dims.iter().try_fold(1usize, |product, (_, size)| product.checked_mul(*size)).is_none() {
            return Err(Error::usage(format!("a mesh of {dims:?} has more ranks than can be counted")));
        }
        Ok(MeshShape { dims: dims.to_vec() })
    }

    /// The axes and their sizes, outermost first.
    pub fn dims(&self) -> &[(Axis, usize)] {
        &self.dims
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.dims.iter().map(|(_, size)| size).product()
    }

    /// Ranks along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.dims.iter().find(|(other, _)| *other == axis).map_or(1, |(_, size)| *size)
    }

    /// The coordinate of a rank along an axis.
    pub fn coordinate(&self, axis: Axis, rank: usize) -> usize {
        let inner = self.dims.iter().rev().take_while(|(other, _)| *other != axis);
        let stride: usize = inner.map(|(_, size)| size).product();
        if self.size(axis) == 1 { 0 } else { rank / stride % self.size(axis) }
    }

    /// An error that lists what fits, unless there are so many ranks.
    fn check_ranks(&self, ranks: usize) -> Result<()> {
        if self.ranks() == ranks {
            return Ok(());
        }
        let sizes: Vec<String> = self.dims.iter().map(|(axis, size)| format!("{axis:?} {size}")).collect();
        let fits = self.dims.iter().filter_map(|(axis, size)| {
            let others = self.ranks() / size;
            (ranks.is_multiple_of(others)).then(|| format!("{axis:?} {} beside the others", ranks / others))
        });
        let mut fits: Vec<String> = fits.collect();
        if fits.is_empty() {
            let divisors: Vec<String> = divisors(ranks).iter().map(ToString::to_string).collect();
            fits.push(format!("sizes out of {}, whose product is {ranks}", divisors.join(", ")));
        }
        Err(Error::usage(format!(
            "a mesh of {} needs {} ranks, and there are {ranks}; what fits: {}",
            if sizes.is_empty() { "no axes".into() } else { sizes.join(" × ") },
            self.ranks(),
            fits.join(", or ")
        )))
    }
}

fn divisors(number: usize) -> Vec<usize> {
    (1..=number).filter(|divisor| number.is_multiple_of(*divisor)).collect()
}

/// The ranks as a grid with named axes, with a communicator along each axis.
#[derive(Debug)]
pub struct Mesh {
    shape: MeshShape,
    rank: usize,
    world: Comm,
    /// Of this rank alone: for axes of size 1.
    alone: Comm,
    axes: Vec<(Axis, Comm)>,
    joint: Vec<(Vec<Axis>, Comm)>,
}

impl Mesh {
    /// Makes the mesh of all ranks. Collective, with the same sizes on every rank; all communicators are made in one
    /// [`split_grid`](Comm::split_grid).
    ///
    /// `dims` has the axes with their sizes, outermost first: with `[(Data, 2), (Tensor, 2)]`, ranks 0 and 1 differ along `Tensor`.
    ///
    /// # Errors
    /// [`Error::Usage`] if the product of the sizes is not the number of ranks (the text lists what fits), or as for [`MeshShape::new`].
    /// Nothing was sent then. [`Error::Comm`] as for `split_grid`.
    pub fn new(comm: &Comm, dims: &[(Axis, usize)]) -> Result<Mesh> {
        Mesh::with_joint(comm, dims, &[])
    }

    /// [`new`](Mesh::new), with communicators over several axes together as well, `&[&[Axis::Data, Axis::Shard]]` for example.
    pub fn with_joint(comm: &Comm, dims: &[(Axis, usize)], joint: &[&[Axis]]) -> Result<Mesh> {
        let shape = MeshShape::new(dims)?;
        shape.check_ranks(comm.world_size())?;
        let sizes: Vec<usize> = dims.iter().map(|(_, size)| *size).collect();
        let place = |axis: Axis| dims.iter().position(|(other, size)| *other == axis && *size > 1);
        let longer: Vec<(Axis, usize)> =
            Axis::ALL.into_iter().filter_map(|axis| place(axis).map(|place| (axis, place))).collect();
        let mut groups: Vec<Vec<usize>> = vec![(0..dims.len()).collect(), Vec::new()];
        groups.extend(longer.iter().map(|(_, place)| vec![*place]));
        for axes in joint {
            let mut places: Vec<usize> = axes.iter().filter_map(|axis| place(*axis)).collect();
            places.sort_unstable();
            places.dedup();
            groups.push(places);
        }
        let groups: Vec<&[usize]> = groups.iter().map(Vec::as_slice).collect();
        let mut comms = comm.split_grid(&sizes, &groups)?.into_iter();
        let mut next = || comms.next().expect("a communicator for each group");
        Ok(Mesh {
            rank: comm.rank(),
            world: next(),
            alone: next(),
            axes: longer.iter().map(|(axis, _)| (*axis, next())).collect(),
            joint: joint.iter().map(|axes| (sorted(axes), next())).collect(),
            shape,
        })
    }

    /// A mesh of `Data`, `Pipeline` and `Tensor`, with as many data ranks as remain. This is the layout of numr's `CommunicatorGroup`:
    /// tensor innermost, then pipeline, then data. `Data` and `Pipeline` have a joint communicator, and `Pipeline` and `Tensor`.
    ///
    /// # Errors
    /// [`Error::Usage`] if the number of ranks is no multiple of `pipeline` × `tensor`, with the sizes that fit.
    pub fn data_pipeline_tensor(comm: &Comm, pipeline: usize, tensor: usize) -> Result<Mesh> {
        let ranks = comm.world_size();
        let model = pipeline.checked_mul(tensor).filter(|model| *model > 0 && ranks.is_multiple_of(*model));
        let Some(model) = model else {
            return Err(Error::usage(format!(
                "pipeline {pipeline} × tensor {tensor} does not divide {ranks} ranks; what fits: products out of {:?}",
                divisors(ranks)
            )));
        };
        let dims = [(Axis::Data, ranks / model), (Axis::Pipeline, pipeline), (Axis::Tensor, tensor)];
        Mesh::with_joint(comm, &dims, &[&[Axis::Data, Axis::Pipeline], &[Axis::Pipeline, Axis::Tensor]])
    }

    /// A mesh of two levels: `Shard` among the ranks of a host, `Data` across hosts, with a joint communicator of both.
    ///
    /// # Errors
    /// [`Error::Usage`] if the hosts have different numbers of ranks, or a host's ranks are not numbered one after another.
    pub fn hierarchical(comm: &Comm) -> Result<Mesh> {
        let hosts = comm.host_topology();
        let each = comm.world_size() / hosts.num_hosts();
        for host in 0..hosts.num_hosts() {
            let ranks = hosts.ranks_of(host);
            if ranks.len() != each || !ranks[0].is_multiple_of(each) || ranks[each - 1] != ranks[0] + each - 1
            {
                return Err(Error::usage(format!(
                    "host {host} has the ranks {ranks:?}; a mesh of two levels needs {each} ranks in a row on each of {} hosts",
                    hosts.num_hosts()
                )));
            }
        }
        let dims = [(Axis::Data, hosts.num_hosts()), (Axis::Shard, each)];
        Mesh::with_joint(comm, &dims, &[&[Axis::Data, Axis::Shard]])
    }

    /// The sizes.
    pub fn shape(&self) -> &MeshShape {
        &self.shape
    }

    /// This rank's number among all.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// All ranks, in their order.
    pub fn world(&self) -> &Comm {
        &self.world
    }

    /// The ranks that differ from this one along an axis alone, ordered by coordinate; a world of one for an axis of size 1.
    pub fn comm(&self, axis: Axis) -> &Comm {
        self.axes.iter().find(|(other, _)| *other == axis).map_or(&self.alone, |(_, comm)| comm)
    }

    /// The ranks that differ along these axes alone, in any order of the axes; `None` unless it was asked for in
    /// [`with_joint`](Mesh::with_joint).
    pub fn joint(&self, axes: &[Axis]) -> Option<&Comm> {
        let axes = sorted(axes);
        self.joint.iter().find(|(other, _)| *other == axes).map(|(_, comm)| comm)
    }

    /// Ranks along an axis; 1 for an axis that was not listed.
    pub fn size(&self, axis: Axis) -> usize {
        self.shape.size(axis)
    }

    /// This rank's coordinate along an axis.
    pub fn coordinate(&self, axis: Axis) -> usize {
        self.shape.coordinate(axis, self.rank)
    }

    /// The ranks along `axis` that hold the same of `heads` heads (see [`Placement::Heads`]): gradients of copies are summed among
    /// them. A world of one if there are as many heads as ranks or more. Collective along the axis.
    ///
    /// # Errors
    /// [`Error::Usage`] if the heads do not fit the ranks, with the numbers of ranks that fit.
    pub fn copies(&self, axis: Axis, heads: usize) -> Result<Comm> {
        let copies = layout::copies_of_heads(axis, self.size(axis), heads)?;
        let comm = self.comm(axis);
        let mut parts = comm.split_grid(&[comm.world_size() / copies, copies], &[&[1]])?;
        Ok(parts.remove(0))
    }
}

fn sorted(axes: &[Axis]) -> Vec<Axis> {
    let mut axes = axes.to_vec();
    axes.sort_unstable();
    axes.dedup();
    axes
}
