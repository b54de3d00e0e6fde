//! Collectives: a kernel's arguments, its checks and its warps.

use super::element::*;
use super::exchange::Arguments;
use super::lane::{INBOX, LL, LL128, MAX_RANKS, Protocol};
use super::launch::parameter;
use super::warps::{Grid, Warp};
use super::{moving, reduce};
use crate::base::call::Code;
use crate::base::handles::Handle;
use crate::base::pointers::In;
use crate::base::violation::violation;
use crate::cuda::context::{self, CudaContext};
use crate::cuda::error::INVALID_VALUE;
use crate::cuda::memory::{self, GARBAGE, Kind, Range, When};
use crate::cuda::queue::Stream;
use crate::cuda::work::{Plain, Work};
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

const FUNCTION: &str = "cuLaunchKernel";
/// Most threads of a block (`__launch_bounds__`).
const THREADS: u32 = 256;
/// Threads of a warp.
const WARP: u32 = 32;

/// What a kernel does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    Move,
    Reduce,
    TwoHops,
}

/// A kernel: its task, protocol and element type.
#[derive(Debug, Clone)]
struct Kernel {
    task: Task,
    protocol: &'static Protocol,
    element: String,
}

impl Kernel {
    /// The kernel with this name.
    fn find(name: &str) -> Option<Kernel> {
        let name = name.strip_prefix("phalanx_")?;
        let tasks = [("move_", Task::Move), ("reduce_", Task::Reduce), ("two_hops_", Task::TwoHops)];
        let (rest, task) =
            tasks.iter().find_map(|(prefix, task)| Some((name.strip_prefix(prefix)?, *task)))?;
        let (protocol, element) = rest.split_once('_').unwrap_or((rest, ""));
        let protocol = [("ll", &LL), ("ll128", &LL128)].into_iter().find(|(name, _)| *name == protocol)?.1;
        Some(Kernel { task, protocol, element: element.to_owned() })
    }

    /// The work of a warp.
    fn warp<'a>(&self, arguments: &'a Arguments, grid: &'a Grid, lane: usize) -> Warp<'a> {
        macro_rules! of_element {
            ($element:ty, $acc:ty) => {
                match self.task {
                    Task::TwoHops => {
                        Box::pin(reduce::two_hops::<$element, $acc>(arguments, grid, self.protocol, lane))
                    }
                    _ => Box::pin(reduce::reduce::<$element, $acc>(arguments, grid, self.protocol, lane)),
                }
            };
        }
        macro_rules! elements {
            ($($name:literal: $element:ty;)*) => {
                match &*self.element {
                    $($name if arguments.op == AVG => of_element!($element, <$element as Element>::Wide),)*
                    $($name => of_element!($element, <$element as Element>::Acc),)*
                    other => violation(FUNCTION, format!("there is no kernel for elements of type {other}")),
                }
            };
        }
        match self.task {
            Task::Move => Box::pin(moving::move_blocks(arguments, grid, self.protocol, lane)),
            _ => elements! {
                "f32": F32; "f64": F64; "f16": F16; "bf16": Bf16; "f8e4m3": F8E4M3; "f8e5m2": F8E5M2;
                "i8": I8; "u8": U8; "i16": I16; "u16": U16; "i32": I32; "u32": U32; "i64": I64; "u64": U64;
            },
        }
    }
}

/// A launch of a kernel.
struct Launched {
    kernel: Kernel,
    arguments: Arguments,
    lanes: usize,
    context: Handle,
}

impl Launched {
    /// Memory that the kernel uses, with whether it writes there.
    fn ranges(&self) -> Vec<(Range, bool)> {
        let Arguments { own, abort, ranks, rank, peers, .. } = &self.arguments;
        let range = |role, address, len| Range { function: FUNCTION, role, address, len };
        let mut ranges = vec![
            (range("the kernel's abort word", *abort, 4), false),
            (range("the kernel's inboxes", *own, (*ranks as usize - 1) * INBOX), true),
        ];
        if self.arguments.factor_is_address != 0 {
            ranges.push((range("the kernel's factor", self.arguments.factor, 1), false));
        }
        for (number, peer) in peers.iter().enumerate().take(*ranks as usize) {
            if number != *rank as usize {
                ranges.push((range("the kernel's inbox at a peer", peer.inbox, INBOX), true));
            }
            ranges.push((range("the kernel's send buffer", peer.send, peer.send_bytes as usize), false));
            ranges.push((range("the kernel's receive buffer", peer.recv, peer.recv_bytes as usize), true));
        }
        ranges
    }

    /// Ends the process if the kernel's GPU must not access the memory.
    fn check(&self, when: When) {
        check_reached(self.ranges().into_iter().map(|(range, _)| range), self.context, when);
    }

    /// Fills the output with garbage, which exposes programs that read it before the kernel has ended. Buffers that
    /// are read, too, are left.
    fn spoil(&self) {
        let peers = &self.arguments.peers[..self.arguments.ranks()];
        let range = |address, len: u64| Range { function: FUNCTION, role: "", address, len: len as usize };
        let mut sent = peers.iter().map(|peer| range(peer.send, peer.send_bytes));
        let received =
            peers.iter().map(|peer| range(peer.recv, peer.recv_bytes)).filter(|range| range.len > 0);
        let received: Vec<Range> = received.collect();
        if !sent.any(|sent| sent.len > 0 && received.iter().any(|range| range.overlaps(&sent))) {
            received.iter().for_each(|range| range.write(&vec![GARBAGE; range.len]));
        }
    }

    fn perform(&self) {
        self.check(When::Performed);
        self.spoil();
        let grid = Grid::new(self.arguments.abort);
        let warps = (0..self.lanes).map(|lane| self.kernel.warp(&self.arguments, &grid, lane)).collect();
        grid.run(warps);
    }
}

/// Ends the process if a kernel on a GPU must not access one of these.
pub fn check_reached(ranges: impl IntoIterator<Item = Range>, context: Handle, when: When) {
    for range in ranges.into_iter().filter(|range| range.len > 0) {
        range.check(when);
        let Some(allocation) = memory::find(range.address) else { continue };
        let is_reached = allocation.kind == Kind::Host
            || context::find(context).is_ok_and(|own: Arc<CudaContext>| own.reaches(allocation.context));
        if !is_reached {
            let Range { role, address, .. } = range;
            violation(
                FUNCTION,
                format!("{role} at {address:#x} is in another context, to which this one has no access"),
            );
        }
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
    let kernel = Kernel::find(name)?;
    let is_line = grid[1..] == [1, 1] && block[1..] == [1, 1];
    if !is_line || block[0] > THREADS || !block[0].is_multiple_of(WARP) {
        return Some(Err(INVALID_VALUE));
    }
    let lanes = (grid[0] * (block[0] / WARP)) as usize;
    Some(parameter::<Arguments>(parameters.slice(1)[0]).map(|arguments| -> Arc<dyn Work> {
        let ranks = arguments.ranks as usize;
        if lanes > kernel.protocol.lanes || !(2..=MAX_RANKS).contains(&ranks) || arguments.rank() >= ranks {
            violation(FUNCTION, format!("{name} on {lanes} warps, as rank {} of {ranks}", arguments.rank));
        }
        let launched = Launched { kernel, arguments, lanes, context: stream.context };
        launched.check(When::Called);
        Arc::new(Plain(move || launched.perform()))
    }))
}
