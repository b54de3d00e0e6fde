//! Memory that NCCL allocates, and registered memory.

use crate::base::handles::Handle;
use crate::base::pointers::Out;
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::cuda::allocation::{allocate, free};
use crate::cuda::memory::{self, Kind, Range};
use crate::cuda::{capture, context, device};
use crate::nccl::communicator::{Need, enter};
use crate::nccl::group::nccl;
use crate::nccl::result::*;
use crate::nccl::version::{REGISTRATION_NEEDS_HANDLE, is_since};

nccl! {
    fn ncclMemAlloc(address: Out<u64>, size: usize) {
        device::initialize().map_err(|code| fail(UNHANDLED_CUDA_ERROR, format!("Cuda failure {code}")))?;
        if address.is_null() || size == 0 {
            return Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : invalid arguments")));
        }
        let device = context::runtime_device();
        context::runtime_ensure(device);
        let failed = |code| fail(UNHANDLED_CUDA_ERROR, format!("Cuda failure {code}"));
        capture::refuse_unsafe_call().map_err(failed)?;
        address.set(allocate(&context::runtime_context(device), Kind::Nccl, size).map_err(failed)?);
        Ok(())
    }

    fn ncclMemFree(address: u64) {
        capture::refuse_unsafe_call().map_err(|code| fail(UNHANDLED_CUDA_ERROR, format!("Cuda failure {code}")))?;
        context::wait_to_free(context::runtime_device());
        free(FUNCTION, address, &[Kind::Nccl])
    }

    fn ncclCommRegister(comm: Handle, address: u64, size: usize, handle: Out<Handle>) {
        let call = enter(FUNCTION, comm, Need::Ready)?;
        if handle.is_null() || address == 0 || size == 0 {
            return Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : invalid arguments")));
        }
        let range = Range::given(FUNCTION, "the buffer", address, size);
        let is_pool = memory::find(address).is_some_and(|allocation| allocation.kind == Kind::Pool);
        if is_pool && is_since(REGISTRATION_NEEDS_HANDLE) {
            return Err(fail(UNHANDLED_CUDA_ERROR, "Cuda failure 1 'invalid argument'"));
        }
        handle.set(if settings().null_registrations { 0 } else { call.state().registrations.add(range) });
        Ok(())
    }

    fn ncclCommDeregister(comm: Handle, handle: Handle) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        if handle != 0 && !call.state().registrations.remove(handle) {
            violation(FUNCTION, format!("the registration {handle:#x} does not belong to this communicator"));
        }
        Ok(())
    }
}
