//! [`DataParallel`]: the gradients of the ranks' parts of a batch, averaged.

use crate::error::{failed, usage};
use crate::ranks::Ranks;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarMap;
use phalanx::ReduceOp;

/// Settings of [`DataParallel`], the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Bytes of a bucket: gradients are exchanged together until there are so many. Default 25 MiB.
    pub bucket_bytes: usize,
    /// Whether gradients of bf16 and f16 are summed in f32. Twice as much is sent. Default no.
    pub sums_in_f32: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { bucket_bytes: 25 << 20, sums_in_f32: false }
    }
}

/// Parameters that all ranks have, of which each computes the gradient of its part of a batch.
///
/// With an optimiser of candle-nn:
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_nn::{AdamW, Module, Optimizer, VarBuilder, VarMap, linear};
/// use phalanx_candle::{DataParallel, Ranks};
///
/// let trained = Ranks::try_run(2, |ranks| {
///     let variables = VarMap::new();
///     let model = linear(4, 1, VarBuilder::from_varmap(&variables, DType::F32, ranks.device()))?;
///     let parallel = DataParallel::new(&ranks, &variables)?;
///     let mut optimizer = AdamW::new_lr(variables.all_vars(), 0.1)?;
///     for _ in 0..3 {
///         let batch = Tensor::full(ranks.rank() as f32, (8, 4), ranks.device())?;
///         let loss = model.forward(&batch)?.sqr()?.mean_all()?;
///         let gradients = parallel.average(Some(loss.backward()?), 8.0)?;
///         optimizer.step(&gradients.expect("some rank has a batch"))?;
///     }
///     model.weight().to_vec2::<f32>()
/// })?;
/// assert_eq!(trained[0], trained[1]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// candle gives all gradients at the end of `backward`, so the exchange cannot overlap it. Gradients of several batches are
/// added up by `GradStore::extend`, without communication; `average` then takes the sum, and the weight of all of them.
#[derive(Debug)]
pub struct DataParallel {
    ranks: Ranks,
    /// In the order of their names, which is the same on all ranks; a `VarMap` has none.
    variables: Vec<(String, Var)>,
    settings: Settings,
    /// Places in `variables` that are exchanged together, all of one type.
    buckets: Vec<Vec<usize>>,
}

impl DataParallel {
    /// Takes the variables of a map, and gives all ranks rank 0's values. Collective.
    ///
    /// # Errors
    /// On all ranks, if their variables differ in names, shapes or types.
    pub fn new(ranks: &Ranks, variables: &VarMap) -> Result<DataParallel> {
        let named = variables.data().lock().expect("no panic with it locked");
        let named = named.iter().map(|(name, variable)| (name.clone(), variable.clone())).collect();
        DataParallel::with(ranks, named, Settings::default())
    }

