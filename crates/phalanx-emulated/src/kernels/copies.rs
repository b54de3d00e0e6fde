//! Copies of blocks (`gpu/kernels/copies.cu`).

use super::launch::parameter;
use crate::base::call::Code;
use crate::base::pointers::In;
use crate::cuda::error::INVALID_VALUE;
use crate::cuda::memory::{Range, When};
use crate::cuda::work::{Plain, Work};
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

const FUNCTION: &str = "cuLaunchKernel";
const THREADS: c_uint = 256;
/// Bytes of a block's description: where it goes, where it is, how long it is.
const BLOCK: usize = 24;

/// The blocks of a list: each with where it is and where it goes.
fn blocks(list: &Range) -> Vec<(Range, Range)> {
    let list = list.read();
    let (blocks, _) = list.as_chunks::<BLOCK>();
    let word =
        |block: &[u8; BLOCK], at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| block[at * 8 + byte]));
    let range = |role, address, len: u64| Range { function: FUNCTION, role, address, len: len as usize };
    let both = |block: &[u8; BLOCK]| {
        let [to, from, bytes] = [0, 1, 2].map(|at| word(block, at));
        (range("a block that is copied", from, bytes), range("where a block is copied", to, bytes))
    };
    blocks.iter().map(both).collect()
}

/// The work of a launch, if it is this kernel.
pub fn work(
    name: &str,
    grid: [c_uint; 3],
    threads: [c_uint; 3],
    parameters: In<*mut c_void>,
) -> Option<Result<Arc<dyn Work>, Code>> {
    if name != "phalanx_copy_blocks" {
        return None;
    }
    if grid[2] != 1 || threads != [THREADS, 1, 1] {
        return Some(Err(INVALID_VALUE));
    }
    let given = parameters.slice(2);
    let both = parameter::<u64>(given[0]).and_then(|list| Ok((list, parameter::<u32>(given[1])?)));
    Some(both.map(|(address, count)| -> Arc<dyn Work> {
        let len = count as usize * BLOCK;
        Arc::new(Plain(move || {
            let list = Range { function: FUNCTION, role: "the kernel's list of blocks", address, len };
            list.check(When::Performed);
            for (from, to) in blocks(&list) {
                from.check(When::Performed);
                to.check(When::Performed);
                to.write(&from.read());
            }
        }))
    }))
}
