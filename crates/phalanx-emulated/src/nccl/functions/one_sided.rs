//! Puts to a peer's window, and signals.

use super::operate::{To, buffers, operate, refuse_flags};
use crate::base::call::Answer;
use crate::base::handles::Handle;
use crate::base::pointers::In;
use crate::nccl::communicator::{Call, Need, enter};
use crate::nccl::group::{nccl, record};
use crate::nccl::operation::{Arguments, Awaited, Kind, peer};
use crate::nccl::result::*;
use crate::nccl::version::{SEVERAL_SIGNALS, is_since};
use std::ffi::{c_int, c_uint};

/// Refuses a context or a signal that the communicator's configuration does not have.
fn check_signal(function: &str, call: &Call, signal: c_int, context: c_int) -> Answer {
    let has_several = is_since(SEVERAL_SIGNALS);
    let check = |what, number, configured| {
        let count = if has_several { configured } else { 1 };
        if (0..count).contains(&number) {
            return Ok(());
        }
        Err(fail(
            INVALID_ARGUMENT,
            format!("{function} : {what} {number} is invalid (must be in [0, {count}))"),
        ))
    };
    check("Context", context, call.config.contexts)?;
    check("Signal index", signal, call.config.signals)
}

fn no_buffers() -> Arguments {
    buffers(0, 0, 0, 0)
}

/// Refuses signals before they are enabled.
fn check_enabled(function: &str, call: &Call) -> Answer {
    if call.state().windows.enable_signals() {
        return Ok(());
    }
    Err(fail(
        INVALID_USAGE,
        format!("{function} called before RMA is initialized. Register a symmetric window first."),
    ))
}

fn wait(function: &'static str, to: To, awaited: Vec<Awaited>) -> Answer {
    let call = enter(function, to.comm, Need::Ready)?;
    check_enabled(function, &call)?;
    for one in &awaited {
        peer(function, &call, one.peer)?;
        check_signal(function, &call, one.signal, one.context)?;
        if one.number < 1 {
            return Err(fail(
                INVALID_ARGUMENT,
                format!("{function} : {} signals cannot be waited for", one.number),
            ));
        }
    }
    drop(call);
    operate(function, to, Kind::WaitSignal(awaited), no_buffers())
}

nccl! {
    fn ncclPutSignal(
        send: u64, count: usize, dtype: c_int, to: c_int, window: Handle, offset: usize, signal: c_int, context: c_int,
        flags: c_uint, comm: Handle, stream: Handle,
    ) {
        record((|| {
            refuse_flags(FUNCTION, flags)?;
            let call = enter(FUNCTION, comm, Need::Ready)?;
            let peer = peer(FUNCTION, &call, to)?;
            check_signal(FUNCTION, &call, signal, context)?;
            call.state().windows.check_source(FUNCTION, send)?;
            let window = call.state().windows.number(FUNCTION, window)?;
            drop(call);
            let kind = Kind::PutSignal { peer, window, offset: offset as u64, signal, context };
            operate(FUNCTION, To { comm, stream }, kind, buffers(send, 0, count, dtype))
        })())
    }

    fn ncclSignal(to: c_int, signal: c_int, context: c_int, flags: c_uint, comm: Handle, stream: Handle) {
        record((|| {
            refuse_flags(FUNCTION, flags)?;
            let call = enter(FUNCTION, comm, Need::Ready)?;
            check_enabled(FUNCTION, &call)?;
            let peer = peer(FUNCTION, &call, to)?;
            check_signal(FUNCTION, &call, signal, context)?;
            drop(call);
            operate(FUNCTION, To { comm, stream }, Kind::Signal { peer, signal, context }, no_buffers())
        })())
    }

    fn ncclWaitSignal(number: c_int, awaited: In<Awaited>, comm: Handle, stream: Handle) {
        if number < 1 || awaited.is_null() {
            return record(Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : there is nothing to wait for"))));
        }
        record(wait(FUNCTION, To { comm, stream }, awaited.slice(number as usize).to_vec()))
    }
}
