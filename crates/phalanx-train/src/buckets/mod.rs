//! Gradient buckets: the mean of the gradients of all ranks, reduced in large pieces while others are still computed.
//!
//! ```
//! use phalanx_train::buckets::{GradientBuckets, Parameter, Settings};
//! use phalanx_train::device::Host;
//!
//! let means = phalanx::try_run(2, |comm| {
//!     let parameters = [Parameter::new::<f32>("bias", 1), Parameter::new::<f32>("weight", 2)];
//!     let mut buckets = GradientBuckets::new(&comm, &Host, &parameters, Settings::default())?;
//!     for _step in 0..3 {
//!         buckets.begin(&comm, 1.0)?;
//!         let mine = (comm.rank() * 2) as f32; // the gradients of the backward pass, as they become ready
//!         buckets.add(&comm, "weight", &&[mine, mine + 1.0][..])?;
//!         buckets.add(&comm, "bias", &&[mine][..])?;
//!         buckets.finish(&comm)?;
//!     }
//!     let mut weight = [0.0f32; 2];
//!     buckets.read("weight", &mut &mut weight[..])?;
//!     Ok::<_, phalanx_train::Error>(weight)
//! })?;
//! assert_eq!(means, [[1.0, 2.0]; 2]);
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! A step is [`begin`](GradientBuckets::begin), [`add`](GradientBuckets::add) for each gradient in any order, and
//! [`finish`](GradientBuckets::finish).
//!
//! - **Order.** In the first step nothing is sent before `finish`; then all ranks take over the order in which rank 0's gradients
//!   became ready, and fill buckets in it. From the second step on a bucket is sent as soon as its gradients are there and the buckets
//!   before it are sent. So ranks whose gradients become ready in other orders still make the same calls.
//! - **Mean or sum.** [`Reduction::Mean`] divides by the weights of all ranks: with the number of samples as weight, each sample counts
//!   the same. A rank without a batch begins with weight 0, adds nothing, and gets the result. [`Reduction::Sum`] adds
//!   them up, each times its rank's weight.
//! - **Micro-batches.** Between [`accumulate(true)`](GradientBuckets::accumulate) and `accumulate(false)`, gradients are summed and nothing
//!   is sent. The first gradient that is added after that is the parameter's last.
//! - **Unused parameters.** What was not added in the last micro-batch is sent by `finish`: what it has, or zeros.
//! - **Precision.** Gradients are summed in f32, f64 those of f64: over micro-batches, and among ranks. Those of f16 and bf16
//!   can be summed in their own type: [`Settings::sums_in_f32`].
//! - **Without a copy.** A backward pass that writes a gradient to its [`slot`](GradientBuckets::slot) and calls
//!   [`ready`](GradientBuckets::ready) saves the copy that `add` makes. Weights and means cost no pass of their own: the reduction multiplies.
//! - **Waits.** The weights of all ranks are told when the step begins. The first bucket waits for them: for the last rank to begin.
//! - **Hook.** [`set_hook`](GradientBuckets::set_hook) replaces the reduction of a bucket, for compression.

mod plan;
mod types;

pub use crate::device::Overlap;
use crate::device::{Device, Number};
pub use crate::sharding::Reduction;
use crate::{Error, Result};
use phalanx::{Comm, DType, PreMulSum, ReduceOp, Request, bf16, f16};
use plan::{Place, arrange};
use std::ops::Range;
pub(crate) use types::each_type;
pub use types::{
    BucketHook, Divisor, Gradient, Parameter, Participation, Settings, Slot, SlotValues, Values,
};

/// What a bucket's values are doing.
enum State<D: Overlap> {
    Here(Values<D>),
    Sent(Pending<D>),
    /// An operation that failed has them.
    Lost,
}

/// [`Values`] that are being summed.
enum Pending<D: Overlap> {
    F32(D::Pending<f32>),
    F64(D::Pending<f64>),
    F16(D::Pending<f16>),
    Bf16(D::Pending<bf16>),
}

struct Bucket<D: Overlap> {
    /// Parameters, by their numbers, one behind the other.
    members: Vec<usize>,
    state: State<D>,
    /// Members that are not ready.
    missing: usize,
}

/// What becomes of this rank's values in a step.
#[derive(Debug, Clone, Copy)]
struct Share {
    all: Participation,
    /// By what they are multiplied before they are summed.
    factor: f64,
    /// Whether plain operations do the same on all ranks: a sum (factor 1) or a mean (1 / ranks).
    plain: Option<ReduceOp>,
}

