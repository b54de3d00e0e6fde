//! The functions on modules, and launches of their kernels.

use super::image::Image;
use super::{atomics, collective, copies, experts, messages, norm, training};
use crate::base::call::{Code, exported};
use crate::base::handles::{self, Handle, Handles};
use crate::base::pointers::{In, Out};
use crate::cuda::context::current;
use crate::cuda::error::{INVALID_HANDLE, INVALID_VALUE, NOT_FOUND};
use crate::cuda::{capture, stream};
use std::ffi::{c_char, c_uint, c_void};
use std::sync::Arc;

struct Module {
    image: Image,
    context: Handle,
}

struct Kernel {
    name: String,
    context: Handle,
}

static MODULES: Handles<Module> = Handles::new("module");
static FUNCTIONS: Handles<Kernel> = Handles::new("function");

/// A kernel's parameter, at the address that the caller passed for it.
pub fn parameter<T: Copy>(pointer: *mut c_void) -> Result<T, Code> {
    if pointer.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's parameter, of the kernel's parameter type.
    Ok(unsafe { pointer.cast::<T>().read_unaligned() })
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Config {
    blocks: [c_uint; 3],
    threads: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
    attributes: *const c_void,
    count: c_uint,
}

fn launch(
    caller: &'static str,
    function: Handle,
    blocks: [c_uint; 3],
    threads: [c_uint; 3],
    stream: Handle,
    parameters: In<*mut c_void>,
) -> Result<(), Code> {
    let kernel = FUNCTIONS.get(caller, function);
    let stream = stream::find(caller, stream)?;
    if kernel.context != stream.context {
        return Err(INVALID_HANDLE);
    }
    if blocks.contains(&0) || threads.contains(&0) {
        return Err(INVALID_VALUE);
    }
    let work = atomics::work(&kernel.name, parameters)
        .or_else(|| training::work(&kernel.name, blocks[0], parameters))
        .or_else(|| copies::work(&kernel.name, blocks, threads, parameters))
        .or_else(|| messages::work(&kernel.name, blocks, threads, parameters))
        .or_else(|| norm::work(&kernel.name, blocks, threads, parameters))
        .or_else(|| experts::work(&kernel.name, &stream, blocks, threads, parameters))
        .or_else(|| collective::work(&kernel.name, &stream, blocks, threads, parameters));
    stream.enqueue(work.ok_or(NOT_FOUND)??)
}

exported! {
    fn cuModuleLoadData(module: Out<Handle>, image: In<c_char>) {
        let context = current()?;
        capture::refuse_unsafe_call()?;
        context.sync_implicitly();
        let handle = handles::fresh();
        MODULES.insert(handle, Arc::new(Module { image: Image::load(image)?, context: context.handle }));
        module.set(handle);
        Ok(())
    }

    fn cuModuleGetFunction(function: Out<Handle>, module: Handle, name: In<c_char>) {
        let (module, name) = (MODULES.get(FUNCTION, module), name.text().ok_or(INVALID_VALUE)?);
        if !module.image.has(&name) {
            return Err(NOT_FOUND);
        }
        let handle = handles::fresh();
        FUNCTIONS.insert(handle, Arc::new(Kernel { name, context: module.context }));
        function.set(handle);
        Ok(())
    }

    fn cuLaunchKernel(
        function: Handle, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        _shared: c_uint, stream: Handle, parameters: In<*mut c_void>, _extra: In<c_void>,
    ) {
        launch(FUNCTION, function, [gx, gy, gz], [bx, by, bz], stream, parameters)
    }

    // Here a kernel begins when the one before it has ended, whatever the attributes allow.
    fn cuLaunchKernelEx(config: In<Config>, function: Handle, parameters: In<*mut c_void>, _extra: In<c_void>) {
        let config = config.get().ok_or(INVALID_VALUE)?;
        launch(FUNCTION, function, config.blocks, config.threads, config.stream, parameters)
    }
}
