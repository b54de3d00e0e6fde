//! Reductions that send less than all: they change the result, and each says how.
//!
//! | | bytes sent, of f32's | what it changes |
//! |---|---|---|
//! | [`PowerSgd`] | r (n + m) / (n m) | a gradient of rank r; what is left out comes in later steps |
//! | [`Quantized`], int8 | 0.26 | at most 1/254 of the greatest number of each block, for each rank and once more |
//! | [`Quantized`], fp8 | 0.26 | at most 1/16 of each number, for each rank and once more; more near 0 |
//!
//! All ranks get the same bits. In the place of the sum of [gradient buckets](crate::buckets), `set_hook` takes a [`PowerSgdHook`] or a
//! [`Quantized`].

#[cfg(feature = "cuda")]
mod gpu;
mod hooks;
mod host;
mod power_sgd;
mod quantized;

pub use hooks::PowerSgdHook;
pub use power_sgd::{LowRank, PowerSgd};
pub use quantized::{Format, Quantize, Quantized};
