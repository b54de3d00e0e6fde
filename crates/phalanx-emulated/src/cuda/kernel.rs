//! Launches of phalanx's own kernels: atomic operations of one thread. Other kernels do not exist here.
//!
//! A module is its PTX text, which must declare the kernel. The kernel's name selects the code in this file.

use super::context::current;
use super::error::{INVALID_VALUE, NOT_FOUND};
use super::memory::{Range, When};
use super::stream;
use super::work::Plain;
use crate::base::call::{Code, exported};
use crate::base::handles::{self, Handle, Handles};
use crate::base::pointers::{In, Out};
use std::ffi::{c_char, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::AcqRel};

/// The prefix of a kernel's name. The operation and the type follow.
const PREFIX: &str = "phalanx_atomic_";

static MODULES: Handles<String> = Handles::new("module");
static FUNCTIONS: Handles<String> = Handles::new("function");

macro_rules! atomically {
    ($atomic:ty, $float:ty, $place:expr, $operation:expr, $is_float:expr, $value:expr, $comparand:expr) => {{
        // SAFETY: checked and aligned, and accessed by atomics and copies only.
        let place = unsafe { &*($place as *const $atomic) };
        let (value, comparand) = ($value, $comparand);
        let add = |old| (<$float>::from_bits(old) + <$float>::from_bits(value)).to_bits();
        match $operation {
            "fetch" => place.fetch_or(0, AcqRel),
            "swap" => place.swap(value, AcqRel),
            "compare_swap" => place
                .compare_exchange(comparand, value, AcqRel, std::sync::atomic::Ordering::Acquire)
                .unwrap_or_else(|old| old),
            "add" if $is_float => place
                .fetch_update(AcqRel, std::sync::atomic::Ordering::Acquire, |old| Some(add(old)))
                .unwrap_or_else(|old| old),
            "add" => place.fetch_add(value, AcqRel),
            "and" => place.fetch_and(value, AcqRel),
            "or" => place.fetch_or(value, AcqRel),
            _ => place.fetch_xor(value, AcqRel),
        }
    }};
}

fn parameter<T: Copy>(pointer: *mut c_void) -> Result<T, Code> {
    if pointer.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's parameter, of the kernel's parameter type.
    Ok(unsafe { pointer.cast::<T>().read_unaligned() })
}

fn perform(name: &str, address: u64, value: u64, comparand: u64, answer: u64) {
    let Some((operation, dtype)) = name.rsplit_once('_') else { return };
    let len = if dtype.ends_with("64") { 8 } else { 4 };
    let range = |role, address| Range { function: "a kernel", role, address, len };
    range("the element", address).check(When::Performed);
    let is_float = dtype.starts_with('f');
    let old = if len == 8 {
        atomically!(AtomicU64, f64, address, operation, is_float, value, comparand)
    } else {
        u64::from(atomically!(AtomicU32, f32, address, operation, is_float, value as u32, comparand as u32))
    };
    if answer != 0 {
        range("the answer", answer).write(&old.to_ne_bytes()[..len]);
    }
}

exported! {
    fn cuModuleLoadData(module: Out<Handle>, image: In<c_char>) {
        current()?.sync_implicitly();
        let handle = handles::fresh();
        MODULES.insert(handle, Arc::new(image.text().ok_or(INVALID_VALUE)?));
        module.set(handle);
        Ok(())
    }

    fn cuModuleGetFunction(function: Out<Handle>, module: Handle, name: In<c_char>) {
        let (module, name) = (MODULES.get(FUNCTION, module), name.text().ok_or(INVALID_VALUE)?);
        let known = name.strip_prefix(PREFIX).filter(|_| module.contains(&format!(".entry {name}(")));
        let handle = handles::fresh();
        FUNCTIONS.insert(handle, Arc::new(known.ok_or(NOT_FOUND)?.to_owned()));
        function.set(handle);
        Ok(())
    }

    fn cuLaunchKernel(
        function: Handle, _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint,
        _shared: c_uint, stream: Handle, parameters: In<*mut c_void>, _extra: In<c_void>,
    ) {
        let name = FUNCTIONS.get(FUNCTION, function);
        let given = parameters.slice(4);
        let wide = name.ends_with("64");
        let operand = |pointer| if wide { parameter::<u64>(pointer) } else { parameter::<u32>(pointer).map(u64::from) };
        let (address, answer) = (parameter::<u64>(given[0])?, parameter::<u64>(given[3])?);
        let (value, comparand) = (operand(given[1])?, operand(given[2])?);
        let stream = stream::find(FUNCTION, stream)?;
        stream.enqueue(Arc::new(Plain(move || perform(&name, address, value, comparand, answer))))
    }
}
