//! NVSHMEM's atomic operations: kernels of one thread.

use super::launch::parameter;
use crate::base::call::Code;
use crate::base::pointers::In;
use crate::cuda::memory::{Range, When};
use crate::cuda::work::{Plain, Work};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::AcqRel};

/// The prefix of a kernel's name. The operation and the type follow.
const PREFIX: &str = "phalanx_atomic_";

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

/// The work of a launch, if the kernel is an atomic operation.
pub fn work(name: &str, parameters: In<*mut c_void>) -> Option<Result<Arc<dyn Work>, Code>> {
    let name = name.strip_prefix(PREFIX)?.to_owned();
    Some(prepare(name, parameters.slice(4)))
}

fn prepare(name: String, given: &[*mut c_void]) -> Result<Arc<dyn Work>, Code> {
    let wide = name.ends_with("64");
    let operand =
        |pointer| if wide { parameter::<u64>(pointer) } else { parameter::<u32>(pointer).map(u64::from) };
    let (address, answer) = (parameter::<u64>(given[0])?, parameter::<u64>(given[3])?);
    let (value, comparand) = (operand(given[1])?, operand(given[2])?);
    Ok(Arc::new(Plain(move || perform(&name, address, value, comparand, answer))))
}
