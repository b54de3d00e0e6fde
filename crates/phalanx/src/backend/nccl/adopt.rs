//! Communicators of the library that the program has made itself.

use super::NcclComm;
use super::init::{CommOrigin, Foreign};
use super::join::agree;
use crate::contract::{Backend, Call, Operation};
use crate::control::host_channel::HostChannel;
use crate::types::error::{Error, Result, UsageError};
use phalanx_sys::nccl::{ncclComm_t, ncclResult_t};
use std::ffi::c_int;

impl NcclComm {
    /// A duplicate of a communicator of the program's, of the same ranks in the same order. Collective.
    ///
    /// # Safety
    /// As for [`Backend::split`]; `handle` is a communicator of the loaded library, alive, with which nobody calls anything meanwhile.
    pub(crate) unsafe fn duplicate_of(&self, handle: ncclComm_t) -> Result<NcclComm> {
        let (parent, call) = (&self.communicator, Call::empty(Operation::Split));
        // SAFETY: the caller's contract.
        let (announced, since) = unsafe { self.begin_split(&call) }?;
        let split = |channel: &dyn HostChannel| {
            // SAFETY: the caller's contract.
            unsafe { channel.split_channel(Some(0), self.rank() as i64) }
        };
        let channel = self.on_host_channel(&announced, split)?.expect("everybody has a colour");
        // SAFETY: the caller's contract.
        let fits = unsafe { self.check_foreign(handle) };
        // SAFETY: nobody else uses the new channel yet. A rank that does not call the library must not leave the others waiting in it.
        let agreed = unsafe { agree(&*channel, fits.is_ok(), "adopt the communicator that it was given") };
        fits?;
        agreed?;
        let (library, device, stream) = (parent.library, parent.device, self.stream.clone());
        let origin = CommOrigin::Copy(Foreign(handle));
        NcclComm::assemble(channel, library, device, stream, self.settings.clone(), &origin)
            .map_err(|error| parent.own_failure(&announced, since, error))
    }

    /// An error unless a communicator of the program's has this one's ranks and GPU.
    ///
    /// # Safety
    /// As for `duplicate_of`.
    unsafe fn check_foreign(&self, handle: ncclComm_t) -> Result<()> {
        let library = self.communicator.library;
        let _locked = self.communicator.lock_library()?;
        let ask = |function: Option<unsafe extern "C" fn(ncclComm_t, *mut c_int) -> ncclResult_t>, name| {
            let (ask, mut number) = (library.need(function, name)?, 0);
            // SAFETY: the caller's contract; an out-pointer that is valid.
            match unsafe { ask(handle, &raw mut number) } {
                ncclResult_t::Success => Ok(number as usize),
                error => Err(Error::from(library.error(error, name))),
            }
        };
        let own = (self.rank(), self.world_size(), self.gpu());
        let foreign = match handle.is_null() {
            true => None,
            false => Some((
                ask(library.ncclCommUserRank, "ncclCommUserRank")?,
                ask(library.ncclCommCount, "ncclCommCount")?,
                ask(library.ncclCommCuDevice, "ncclCommCuDevice")?,
            )),
        };
        if foreign == Some(own) {
            return Ok(());
        }
        let describe =
            |(rank, ranks, gpu): (usize, usize, usize)| format!("rank {rank} of {ranks} on GPU {gpu}");
        let value = foreign.map_or("a null pointer".to_owned(), describe);
        Err(UsageError::Setting { name: "adopt: handle".into(), value, expected: describe(own) }.into())
    }
}
