//! [`Ranks::average`]: the gradients of the ranks' parts of a batch, averaged; and clipping.

use crate::elements::Elements;
#[cfg(feature = "cuda")]
use crate::gpu::Collective;
use crate::ranks::usage;
use crate::{Error, Ranks, Result};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Element, Tensor, TensorData};
use phalanx::{PreMulSum, ReduceOp, bf16, f16};
use phalanx_train::device::{Host, Number};
use phalanx_train::norm::{Squares, clip_factor};
use std::collections::HashSet;
use std::iter::Peekable;
use std::vec::IntoIter;

impl Ranks {
    /// The mean of the ranks' gradients, in which each rank counts alike. Collective.
    ///
    /// A parameter that only some ranks have used counts as zero on the others. One that no rank has used has no gradient afterwards, so that
    /// momentum does not move it. A tied parameter is averaged once. Gradients are averaged where they lie, in host memory or on this rank's GPU;
    /// on a GPU the mean is enqueued when this returns. Those on another device are moved, and moved back.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::{GradientsParams, SgdConfig};
    /// use burn::tensor::Tensor;
    /// use phalanx_burn::Ranks;
    ///
    /// let trained = Ranks::try_run(2, |ranks| {
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
        let mut taker = Taker {
            ranks: self,
            gradients,
            users: users.iter(),
            share,
            seen: HashSet::new(),
            taken: Vec::new(),
        };
        module.visit(&mut taker);
        let Taker { gradients, taken, .. } = taker;
        #[cfg(feature = "cuda")]
        self.exchange_on_gpu(Collective::Sum, taken.iter().map(|(_, taken)| &taken.elements))?;
        let average = |(id, taken): (ParamId, Taken)| Ok((id, taken.averaged_on_host(self, share)?));
        let averaged = taken.into_iter().map(average).collect::<Result<Vec<_>>>()?;
        let mut giver = Giver { gradients, averaged: averaged.into_iter().peekable() };
        module.visit(&mut giver);
        Ok(Some(giver.gradients))
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
        match data.dtype() {
            DType::F64 => self.reduce::<f64>(&mut data, share)?,
            DType::F32 => self.reduce::<f32>(&mut data, share)?,
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

/// A gradient that is out of its store, and what it is to be again.
struct Taken {
    elements: Elements,
    device: Device,
    dtype: DType,
}

impl Taken {
    fn averaged_on_host(self, ranks: &Ranks, share: Option<f64>) -> Result<Taken> {
        let elements = match self.elements {
            Elements::Host(data) => Elements::Host(ranks.average_data(data, share)?),
            #[cfg(feature = "cuda")]
            on_gpu @ Elements::Gpu(_) => on_gpu,
        };
        Ok(Taken { elements, ..self })
    }
}

/// Takes the gradients of a module, or zeros where only other ranks have one.
struct Taker<'a> {
    ranks: &'a Ranks,
    gradients: GradientsParams,
    /// How many ranks have a gradient of the next parameter, and of those behind it.
    users: std::slice::Iter<'a, f64>,
    share: Option<f64>,
    seen: HashSet<ParamId>,
    taken: Vec<(ParamId, Taken)>,
}

impl Taker<'_> {
    /// Whether elements of a type are sent as f32. A share in a type of 8 or 11 bits would be wrong by as much as a rank; on the host, a plain mean
    /// is made in f32 anyway.
    fn is_widened(&self, dtype: DType) -> bool {
        let has_exact_share = !self.ranks.has_gpu() || self.ranks.world_size().is_power_of_two();
        let in_f32 = self.ranks.sums_in_f32 || self.share.is_some() || !has_exact_share;
        in_f32 && matches!(dtype, DType::F16 | DType::BF16)
    }
}

impl ModuleVisitor for Taker<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) || self.users.next().is_none_or(|users| *users == 0.0) {
            return;
        }
        let base = param.base();
        let gradient = self.gradients.remove::<D>(param.id);
        let gradient = gradient.unwrap_or_else(|| {
            Tensor::zeros(base.shape(), (&base.device().without_autodiff(), base.dtype()))
        });
        let (device, dtype) = (gradient.device(), gradient.dtype());
        let sent = if self.is_widened(dtype) { gradient.cast(DType::F32) } else { gradient };
        let share = self.share.unwrap_or(1.0 / self.ranks.world_size() as f64);
        let elements = Elements::of(self.ranks, sent, share);
        self.taken.push((param.id, Taken { elements, device, dtype }));
    }
}

/// Puts averaged gradients into their store, in the order in which they were taken.
struct Giver {
    gradients: GradientsParams,
    averaged: Peekable<IntoIter<(ParamId, Taken)>>,
}

impl ModuleVisitor for Giver {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some((id, taken)) = self.averaged.next_if(|(id, _)| *id == param.id) {
            let gradient = taken.elements.place::<D>(param.base().shape(), &taken.device, taken.dtype);
            self.gradients.register(id, gradient);
        }
    }
}

impl Ranks {
    /// Scales the gradients of a module so that the norm of all together is at most `most`; returns the norm before. Collective, behind
    /// [`average`](Ranks::average). burn's own clipping looks at each parameter by itself.
    ///
    /// All ranks scale by rank 0's norm: GPUs may differ in the last bit of it. If the norm is not finite, nothing changes.
    ///
    /// # Errors
    /// [`Error::Usage`](crate::Error::Usage) for a bound that is not greater than 0, or a gradient that is not of f64, f32, f16 or bf16.
    /// phalanx's errors.
    pub fn clip<M: Module>(&self, gradients: &mut GradientsParams, module: &M, most: f64) -> Result<f64> {
        clip_factor(0.0, most)?;
        let mut norm = Norm { gradients, seen: HashSet::new(), squares: 0.0, on_gpu: None, outcome: Ok(()) };
        module.visit(&mut norm);
        let Norm { squares, on_gpu, outcome, .. } = norm;
        outcome?;
        let mut squares = [squares + on_gpu.map_or(0.0, |sum| sum.into_scalar::<f64>())];
        self.comm().broadcast_in_place(&mut squares, 0)?;
        let norm = squares[0].sqrt();
        let factor = clip_factor(norm, most)?;
        if factor != 1.0 {
            module.visit(&mut Scale { gradients, seen: HashSet::new(), factor });
        }
        Ok(norm)
    }
}

struct Norm<'a> {
    gradients: &'a mut GradientsParams,
    seen: HashSet<ParamId>,
    /// Of gradients in host memory.
    squares: f64,
    /// Of those on another device, where they stay.
    on_gpu: Option<Tensor<1>>,
    outcome: Result<()>,
}

impl Norm<'_> {
    /// In f64, in the order of the elements.
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
        let device = gradient.device();
        if device != Device::flex() {
            let sum = gradient.clone().cast(DType::F32).square().sum();
            self.on_gpu = Some(self.on_gpu.take().map_or(sum.clone(), |others| others + sum));
            self.gradients.register(param.id, gradient);
            return;
        }
        let data = gradient.into_data();
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
