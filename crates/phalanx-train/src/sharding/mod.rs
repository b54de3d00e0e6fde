//! Sharding: each rank keeps a part of the optimizer's state, of the gradients, or of the parameters as well (ZeRO, Rajbhandari et al. 2020).
//!
//! ```
//! use phalanx_train::device::Host;
//! use phalanx_train::optimizer::Sgd;
//! use phalanx_train::sharding::{FlatLayout, Reduction, ShardedGroup};
//!
//! let results = phalanx::try_run(2, |comm| {
//!     let layout = FlatLayout::new(&[("weight", [2, 2]), ("bias", [2, 1])], comm.world_size())?;
//!     let mut initial = vec![1.0f32; layout.len()]; // the same on every rank
//!     initial[6..].fill(0.0); // padding
//!     let optimizer = Sgd { learning_rate: 0.5, momentum: 0.0, nesterov: false, weight_decay: 0.0 };
//!     let mut group = ShardedGroup::<_, f32, f32>::new(&comm, &Host, layout, &initial, &optimizer)?;
//!
//!     let parameters = group.gather(&comm)?; // all of them, until they are released
//!     let gradient: Vec<f32> = parameters.iter().map(|p| p * (comm.rank() + 1) as f32).collect();
//!     group.reduce_gradient(&comm, &&gradient[..], Reduction::Mean)?;
//!     group.step(&optimizer, 1.0)?;
//!     Ok::<_, phalanx_train::Error>(group.gather(&comm)?[..6].to_vec())
//! })?;
//! assert_eq!(results, [[0.25; 6]; 2]); // 1 - 0.5 * (1 + 2) / 2
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! What is sharded follows from the calls:
//!
//! | | gradients | parameters |
//! |---|---|---|
//! | optimizer's state (ZeRO-1) | reduced by all: [`take_gradient`](ShardedGroup::take_gradient) | kept: [`gather`](ShardedGroup::gather) once a step |
//! | and gradients (ZeRO-2) | [`reduce_gradient`](ShardedGroup::reduce_gradient) | kept |
//! | and parameters (ZeRO-3) | `reduce_gradient` | gathered before each use, [`release`](ShardedGroup::release)d after it |
//!
//! A model has several groups, one for each layer for example. With ZeRO-3 a rank then has the parameters of one or two layers in
//! full: gather a layer's, use them, release them; backwards again, since what was released is gathered anew. With
//! [`prefetch`](ShardedGroup::prefetch) the next layer's come while this one's are used. **Hybrid**: shard among
//! the ranks of a host and give [`reduce_gradient_among`](ShardedGroup::reduce_gradient_among) the communicator of those that have the same part on
//! other hosts.
//!
//! Master parameters, moments and the accumulated gradient are of type `M` (f32, say), the gathered parameters and the gradients
//! that come in of type `T` (bf16, say). Gradients are summed in `M`.

mod layout;

pub use layout::FlatLayout;

use crate::device::{Number, Overlap};
use crate::optimizer::Optimizer;
use crate::{Error, Result};
use phalanx::{Comm, Source};

/// What becomes of the gradients of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reduction {
    /// Their mean.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// This rank's part of a group of parameters: master parameters, gradient and the optimizer's state.
#[derive(Debug)]
pub struct ShardedGroup<D: Overlap, T: Number, M: Number> {
    device: D,
    layout: FlatLayout,
    rank: usize,
    master: D::Buffer<M>,
    gradient: D::Buffer<M>,
    states: Vec<D::Buffer<M>>,
    /// Steps made.
    steps: u64,
    /// All parameters, as long as they are gathered and current.
    gathered: Option<D::Buffer<T>>,
    /// The same, on their way.
    gathering: Option<D::Gathering<T>>,
}

