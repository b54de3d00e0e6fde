//! [`Ranks::average`]: the gradients of the ranks' parts of a batch, averaged; and clipping.

use crate::ranks::usage;
use crate::{Error, Ranks, Result};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Element, Tensor, TensorData};
use phalanx::{PreMulSum, ReduceOp, bf16, f16};
use phalanx_train::device::{Host, Number};
use phalanx_train::norm::{Squares, clip_factor};
use std::collections::HashSet;

impl Ranks {
    /// The mean of the ranks' gradients, in which each rank counts alike. Collective.
    ///
    /// A parameter that only some ranks have used counts as zero on the others. One that no rank has used has no gradient afterwards, so that
    /// momentum does not move it. A tied parameter is averaged once. On the CPU gradients are averaged where they lie; those on another
    /// device go through host memory.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::{GradientsParams, SgdConfig};
    /// use burn::tensor::Tensor;
    /// use phalanx_burn::Ranks;
    ///
    /// let trained = Ranks::run(2, |ranks| {
    ///     let device = ranks.device().autodiff();
    ///     let mut model = ranks.broadcast(LinearConfig::new(4, 1).init(&device))?;
    ///     let mut optimizer = SgdConfig::new().init();
    ///     for _ in 0..3 {
    ///         let batch = Tensor::full([8, 4], ranks.rank() as f32, &device);
    ///         let loss = model.forward::<2>(batch).square().mean();
    ///         let gradients = GradientsParams::from_grads(loss.backward(), &model);
    ///         let gradients = ranks.average(gradients, &model)?;
    ///         model = optimizer.step(0.1, model, gradients);
    ///     }
    ///     Ok(model.weight.val().into_data())
    /// })?;
    /// let trained = trained.into_iter().collect::<phalanx_burn::Result<Vec<_>>>()?;
    /// assert_eq!(trained[0], trained[1]);
    /// # Ok::<(), phalanx_burn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Mismatch`](crate::Error::Mismatch) on all ranks if their modules differ; it names the first difference.
    /// [`Error::Usage`](crate::Error::Usage) for a gradient that is not of f64, f32, f16 or bf16. phalanx's errors.
    pub fn average<M: Module>(&self, gradients: GradientsParams, module: &M) -> Result<GradientsParams> {
        let mean = self.average_by(Some(gradients), 1.0, module)?;
        Ok(mean.expect("this rank has a batch"))
    }

    /// The same mean, in which each rank counts by its weight: the number of samples that its loss is the mean of. Collective.
    ///
    /// A rank that has run out of batches passes `None`, and gets the others' mean, to make the same step. The answer is `None` when no rank has
    /// a batch, on all ranks at once.
    ///
    /// # Errors
    /// As for [`average`](Ranks::average); [`Error::Usage`](crate::Error::Usage) also for a weight that is not greater than 0.
    pub fn average_by<M: Module>(
        &self,
        gradients: Option<GradientsParams>,
        weight: f64,
        module: &M,
    ) -> Result<Option<GradientsParams>> {
        if gradients.is_some() && !(weight > 0.0 && weight.is_finite()) {
            return usage(format!("a weight of {weight}; it is the number of samples, greater than 0"));
        }
        self.agree(module)?;
        // The ranks' weights, and for each parameter the number of ranks that have a gradient.
        let mut header = vec![0.0; self.world_size()];
        header[self.rank()] = if gradients.is_some() { weight } else { 0.0 };
        let gradients = gradients.unwrap_or_default();
        header.extend(gradients_there(&gradients, module));
        self.comm().all_reduce_in_place(&mut header, ReduceOp::Sum)?;
        let (weights, users) = header.split_at(self.world_size());
        let total: f64 = weights.iter().sum();
        if total == 0.0 {
            return Ok(None);
        }
        let differ = weights.iter().any(|other| *other != weights[0]);
        let share = differ.then(|| weights[self.rank()] / total);
        let mut averager = Averager {
            ranks: self,
            gradients,
            users: users.iter(),
            share,
            seen: HashSet::new(),
            outcome: Ok(()),
        };
        module.visit(&mut averager);
        averager.outcome?;
        Ok(Some(averager.gradients))
    }

    /// Makes the sum over ranks of `share` times the elements, or their mean if there is no share.
    fn reduce<T: Element + Number>(&self, data: &mut TensorData, share: Option<f64>) -> Result<()> {
        let elements = data.as_mut_slice::<T>().map_err(|error| Error::Usage(error.to_string()))?;
        match share {
            None => self.comm().all_reduce_in_place(elements, ReduceOp::Avg)?,
            Some(share) => self.comm().all_reduce_in_place(elements, PreMulSum(T::from_f64(share)))?,
        }
        Ok(())
    }

