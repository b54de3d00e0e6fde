//! Memory of NCCL's own, and registered memory.

use super::communicator::{Need, enter};
use super::result::*;
use crate::cuda::allocation::{allocate, free, given};
use crate::cuda::memory::{self, Kind, Range};
use crate::cuda::{capture, context, device};
use crate::handles::{self, Handle};
use crate::pointers::Out;
use crate::settings::settings;
use crate::violation::violation;

/// A communicator's registrations.
#[derive(Default)]
pub struct Registrations(Vec<Registration>);

struct Registration {
    handle: Handle,
    range: Range,
    /// The same memory again gives the same handle.
    count: usize,
}

impl Registrations {
    /// The communicator ends, and with it its registrations.
    pub fn forget(&mut self) {
        self.0.drain(..).for_each(|registration| memory::register(registration.range.address, false));
    }

    fn add(&mut self, range: Range) -> Handle {
        let same =
            |other: &&mut Registration| (other.range.address, other.range.len) == (range.address, range.len);
        if let Some(registration) = self.0.iter_mut().find(same) {
            registration.count += 1;
            return registration.handle;
        }
        memory::register(range.address, true);
        let handle = handles::fresh();
        self.0.push(Registration { handle, range, count: 1 });
        handle
    }

    /// Whether there was such a registration.
    fn remove(&mut self, handle: Handle) -> bool {
        let Some(place) = self.0.iter().position(|registration| registration.handle == handle) else {
            return false;
        };
        self.0[place].count -= 1;
        if self.0[place].count == 0 {
            let registration = self.0.swap_remove(place);
            memory::register(registration.range.address, false);
        }
        true
    }
}

exported! {
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
        free(FUNCTION, address, &[Kind::Nccl])
    }

    fn ncclCommRegister(comm: Handle, address: u64, size: usize, handle: Out<Handle>) {
        let call = enter(FUNCTION, comm, Need::Ready)?;
        if handle.is_null() || address == 0 || size == 0 {
            return Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : invalid arguments")));
        }
        let range = given(FUNCTION, "the buffer", address, size);
        // 2.30.7 asks for the allocation's handle (`ncclRegister` in its source), which memory of pools does not give.
        if settings().nccl_version >= 23007 && memory::find(address).is_some_and(|one| one.kind == Kind::Pool) {
            return Err(fail(UNHANDLED_CUDA_ERROR, "Cuda failure 1 'invalid argument'"));
        }
        handle.set(if settings().null_registrations { 0 } else { call.state().registrations.add(range) });
        Ok(())
    }

    fn ncclCommDeregister(comm: Handle, handle: Handle) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        if handle != 0 && !call.state().registrations.remove(handle) {
            violation(FUNCTION, format!("the registration {handle:#x} is none of this communicator"));
        }
        Ok(())
    }
}
