//! Compression in the place of the sum of [gradient buckets](crate::buckets).

use super::{LowRank, PowerSgd, Quantize, Quantized};
use crate::buckets::{BucketHook, Values, each_type};
use crate::device::{Device, Number, Overlap};
use crate::{Error, Result};
use phalanx::{Comm, ReduceOp, Source};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Each bucket travels in 8 bits. `buckets.set_hook(Some(Box::new(quantized)))`.
impl<D: Quantize + Overlap> BucketHook<D> for Quantized {
    fn reduce(
        &mut self,
        device: &D,
        _bucket: usize,
        _members: &[(&str, Range<usize>)],
        comm: &Comm,
        values: &mut Values<D>,
    ) -> Result<()> {
        each_type!(values, Values(values, A) => quantized_sum::<D, A>(*self, device, comm, values))
    }
}

fn quantized_sum<D: Quantize, A: Number>(
    quantized: Quantized,
    device: &D,
    comm: &Comm,
    values: &mut D::Buffer<A>,
) -> Result<()> {
    let len = values.len();
    let mut values = device.view_mut(values, 0..len);
    quantized.all_reduce_mean(comm, device, &mut values)?;
    device.scale(&mut values, comm.world_size() as f64)
}

/// [`PowerSgd`] of each matrix in [gradient buckets](crate::buckets); what is no matrix is summed.
///
/// ```
/// use phalanx_train::buckets::{GradientBuckets, Parameter, Settings};
/// use phalanx_train::compress::PowerSgdHook;
/// use phalanx_train::device::Host;
///
/// let means = phalanx::try_run(2, |comm| {
///     let parameters = [Parameter::new::<f32>("bias", 2), Parameter::new::<f32>("weight", 4)];
///     let mut buckets = GradientBuckets::new(&comm, &Host, &parameters, Settings::default())?;
///     let hook = PowerSgdHook::<_, f32>::new(&Host, &[("weight", 2, 2)], 1, 7)?;
///     buckets.set_hook(Some(Box::new(hook.clone())))?; // a clone is the same hook
///     buckets.begin(&comm, 1.0)?;
///     let factor = [1.0, 3.0][comm.rank()];
///     buckets.add(&comm, "weight", &&[1.0, 2.0, 2.0, 4.0f32].map(|x| x * factor)[..])?;
///     buckets.finish(&comm)?;
///     let mut weight = [0.0f32; 4];
///     buckets.read("weight", &mut &mut weight[..])?;
///     Ok::<_, phalanx_train::Error>(weight)
/// })?;
/// for mean in means {
///     for (number, expected) in mean.iter().zip([2.0, 4.0, 4.0, 8.0f32]) {
///         assert!((number - expected).abs() < 1e-5);
///     }
/// }
/// # Ok::<(), phalanx_train::Error>(())
/// ```
///
/// The state belongs to parameters, by their names, so it stays right when buckets are filled in another order or made anew. `M` is the type
/// in which the matrices' gradients are summed: f32, or f64 for gradients of f64.
pub struct PowerSgdHook<D: Device, M: Number> {
    matrices: Arc<Mutex<BTreeMap<String, PowerSgd<D, M>>>>,
}

impl<D: Device, M: Number> Clone for PowerSgdHook<D, M> {
    fn clone(&self) -> Self {
        PowerSgdHook { matrices: self.matrices.clone() }
    }
}

impl<D: LowRank, M: Number> PowerSgdHook<D, M> {
    /// For these matrices: name, rows and columns. `rank` and `seed` as for [`PowerSgd::new`].
    ///
    /// # Errors
    /// As [`PowerSgd::new`]; [`Error::Usage`] for a name that is there twice.
    pub fn new<N: AsRef<str>>(
        device: &D,
        matrices: &[(N, usize, usize)],
        rank: usize,
        seed: u64,
    ) -> Result<PowerSgdHook<D, M>> {
        let mut made = BTreeMap::new();
        for (number, (name, rows, columns)) in matrices.iter().enumerate() {
            let name = name.as_ref();
            let seed = seed.wrapping_add(number as u64);
            let power = PowerSgd::new(device, *rows, *columns, rank, seed).map_err(|error| match error {
                Error::Usage(text) => Error::Usage(format!("{name:?}: {text}")),
                error => error,
            })?;
            if made.insert(name.to_owned(), power).is_some() {
                return Err(Error::usage(format!("two matrices are named {name:?}; name them apart")));
            }
        }
        Ok(PowerSgdHook { matrices: Arc::new(Mutex::new(made)) })
    }

    /// Calls `f` with the name and the [state](PowerSgd::state) of each matrix, for checkpoints: in the order of the names.
    pub fn for_each_state(&self, mut f: impl FnMut(&str, [&mut D::Buffer<M>; 2])) {
        for (name, power) in self.lock().iter_mut() {
            f(name, power.state());
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, PowerSgd<D, M>>> {
        self.matrices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sum<A: Number>(
        &self,
        device: &D,
        members: &[(&str, Range<usize>)],
        comm: &Comm,
        values: &mut D::Buffer<A>,
    ) -> Result<()> {
        let mut matrices = self.lock();
        // What is no matrix is summed in as few calls as possible: members lie one behind the other.
        let is_plain = |(name, _): &&(&str, Range<usize>)| !matrices.contains_key(*name);
        for run in members.chunk_by(|a, b| is_plain(&a) && is_plain(&b)).filter(|run| is_plain(&&run[0])) {
            let range = run[0].1.start..run[run.len() - 1].1.end;
            comm.all_reduce_in_place(&mut device.view_mut(values, range), ReduceOp::Sum)?;
        }
        for (name, range) in members {
            let Some(power) = matrices.get_mut(*name) else { continue };
            let len = range.len();
            let mut view = device.view_mut(values, range.clone());
            // Values and state may have different types; then the values pass through the state's.
            let mut gradient = device.zeros::<M>(len)?;
            let mut gradient = device.view_mut(&mut gradient, 0..len);
            device.convert(&D::reborrow(&view), &mut gradient)?;
            power.reduce(comm, &mut gradient)?;
            device.scale(&mut gradient, comm.world_size() as f64)?;
            device.convert(&D::reborrow(&gradient), &mut view)?;
        }
        Ok(())
    }
}

impl<D: LowRank + Overlap, M: Number> BucketHook<D> for PowerSgdHook<D, M> {
    fn reduce(
        &mut self,
        device: &D,
        _bucket: usize,
        members: &[(&str, Range<usize>)],
        comm: &Comm,
        values: &mut Values<D>,
    ) -> Result<()> {
        each_type!(values, Values(values, A) => self.sum::<A>(device, members, comm, values))
    }
}