    /// The same, of variables by name, with other settings. Collective.
    ///
    /// # Errors
    /// As for [`new`](DataParallel::new); for a name that is there twice, and for a type that is not of floating-point numbers.
    pub fn with(ranks: &Ranks, variables: Vec<(String, Var)>, settings: Settings) -> Result<DataParallel> {
        let mut variables = variables;
        variables.sort_by(|a, b| a.0.cmp(&b.0));
        if let Some(pair) = variables.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(usage(format!("two variables are named {:?}; name them apart", pair[0].0)));
        }
        if let Some((name, other)) = variables.iter().find(|(_, variable)| !variable.dtype().is_float()) {
            return Err(usage(format!(
                "{name:?} is of {}, which has no gradients; leave it out",
                other.dtype().as_str()
            )));
        }
        if settings.bucket_bytes == 0 {
            return Err(usage("buckets of 0 bytes hold nothing; 25 MiB is usual".into()));
        }
        compare(ranks, &variables)?;
        for (_, variable) in &variables {
            ranks.broadcast_in_place(variable, 0)?;
        }
        let buckets = fill(&variables, settings.bucket_bytes);
        Ok(DataParallel { ranks: ranks.clone(), variables, settings, buckets })
    }

    /// The variables, in the order in which they are exchanged.
    pub fn variables(&self) -> &[(String, Var)] {
        &self.variables
    }

    /// Replaces the gradients by their mean over all ranks. Collective.
    ///
    /// `weight` is the number of samples that the loss is the mean of, so that each sample counts alike. A rank that has run out of
    /// batches passes `None`, and gets the others' mean, to make the same step; the answer is `None` when no rank has a batch, on all
    /// ranks at once. A variable that no rank has used has no gradient afterwards; one that some have used counts as 0 elsewhere.
    ///
    /// # Errors
    /// For a weight that is not greater than 0; phalanx's errors.
    pub fn average(&self, gradients: Option<GradStore>, weight: f64) -> Result<Option<GradStore>> {
        if gradients.is_some() && !(weight > 0.0 && weight.is_finite()) {
            return Err(usage(format!("a weight of {weight}; it is the number of samples, greater than 0")));
        }
        let own = if gradients.is_some() { weight } else { 0.0 };
        let mut gradients = match gradients {
            Some(gradients) => gradients,
            None => nothing()?,
        };
        // The sum of the weights, and for each variable the number of ranks that have a gradient.
        let mut header = vec![own];
        let has = |(_, variable): &(String, Var)| if gradients.get(variable).is_some() { 1.0 } else { 0.0 };
        header.extend(self.variables.iter().map(has));
        self.ranks.comm().all_reduce_in_place(&mut header, ReduceOp::Sum).map_err(failed)?;
        let (total, users) = (header[0], &header[1..]);
        if total == 0.0 {
            return Ok(None);
        }
        for bucket in &self.buckets {
            let used: Vec<&Var> = bucket
                .iter()
                .filter(|place| users[**place] > 0.0)
                .map(|place| &self.variables[*place].1)
                .collect();
            self.average_bucket(&used, &mut gradients, own / total)?;
        }
        Ok(Some(gradients))
    }

    /// Replaces the gradients of some variables by the ranks' sum of `share` times them.
    fn average_bucket(&self, variables: &[&Var], gradients: &mut GradStore, share: f64) -> Result<()> {
        let Some(first) = variables.first() else { return Ok(()) };
        let dtype = match first.dtype() {
            DType::BF16 | DType::F16 if self.settings.sums_in_f32 => DType::F32,
            dtype => dtype,
        };
        let flat = |variable: &&Var| match gradients.get(variable) {
            Some(gradient) if share > 0.0 => gradient.to_dtype(dtype)?.flatten_all()?.affine(share, 0.0),
            _ => Tensor::zeros(variable.elem_count(), dtype, variable.device()),
        };
        let parts = variables.iter().map(flat).collect::<Result<Vec<_>>>()?;
        let sum = Tensor::cat(&parts, 0)?;
        self.ranks.all_reduce_in_place(&sum, ReduceOp::Sum)?;
        let mut start = 0;
        for variable in variables {
            let len = variable.elem_count();
            let gradient =
                sum.narrow(0, start, len)?.reshape(variable.shape())?.to_dtype(variable.dtype())?;
            gradients.insert(variable, gradient);
            start += len;
        }
        Ok(())
    }

    /// Scales the gradients so that their norm is at most `most`; answers the norm before. Of variables that all ranks have whole.
    ///
    /// # Errors
    /// For a bound that is not greater than 0.
    pub fn clip(&self, gradients: &mut GradStore, most: f64) -> Result<f64> {
        check_bound(most)?;
        let norm = self.squares(gradients, |_| true)?.sqrt();
        self.scale(gradients, norm, most)
    }

    /// The same, where the variables for which `is_split` holds are parts of parameters, of which `ranks` have one each: their squares are
    /// summed over these ranks, and the others count once. Collective among `ranks`.
    ///
    /// # Errors
    /// As for [`clip`](DataParallel::clip); phalanx's errors.
    pub fn clip_split(
        &self,
        gradients: &mut GradStore,
        most: f64,
        ranks: &Ranks,
        is_split: impl Fn(&str) -> bool,
    ) -> Result<f64> {
        check_bound(most)?;
        let mut of_parts = [self.squares(gradients, &is_split)?];
        ranks.comm().all_reduce_in_place(&mut of_parts, ReduceOp::Sum).map_err(failed)?;
        let norm = (of_parts[0] + self.squares(gradients, |name| !is_split(name))?).sqrt();
        self.scale(gradients, norm, most)
    }

    /// The sum of the squares of some variables' gradients.
    fn squares(&self, gradients: &GradStore, takes: impl Fn(&str) -> bool) -> Result<f64> {
        let taken = self.variables.iter().filter(|(name, _)| takes(name));
        let squares = taken.filter_map(|(_, variable)| gradients.get(variable)).map(|gradient| {
            let sum = gradient.to_dtype(DType::F64)?.sqr()?.sum_all()?;
            sum.to_device(&Device::Cpu)?.to_scalar::<f64>()
        });
        squares.sum()
    }

    fn scale(&self, gradients: &mut GradStore, norm: f64, most: f64) -> Result<f64> {
        if norm > most {
            for (_, variable) in &self.variables {
                if let Some(gradient) = gradients.remove(variable) {
                    gradients.insert(variable, (gradient * (most / norm))?);
                }
            }
        }
        Ok(norm)
    }
}