impl<D: Overlap, T: Number, M: Number> ShardedGroup<D, T, M> {
    /// Takes this rank's part of the parameters. `initial` has all of them, as `layout` says, and is the same on every rank. No rank is asked.
    ///
    /// # Errors
    /// [`Error::Usage`] if the layout is for another number of ranks, `initial` of another length, or the optimizer cannot update one of the
    /// parameters. Errors of the device.
    pub fn new(
        comm: &Comm,
        device: &D,
        layout: FlatLayout,
        initial: &[M],
        optimizer: &impl Optimizer<D>,
    ) -> Result<ShardedGroup<D, T, M>> {
        let (rank, ranks, part) = (comm.rank(), comm.world_size(), layout.part_len());
        if layout.len() != ranks * part {
            return Err(Error::usage(format!(
                "a layout for {} ranks with a communicator of {ranks}: make the layout with its world_size()",
                layout.len() / part
            )));
        }
        if initial.len() != layout.len() {
            return Err(Error::usage(format!(
                "{} initial numbers for a layout of {}: give all ranks' parts, with padding",
                initial.len(),
                layout.len()
            )));
        }
        for (name, shape, _) in layout.parameters() {
            if let Some(problem) = optimizer.problem_with(shape) {
                return Err(Error::usage(format!("parameter {name:?}: {problem}")));
            }
        }
        let cut = |rank| layout.pieces(rank).find(|(_, piece, _)| !piece.is_whole());
        if let Some((name, ..)) = (0..ranks).filter(|_| optimizer.needs_whole_parameters()).find_map(cut) {
            return Err(Error::usage(format!(
                "parameter {name:?} is cut between ranks, and the optimizer needs it whole: use FlatLayout::whole"
            )));
        }
        if let Some(name) = layout.split_parameter().filter(|_| optimizer.needs_whole_parameters()) {
            return Err(Error::usage(format!(
                "the plan splits parameter {name:?}, and the optimizer needs it whole: replicate it, or take another optimizer for it"
            )));
        }
        let states = (0..optimizer.states()).map(|_| device.zeros(part)).collect::<Result<_>>()?;
        Ok(ShardedGroup {
            master: device.upload(&initial[layout.part(rank)])?,
            gradient: device.zeros(part)?,
            device: device.clone(),
            layout,
            rank,
            states,
            steps: 0,
            gathered: None,
            gathering: None,
        })
    }

    /// Where the parameters lie.
    pub fn layout(&self) -> &FlatLayout {
        &self.layout
    }

    pub(crate) fn device(&self) -> &D {
        &self.device
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Steps made so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// All parameters, from the parts of all ranks. Collective, unless they are there: every rank gathers and releases alike.
    ///
    /// # Errors
    /// Errors of `comm` and of the device.
    pub fn gather(&mut self, comm: &Comm) -> Result<&D::Buffer<T>> {
        self.prefetch(comm)?;
        if let Some(gathering) = self.gathering.take() {
            self.gathered = Some(self.device.finish_gather(gathering)?);
        }
        Ok(self.gathered.as_ref().expect("they were gathered just now"))
    }

    /// Starts to [`gather`](ShardedGroup::gather) the parameters, and does not wait for them. Collective, as `gather` is.
    ///
    /// Called for the next layer before this one is computed, it hides the time of the gathering.
    ///
    /// # Errors
    /// Errors of `comm` and of the device.
    pub fn prefetch(&mut self, comm: &Comm) -> Result<()> {
        if self.gathered.is_none() && self.gathering.is_none() {
            let device = &self.device;
            let own = device.view(&self.master, 0..self.layout.part_len());
            let all = device.alloc::<T>(self.layout.len())?;
            self.gathering = Some(device.start_gather(comm, &own, all)?);
        }
        Ok(())
    }

    /// Frees the gathered parameters. Waits for those that are on their way.
    pub fn release(&mut self) {
        if let Some(gathering) = self.gathering.take() {
            // If it has failed, so has the communicator, and the next call says so.
            let _ = self.device.finish_gather(gathering);
        }
        self.gathered = None;
    }

    /// Adds the mean or sum of all ranks' gradients to this rank's part. `gradient` is of all parameters, as the layout says. Collective: a
    /// rank without a gradient gives zeros.
    ///
    /// Called several times before a step, it accumulates. On a GPU it is started, beside what is computed; what is enqueued then waits for
    /// all but the last two.
    ///
    /// # Errors
    /// [`Error::Usage`] if `gradient` is of another length. Errors of `comm` and of the device.
    pub fn reduce_gradient(
        &mut self,
        comm: &Comm,
        gradient: &D::View<'_, T>,
        reduction: Reduction,
    ) -> Result<()> {
        self.reduce_gradient_among(comm, None, gradient, reduction)
    }

    /// As [`reduce_gradient`](ShardedGroup::reduce_gradient), and then among the `replicas`: the ranks of other groups that have the same part.
    ///
    /// # Errors
    /// As [`reduce_gradient`](ShardedGroup::reduce_gradient).
    pub fn reduce_gradient_among(
        &mut self,
        comm: &Comm,
        replicas: Option<&Comm>,
        gradient: &D::View<'_, T>,
        reduction: Reduction,
    ) -> Result<()> {
        self.check(gradient)?;
        let (device, part, all) = (&self.device, self.layout.part_len(), self.layout.len());
        let mut sums = device.alloc::<M>(all)?;
        device.convert(gradient, &mut device.view_mut(&mut sums, 0..all))?;
        let ranks = comm.world_size() * replicas.map_or(1, Comm::world_size);
        let factor = match reduction {
            Reduction::Mean => 1.0 / ranks as f64,
            Reduction::Sum => 1.0,
        };
        device.add_reduced(comm, replicas, sums, factor, &mut device.view_mut(&mut self.gradient, 0..part))
    }

    /// Adds this rank's part of a gradient that is reduced already, by [all_reduce](Comm::all_reduce) for example. Not collective.
    ///
    /// # Errors
    /// [`Error::Usage`] if `gradient` is of another length. Errors of the device.
    pub fn take_gradient(&mut self, gradient: &D::Buffer<T>) -> Result<()> {
        let (device, part) = (&self.device, self.layout.part_len());
        self.check(&device.view(gradient, 0..gradient.len()))?;
        let own = device.view(gradient, self.layout.part(self.rank));
        device.add(1.0, &own, &mut device.view_mut(&mut self.gradient, 0..part))
    }

    /// This rank's part of the gradient. Padding is 0. [`global_norm_of_groups`](crate::norm::global_norm_of_groups) is the norm of all.
    pub fn gradient(&self) -> D::View<'_, M> {
        self.device.view(&self.gradient, 0..self.layout.part_len())
    }

