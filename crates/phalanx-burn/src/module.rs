//! [`Ranks::broadcast`]: rank 0's module on all ranks; and running statistics.

use crate::elements::Elements;
#[cfg(feature = "cuda")]
use crate::gpu::Collective;
use crate::ranks::usage;
use crate::{Ranks, Result};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use phalanx::ReduceOp;
use std::collections::HashMap;
use std::vec::IntoIter;

impl Ranks {
    /// The module with rank 0's parameters and running statistics, on every rank. Collective.
    ///
    /// A training on ranks begins with it: equal seeds do not give equal modules, since burn makes a parameter when it is first used, and threads
    /// share the random numbers. What is trained stays so, and gradient checkpointing stays as it is. All memory of the module is needed
    /// twice meanwhile.
    ///
    /// # Errors
    /// [`Error::Mismatch`](crate::Error::Mismatch) on all ranks if their modules differ; it names the first difference.
    /// [`Error::Usage`](crate::Error::Usage) for quantized parameters, before anything is sent. phalanx's errors.
    pub fn broadcast<M: Module>(&self, module: M) -> Result<M> {
        settle(&module);
        let mut values = Values { ranks: self, values: Vec::new(), is_quantized: false };
        module.visit(&mut values);
        let Values { mut values, is_quantized, .. } = values;
        if is_quantized {
            return usage("a quantized parameter cannot be broadcast; broadcast first, then quantize".into());
        }
        self.agree(&module)?;
        #[cfg(feature = "cuda")]
        self.exchange_on_gpu(Collective::Rank0sToAll, &values)?;
        let in_host_memory = values.iter_mut().filter_map(Elements::host_mut);
        in_host_memory.into_iter().try_for_each(|data| {
            TensorData::with_bytes_mut([data], |bytes| {
                bytes.into_iter().try_for_each(|bytes| self.comm().broadcast_in_place(&mut bytes[..], 0))
            })
        })?;
        if self.rank() == 0 {
            return Ok(module);
        }
        Ok(module.map(&mut Placed(values.into_iter())))
    }

    /// The module with the running statistics of batch normalization that all ranks' batches together give. Collective; once an epoch, say,
    /// before the module is validated or saved.
    ///
    /// The means are averaged; a variance is the mean of the ranks' variances, and the variance of their means on top. The ranks count alike.
    ///
    /// # Errors
    /// As for [`broadcast`](Ranks::broadcast).
    pub fn average_statistics<M: Module>(&self, module: M) -> Result<M> {
        settle(&module);
        self.agree(&module)?;
        let mut found = Statistics::default();
        module.visit(&mut found);
        let places: Vec<String> =
            found.order.iter().filter_map(|path| path.strip_suffix(MEAN)).map(str::to_owned).collect();
        for place in places {
            let (mean, variance) = (format!("{place}{MEAN}"), format!("{place}{VARIANCE}"));
            let [Some(own_mean), Some(own_variance)] =
                [&mean, &variance].map(|path| found.values.remove(path))
            else {
                continue;
            };
            let mut means = own_mean.clone();
            self.comm().all_reduce_in_place(&mut means, ReduceOp::Avg)?;
            let apart = |((variance, own), mean): ((f64, f64), &f64)| variance + (own - mean).powi(2);
            let mut variances: Vec<f64> =
                own_variance.into_iter().zip(own_mean).zip(&means).map(apart).collect();
            self.comm().all_reduce_in_place(&mut variances, ReduceOp::Avg)?;
            found.averaged.insert(mean, means);
            found.averaged.insert(variance, variances);
        }
        found.path.clear();
        Ok(module.map(&mut found))
    }
}

/// Brings what threads have given to running statistics into their values, which a traversal sees. burn does it for `valid` and `train` only.
fn settle<M: Module>(module: &M) {
    drop(module.valid());
}

/// The values of all tensors, in the order of the traversal. Ranks as threads may share running statistics, which are locked during a
/// traversal: nothing is sent meanwhile.
struct Values<'a> {
    ranks: &'a Ranks,
    values: Vec<Elements>,
    is_quantized: bool,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base().without_autodiff();
        if matches!(value.dtype(), DType::QFloat(_)) {
            self.is_quantized = true;
        } else {
            self.values.push(Elements::of(self.ranks, value, 1.0));
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.values.push(Elements::Host(param.base().into_data()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.values.push(Elements::Host(param.base().into_data()));
    }
}

/// The same values, in the tensors' place.
struct Placed(IntoIter<Elements>);

impl Placed {
    fn next(&mut self) -> Elements {
        self.0.next().expect("as many as were collected")
    }

    fn next_on_host(&mut self) -> TensorData {
        self.next().into_host().expect("whole numbers and booleans are sent from host memory")
    }
}

impl ModuleMapper for Placed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let elements = self.next();
        param.map(|old| {
            let new = elements.place(old.shape(), &old.device().without_autodiff(), old.dtype());
            like(&old, new)
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let data = self.next_on_host();
        param.map(|old| {
            let dtype = data.dtype();
            Tensor::from_data(data, (&old.device(), dtype))
        })
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        let data = self.next_on_host();
        param.map(|old| Tensor::from_data(data, &old.device()))
    }
}

/// Another tensor in a tensor's place, with its gradient's fate and its checkpointing.
fn like<const D: usize>(old: &Tensor<D>, new: Tensor<D>) -> Tensor<D> {
    match old.gradient_checkpointing_strategy() {
        None => new,
        Some(strategy) => new
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy)
            .set_require_grad(old.is_require_grad()),
    }
}

const MEAN: &str = "running_mean";
const VARIANCE: &str = "running_var";

/// Running statistics by path: collected by a visit, and placed by a mapping.
#[derive(Default)]
struct Statistics {
    path: Vec<String>,
    /// Paths, in the order of the traversal.
    order: Vec<String>,
    values: HashMap<String, Vec<f64>>,
    averaged: HashMap<String, Vec<f64>>,
}

impl ModuleVisitor for Statistics {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.path.last().is_some_and(|name| name == MEAN || name == VARIANCE) {
            let path = self.path.join(".");
            let value = param.base().without_autodiff().into_data().iter::<f64>().collect();
            self.order.push(path.clone());
            self.values.insert(path, value);
        }
    }
}

impl ModuleMapper for Statistics {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = self.averaged.remove(&self.path.join(".")) else { return param };
        param.map(|old| {
            let data = TensorData::new(value, old.shape()).convert_dtype(old.dtype());
            let new = Tensor::from_data(data, (&old.device().without_autodiff(), old.dtype()));
            like(&old, new)
        })
    }
}