impl Share {
    fn op<A: Number>(&self) -> phalanx::Reduction<A> {
        self.plain.map_or_else(|| PreMulSum(A::from_f64(self.factor)).into(), Into::into)
    }
}

/// A step between `begin` and `finish`.
struct Step {
    weight: f64,
    /// The weights of all ranks, under way.
    told: Option<Request<(Vec<f64>, Vec<f64>)>>,
    /// What follows from them.
    share: Option<Share>,
    accumulates: bool,
    /// For each parameter, whether its place in the bucket has a value of this step.
    written: Vec<bool>,
    ready: Vec<bool>,
    /// The number of buckets that are sent.
    sent: usize,
}

/// Reduces gradients among ranks in buckets: see [the module](self).
pub struct GradientBuckets<D: Overlap> {
    device: D,
    settings: Settings,
    /// In the order of their names.
    parameters: Vec<Parameter>,
    places: Vec<Place>,
    buckets: Vec<Bucket<D>>,
    step: Option<Step>,
    /// Whether the ranks have agreed on an order.
    has_order: bool,
    /// The order in which this rank's gradients became ready, until the ranks have agreed.
    ready_order: Vec<u32>,
    /// The order for the next step.
    new_order: Option<Vec<u32>>,
    hook: Option<Box<dyn BucketHook<D>>>,
}

impl<D: Overlap> GradientBuckets<D> {
    /// Makes buckets for these parameters, in any order. Collective.
    ///
    /// # Errors
    /// [`Error::Usage`] for a name that is there twice, a type that is not of floating-point numbers, or buckets of 0 bytes: nothing was sent.
    /// [`Error::Mismatch`] on all ranks if the parameters or settings differ.
    pub fn new(
        comm: &Comm,
        device: &D,
        parameters: &[Parameter],
        settings: Settings,
    ) -> Result<GradientBuckets<D>> {
        if settings.bucket_bytes == 0 {
            return Err(Error::usage("buckets of 0 bytes hold nothing; 25 MiB is usual"));
        }
        let mut parameters = parameters.to_vec();
        parameters.sort_by(|a, b| a.name.cmp(&b.name));
        for pair in parameters.windows(2) {
            if pair[0].name == pair[1].name {
                return Err(Error::usage(format!(
                    "two parameters are named {:?}; name them apart",
                    pair[0].name
                )));
            }
        }
        if let Some(other) = parameters.iter().find(|parameter| !is_number(parameter.dtype)) {
            return Err(Error::usage(format!(
                "the gradients of {:?} are of {}; what can be reduced is f32, f64, f16 and bf16",
                other.name, other.dtype
            )));
        }
        let mut all = vec![0u64; comm.world_size()];
        comm.all_gather(&[plan::fingerprint(&parameters, &settings)], &mut all)?;
        if let Some(other) = all.iter().position(|print| *print != all[0]) {
            return Err(Error::Mismatch(format!(
                "rank {other} has other parameters (names, lengths or types) or settings of gradient buckets than rank 0; rank {} has {} \
                 parameters",
                comm.rank(),
                parameters.len()
            )));
        }
        let mut made = GradientBuckets {
            device: device.clone(),
            settings,
            places: Vec::new(),
            buckets: Vec::new(),
            step: None,
            has_order: false,
            ready_order: Vec::new(),
            new_order: Some((0..parameters.len() as u32).collect()),
            hook: None,
            parameters,
        };
        made.lay_out()?;
        Ok(made)
    }

    /// Replaces the reduction, on all ranks alike; `None` brings the sum back.
    ///
    /// # Errors
    /// [`Error::Usage`] between `begin` and `finish`.
    pub fn set_hook(&mut self, hook: Option<Box<dyn BucketHook<D>>>) -> Result<()> {
        if self.step.is_some() {
            return Err(Error::usage("the hook cannot change within a step; set it before begin"));
        }
        self.hook = hook;
        Ok(())
    }

    /// The names of the parameters of each bucket, in the order of sending.
    pub fn buckets(&self) -> Vec<Vec<&str>> {
        let names = |bucket: &Bucket<D>| {
            bucket.members.iter().map(|member| self.parameters[*member].name.as_str()).collect()
        };
        self.buckets.iter().map(names).collect()
    }

