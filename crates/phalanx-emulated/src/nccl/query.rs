//! Questions about the library and communicators; suspending them.

use super::communicator::{Need, Phase, enter};
use super::result::*;
use crate::call::Code;
use crate::handles::Handle;
use crate::pointers::Out;
use crate::settings::settings;
use std::ffi::c_int;

/// What a communicator is said to use of its device.
const MEMORY: u64 = 64 << 20;

fn not_null<T>(function: &str, to: Out<T>) -> Result<Out<T>, Code> {
    if to.is_null() {
        Err(fail(INVALID_ARGUMENT, format!("{function} : the result's argument is NULL")))
    } else {
        Ok(to)
    }
}

exported! {
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
        // Can be suspended, is suspended, cannot be suspended, in all.
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
