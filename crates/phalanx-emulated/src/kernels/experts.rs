//! Dispatch and combine of experts (`gpu/kernels/experts.cu`): a kernel's arguments, its checks and its blocks.

use super::collective::check_reached;
use super::expert_blocks::{Arguments, Block, NUMBERS};
use super::lane::{LL, LL128, MAX_RANKS, Protocol};
use super::launch::parameter;
use super::warps::{Grid, Warp};
use crate::base::call::Code;
use crate::base::handles::Handle;
use crate::base::pointers::In;
use crate::base::violation::violation;
use crate::cuda::error::INVALID_VALUE;
use crate::cuda::memory::{GARBAGE, Range, When};
use crate::cuda::queue::Stream;
use crate::cuda::work::{Plain, Work};
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

const FUNCTION: &str = "cuLaunchKernel";
const PREFIX: &str = "phalanx_expert_";
/// Threads of a block, and most blocks.
const THREADS: u32 = 256;
const BLOCKS: u32 = 128;

/// A launch of a kernel.
struct Launched {
    is_dispatch: bool,
    protocol: &'static Protocol,
    arguments: Arguments,
    blocks: usize,
    context: Handle,
}

impl Launched {
    /// Memory that the kernel uses.
    fn ranges(&self) -> Vec<Range> {
        let a = &self.arguments;
        let range = |role, address, len: u64| Range { function: FUNCTION, role, address, len: len as usize };
        let (choices, tokens) = (u64::from(a.max_tokens * a.top_k), u64::from(a.tokens));
        let scratch = a.own + NUMBERS + (1 + u64::from(a.ranks)) * choices * 4;
        let rows = u64::from(a.experts * a.ranks * a.max_tokens);
        let (row, scale) = (u64::from(a.row_bytes), u64::from(a.scale_bytes));
        let mut ranges = vec![range("the kernel's abort word", a.abort, 4)];
        let all = &a.scratch[..a.ranks as usize];
        ranges.extend(all.iter().map(|start| range("the kernel's scratch", *start, scratch)));
        let chosen = u64::from(a.tokens * a.top_k);
        if self.is_dispatch {
            ranges.extend([
                range("the kernel's tokens", a.input, tokens * row),
                range("the kernel's scales", a.scales, tokens * scale),
                range("the kernel's routing", a.routing, chosen * u64::from(a.index_bytes)),
                range("the kernel's rows", a.output, rows * row),
                range("the kernel's scales of rows", a.row_scales, rows * scale),
                range("the kernel's counts", a.counts, u64::from(a.experts) * 4),
            ]);
        } else {
            ranges.extend([
                range("the kernel's rows", a.input, rows * row),
                range("the kernel's weights", a.weights, chosen * 4),
                range("the kernel's tokens", a.output, tokens * row),
            ]);
        }
        ranges
    }

    /// Fills what is written whole with garbage, which exposes programs that read it before the kernel has ended.
    fn spoil(&self) {
        let written = if self.is_dispatch { "the kernel's counts" } else { "the kernel's tokens" };
        let ranges = self.ranges();
        let spoiled = ranges.iter().filter(|range| range.role == written && range.len > 0);
        spoiled.for_each(|range| range.write(&vec![GARBAGE; range.len]));
    }

    fn perform(&self) {
        check_reached(self.ranges(), self.context, When::Performed);
        self.spoil();
        let grid = Grid::new(self.arguments.abort);
        let block = |number| Block {
            arguments: &self.arguments,
            grid: &grid,
            protocol: self.protocol,
            number,
            blocks: self.blocks,
        };
        let run = |number| -> Warp<'_> {
            match self.is_dispatch {
                true => Box::pin(block(number).dispatch()),
                false => Box::pin(block(number).combine()),
            }
        };
        grid.run((0..self.blocks).map(run).collect());
    }
}

/// The work of a launch, if there is such a kernel.
pub fn work(
    name: &str,
    stream: &Stream,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    parameters: In<*mut c_void>,
) -> Option<Result<Arc<dyn Work>, Code>> {
    let (task, protocol) = name.strip_prefix(PREFIX)?.split_once('_')?;
    let is_dispatch = task == "dispatch";
    let protocol = if protocol == "ll" { &LL } else { &LL128 };
    if grid[1..] != [1, 1] || block != [THREADS, 1, 1] || grid[0] > BLOCKS {
        return Some(Err(INVALID_VALUE));
    }
    Some(parameter::<Arguments>(parameters.slice(1)[0]).map(|arguments| -> Arc<dyn Work> {
        let Arguments { rank, ranks, tokens, max_tokens, .. } = arguments;
        if !(2..=MAX_RANKS as u32).contains(&ranks) || rank >= ranks || tokens > max_tokens {
            violation(FUNCTION, format!("{name} as rank {rank} of {ranks}, {tokens} of {max_tokens} tokens"));
        }
        if is_dispatch && grid[0] < 2 {
            violation(FUNCTION, format!("{name} without a block that counts"));
        }
        let (blocks, context) = (grid[0] as usize, stream.context);
        let launched = Launched { is_dispatch, protocol, arguments, blocks, context };
        check_reached(launched.ranges(), context, When::Called);
        Arc::new(Plain(move || launched.perform()))
    }))
}
