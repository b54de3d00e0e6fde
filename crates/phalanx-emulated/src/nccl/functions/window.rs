//! The functions on windows.

use crate::base::call::Answer;
use crate::base::handles::Handle;
use crate::base::pointers::Out;
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::cuda::memory::{self, Kind, Range};
use crate::cuda::{capture, context};
use crate::nccl::communicator::windows::Window;
use crate::nccl::communicator::{Need, enter};
use crate::nccl::group::{self, nccl, record};
use crate::nccl::job::Job;
use crate::nccl::result::*;
use std::ffi::c_int;
use std::sync::Arc;

/// `NCCL_WIN_REQUIRED_ALIGNMENT`, in bytes.
const ALIGNMENT: u64 = 4096;

fn register(
    function: &'static str,
    comm: Handle,
    (address, size): (u64, usize),
    to: Out<Handle>,
    flags: c_int,
) -> Answer {
    let call = enter(function, comm, Need::Ready)?;
    if to.is_null() || address == 0 || size == 0 || !(0..=3).contains(&flags) || address % ALIGNMENT != 0 {
        return Err(fail(
            INVALID_ARGUMENT,
            format!("{function} : invalid arguments; {address:#x} must be a multiple of {ALIGNMENT}"),
        ));
    }
    if capture::any_in(context::runtime_context(call.device).handle) {
        violation(function, "a window is registered while a stream of its device is captured");
    }
    let range = Range::given(function, "the buffer", address, size);
    let is_fit = memory::find(address).is_some_and(|allocation| allocation.kind == Kind::Nccl)
        && !settings().null_windows;
    let mut own = vec![u8::from(is_fit)];
    own.extend(address.to_ne_bytes());
    let number = call.next_exchange();
    let communicator = Arc::clone(&call);
    drop(call);
    let worker = Arc::clone(&communicator);
    let body = move || {
        // Open before any peer can write to it.
        worker.mailbox.open_window(number, range);
        let Ok(all) = worker.exchange(number, worker.all_ranks(), &own) else {
            return INTERNAL_ERROR;
        };
        worker.random.delay();
        if all.iter().any(|theirs| theirs[0] == 0) {
            // As NCCL for memory that peers cannot map: success, and no window.
            worker.mailbox.close_window(number);
            to.set(0);
            return SUCCESS;
        }
        let start = |theirs: &Vec<u8>| u64::from_ne_bytes(theirs[1..].try_into().expect("8 bytes"));
        let starts = all.iter().map(start).collect();
        to.set(worker.state().windows.add(Window { number, range, starts }));
        SUCCESS
    };
    group::run(Job { function, communicator, body: Box::new(body) })
}

nccl! {
    fn ncclCommWindowRegister(comm: Handle, address: u64, size: usize, window: Out<Handle>, flags: c_int) {
        record(register(FUNCTION, comm, (address, size), window, flags))
    }

    fn ncclCommWindowDeregister(comm: Handle, window: Handle) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        if window == 0 {
            return Ok(());
        }
        let Some(known) = call.state().windows.remove(window) else {
            violation(FUNCTION, format!("the window {window:#x} does not belong to this communicator"));
        };
        call.mailbox.close_window(known.number);
        Ok(())
    }

    fn ncclWinGetUserPtr(comm: Handle, window: Handle, address: Out<u64>) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        let known = call.state().windows.start(window);
        address.set(known.unwrap_or(0));
        known.map(drop).ok_or_else(|| fail(INVALID_ARGUMENT, format!("{FUNCTION} : {window:#x} is no window")))
    }
}
