//! Windows: memory of each rank that the others can write to.

use super::communicator::{Call, Need, enter};
use super::group::{self, Job, note};
use super::result::*;
use crate::call::{Answer, Code};
use crate::cuda::allocation::given;
use crate::cuda::memory::{self, Kind, Range};
use crate::cuda::{capture, context};
use crate::handles::{self, Handle};
use crate::pointers::Out;
use crate::settings::settings;
use crate::violation::violation;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Arc;

/// `NCCL_WIN_REQUIRED_ALIGNMENT`.
const ALIGNMENT: u64 = 4096;

/// A communicator's windows, and whether it has ever had one.
#[derive(Default)]
pub struct Windows(BTreeMap<Handle, Window>, bool);

#[derive(Clone)]
struct Window {
    /// The number that all ranks know it by.
    number: u64,
    range: Range,
    /// Where it starts on each rank.
    starts: Vec<u64>,
}

impl Windows {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn has(&self, handle: Handle) -> bool {
        self.0.contains_key(&handle)
    }

    /// An address in a rank's part of a window; `None` if there is no such place.
    pub fn start_at(&self, handle: Handle, rank: c_int, offset: usize) -> Option<u64> {
        let window = self.0.get(&handle)?;
        let start = window.starts.get(usize::try_from(rank).ok()?)?;
        (offset < window.range.len).then(|| start + offset as u64)
    }

    /// Whether signals can be raised: from 2.31 on the first window begins that.
    pub fn have_begun(&self) -> bool {
        self.1 || settings().nccl_version < 23100
    }

    /// The communicator ends, and with it its windows.
    pub fn forget(&mut self) {
        std::mem::take(&mut self.0).values().for_each(|window| memory::register(window.range.address, false));
    }
}

/// The number of a window, by which its peers know it.
pub fn number(function: &str, call: &Call, handle: Handle) -> Result<u64, Code> {
    let known = call.state().windows.0.get(&handle).map(|window| window.number);
    known.ok_or_else(|| {
        fail(INVALID_ARGUMENT, format!("{function} : {handle:#x} is no window of this communicator"))
    })
}

/// Refuses a source that is in none of the communicator's windows.
pub fn check_source(function: &str, call: &Call, address: u64) -> Answer {
    let holds = |window: &Window| {
        address.checked_sub(window.range.address).is_some_and(|at| at < window.range.len as u64)
    };
    if call.state().windows.0.values().any(holds) {
        return Ok(());
    }
    Err(fail(INVALID_ARGUMENT, format!("{function} : the source {address:#x} is in no symmetric window")))
}

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
    if capture::any(&context::runtime_context(call.device)) {
        violation(function, "no window may be registered while a stream of its device is captured");
    }
    let range = given(function, "the buffer", address, size);
    let fit = memory::find(address).is_some_and(|allocation| allocation.kind == Kind::Nccl)
        && !settings().null_windows;
    let mut own = vec![u8::from(fit)];
    own.extend(address.to_ne_bytes());
    let number = call.next_exchange();
    let communicator = Arc::clone(&call);
    drop(call);
    let worker = Arc::clone(&communicator);
    let body = move || {
        // Known before any peer can write to it.
        worker.mailbox.open_window(number, range);
        let Ok(all) = worker.exchange(number, worker.everyone(), &own) else {
            return INTERNAL_ERROR;
        };
        worker.random.dawdle();
        if all.iter().any(|theirs| theirs[0] == 0) {
            // As NCCL does for memory that peers cannot map: success, and no window.
            worker.mailbox.close_window(number);
            to.set(0);
            return SUCCESS;
        }
        let start = |theirs: &Vec<u8>| u64::from_ne_bytes(theirs[1..].try_into().expect("8 bytes"));
        let starts = all.iter().map(start).collect();
        let handle = handles::fresh();
        memory::register(range.address, true);
        let windows = &mut worker.state().windows;
        windows.0.insert(handle, Window { number, range, starts });
        windows.1 = true;
        to.set(handle);
        SUCCESS
    };
    group::work(Job { function, communicator, body: Box::new(body) })
}

exported! {
    fn ncclCommWindowRegister(comm: Handle, address: u64, size: usize, window: Out<Handle>, flags: c_int) {
        note(register(FUNCTION, comm, (address, size), window, flags))
    }

    fn ncclCommWindowDeregister(comm: Handle, window: Handle) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        if window == 0 {
            return Ok(());
        }
        let Some(known) = call.state().windows.0.remove(&window) else {
            violation(FUNCTION, format!("the window {window:#x} is none of this communicator"));
        };
        call.mailbox.close_window(known.number);
        memory::register(known.range.address, false);
        Ok(())
    }

    fn ncclWinGetUserPtr(comm: Handle, window: Handle, address: Out<u64>) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        let known = call.state().windows.0.get(&window).map(|window| window.range.address);
        address.set(known.unwrap_or(0));
        known.map(drop).ok_or_else(|| fail(INVALID_ARGUMENT, format!("{FUNCTION} : {window:#x} is no window")))
    }
}
