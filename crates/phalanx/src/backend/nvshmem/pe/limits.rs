//! Limits of the library's reductions, and how each reduction is done within them.
//!
//! On a stream the library reduces with NCCL or with the switch (NVLink multicast, where it is on), and with
//! its own kernels what neither does. Those kernels
//! - send parts of the source after they have begun to write to the destination, so that a reduction in place
//!   among three PEs or more is wrong (seen with 3.4.5: 30,001 int8, xor, 3 PEs),
//! - write the parts of a reduce_scatter to scratch memory (half of `NVSHMEM_REDUCE_SCRATCH_SIZE`, 256 KiB)
//!   without looking whether they fit.
//!
//! So such a reduction is made of pieces, whose source is copied to [`TEAM_SCRATCH`] bytes of symmetric
//! memory for each team.
//!
//! With the switch, according to the source of 3.4.5 (untested: multicast was off on all machines used), a
//! reduce_scatter adds integers as floats, and the result for 16-bit floats depends on their number in each
//! block. So only sums of f32 use the switch.

use super::collective::{TeamReduction, column};
use super::context::Context;
use super::library::NvshmemLibrary;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result, UnsupportedError};
use cudarc::driver::sys::CUdeviceptr;
use phalanx_sys::nccl::NCCL;
use phalanx_sys::nvshmem::{init_status, nvshmem_team_t, team};
use std::ffi::c_void;

/// Bytes of a piece: of a reduction in place, or of the parts for all PEs of a reduce_scatter.
pub(crate) const TEAM_SCRATCH: usize = 64 << 10;
/// Teams that have scratch memory (`NVSHMEM_MAX_TEAMS`, unless it was changed).
const TEAMS: usize = 128;

/// What the library reduces with here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Whether the library found NCCL.
    nccl: bool,
    /// The scratch, the same on all PEs.
    start: CUdeviceptr,
    /// Whether all PEs have NVLink multicast.
    multicast: bool,
}

/// A reduction, as its method is looked up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReductionQuery {
    pub team: nvshmem_team_t,
    pub pes: usize,
    pub dtype: DType,
    pub op: TeamReduction,
    pub scatters: bool,
}

/// How a reduction is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReductionMethod {
    /// By the library, of any length and also in place.
    Direct,
    /// By the library's own kernels, with their limits.
    InPieces,
    /// The library cannot do it.
    Unsupported,
}

impl Limits {
    /// Before there is scratch.
    pub fn unknown() -> Limits {
        Limits { nccl: false, start: 0, multicast: false }
    }

    /// Collective, just after initialisation: later the process may load an NCCL of which the library knows
    /// nothing.
    pub fn of(context: &Context) -> Result<Limits> {
        let nccl = finds_nccl(context.library);
        let start = if context.n_pes() > 1 { context.reserve(TEAMS * TEAM_SCRATCH)? } else { 0 };
        let has_multicast = |find: unsafe extern "C" fn(_, _) -> *mut c_void| {
            // SAFETY: initialised; the team of all PEs, and a symmetric address.
            !unsafe { find(team::WORLD, start as *const c_void) }.is_null()
        };
        let multicast = start != 0 && context.library.nvshmemx_mc_ptr.is_some_and(has_multicast);
        Ok(Limits { nccl, start, multicast })
    }

    /// Most teams of a process at a time, beside the library's own. With multicast the library makes each of
    /// them `NVSHMEM_MAX_CTAS` (16) times, also four of its own six, and ends the process when there are no
    /// more (source of 3.4.5; untested). Without multicast it returns an error.
    pub fn teams(&self) -> usize {
        if !self.multicast {
            return usize::MAX;
        }
        let number = |name, default| {
            std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
        };
        let (all, copies): (usize, usize) =
            (number("NVSHMEM_MAX_TEAMS", TEAMS).max(64), number("NVSHMEM_MAX_CTAS", 16).max(1));
        all.saturating_sub(2 + 4 * copies) / copies
    }

    /// The method for a reduction. The device is current, and it is the caller's turn in the library.
    pub fn method(&self, library: &NvshmemLibrary, query: ReductionQuery) -> ReductionMethod {
        let ReductionQuery { team, pes, dtype, op, scatters } = query;
        if pes == 1 {
            return ReductionMethod::Direct;
        }
        let multicast = |find: unsafe extern "C" fn(_, _) -> *mut c_void| {
            // SAFETY: initialised; a team that exists, and a symmetric address.
            !unsafe { find(team, self.start as *const c_void) }.is_null()
        };
        let is_nccls = column(dtype).is_some()
            && (op as usize) < TeamReduction::And as usize
            && !matches!(dtype, DType::I16 | DType::U16);
        match library.nvshmemx_mc_ptr.is_some_and(multicast) {
            true if (op, dtype) == (TeamReduction::Sum, DType::F32) => ReductionMethod::Direct,
            true if scatters => ReductionMethod::Unsupported,
            false if self.nccl && is_nccls => ReductionMethod::Direct,
            _ => ReductionMethod::InPieces,
        }
    }

    /// The scratch of a team.
    pub fn scratch(&self, team: nvshmem_team_t) -> Result<CUdeviceptr> {
        match usize::try_from(team) {
            Ok(number) if number < TEAMS => Ok(self.start + (number * TEAM_SCRATCH) as u64),
            _ => Err(Error::from(UnsupportedError {
                what: format!("this reduction on team {team}"),
                why: format!("it takes room aside, which the first {TEAMS} teams have"),
                remedy: "destroy teams that are not used".into(),
            })),
        }
    }
}

/// Whether the library has found NCCL: it looks for it by name, so any loaded NCCL is found.
fn finds_nccl(library: &NvshmemLibrary) -> bool {
    // As the library reads it: an empty value is true.
    let is_off = std::env::var("NVSHMEM_DISABLE_NCCL")
        .is_ok_and(|value| !value.starts_with(['0', 'N', 'n', 'F', 'f']));
    // SAFETY: may be called at any time.
    let is_alone =
        library.nvshmemx_init_status.is_some_and(|status| unsafe { status() } == init_status::IS_INITIALIZED);
    // PEs that share a GPU do not use it.
    !is_off && is_alone && !NCCL.loaded().is_empty()
}
