//! Norms, loss scales and checksums: what all ranks must decide alike.
//!
//! ```
//! use phalanx_train::device::Host;
//! use phalanx_train::mesh::{Axis, Layout, Mesh, Placement};
//! use phalanx_train::norm::{LossScaler, clip};
//!
//! let norms = phalanx::try_run(2, |comm| {
//!     let mesh = Mesh::new(&comm, &[(Axis::Tensor, 2)])?;
//!     let split = Layout::replicated(&[2]).with(Axis::Tensor, Placement::Split(0));
//!     let replicated = Layout::replicated(&[1]);
//!     // Of the whole gradient, 3 | 4, each rank has a half; of the other, both have all.
//!     let (mut half, mut all) = ([3.0f32 + comm.rank() as f32], [12.0f32]);
//!     let norm = clip(&mesh, &Host, &mut [(&split, &mut half[..]), (&replicated, &mut all[..])], 6.5)?;
//!     assert_eq!(all, [6.0]);
//!     assert!(LossScaler::new(65536.0).update(norm)); // finite: take the step
//!     Ok::<_, phalanx_train::Error>(norm)
//! })?;
//! assert_eq!(norms, [13.0; 2]);
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! Each element counts once, whatever its placement: of what several ranks hold, [copy 0](crate::mesh::Block::is_counted) counts. Every
//! rank gets the parts of all ranks and adds them in rank order, so the norm has the same bits everywhere, and so has each decision that is
//! made from it.

#[cfg(feature = "cuda")]
mod gpu;

use crate::device::{Device, Host, Number, Overlap};
use crate::mesh::{Layout, Mesh, Placement};
use crate::sharding::ShardedGroup;
use crate::{Error, Result};
use phalanx::{DType, Source};

/// Arithmetic of norms and checksums.
pub trait Squares: Device {
    /// `to += Σ from²`, computed in f64; `to` has one element, `from` any number.
    fn add_squares<T: Number>(&self, from: &Self::View<'_, T>, to: &mut Self::ViewMut<'_, f64>)
    -> Result<()>;

    /// A checksum of each of several views, over the bits of its numbers and their places. It waits for the numbers.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn checksums<T: Number>(&self, views: &[&Self::View<'_, T>]) -> Result<Vec<u64>>;
}

impl Squares for Host {
    fn checksums<T: Number>(&self, views: &[&&[T]]) -> Result<Vec<u64>> {
        let sum = |view: &&&[T]| {
            let places = (0u64..).zip(view.iter());
            places.fold(0u64, |sum, (at, x)| sum.wrapping_add(mix(bits(*x), at)))
        };
        Ok(views.iter().map(sum).collect())
    }

    fn add_squares<T: Number>(&self, from: &&[T], to: &mut &mut [f64]) -> Result<()> {
        // Four sums, which the processor adds side by side.
        let (quads, rest) = from.as_chunks::<4>();
        let mut sums = [0.0; 4];
        for quad in quads {
            for (sum, x) in sums.iter_mut().zip(quad) {
                *sum += x.to_f64() * x.to_f64();
            }
        }
        let rest: f64 = rest.iter().map(|x| x.to_f64() * x.to_f64()).sum();
        to[0] += sums.iter().sum::<f64>() + rest;
        Ok(())
    }
}

