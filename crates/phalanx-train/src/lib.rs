//! Training on many ranks, on flat buffers: no tensor library is needed, and any can be used.

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
pub mod sampler;
pub mod sharding;
pub mod tensor;

pub use error::{Error, Result};