    /// Begins a step. `weight` is that of this rank's batch: 1, or the number of its samples; 0 if it has none. Collective, and started:
    /// it waits for nobody.
    ///
    /// # Errors
    /// [`Error::Usage`] for a negative weight or one that is not finite, or if the step before is not finished.
    pub fn begin(&mut self, comm: &Comm, weight: f64) -> Result<()> {
        if !(weight.is_finite() && weight >= 0.0) {
            return Err(Error::usage(format!(
                "a batch has weight {weight}; give 0 without a batch, else its samples or 1"
            )));
        }
        if self.step.is_some() {
            return Err(Error::usage("begin was called in a step; finish it first"));
        }
        self.lay_out()?;
        self.ready_order.clear();
        let told = Some(self.device.start_exchange(comm, weight)?);
        let none = vec![false; self.parameters.len()];
        let (written, ready) = (none.clone(), none);
        self.step = Some(Step { weight, told, share: None, accumulates: false, written, ready, sent: 0 });
        Ok(())
    }

    /// Says whether the gradients that follow are of a micro-batch behind which others come (true), or of the last one (false, as after
    /// `begin`).
    ///
    /// # Errors
    /// [`Error::Usage`] outside of a step, and for true after a gradient of the last micro-batch.
    pub fn accumulate(&mut self, accumulates: bool) -> Result<()> {
        let step = self.step.as_mut().ok_or_else(outside)?;
        if accumulates && step.ready.contains(&true) {
            return Err(Error::usage(
                "gradients of the last micro-batch were added already; call accumulate(true) before the first gradient of the step",
            ));
        }
        step.accumulates = accumulates;
        Ok(())
    }

    /// Adds a gradient of this rank. The buckets that are complete by it are sent.
    ///
    /// # Errors
    /// [`Error::Usage`] outside of a step, for a name that there is not, another length or type, a gradient of the last micro-batch that
    /// was added before, or a rank without a batch; the gradient was not added then. [`Error::Comm`] if sending fails.
    pub fn add<T: Number>(&mut self, comm: &Comm, name: &str, gradient: &D::View<'_, T>) -> Result<()> {
        let number = self.number(name)?;
        let parameter = &self.parameters[number];
        let len = phalanx::Source::len(gradient);
        if (len, T::DTYPE) != (parameter.len, parameter.dtype) {
            return Err(Error::usage(format!(
                "the gradient of {name:?} has {len} elements of {}; the parameter was declared with {} of {}",
                T::DTYPE,
                parameter.len,
                parameter.dtype
            )));
        }
        let device = self.device.clone();
        {
            let Slot { values, has_value } = self.slot(name)?;
            each_type!(values, SlotValues(mut to, A) => put::<D, T, A>(&device, gradient, &mut to, has_value)?);
        }
        self.ready(comm, name)
    }