/// The square root of the sum of the squares of all elements, each counted once. Collective over the mesh; waits for the result.
///
/// `parts` has what this rank holds, with its layout: other ranks may hold other parameters. If an element on any rank is not finite, the
/// norm is not, also if the element is of a copy that does not count.
///
/// # Errors
/// [`Error::Usage`] for a length that is not the block's, a partial placement, or a layout that does not fit the mesh.
pub fn global_norm<D: Squares, T: Number>(
    mesh: &Mesh,
    device: &D,
    parts: &[(&Layout, D::View<'_, T>)],
) -> Result<f64> {
    let mut sums = Sums::new(device)?;
    let counted = parts
        .iter()
        .map(|(layout, data)| is_counted(mesh, layout, data.len()))
        .collect::<Result<Vec<bool>>>()?;
    for ((_, data), counts) in parts.iter().zip(counted) {
        sums.add(data, counts)?;
    }
    sums.norm(mesh)
}

/// Scales all elements so that their [global norm](global_norm) is at most `limit`; answers the norm before. If the norm is not finite,
/// nothing changes. Collective over the mesh.
///
/// # Errors
/// As for `global_norm`; [`Error::Usage`] also for a limit that is not above 0.
pub fn clip<D: Squares, T: Number>(
    mesh: &Mesh,
    device: &D,
    parts: &mut [(&Layout, D::ViewMut<'_, T>)],
    limit: f64,
) -> Result<f64> {
    // Refuses a limit before anything is sent.
    clip_factor(0.0, limit)?;
    let mut sums = Sums::new(device)?;
    let counted = parts
        .iter()
        .map(|(layout, data)| is_counted(mesh, layout, data.len()))
        .collect::<Result<Vec<bool>>>()?;
    for ((_, data), counts) in parts.iter().zip(counted) {
        sums.add(&D::reborrow(data), counts)?;
    }
    let norm = sums.norm(mesh)?;
    let factor = clip_factor(norm, limit)?;
    if factor != 1.0 {
        for (_, data) in parts {
            device.scale(data, factor)?;
        }
    }
    Ok(norm)
}

/// The global norm of the gradients of sharded groups, each element counted once. Collective over the mesh; waits for the result.
///
/// Other ranks may have other groups. A group whose layout was made with [`FlatLayout::placed`](crate::sharding::FlatLayout::placed) knows which
/// of its parameters are copies; parameters of other groups count as the same along all axes but Shard and Pipeline.
///
/// # Errors
/// [`Error::Usage`] if a layout does not fit the mesh. Errors of the communicator and of the device.
pub fn global_norm_of_groups<D: Squares + Overlap, T: Number, M: Number>(
    mesh: &Mesh,
    device: &D,
    groups: &[&ShardedGroup<D, T, M>],
) -> Result<f64> {
    let mut sums = Sums::new(device)?;
    for group in groups {
        for (name, _, range) in group.layout().pieces(group.rank()) {
            let counts = group.layout().is_counted(name, mesh.shape(), mesh.rank())?;
            sums.add(&group.gradient_in(range), counts)?;
        }
    }
    sums.norm(mesh)
}

/// What a gradient of this norm is multiplied by, for [`step`](crate::sharding::ShardedGroup::step), so that the norm is at most `limit`. 1 for a
/// norm that is not finite: such a step is skipped.
///
/// # Errors
/// [`Error::Usage`] for a limit that is not above 0.
pub fn clip_factor(norm: f64, limit: f64) -> Result<f64> {
    if limit.is_nan() || limit <= 0.0 {
        return Err(Error::usage(format!("a norm cannot be limited to {limit}; give a number above 0")));
    }
    Ok(if norm.is_finite() && norm > limit { limit / norm } else { 1.0 })
}

fn is_counted(mesh: &Mesh, layout: &Layout, len: usize) -> Result<bool> {
    if let Some((axis, _)) = layout.placements.iter().find(|(_, placement)| *placement == Placement::Partial)
    {
        return Err(Error::usage(format!(
            "the norm of summands (partial along {axis:?}) is not that of their sum; reduce them first"
        )));
    }
    let block = layout.local(mesh)?;
    if block.len() != len {
        return Err(Error::usage(format!(
            "rank {} holds {} elements of a parameter of shape {:?}, and {len} were given",
            mesh.rank(),
            block.len(),
            layout.shape
        )));
    }
    Ok(block.is_counted())
}

/// Sums of squares of this rank: of what counts, and of all.
struct Sums<'d, D: Squares> {
    device: &'d D,
    sums: D::Buffer<f64>,
}

impl<'d, D: Squares> Sums<'d, D> {
    fn new(device: &'d D) -> Result<Sums<'d, D>> {
        Ok(Sums { device, sums: device.zeros(2)? })
    }

    fn add<T: Number>(&mut self, data: &D::View<'_, T>, counts: bool) -> Result<()> {
        let place = if counts { 0..1 } else { 1..2 };
        self.device.add_squares(data, &mut self.device.view_mut(&mut self.sums, place))
    }

    fn norm(&self, mesh: &Mesh) -> Result<f64> {
        let device = self.device;
        let ranks = mesh.world().world_size();
        let mut all = device.alloc::<f64>(2 * ranks)?;
        mesh.world()
            .all_gather(&device.view(&self.sums, 0..2), &mut device.view_mut(&mut all, 0..2 * ranks))?;
        let all = device.download(&device.view(&all, 0..2 * ranks))?;
        // Copies that do not count show only whether they are finite: 0 × infinity is not a number.
        let sum: f64 = all.as_chunks::<2>().0.iter().map(|[counted, copies]| counted + 0.0 * copies).sum();
        Ok(sum.sqrt())
    }
}

/// The factor by which a loss is multiplied, so that gradients in f16 do not vanish.
///
/// It halves if a gradient is not finite, and that step is skipped; it doubles after a number of good steps. Its decision follows from the
/// [global norm](global_norm), which all ranks have alike.
#[derive(Debug, Clone, PartialEq)]
pub struct LossScaler {
    scale: f64,
    interval: u32,
    good: u32,
}

impl LossScaler {
    /// Begins with this scale, 65536 say, and doubles it after 2000 good steps.
    pub fn new(scale: f64) -> LossScaler {
        LossScaler { scale, interval: 2000, good: 0 }
    }

    /// The same with another number of good steps.
    #[must_use]
    pub fn doubling_after(mut self, steps: u32) -> LossScaler {
        self.interval = steps;
        self
    }

    /// By what to multiply the loss, and to divide the gradients before they are used.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether to take the step, by the norm of the gradients (scaled or not). If not, nothing may change: no parameter, moment or count of
    /// steps.
    pub fn update(&mut self, norm: f64) -> bool {
        if !norm.is_finite() {
            self.scale /= 2.0;
            self.good = 0;
            return false;
        }
        self.good += 1;
        if self.good >= self.interval {
            self.scale *= 2.0;
            self.good = 0;
        }
        true
    }
}

/// A parameter of this rank for [`ReplicaCheck`]: its name, its layout, and what this rank holds.
pub type Held<'a, D, T> = (&'a str, &'a Layout, <D as Device>::View<'a, T>);

/// Compares the copies of parameters among ranks, every n steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaCheck {
    every: u64,
}

impl ReplicaCheck {
    /// Compares in the steps that are multiples of `steps`; never if that is 0.
    pub fn every(steps: u64) -> ReplicaCheck {
        ReplicaCheck { every: steps }
    }

    /// Compares checksums, in such a step. Collective over the mesh in that case, with the same step on every rank; waits for the
    /// parameters. Ranks may hold different parameters.
    ///
    /// # Errors
    /// [`Error::Mismatch`] on every rank if copies differ: the text names the parameters, and for each the ranks that differ from most of
    /// its holders (from the one with the lowest rank, if there is no majority). A rank that does not have the parameter knows its name only
    /// as a number. [`Error::Usage`] as for [`global_norm`].
    pub fn check<D: Squares, T: Number>(
        &self,
        step: u64,
        mesh: &Mesh,
        device: &D,
        parameters: &[Held<'_, D, T>],
    ) -> Result<()> {
        if self.every == 0 || !step.is_multiple_of(self.every) {
            return Ok(());
        }
        for (_, layout, data) in parameters {
            is_counted(mesh, layout, data.len())?;
        }
        let sums = device.checksums(&parameters.iter().map(|(_, _, data)| data).collect::<Vec<_>>())?;
        let mut own = Vec::with_capacity(3 * parameters.len());
        for ((name, layout, _), sum) in parameters.iter().zip(sums) {
            own.extend([hash(name.bytes().map(u64::from)), block_id(mesh, layout)?, sum]);
        }
        let comm = mesh.world();
        let mut counts = vec![0u64; comm.world_size()];
        comm.all_gather(&[own.len() as u64], &mut counts)?;
        let counts: Vec<usize> = counts.iter().map(|count| *count as usize).collect();
        let mut all = vec![0u64; counts.iter().sum()];
        comm.all_gather_v(&own, &mut all, &counts)?;
        // By name and block, the checksum of each holder, in rank order.
        let mut held = std::collections::BTreeMap::<[u64; 2], Vec<(usize, u64)>>::new();
        let mut rest = &all[..];
        for (rank, count) in counts.iter().enumerate() {
            let (of_rank, others) = rest.split_at(*count);
            rest = others;
            for [name, block, sum] in of_rank.as_chunks::<3>().0 {
                held.entry([*name, *block]).or_default().push((rank, *sum));
            }
        }
        let problems: Vec<String> = held
            .iter()
            .filter_map(|([name, _], sums)| {
                let holders = |sum: u64| sums.iter().filter(|(_, other)| *other == sum).count();
                let right = sums.iter().rev().max_by_key(|(_, sum)| holders(*sum))?.1;
                let wrong: Vec<usize> =
                    sums.iter().filter(|(_, sum)| *sum != right).map(|(rank, _)| *rank).collect();
                let known = parameters.iter().find(|(own, ..)| hash(own.bytes().map(u64::from)) == *name);
                let name = known.map_or_else(|| format!("#{name:016x}"), |(name, ..)| format!("{name:?}"));
                (!wrong.is_empty())
                    .then(|| format!("of {name}, ranks {wrong:?} have other values than the rest"))
            })
            .collect();
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::Mismatch(format!("copies differ in step {step}: {}", problems.join("; "))))
    }
}

/// A number that ranks have alike which hold the same block.
fn block_id(mesh: &Mesh, layout: &Layout) -> Result<u64> {
    let block = layout.local(mesh)?;
    let ranges = block.ranges.iter().flat_map(|range| [range.start as u64, range.end as u64]);
    let own = mesh.shape().dims().iter().filter(|(axis, _)| layout.placement(*axis) == Placement::Own);
    let own = own.map(|(axis, _)| mesh.coordinate(*axis) as u64);
    Ok(hash(ranges.chain(own)))
}

/// The bits of a number.
fn bits<T: Number>(number: T) -> u64 {
    match T::DTYPE {
        DType::F64 => number.to_f64().to_bits(),
        DType::F16 => half::f16::from_f32(number.to_f32()).to_bits().into(),
        DType::Bf16 => half::bf16::from_f32(number.to_f32()).to_bits().into(),
        _ => number.to_f32().to_bits().into(),
    }
}

/// A word and its place, mixed by splitmix64: another word gives another result.
fn mix(word: u64, at: u64) -> u64 {
    let x = word.wrapping_add((at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A hash that no change of a single word leaves as it is.
fn hash(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
    })
}