    pub(crate) fn gradient_in(&self, range: std::ops::Range<usize>) -> D::View<'_, M> {
        self.device.view(&self.gradient, range)
    }

    /// Makes a step with `factor` times the gradient (1, or what clipping and loss scales ask for), and sets the gradient to 0. Not
    /// collective. The gathered parameters are released, since they are older.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn step(&mut self, optimizer: &impl Optimizer<D>, factor: f64) -> Result<()> {
        let (device, part) = (&self.device, self.layout.part_len());
        self.steps += 1;
        if factor != 1.0 {
            device.scale(&mut device.view_mut(&mut self.gradient, 0..part), factor)?;
        }
        for (_, piece, range) in self.layout.pieces(self.rank) {
            let gradient = device.view(&self.gradient, range.clone());
            let mut parameters = device.view_mut(&mut self.master, range.clone());
            let mut states: Vec<_> =
                self.states.iter_mut().map(|state| device.view_mut(state, range.clone())).collect();
            optimizer.update(device, self.steps, &piece, &gradient, &mut parameters, &mut states)?;
        }
        device.fill(&mut device.view_mut(&mut self.gradient, 0..part), 0.0)?;
        self.release();
        Ok(())
    }

    /// Sets the gradient to 0 without a step: after an overflow, say.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn skip(&mut self) -> Result<()> {
        let part = self.layout.part_len();
        self.device.fill(&mut self.device.view_mut(&mut self.gradient, 0..part), 0.0)
    }

    /// This rank's part of the master parameters and of each state, for checkpoints. [`FlatLayout::pieces`] says what is where.
    pub fn parts(&self) -> impl Iterator<Item = &D::Buffer<M>> {
        std::iter::once(&self.master).chain(&self.states)
    }

    /// The same, to restore them, with the number of steps made. Gathered parameters are released.
    pub fn restore(&mut self, steps: u64) -> impl Iterator<Item = &mut D::Buffer<M>> {
        self.steps = steps;
        self.release();
        std::iter::once(&mut self.master).chain(&mut self.states)
    }

    fn check(&self, gradient: &D::View<'_, T>) -> Result<()> {
        let (len, expected) = (gradient.len(), self.layout.len());
        if len == expected {
            return Ok(());
        }
        Err(Error::usage(format!(
            "a gradient of {len} numbers for a layout of {expected}: give all of it, with padding"
        )))
    }
}
