//! Messages (`gpu/kernels/messages.cu`): each direction of each pair has warps of its own.

use super::lane::{INBOX, LL, LL128};
use super::launch::parameter;
use super::message_warps::{Arguments, MOST, share};
use super::warps::{Grid, Warp};
use crate::base::call::Code;
use crate::base::pointers::In;
use crate::base::violation::violation;
use crate::cuda::error::INVALID_VALUE;
use crate::cuda::memory::{GARBAGE, Range, When};
use crate::cuda::work::{Plain, Work};
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

const FUNCTION: &str = "cuLaunchKernel";
const WARP: c_uint = 32;
/// Most threads of a block.
const THREADS: c_uint = 256;

impl Arguments {
    /// Memory that the kernel uses.
    fn check(&self, parts: usize, when: When) {
        let range = |role, address, len| Range { function: FUNCTION, role, address, len };
        range("the kernel's abort word", self.abort, 4).check(when);
        for part in &self.parts[..parts] {
            range("the kernel's inbox", part.own, INBOX).check(when);
            range("the kernel's inbox at a peer", part.remote, INBOX).check(when);
            let role =
                if part.sends == 0 { "the kernel's receive buffer" } else { "the kernel's send buffer" };
            for message in self.messages(part) {
                range(role, message.buffer, message.bytes as usize).check(when);
            }
        }
    }

    /// Fills what is received with garbage, unless it is sent, too.
    fn spoil(&self, parts: usize) {
        let ranges = |sends| {
            let wanted = self.parts[..parts].iter().filter(move |part| (part.sends != 0) == sends);
            wanted.flat_map(|part| self.messages(part)).map(|message| Range {
                function: FUNCTION,
                role: "",
                address: message.buffer,
                len: message.bytes as usize,
            })
        };
        for received in ranges(false) {
            if !ranges(true).any(|sent| received.overlaps(&sent)) {
                received.write(&vec![GARBAGE; received.len]);
            }
        }
    }
}

/// The work of a launch, if there is such a kernel.
pub fn work(
    name: &str,
    grid: [c_uint; 3],
    threads: [c_uint; 3],
    parameters: In<*mut c_void>,
) -> Option<Result<Arc<dyn Work>, Code>> {
    let protocol = match name.strip_prefix("phalanx_messages_")? {
        "ll" => &LL,
        "ll128" => &LL128,
        _ => return None,
    };
    let parts = grid[1] as usize;
    if grid[2] != 1 || threads[1..] != [1, 1] || threads[0] > THREADS || !threads[0].is_multiple_of(WARP) {
        return Some(Err(INVALID_VALUE));
    }
    let lanes = (grid[0] * (threads[0] / WARP)) as usize;
    Some(parameter::<Arguments>(parameters.slice(1)[0]).map(|a| -> Arc<dyn Work> {
        if lanes > protocol.lanes / 2 || lanes as u64 > a.lanes || parts > MOST {
            violation(FUNCTION, format!("{name} on {lanes} warps for each of {parts} parts"));
        }
        a.check(parts, When::Called);
        Arc::new(Plain(move || {
            a.check(parts, When::Performed);
            a.spoil(parts);
            let shared = Grid::new(a.abort);
            let of_part = |part| {
                let (a, shared) = (&a, &shared);
                (0..lanes).map(move |lane| -> Warp<'_> { Box::pin(share(a, shared, part, protocol, lane)) })
            };
            shared.run(a.parts[..parts].iter().flat_map(of_part).collect());
        }))
    }))
}
