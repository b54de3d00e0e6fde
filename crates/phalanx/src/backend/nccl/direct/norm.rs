//! The launches of `gpu/kernels/norm.cu`.

use super::launch::{KernelArguments, KernelLaunch};
use super::setup::Direct;
use super::tunables::{LL128_LANES, LL128_STEP, MAX_RANKS, NORM_ROW_STEPS, NORM_WARPS};
use crate::contract::{Call, RmsNorm};
use crate::gpu::kernels::Kernel;

/// `NormArguments` in gpu/kernels/norm.cu.
#[repr(C)]
pub(super) struct NormArguments {
    inboxes: [u64; MAX_RANKS],
    own: u64,
    abort: u64,
    input: u64,
    residual: u64,
    weight: u64,
    output: u64,
    scales: u64,
    rank: u32,
    ranks: u32,
    rows: u32,
    hidden: u32,
    epsilon: f32,
    format: u32,
}

impl NormArguments {
    /// Those of the norm alone: `send` is the sum.
    fn of(call: &Call<'_>, norm: &RmsNorm) -> NormArguments {
        NormArguments {
            inboxes: [0; MAX_RANKS],
            own: 0,
            abort: 0,
            input: call.send.addr() as u64,
            residual: norm.residual,
            weight: norm.weight,
            output: call.recv.addr() as u64,
            scales: norm.scales,
            rank: 0,
            ranks: 1,
            rows: (call.blocks.longest() / norm.hidden) as u32,
            hidden: norm.hidden as u32,
            epsilon: norm.epsilon,
            format: norm.format as u32,
        }
    }
}

/// Steps of a row.
fn row_steps(call: &Call<'_>, norm: &RmsNorm) -> usize {
    (norm.hidden * call.dtype.size()).div_ceil(LL128_STEP)
}

/// The launch of a kernel of the module on a call's rows. The blocks' warps are as many as a row's steps, or half as many.
fn launch(kernel: Kernel, call: &Call<'_>, norm: &RmsNorm, arguments: NormArguments) -> KernelLaunch {
    let steps = row_steps(call, norm);
    debug_assert!(steps <= NORM_ROW_STEPS);
    let warps = if steps <= NORM_WARPS { steps } else { steps.div_ceil(2) };
    let blocks = arguments.rows.min((LL128_LANES / warps) as u32).max(1);
    let arguments = KernelArguments::Norm(arguments);
    KernelLaunch::new(kernel, [blocks, 1], 32 * warps as u32, call.stream, arguments)
}

/// The norm of a sum that is complete: `send` of the call.
pub(crate) fn alone(kernel: Kernel, call: &Call<'_>, norm: &RmsNorm) -> KernelLaunch {
    launch(kernel, call, norm, NormArguments::of(call, norm))
}

impl Direct {
    /// The sum and the norm in one kernel.
    pub(super) fn fused(&self, kernel: Kernel, rank: usize, call: &Call<'_>, norm: &RmsNorm) -> KernelLaunch {
        let arguments = NormArguments {
            inboxes: self.inboxes,
            own: self.own,
            abort: self.abort_word(),
            rank: rank as u32,
            ranks: self.topology.ranks as u32,
            ..NormArguments::of(call, norm)
        };
        launch(kernel, call, norm, arguments)
    }
}