    /// Where the backward pass writes a gradient itself, in the place of [`add`](GradientBuckets::add); call [`ready`](GradientBuckets::ready)
    /// when it is there.
    ///
    /// # Errors
    /// As for `add`.
    pub fn slot(&mut self, name: &str) -> Result<Slot<'_, D>> {
        let number = self.number(name)?;
        let step = self.step.as_ref().ok_or_else(outside)?;
        if step.weight == 0.0 {
            return Err(Error::usage(format!(
                "a gradient of {name:?} on a rank that began the step with weight 0, without a batch; give begin the batch's weight"
            )));
        }
        if step.ready[number] {
            return Err(Error::usage(format!(
                "the gradient of {name:?} was added before in this step; add the gradients of several uses first, or call accumulate(true)"
            )));
        }
        let Place { bucket, range } = self.places[number].clone();
        let State::Here(values) = &mut self.buckets[bucket].state else {
            unreachable!("a bucket is sent when its last member is ready")
        };
        let values =
            each_type!(values, Values(values, A) in SlotValues => self.device.view_mut::<A>(values, range));
        Ok(Slot { values, has_value: step.written[number] })
    }

    /// Says that a gradient is in its [`slot`](GradientBuckets::slot). Errors as for [`add`](GradientBuckets::add).
    pub fn ready(&mut self, comm: &Comm, name: &str) -> Result<()> {
        let number = self.number(name)?;
        let step = self.step.as_mut().ok_or_else(outside)?;
        if step.ready[number] || step.weight == 0.0 {
            return Err(Error::usage(format!(
                "{name:?} is ready already, or this rank has no batch in this step; see slot"
            )));
        }
        step.written[number] = true;
        if step.accumulates {
            return Ok(());
        }
        self.set_ready(number);
        self.send(comm)
    }

    /// Sends what was not sent, and waits for the results. Collective.
    ///
    /// # Errors
    /// [`Error::Usage`] outside of a step; [`Error::Comm`] if an operation fails: the step is over, and has no gradients.
    pub fn finish(&mut self, comm: &Comm) -> Result<Participation> {
        let written = &self.step.as_ref().ok_or_else(outside)?.written;
        let unused: Vec<usize> = (0..written.len()).filter(|number| !written[*number]).collect();
        let ended = self.complete(comm, &unused);
        self.step = None;
        if ended.is_err() {
            // Buffers that operations under way have are not ours.
            self.new_order = Some(self.order());
        }
        let taking_part = ended?.all;
        if !self.has_order {
            self.agree_on_order(comm)?;
        }
        Ok(taking_part)
    }

    /// Copies the reduced gradient of a parameter, rounded to `T`. On a GPU, enqueued.
    ///
    /// # Errors
    /// [`Error::Usage`] in a step, before the first, for a name that there is not, and for another length.
    pub fn read<T: Number>(&self, name: &str, to: &mut D::ViewMut<'_, T>) -> Result<()> {
        let len = phalanx::Source::len(to);
        let expected = self.parameters[self.number(name)?].len;
        if len != expected {
            return Err(Error::usage(format!(
                "{name:?} has {expected} elements, and the buffer {len}; pass one of {expected}"
            )));
        }
        each_type!(self.gradient(name)?, Gradient(view, A) => self.device.convert::<A, T>(&view, to))
    }

    /// The reduced gradient of a parameter, where it is: valid until the next `begin`. Errors as for [`read`](GradientBuckets::read).
    pub fn gradient(&self, name: &str) -> Result<Gradient<'_, D>> {
        let Place { bucket, range } = self.places[self.number(name)?].clone();
        let values = match &self.buckets[bucket].state {
            State::Here(values) if self.step.is_none() => values,
            _ => {
                return Err(Error::usage(format!(
                    "the gradient of {name:?} is not complete; read it after finish"
                )));
            }
        };
        Ok(each_type!(values, Values(values, A) in Gradient => self.device.view::<A>(values, range)))
    }

    fn number(&self, name: &str) -> Result<usize> {
        self.parameters.binary_search_by(|parameter| parameter.name.as_str().cmp(name)).map_err(|_| {
            Error::usage(format!(
                "there is no parameter {name:?} among the {} of these buckets; list it in new",
                self.parameters.len()
            ))
        })
    }

    fn order(&self) -> Vec<u32> {
        self.buckets.iter().flat_map(|bucket| &bucket.members).map(|member| *member as u32).collect()
    }

    /// Makes the buckets of a new order, if there is one, and makes all ready for a step.
    fn lay_out(&mut self) -> Result<()> {
        if let Some(order) = self.new_order.take() {
            let arranged = arrange(&self.parameters, &order, &self.settings);
            self.places = arranged.places;
            self.buckets.clear();
            for (members, len, dtype) in arranged.buckets {
                let values = match self.settings.sum_type(dtype) {
                    DType::F64 => Values::F64(self.device.zeros(len)?),
                    DType::F16 => Values::F16(self.device.zeros(len)?),
                    DType::Bf16 => Values::Bf16(self.device.zeros(len)?),
                    _ => Values::F32(self.device.zeros(len)?),
                };
                self.buckets.push(Bucket { members, state: State::Here(values), missing: 0 });
            }
        }
        for bucket in &mut self.buckets {
            bucket.missing = bucket.members.len();
        }
        Ok(())
    }

    fn set_ready(&mut self, number: usize) {
        let step = self.step.as_mut().expect("a step");
        if !std::mem::replace(&mut step.ready[number], true) {
            self.buckets[self.places[number].bucket].missing -= 1;
            if !self.has_order {
                self.ready_order.push(number as u32);
            }
        }
    }

    /// Sends the buckets that are complete, in order; in the first step none before the end.
    fn send(&mut self, comm: &Comm) -> Result<()> {
        if self.has_order { self.send_complete(comm) } else { Ok(()) }
    }

    fn send_complete(&mut self, comm: &Comm) -> Result<()> {
        loop {
            let sent = self.step.as_ref().expect("a step").sent;
            if self.buckets.get(sent).is_none_or(|bucket| bucket.missing > 0) {
                return Ok(());
            }
            let share = self.share(comm)?;
            self.step.as_mut().expect("a step").sent += 1;
            let bucket = &mut self.buckets[sent];
            let State::Here(mut values) = std::mem::replace(&mut bucket.state, State::Lost) else {
                unreachable!("sent once in a step")
            };
            if let Some(hook) = &mut self.hook {
                let name = |member: &usize| self.parameters[*member].name.as_str();
                let place = |member: &usize| (name(member), self.places[*member].range.clone());
                let members: Vec<(&str, Range<usize>)> = bucket.members.iter().map(place).collect();
                if share.factor != 1.0 {
                    each_type!(&mut values, Values(values, A) => scale::<D, A>(&self.device, values, share.factor)?);
                }
                hook.reduce(&self.device, sent, &members, comm, &mut values)?;
                bucket.state = State::Here(values);
                continue;
            }
            bucket.state = State::Sent(each_type!(
                values,
                Values(values, A) in Pending => self.device.start_sum::<A>(comm, values, share.op())?
            ));
        }
    }

    /// Sends all, with zeros for what is unused, and takes the results.
    fn complete(&mut self, comm: &Comm, unused: &[usize]) -> Result<Share> {
        for number in unused {
            let Place { bucket, range } = self.places[*number].clone();
            let State::Here(values) = &mut self.buckets[bucket].state else {
                unreachable!("not sent without this one")
            };
            each_type!(values, Values(values, A) => {
                self.device.fill::<A>(&mut self.device.view_mut(values, range), 0.0)?;
            });
        }
        (0..self.parameters.len()).for_each(|number| self.set_ready(number));
        self.send_complete(comm)?;
        let share = self.share(comm)?;
        for bucket in &mut self.buckets {
            bucket.state = State::Here(match std::mem::replace(&mut bucket.state, State::Lost) {
                State::Sent(pending) => {
                    each_type!(pending, Pending(sum, A) in Values => self.device.finish_sum::<A>(sum)?)
                }
                State::Here(values) => values,
                State::Lost => {
                    return Err(Error::usage(
                        "an operation failed in this step, and its values are lost; see that error, and begin again",
                    ));
                }
            });
        }
        Ok(share)
    }

    /// What becomes of this rank's values. Waits for the weights of all ranks, once in a step.
    fn share(&mut self, comm: &Comm) -> Result<Share> {
        let step = self.step.as_mut().expect("a step");
        if let Some(share) = step.share {
            return Ok(share);
        }
        let told = step.told.take().ok_or_else(|| {
            Error::usage("the weights of all ranks could not be told; see that error, and begin again")
        })?;
        let (_, weights) = told.wait()?;
        let all = Participation {
            ranks: weights.iter().filter(|weight| **weight > 0.0).count(),
            weight: weights.iter().sum(),
        };
        let by = match (self.settings.reduction, self.settings.divisor) {
            (Reduction::Sum, _) => 1.0,
            (_, Divisor::Participants) => all.weight,
            (_, Divisor::InitialWorld) => all.weight * comm.world_size() as f64 / all.ranks.max(1) as f64,
        };
        let are_equal = weights.iter().all(|weight| *weight == weights[0]);
        let plain = match self.settings.reduction {
            // Nobody has a batch: a sum of zeros.
            _ if all.ranks == 0 => Some(ReduceOp::Sum),
            Reduction::Sum => (are_equal && weights[0] == 1.0).then_some(ReduceOp::Sum),
            Reduction::Mean => are_equal.then_some(ReduceOp::Avg),
        };
        let factor = if all.ranks == 0 { 1.0 } else { step.weight / by };
        Ok(*step.share.insert(Share { all, factor, plain }))
    }

    /// All ranks take over the order of rank 0, for the next step on.
    fn agree_on_order(&mut self, comm: &Comm) -> Result<()> {
        let mut order = std::mem::take(&mut self.ready_order);
        if !order.is_empty() {
            comm.broadcast_in_place(&mut order[..], 0)?;
        }
        self.new_order = Some(order);
        self.has_order = true;
        Ok(())
    }
}

fn is_number(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::Bf16)
}

fn outside() -> Error {
    Error::usage("gradients are added and finished in a step; call begin first")
}

/// Puts a gradient to its place, or adds it to what is there.
fn put<D: Device, T: Number, A: Number>(
    device: &D,
    gradient: &D::View<'_, T>,
    to: &mut D::ViewMut<'_, A>,
    has_value: bool,
) -> Result<()> {
    if has_value { device.add(1.0, gradient, to) } else { device.convert(gradient, to) }
}

fn scale<D: Device, A: Number>(device: &D, values: &mut D::Buffer<A>, factor: f64) -> Result<()> {
    let len = phalanx::Source::len(values);
    device.scale(&mut device.view_mut(values, 0..len), factor)
}
