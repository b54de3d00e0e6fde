//! What the library's own reductions cannot do, and how it is done nevertheless.
//!
//! On a stream the library has NCCL reduce, or the switch (NVLink multicast), and has kernels of its own for what neither
//! does: 16-bit integers, bitwise reductions, most of what is no sum where there is multicast, and everything where there is
//! neither. Those kernels
//! - send parts of the source after they have begun to write to the destination, so that a reduction in place among three PEs
//!   or more is wrong (seen with 3.4.5: 30,001 int8, xor, 3 PEs),
//! - write the parts of a reduce_scatter to scratch memory (half of `NVSHMEM_REDUCE_SCRATCH_SIZE`, 256 KiB) without looking
//!   whether they fit.
//!
//! So such a reduction is made of pieces, whose source is put aside, in [`ROOM`] bytes of symmetric memory for each team.

use super::collective::{TeamReduction, column};
use super::context::Context;
use super::library::Library;
use crate::dtype::DType;
use crate::error::{Error, Result, UnsupportedError};
use cudarc::driver::sys::CUdeviceptr;
use phalanx_sys::nccl::NCCL;
use phalanx_sys::nvshmem::{init_status, nvshmem_team_t};
use std::ffi::c_void;

/// Bytes of a piece: of a reduction in place, or of the parts for all PEs of a reduce_scatter.
pub(crate) const ROOM: usize = 64 << 10;
/// Teams that have room (`NVSHMEM_MAX_TEAMS`, unless it was changed).
const TEAMS: usize = 128;

/// What the library does its reductions with here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Whether it found NCCL.
    nccl: bool,
    /// The room, the same on all PEs.
    start: CUdeviceptr,
}

/// A reduction whose limits are asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub team: nvshmem_team_t,
    pub pes: usize,
    pub dtype: DType,
    pub op: TeamReduction,
    /// Elements of the destination.
    pub count: usize,
}

impl Limits {
    /// Before there is room.
    pub fn unknown() -> Limits {
        Limits { nccl: false, start: 0 }
    }

    /// Collective, just after initialisation: later the process may load an NCCL of which the library knows nothing.
    pub fn of(context: &Context) -> Result<Limits> {
        let nccl = finds_nccl(context.library);
        let start = if context.n_pes() > 1 { context.reserve(TEAMS * ROOM)? } else { 0 };
        Ok(Limits { nccl, start })
    }

    /// Whether the library's own kernels do it. Its device is current, and this is its caller's turn.
    pub fn apply(&self, library: &Library, asked: Asked) -> Result<bool> {
        use DType::{Bf16, F16, F32, I16, U16};
        let Asked { team, pes, dtype, op, count } = asked;
        if pes == 1 {
            return Ok(false);
        }
        let name = "nvshmemx_mc_ptr";
        let multicast = library.need(library.nvshmemx_mc_ptr, name)?;
        // SAFETY: initialised; a team that exists, and a symmetric address.
        let through_switch = !unsafe { multicast(team, self.start as *const c_void) }.is_null();
        let is_done_for_it = if through_switch {
            // In the terms of the library, with nothing left over: the pieces of one PE, pairs of halves.
            let is_even = count.is_multiple_of(pes) && (dtype == F32 || pes.is_multiple_of(2) && count > pes);
            op == TeamReduction::Sum && matches!(dtype, F32 | F16 | Bf16) && is_even
        } else {
            let is_nccls = (op as usize) < TeamReduction::And as usize && !matches!(dtype, I16 | U16);
            self.nccl && is_nccls && column(dtype).is_some()
        };
        Ok(!is_done_for_it)
    }

    /// The room of a team.
    pub fn room(&self, team: nvshmem_team_t) -> Result<CUdeviceptr> {
        match usize::try_from(team) {
            Ok(number) if number < TEAMS => Ok(self.start + (number * ROOM) as u64),
            _ => Err(Error::from(UnsupportedError {
                what: format!("this reduction on team {team}"),
                why: format!("it takes room aside, which the first {TEAMS} teams have"),
                remedy: "destroy teams that are not used, or reduce to another buffer".into(),
            })),
        }
    }
}

/// Whether the library has found NCCL: it looks for it by its name, so what the process has loaded at all is found.
fn finds_nccl(library: &Library) -> bool {
    let is_off = std::env::var("NVSHMEM_DISABLE_NCCL").is_ok_and(|value| {
        !matches!(value.trim().to_ascii_lowercase().as_str(), "" | "0" | "n" | "no" | "f" | "false")
    });
    // SAFETY: may be called at any time.
    let is_alone =
        library.nvshmemx_init_status.is_some_and(|status| unsafe { status() } == init_status::IS_INITIALIZED);
    // PEs that share a GPU do without it.
    !is_off && is_alone && !NCCL.loaded().is_empty()
}
