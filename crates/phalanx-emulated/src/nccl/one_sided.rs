//! The functions that write to a peer's window, and signals.

use super::collective::{To, operate, refuse_flags};
use super::communicator::{Call, Need, enter};
use super::group::note;
use super::operation::{Arguments, Awaited, Kind, peer};
use super::result::*;
use super::window;
use crate::call::Answer;
use crate::handles::Handle;
use crate::pointers::In;
use crate::settings::settings;
use std::ffi::{c_int, c_uint};

/// The release from which on there is more than the first signal of the first context, whatever is configured.
const SEVERAL: c_int = 23100;

/// There are as many contexts, and signals of each peer in one, as the communicator is configured to have.
fn check_signal(function: &str, call: &Call, signal: c_int, context: c_int) -> Answer {
    let has_several = settings().nccl_version >= SEVERAL;
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

fn nothing() -> Arguments {
    Arguments { send: 0, receive: 0, count: 0, dtype: 0, reduction: None, bias: 0 }
}

/// Refuses signals before the first window.
fn check_begun(function: &str, call: &Call) -> Answer {
    if call.state().windows.have_begun() {
        return Ok(());
    }
    Err(fail(
        INVALID_USAGE,
        format!("{function} called before RMA is initialized. Register a symmetric window first."),
    ))
}

fn wait(function: &'static str, to: To, awaited: Vec<Awaited>) -> Answer {
    let call = enter(function, to.comm, Need::Ready)?;
    check_begun(function, &call)?;
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
    operate(function, to, Kind::WaitSignal(awaited), nothing())
}

exported! {
    fn ncclPutSignal(
        send: u64, count: usize, dtype: c_int, to: c_int, window: Handle, offset: usize, signal: c_int, context: c_int,
        flags: c_uint, comm: Handle, stream: Handle,
    ) {
        note((|| {
            refuse_flags(FUNCTION, flags)?;
            let call = enter(FUNCTION, comm, Need::Ready)?;
            let peer = peer(FUNCTION, &call, to)?;
            check_signal(FUNCTION, &call, signal, context)?;
            window::check_source(FUNCTION, &call, send)?;
            let window = window::number(FUNCTION, &call, window)?;
            drop(call);
            let kind = Kind::PutSignal { peer, window, offset: offset as u64, signal, context };
            operate(FUNCTION, To { comm, stream }, kind, Arguments { send, receive: 0, count, dtype, reduction: None, bias: 0 })
        })())
    }

    fn ncclSignal(to: c_int, signal: c_int, context: c_int, flags: c_uint, comm: Handle, stream: Handle) {
        note((|| {
            refuse_flags(FUNCTION, flags)?;
            let call = enter(FUNCTION, comm, Need::Ready)?;
            check_begun(FUNCTION, &call)?;
            let peer = peer(FUNCTION, &call, to)?;
            check_signal(FUNCTION, &call, signal, context)?;
            drop(call);
            operate(FUNCTION, To { comm, stream }, Kind::Signal { peer, signal, context }, nothing())
        })())
    }

    fn ncclWaitSignal(number: c_int, awaited: In<Awaited>, comm: Handle, stream: Handle) {
        if number < 1 || awaited.is_null() {
            return note(Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : there is nothing to wait for"))));
        }
        note(wait(FUNCTION, To { comm, stream }, awaited.slice(number as usize).to_vec()))
    }
}
