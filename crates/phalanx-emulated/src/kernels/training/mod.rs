//! phalanx-train's kernels, by name. They follow `device/gpu/kernels/*.cu` of phalanx-train: the same arithmetic in the same order.
//!
//! `number.rs` has the types, `memory.rs` a launch's parameters and buffers; each other file is one of the kernels' files. `blas.rs` stands for
//! cuBLAS.

mod attention;
mod blas;
mod compress;
mod elements;
mod matrices;
mod memory;
mod norm;
mod number;
mod optimizer;
mod rows;
mod tensor;

use crate::base::call::Code;
use crate::base::pointers::In;
use crate::cuda::work::{Plain, Work};
use memory::Parameters;
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

/// What all names begin with.
const PREFIX: &str = "phalanx_train_";

/// What a kernel does when its stream comes to it.
type Task = Box<dyn Fn() + Send + Sync>;

/// The work of a launch, if there is such a kernel.
pub fn work(name: &str, blocks: c_uint, parameters: In<*mut c_void>) -> Option<Result<Arc<dyn Work>, Code>> {
    let name = name.strip_prefix(PREFIX)?;
    let parameters = Parameters::new(parameters, blocks as usize);
    let files = [
        elements::task,
        optimizer::task,
        norm::task,
        tensor::task,
        matrices::task,
        rows::task,
        compress::task,
        attention::task,
    ];
    let task = files.into_iter().find_map(|task| task(name, &parameters))?;
    Some(task.map(|task| -> Arc<dyn Work> { Arc::new(Plain(task)) }))
}