    fn average_data(&self, mut data: TensorData, share: Option<f64>) -> Result<TensorData> {
        let dtype = data.dtype();
        match dtype {
            DType::F64 => self.reduce::<f64>(&mut data, share)?,
            DType::F32 => self.reduce::<f32>(&mut data, share)?,
            // A share in a type of 8 or 11 bits would be wrong by as much as a rank.
            DType::F16 | DType::BF16 if self.sums_in_f32 || share.is_some() => {
                data = data.convert_dtype(DType::F32);
                self.reduce::<f32>(&mut data, share)?;
                data = data.convert_dtype(dtype);
            }
            DType::F16 => self.reduce::<f16>(&mut data, share)?,
            DType::BF16 => self.reduce::<bf16>(&mut data, share)?,
            other => {
                return usage(format!("a gradient of {other:?}; f64, f32, f16 and bf16 can be averaged"));
            }
        }
        Ok(data)
    }
}

/// For each parameter of floating-point numbers, whether it has a gradient: 1 or 0.
fn gradients_there<M: Module>(gradients: &GradientsParams, module: &M) -> Vec<f64> {
    struct There<'a> {
        gradients: &'a GradientsParams,
        seen: HashSet<ParamId>,
        flags: Vec<f64>,
    }
    impl ModuleVisitor for There<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.seen.insert(param.id) {
                self.flags.push(if self.gradients.get::<D>(param.id).is_some() { 1.0 } else { 0.0 });
            }
        }
    }
    let mut there = There { gradients, seen: HashSet::new(), flags: Vec::new() };
    module.visit(&mut there);
    there.flags
}

/// Averages the gradients of a module, one after another.
struct Averager<'a> {
    ranks: &'a Ranks,
    gradients: GradientsParams,
    /// How many ranks have a gradient of the next parameter, and of those behind it.
    users: std::slice::Iter<'a, f64>,
    share: Option<f64>,
    seen: HashSet<ParamId>,
    outcome: Result<()>,
}

impl ModuleVisitor for Averager<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let is_used = self.users.next().is_some_and(|users| *users > 0.0);
        if !is_used || self.outcome.is_err() {
            return;
        }
        let base = param.base();
        let (device, data) = match self.gradients.remove::<D>(param.id) {
            Some(gradient) => (gradient.device(), gradient.into_data()),
            None => {
                let zeros = TensorData::full_dtype(base.shape(), 0.0, base.dtype());
                (base.device().without_autodiff(), zeros)
            }
        };
        match self.ranks.average_data(data, self.share) {
            Ok(data) => {
                let dtype = data.dtype();
                self.gradients.register(param.id, Tensor::<D>::from_data(data, (&device, dtype)));
            }
            Err(error) => self.outcome = Err(error),
        }
    }
}

/// Scales the gradients of a module so that the norm of all together is at most `most`; answers the norm before. burn's own clipping looks at
/// each parameter by itself.
///
/// After [`Ranks::average`] all ranks have the same gradients, and scale them alike without a word to each other. If the norm is not finite,
/// nothing changes.
///
/// # Errors
/// [`Error::Usage`](crate::Error::Usage) for a bound that is not greater than 0, or a gradient that is not of f64, f32, f16 or bf16.
pub fn clip<M: Module>(gradients: &mut GradientsParams, module: &M, most: f64) -> Result<f64> {
    clip_factor(0.0, most)?;
    let mut norm = Norm { gradients, seen: HashSet::new(), squares: 0.0, outcome: Ok(()) };
    module.visit(&mut norm);
    let Norm { squares, outcome, .. } = norm;
    outcome?;
    let norm = squares.sqrt();
    let factor = clip_factor(norm, most)?;
    if factor != 1.0 {
        module.visit(&mut Scale { gradients, seen: HashSet::new(), factor });
    }
    Ok(norm)
}

struct Norm<'a> {
    gradients: &'a mut GradientsParams,
    seen: HashSet<ParamId>,
    squares: f64,
    outcome: Result<()>,
}

impl Norm<'_> {
    /// In f64, in the order of the elements: the same bits on every rank.
    fn add(&mut self, data: &TensorData) -> Result<()> {
        fn squares<T: Element + Number>(data: &TensorData) -> Result<f64> {
            let elements = data.as_slice::<T>().map_err(|error| Error::Usage(error.to_string()))?;
            let mut sum = [0.0];
            Host.add_squares(&elements, &mut &mut sum[..])?;
            Ok(sum[0])
        }
        self.squares += match data.dtype() {
            DType::F64 => squares::<f64>(data)?,
            DType::F32 => squares::<f32>(data)?,
            DType::F16 => squares::<f16>(data)?,
            DType::BF16 => squares::<bf16>(data)?,
            other => return usage(format!("a gradient of {other:?}; f64, f32, f16 and bf16 can be clipped")),
        };
        Ok(())
    }
}

impl ModuleVisitor for Norm<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) || self.outcome.is_err() {
            return;
        }
        // Taken out, so that its memory has one owner and is not copied.
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        let (device, data) = (gradient.device(), gradient.into_data());
        self.outcome = self.add(&data);
        let dtype = data.dtype();
        self.gradients.register(param.id, Tensor::<D>::from_data(data, (&device, dtype)));
    }
}

struct Scale<'a> {
    gradients: &'a mut GradientsParams,
    seen: HashSet<ParamId>,
    factor: f64,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.seen.insert(param.id)
            && let Some(gradient) = self.gradients.remove::<D>(param.id)
        {
            self.gradients.register(param.id, gradient.mul_scalar(self.factor));
        }
    }
}