fn check_bound(most: f64) -> Result<()> {
    if most > 0.0 && most.is_finite() {
        return Ok(());
    }
    Err(usage(format!("a norm of at most {most}; the bound must be greater than 0")))
}

/// A store without gradients. candle makes one only by `backward`.
fn nothing() -> Result<GradStore> {
    let zero = Tensor::zeros((), DType::F32, &Device::Cpu)?;
    let mut gradients = zero.backward()?;
    gradients.remove(&zero);
    Ok(gradients)
}

/// An error on all ranks if their variables differ.
fn compare(ranks: &Ranks, variables: &[(String, Var)]) -> Result<()> {
    let describe =
        |(name, variable): &(String, Var)| format!("{name} {:?} {:?}\n", variable.dims(), variable.dtype());
    let own: String = variables.iter().map(describe).collect();
    let print = own.bytes().fold(0xcbf2_9ce4_8422_2325u64, |print, byte| {
        (print ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mut prints = vec![0; ranks.world_size()];
    ranks.comm().all_gather(&[print], &mut prints).map_err(failed)?;
    match prints.iter().position(|other| *other != prints[0]) {
        None => Ok(()),
        Some(rank) => Err(usage(format!(
            "rank {rank} has other variables (names, shapes or types) than rank 0; rank {} has {}",
            ranks.rank(),
            variables.len()
        ))),
    }
}

/// Puts variables together until a bucket is full, those of each type by themselves.
fn fill(variables: &[(String, Var)], bytes: usize) -> Vec<Vec<usize>> {
    let mut full: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<(DType, usize, Vec<usize>)> = Vec::new();
    for (place, (_, variable)) in variables.iter().enumerate() {
        let (dtype, size) = (variable.dtype(), variable.elem_count() * variable.dtype().size_in_bytes());
        let index = open.iter().position(|(other, ..)| *other == dtype).unwrap_or_else(|| {
            open.push((dtype, 0, Vec::new()));
            open.len() - 1
        });
        let (_, filled, bucket) = &mut open[index];
        if *filled + size > bytes && !bucket.is_empty() {
            full.push(std::mem::take(bucket));
            *filled = 0;
        }
        *filled += size;
        bucket.push(place);
    }
    full.extend(open.into_iter().map(|(.., bucket)| bucket));
    full
}
