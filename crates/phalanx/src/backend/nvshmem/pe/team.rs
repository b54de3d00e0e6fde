//! Teams: subsets of the PEs, with numbers of their own.

use super::context::Context;
use super::control::CollectiveCall;
use super::library::NvshmemLibrary;
use super::memory::Symmetric;
use super::views::Multicast;
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use cudarc::driver::sys::CUdeviceptr;
use phalanx_sys::nvshmem::{nvshmem_team_t, team};
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::ops::Deref;

/// A subset of the PEs, numbered from 0: all of them ([`Context::world`]), those with mapped memory
/// ([`Context::shared`]) or on this node ([`Context::node`]), or part of another team ([`SplitTeam`]).
///
/// A team carries out one operation at a time, since its PEs synchronise in one place. Operations on
/// different streams need an order between the streams (an event).
#[derive(Debug)]
pub struct Team<'c> {
    pub(crate) context: &'c Context,
    pub(crate) handle: nvshmem_team_t,
    pe: usize,
    pes: usize,
}

/// A [`Team`] that was split off another.
///
/// It ends with [`destroy`](SplitTeam::destroy), on all its PEs together, and once:
/// ```compile_fail,E0382
/// # fn f(team: phalanx::nvshmem::SplitTeam<'_>) -> phalanx::Result<()> {
/// team.destroy()?;
/// team.destroy()
/// # }
/// ```
/// Dropping it cannot do that: it then stays until
/// the context ends, with a line in the log.
#[derive(Debug)]
pub struct SplitTeam<'c>(Team<'c>);

impl<'c> Deref for SplitTeam<'c> {
    type Target = Team<'c>;

    fn deref(&self) -> &Team<'c> {
        &self.0
    }
}

impl Context {
    /// An error if the library has not `new` teams left, where it would end the process.
    pub(crate) fn check_teams(&self, new: usize) -> Result<()> {
        let (has, most) = (self.teams.get(), self.limits.teams());
        if has + new <= most {
            return Ok(());
        }
        Err(Error::from(UnsupportedError {
            what: format!("{new} more teams beside {has}"),
            why: format!(
                "with NVLink multicast each takes many of NVSHMEM_MAX_TEAMS, which are enough for {most}"
            ),
            remedy: "destroy teams, set NVSHMEM_MAX_TEAMS to more, or NVSHMEM_DISABLE_NVLS=1".into(),
        }))
    }

    /// All PEs. `NVSHMEM_TEAM_WORLD`
    pub fn world(&self) -> Team<'_> {
        Team { context: self, handle: team::WORLD, pe: self.my_pe(), pes: self.n_pes() }
    }

    /// The PEs whose memory this one can load from and store to. `NVSHMEM_TEAM_SHARED`
    pub fn shared(&self) -> Result<Team<'_>> {
        Team::of(self, team::SHARED)
    }

    /// The PEs of this node. `NVSHMEMX_TEAM_NODE`
    pub fn node(&self) -> Result<Team<'_>> {
        Team::of(self, team::NODE)
    }

    /// The PEs with the same number on their nodes. `NVSHMEMX_TEAM_SAME_MYPE_NODE`
    pub fn same_pe_of_nodes(&self) -> Result<Team<'_>> {
        Team::of(self, team::SAME_MYPE_NODE)
    }
}

