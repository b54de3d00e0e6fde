//! Questions about the library and communicators; suspending them.

use crate::base::call::Code;
use crate::base::handles::Handle;
use crate::base::pointers::Out;
use crate::base::settings::settings;
use crate::nccl::communicator::{Need, Phase, enter};
use crate::nccl::group::nccl;
use crate::nccl::result::*;
use std::ffi::c_int;

/// Bytes of its device that a communicator claims to use.
const MEMORY: u64 = 64 << 20;

fn not_null<T>(function: &str, to: Out<T>) -> Result<Out<T>, Code> {
    if to.is_null() {
        Err(fail(INVALID_ARGUMENT, format!("{function} : the result's argument is NULL")))
    } else {
        Ok(to)
    }
}

nccl! {
    fn ncclGetVersion(version: Out<c_int>) {
        not_null(FUNCTION, version)?.set(settings().nccl_version);
        Ok(())
    }

    fn ncclCommCount(comm: Handle, count: Out<c_int>) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        not_null(FUNCTION, count)?.set(call.ranks as c_int);
        Ok(())
    }

    fn ncclCommCuDevice(comm: Handle, device: Out<c_int>) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        not_null(FUNCTION, device)?.set(call.device as c_int);
        Ok(())
    }

    fn ncclCommUserRank(comm: Handle, rank: Out<c_int>) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        not_null(FUNCTION, rank)?.set(call.rank as c_int);
        Ok(())
    }

    fn ncclCommGetAsyncError(comm: Handle, error: Out<Code>) {
        let call = enter(FUNCTION, comm, Need::Any)?;
        not_null(FUNCTION, error)?.set(call.state().result);
        Ok(())
    }

    fn ncclCommSuspend(comm: Handle, flags: c_int) {
        let call = enter(FUNCTION, comm, Need::Ready)?;
        // NCCL_SUSPEND_MEM.
        if flags != 1 {
            return Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : invalid flags {flags}")));
        }
        call.state().phase = Phase::Suspended;
        Ok(())
    }

    fn ncclCommResume(comm: Handle) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        let mut state = call.state();
        if state.phase != Phase::Suspended {
            return Err(fail(INVALID_USAGE, format!("{FUNCTION} : the communicator is not suspended")));
        }
        state.phase = Phase::Ready;
        Ok(())
    }

    fn ncclCommMemStats(comm: Handle, which: c_int, value: Out<u64>) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        let suspended = call.state().phase == Phase::Suspended;
        let value = not_null(FUNCTION, value)?;
        // Memory that can be suspended, whether it is, memory that cannot be suspended, all memory.
        value.set(match which {
            0 => MEMORY,
            1 => u64::from(suspended),
            2 => MEMORY / 4,
            3 => MEMORY + MEMORY / 4,
            _ => return Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : {which} is no statistic"))),
        });
        Ok(())
    }
}
