//! What buckets take and give: parameters, settings, hooks, and gradients in their places.

use crate::Result;
use crate::device::{Device, Number};
use crate::sharding::Reduction;
use phalanx::{Comm, DType, bf16, f16};
use std::ops::Range;

/// Does the same with values of any type, which `$T` stands for; behind `in`, the enum of which the result becomes the same variant.
macro_rules! each_type {
    ($of:expr, $from:ident($values:pat, $T:ident) in $to:ident => $do:expr) => {
        match $of {
            $from::F32($values) => $to::F32({
                type $T = f32;
                $do
            }),
            $from::F64($values) => $to::F64({
                type $T = f64;
                $do
            }),
            $from::F16($values) => $to::F16({
                type $T = phalanx::f16;
                $do
            }),
            $from::Bf16($values) => $to::Bf16({
                type $T = phalanx::bf16;
                $do
            }),
        }
    };
    ($of:expr, $from:ident($values:pat, $T:ident) => $do:expr) => {
        match $of {
            $from::F32($values) => {
                type $T = f32;
                $do
            }
            $from::F64($values) => {
                type $T = f64;
                $do
            }
            $from::F16($values) => {
                type $T = phalanx::f16;
                $do
            }
            $from::Bf16($values) => {
                type $T = phalanx::bf16;
                $do
            }
        }
    };
}
pub(crate) use each_type;

/// A parameter whose gradients are reduced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its name, the same on all ranks.
    pub name: String,
    /// Number of elements.
    pub len: usize,
    /// Type of its gradients.
    pub dtype: DType,
}

impl Parameter {
    /// A parameter of this many elements of type `T`.
    pub fn new<T: Number>(name: impl Into<String>, len: usize) -> Parameter {
        Parameter { name: name.into(), len, dtype: T::DTYPE }
    }
}

/// By what a mean divides if ranks have no batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Divisor {
    /// The weights of the ranks that have a batch.
    #[default]
    Participants,
    /// As if the others had batches as large as the participants' mean, with gradient 0.
    InitialWorld,
}

/// Settings of buckets, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Bytes of a bucket, in the type in which it is summed. A parameter that is larger has one to itself. Default 25 MiB.
    pub bucket_bytes: usize,
    /// Mean or sum; default mean.
    pub reduction: Reduction,
    /// By what a mean divides.
    pub divisor: Divisor,
    /// Whether gradients of f16 and bf16 are summed in f32, over micro-batches and among ranks; default true. If not, in their own type: half
    /// the bytes are sent, and each sum is rounded (in bf16, 256 + 1 is 256).
    pub sums_in_f32: bool,
}

impl Settings {
    /// The type in which gradients of a type are summed.
    pub(super) fn sum_type(&self, gradients: DType) -> DType {
        match gradients {
            DType::F16 | DType::Bf16 if self.sums_in_f32 => DType::F32,
            own => own,
        }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            bucket_bytes: 25 << 20,
            reduction: Reduction::Mean,
            divisor: Divisor::Participants,
            sums_in_f32: true,
        }
    }
}

/// The values of a bucket, in the type in which they are summed.
pub enum Values<D: Device> {
    /// Of parameters of f32, and of f16 and bf16 if [`Settings::sums_in_f32`].
    F32(D::Buffer<f32>),
    /// Of parameters of f64.
    F64(D::Buffer<f64>),
    /// Of parameters of f16, if it is summed in its own type.
    F16(D::Buffer<f16>),
    /// Of parameters of bf16, if it is summed in its own type.
    Bf16(D::Buffer<bf16>),
}

/// A reduction in the place of the sum over all ranks.
pub trait BucketHook<D: Device>: Send {
    /// Replaces `values` by their sum over the ranks of `comm`, or by what stands for it. Called on every rank for the same buckets in the
    /// same order, each step. `members` has the bucket's parameters and where they are in it.
    ///
    /// The values are multiplied by this rank's share, so that the sum is the result: the mean, say.
    fn reduce(
        &mut self,
        device: &D,
        bucket: usize,
        members: &[(&str, Range<usize>)],
        comm: &Comm,
        values: &mut Values<D>,
    ) -> Result<()>;
}

/// A closure without the device.
impl<D, F> BucketHook<D> for F
where
    D: Device,
    F: FnMut(usize, &[(&str, Range<usize>)], &Comm, &mut Values<D>) -> Result<()> + Send,
{
    fn reduce(
        &mut self,
        _device: &D,
        bucket: usize,
        members: &[(&str, Range<usize>)],
        comm: &Comm,
        values: &mut Values<D>,
    ) -> Result<()> {
        self(bucket, members, comm, values)
    }
}

/// A reduced gradient, in the type in which it was summed.
pub enum Gradient<'a, D: Device> {
    /// Of a parameter of f32, and of f16 and bf16 if [`Settings::sums_in_f32`].
    F32(D::View<'a, f32>),
    /// Of a parameter of f64.
    F64(D::View<'a, f64>),
    /// Of a parameter of f16, if it is summed in its own type.
    F16(D::View<'a, f16>),
    /// Of a parameter of bf16, if it is summed in its own type.
    Bf16(D::View<'a, bf16>),
}

/// The place of a gradient in its bucket.
pub struct Slot<'a, D: Device> {
    /// Where to write it.
    pub values: SlotValues<'a, D>,
    /// Whether it has the sum of earlier micro-batches, to which the gradient is to be added. Else all of it is to be overwritten.
    pub has_value: bool,
}

/// Elements of a [`Slot`], in the type in which they are summed.
pub enum SlotValues<'a, D: Device> {
    /// Of a parameter of f32, and of f16 and bf16 if [`Settings::sums_in_f32`].
    F32(D::ViewMut<'a, f32>),
    /// Of a parameter of f64.
    F64(D::ViewMut<'a, f64>),
    /// Of a parameter of f16, if it is summed in its own type.
    F16(D::ViewMut<'a, f16>),
    /// Of a parameter of bf16, if it is summed in its own type.
    Bf16(D::ViewMut<'a, bf16>),
}

/// The ranks that had a batch in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Participation {
    /// How many they are. With 0, all gradients are 0: the training is over for all ranks.
    pub ranks: usize,
    /// The sum of their weights.
    pub weight: f64,
}