impl<'c> Team<'c> {
    fn of(context: &'c Context, handle: nvshmem_team_t) -> Result<Team<'c>> {
        let library = context.library;
        let my_pe = library.need(library.nvshmem_team_my_pe, "nvshmem_team_my_pe")?;
        let n_pes = library.need(library.nvshmem_team_n_pes, "nvshmem_team_n_pes")?;
        context.enter()?;
        // SAFETY: initialised; a team that exists, of which this PE is a member.
        let (pe, pes) = unsafe { (my_pe(handle), n_pes(handle)) };
        Ok(Team { context, handle, pe: pe as usize, pes: pes as usize })
    }

    /// Wraps a team of the library; `None` if this PE is no member.
    fn made(context: &'c Context, handle: nvshmem_team_t) -> Result<Option<SplitTeam<'c>>> {
        if handle == team::INVALID {
            return Ok(None);
        }
        context.teams.set(context.teams.get() + 1);
        Team::of(context, handle).map(SplitTeam).map(Some)
    }

    /// The number of this PE in the team. `nvshmem_team_my_pe`
    pub fn my_pe(&self) -> usize {
        self.pe
    }

    /// How many PEs the team has. `nvshmem_team_n_pes`
    pub fn n_pes(&self) -> usize {
        self.pes
    }

    /// The C handle, for kernels.
    pub fn raw_handle(&self) -> i32 {
        self.handle
    }

    /// Translates the number of a PE of this team to its number in another; `None` if it is no member there.
    /// `nvshmem_team_translate_pe`
    ///
    /// # Errors
    /// [`UsageError::Rank`] if this team has no such PE.
    pub fn translate_pe(&self, pe: usize, to: &Team<'_>) -> Result<Option<usize>> {
        let pe = self.check_pe("translate_pe", pe)?;
        let library = self.context.library;
        let translate = library.need(library.nvshmem_team_translate_pe, "nvshmem_team_translate_pe")?;
        self.context.enter()?;
        // SAFETY: initialised; teams that exist.
        let found = unsafe { translate(self.handle, pe, to.handle) };
        Ok(usize::try_from(found).ok())
    }

    /// Makes a team of `size` of this team's PEs: `start`, `start + stride`, and so on. Collective over this
    /// team; `None` on PEs outside the new one. `nvshmem_team_split_strided`
    ///
    /// # Errors
    /// [`UsageError::Rank`] if it would reach beyond this team; [`UsageError::Setting`] for a size or stride
    /// of 0, or beyond an `int`; [`Error::Library`](crate::Error) if the library has no more teams
    /// (`NVSHMEM_MAX_TEAMS`). With NVLink multicast a team takes 16 of them, and
    /// [`Error::Unsupported`](crate::Error) comes first.
    pub fn split_strided(&self, start: usize, stride: usize, size: usize) -> Result<Option<SplitTeam<'c>>> {
        let name = "nvshmem_team_split_strided";
        for (what, value) in [("stride", stride), ("size", size)] {
            if value == 0 || value > c_int::MAX as usize {
                let name = format!("split_strided: {what}");
                let (value, expected) = (value.to_string(), format!("1 to {}", c_int::MAX));
                return Err(UsageError::Setting { name, value, expected }.into());
            }
        }
        let last =
            stride.checked_mul(size - 1).and_then(|steps| steps.checked_add(start)).unwrap_or(usize::MAX);
        self.check_pe("split_strided", last)?;
        // SAFETY: initialised; a team that exists, of which this PE is a member; all PEs of the new one are
        // in it.
        let call = unsafe { strided(self.context.library, self.handle, start, stride, size) }?;
        let (code, new) =
            self.together(CollectiveCall::new(name, [start as u64, stride as u64, size as u64]), 1, call)?;
        // PEs outside the team get a code that is not zero in some versions.
        let made = Team::made(self.context, new)?;
        let member = self.pe >= start && (self.pe - start).is_multiple_of(stride) && self.pe <= last;
        if made.is_none() && member {
            self.context.library.check(name, if code == 0 { 7 } else { code })?;
        }
        Ok(made)
    }

    /// Splits the team into rows of `width` PEs, by their numbers: returns the teams of this PE's row and
    /// column. Collective over this team. `nvshmem_team_split_2d`
    ///
    /// # Errors
    /// [`UsageError::Setting`] for no width; as for [`split_strided`](Team::split_strided) if there are no
    /// more teams.
    pub fn split_2d(&self, width: usize) -> Result<(SplitTeam<'c>, SplitTeam<'c>)> {
        let name = "nvshmem_team_split_2d";
        if width == 0 || width > c_int::MAX as usize {
            let (value, expected) = (width.to_string(), format!("1 to {}", c_int::MAX));
            return Err(UsageError::Setting { name: "split_2d: width".into(), value, expected }.into());
        }
        let split = self.context.library.need(self.context.library.nvshmem_team_split_2d, name)?;
        let (parent, width) = (self.handle, width as c_int);
        let call = move || {
            let (mut row, mut column) = (team::INVALID, team::INVALID);
            let default = std::ptr::null();
            // SAFETY: as above.
            let code = unsafe { split(parent, width, default, 0, &raw mut row, default, 0, &raw mut column) };
            (code, row, column)
        };
        let (code, row, column) = self.together(CollectiveCall::new(name, [width as u64, 0, 0]), 2, call)?;
        match (Team::made(self.context, row)?, Team::made(self.context, column)?) {
            (Some(row), Some(column)) => Ok((row, column)),
            _ => Err(self.context.library.error(name, code, super::library::status_text(code)).into()),
        }
    }

    /// A collective call over this team that makes `new` teams. Waits for all work of the GPU, which may use
    /// the team. PEs compare the call if the team has all of them.
    fn together<R: Send + 'static>(
        &self,
        step: CollectiveCall,
        new: usize,
        call: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R> {
        self.context.drain()?;
        let room = self.context.check_teams(new);
        if self.handle == team::WORLD {
            self.context.meet(&step)?;
            self.context.together(room, "have another team")?;
        } else {
            room?;
        }
        self.context.bounded(step.describe(), call)
    }

    /// The address at which this team's PEs can store to all parts of `memory` at once and load their sum
    /// (NVLink multicast); `None` where they cannot. `nvshmemx_mc_ptr`
    ///
    /// # Errors
    /// [`Error::MissingFunction`](crate::Error); the context's, if it has failed.
    pub fn multicast<'a, T: Element>(&self, memory: &'a Symmetric<'_, T>) -> Result<Option<Multicast<'a, T>>>
    where
        'c: 'a,
    {
        let library = self.context.library;
        let find = library.need(library.nvshmemx_mc_ptr, "nvshmemx_mc_ptr")?;
        self.context.enter()?;
        // SAFETY: initialised; a team that exists, and a symmetric address.
        let found = unsafe { find(self.handle, memory.device_ptr() as *const c_void) } as CUdeviceptr;
        Ok((found != 0).then(|| Multicast::new(found, memory.len())))
    }

    pub(crate) fn check_pe(&self, operation: &'static str, pe: usize) -> Result<c_int> {
        if pe < self.pes {
            return Ok(pe as c_int);
        }
        let role = "the team's PE";
        Err(UsageError::Rank { operation, role, rank: pe, world_size: self.pes }.into())
    }
}

/// Prepares the call that splits a team, to be made by all its PEs together: it returns the code and the new
/// team.
///
/// # Safety
/// The library is initialised when it is called, and the team one that exists, of which this PE is a member;
/// it has all PEs of the new one.
pub(crate) unsafe fn strided(
    library: &NvshmemLibrary,
    parent: nvshmem_team_t,
    start: usize,
    stride: usize,
    size: usize,
) -> Result<impl FnOnce() -> (c_int, nvshmem_team_t) + Send + 'static> {
    let split = library.need(library.nvshmem_team_split_strided, "nvshmem_team_split_strided")?;
    Ok(move || {
        let mut new = team::INVALID;
        let (start, stride, size) = (start as c_int, stride as c_int, size as c_int);
        // SAFETY: the caller's contract; no configuration is the default one.
        let code = unsafe { split(parent, start, stride, size, std::ptr::null(), 0, &raw mut new) };
        (code, new)
    })
}

impl SplitTeam<'_> {
    /// Waits for all work of the GPU, then destroys the team. Collective over it. `nvshmem_team_destroy`
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error), [`Error::Peer`](crate::Error) if a PE does not come.
    pub fn destroy(self) -> Result<()> {
        let this = ManuallyDrop::new(self);
        let (context, handle) = (this.context, this.handle);
        let destroy = context.library.need(context.library.nvshmem_team_destroy, "nvshmem_team_destroy")?;
        // Work on streams may still use the team.
        context.drain()?;
        // SAFETY: a team that was split off; destroyed once, since `self` is consumed.
        context.bounded("nvshmem_team_destroy".into(), move || unsafe { destroy(handle) })?;
        context.teams.set(context.teams.get() - 1);
        Ok(())
    }
}

impl Drop for SplitTeam<'_> {
    fn drop(&mut self) {
        crate::os::log::warn!(
            pe = self.context.my_pe(),
            "an NVSHMEM team of {} PEs was dropped and not destroyed: it stays until the context is finalized; call \
             SplitTeam::destroy on its PEs",
            self.pes
        );
    }
}
