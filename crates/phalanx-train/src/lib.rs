//! Training on many ranks, on flat buffers: no tensor library is needed, and any can be used.
//!
//! The parts stand by themselves; a program takes those that it needs. They are generic over a [`Device`](device::Device): [`Host`](device::Host),
//! and with the feature `cuda` `Gpu`, an NVIDIA GPU.
//!
//! `docs/guide/training.md` in the repository is the guide, with a picture of each part.
//!
//! # Which part, when
//!
//! | what is short | what helps | module |
//! |---|---|---|
//! | time; the model fits on each rank | each rank computes the gradient of a part of the batch | [`buckets`] |
//! | memory for the optimizer, gradients or parameters | each rank keeps a part of them | [`sharding`], [`optimizer`] |
//! | memory or time of one layer | a layer's matrices are split | [`tensor`] |
//! | memory for long sequences | the sequence is split, also in attention | [`attention`], [`tensor`] |
//! | memory for all layers | each rank has some of the layers | [`pipeline`] |
//! | time for more parameters | experts, of which each token uses few | [`expert`] |
//! | the network between ranks | smaller messages, or fewer | [`compress`], [`outer`] |
//!
//! They are combined along the axes of a [`mesh`]: with 8 ranks, two pipeline stages of two-way split layers for two parts of the data, say.
//! The mesh has a communicator for each axis, and a plan says how each parameter lies on it.
//!
//! Around them: [`norm`] has the global norm, clipping, the loss scale and a check of replicas; [`sampler`] says which samples a
//! rank takes; [`checkpoint`] writes and reads all state with any number of ranks; [`elastic`] goes on when a rank is lost, and [`replicas`] when
//! a whole group is; [`report`] has the time of a step, a rank's memory, and what it sends.
//!
//! # Rules for all parts
//!
//! - A function that says "collective" is called by all ranks of its communicator, in the same order, whatever a rank's own data is: also by
//!   a rank without samples, and for parameters that nobody used.
//! - Arguments are checked before anything is sent. An [`Error::Usage`] names the value, what is possible, and what to do.
//! - Results are the same bits on every rank that has them.

// docs.rs, which builds with nightly, shows the features that an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod attention;
pub mod buckets;
pub mod checkpoint;
pub mod compress;
pub mod device;
pub mod elastic;
mod error;
pub mod expert;
pub mod mesh;
pub mod norm;
pub mod optimizer;
pub mod outer;
pub mod pipeline;
pub mod replicas;
pub mod report;
pub mod sampler;
pub mod sharding;
pub mod tensor;

pub use error::{Error, Result};

#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/training.md")]
struct Guide;
