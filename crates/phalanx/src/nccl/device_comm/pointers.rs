//! Addresses and logical endpoints of windows, for kernels.

use super::DeviceComm;
use super::teams::Team;
use crate::backend::nccl::communicator::Communicator;
use crate::backend::nccl::memory::Buffer;
use crate::contract::Shape;
use crate::nccl::Nccl;
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use phalanx_sys::nccl::{ncclMultimemHandle_t, ncclResult_t, ncclWindow_t};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// A logical endpoint of a peer's memory, and an offset in it (2.31).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Endpoint {
    /// Its number (`ncclCftLeId`).
    pub id: u32,
    /// Bytes from its start.
    pub offset: usize,
}

impl DeviceComm {
    /// Multicast address, for the [`Lsa`](crate::nccl::TeamKind::Lsa) team, of an element of a window
    /// (`ncclGetLsaMultimemDevicePointer`, 2.29.2); `None` where there is no multicast.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if it was made without
    /// [`lsa_multimem`](crate::nccl::DeviceRequirements::lsa_multimem), since then all ranks would have to
    /// ask.
    pub fn lsa_multimem_pointer<T: Element>(&self, buffer: &Buffer<T>, offset: usize) -> Result<Option<u64>> {
        if !self.has_lsa_multimem {
            return Err(Error::from(UnsupportedError {
                what: "a multicast address of the LSA team".into(),
                why: "the device communicator was made without".into(),
                remedy: "ask for it: DeviceRequirements::lsa_multimem".into(),
            }));
        }
        let (name, communicator) = ("ncclGetLsaMultimemDevicePointer", &*self.communicator);
        let get = communicator.library.need(communicator.library.ncclGetLsaMultimemDevicePointer, name)?;
        let (window, offset) = place(&self.communicator, buffer, offset)?;
        // SAFETY: a window of the communicator, which is there; the out-pointer is written during the call.
        address(communicator, name, |start| unsafe { get(window, offset, start) })
    }

    /// The same of a team of [`multimem`](crate::nccl::DeviceComm::multimem) (`ncclGetMultimemDevicePointer`,
    /// 2.29.2), by its number there.
    ///
    /// # Panics
    /// If there is no such team.
    pub fn multimem_pointer<T: Element>(
        &self,
        team: usize,
        buffer: &Buffer<T>,
        offset: usize,
    ) -> Result<Option<u64>> {
        let (name, communicator) = ("ncclGetMultimemDevicePointer", &*self.communicator);
        let get = communicator.library.need(communicator.library.ncclGetMultimemDevicePointer, name)?;
        let (window, offset) = place(&self.communicator, buffer, offset)?;
        let base = self.multimem[team];
        if base == 0 {
            return Ok(None);
        }
        let team = ncclMultimemHandle_t { mcBasePtr: base as *mut c_void };
        // SAFETY: as above, and a handle that the library gave.
        address(communicator, name, |start| unsafe { get(window, offset, team, start) })
    }
}

impl Nccl<'_> {
    /// Address on this GPU of an element in a rank's part of a window (`ncclGetPeerDevicePointer`, 2.29.2);
    /// `None` where it does not reach that rank's memory. The offset is in elements. The address is for
    /// kernels, as long as the window lives.
    ///
    /// # Errors
    /// If the buffer is not a window of this communicator, the offset is beyond its end, or there is no such
    /// rank.
    pub fn peer_pointer<T: Element>(
        &self,
        buffer: &Buffer<T>,
        offset: usize,
        rank: usize,
    ) -> Result<Option<u64>> {
        let (name, communicator) = ("ncclGetPeerDevicePointer", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclGetPeerDevicePointer, name)?;
        self.comm.shape().check_rank("peer_pointer", "rank", rank)?;
        let (window, offset) = place(communicator, buffer, offset)?;
        // SAFETY: a window of the communicator, which is there; the out-pointer is written during the call.
        address(communicator, name, |start| unsafe { get(window, offset, rank as c_int, start) })
    }

    /// As [`peer_pointer`](crate::nccl::Nccl::peer_pointer), by the rank's number in the
    /// [`Lsa`](crate::nccl::TeamKind::Lsa) team (`ncclGetLsaDevicePointer`, 2.29.2).
    ///
    /// # Errors
    /// As of [`peer_pointer`](crate::nccl::Nccl::peer_pointer); the library's own for a rank that is not
    /// there.
    pub fn lsa_pointer<T: Element>(&self, buffer: &Buffer<T>, offset: usize, lsa_rank: usize) -> Result<u64> {
        let (name, communicator) = ("ncclGetLsaDevicePointer", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclGetLsaDevicePointer, name)?;
        let (window, offset) = place(communicator, buffer, offset)?;
        let rank = c_int::try_from(lsa_rank).unwrap_or(c_int::MAX);
        // SAFETY: as above.
        let start = address(communicator, name, |start| unsafe { get(window, offset, rank, start) })?;
        Ok(start.unwrap_or(0))
    }

    /// Returns the start of a window on this rank (`ncclWinGetUserPtr`, 2.29.2).
    ///
    /// # Errors
    /// As of [`peer_pointer`](crate::nccl::Nccl::peer_pointer).
    pub fn window_start<T: Element>(&self, buffer: &Buffer<T>) -> Result<u64> {
        let (name, communicator) = ("ncclWinGetUserPtr", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclWinGetUserPtr, name)?;
        let window = buffer.window_of(communicator)?;
        let mut start = std::ptr::null_mut();
        // SAFETY: as above.
        communicator.call(name, |comm| unsafe { get(comm, window, &raw mut start) })?;
        Ok(start as u64)
    }

    /// Returns the logical endpoint of an element in a rank's part of a window (`ncclGetPeerDeviceLeInfo`,
    /// 2.31).
    ///
    /// # Errors
    /// As of [`peer_pointer`](crate::nccl::Nccl::peer_pointer); the library's own where there are no
    /// endpoints.
    pub fn peer_endpoint<T: Element>(
        &self,
        buffer: &Buffer<T>,
        offset: usize,
        rank: usize,
    ) -> Result<Endpoint> {
        let (name, communicator) = ("ncclGetPeerDeviceLeInfo", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclGetPeerDeviceLeInfo, name)?;
        self.comm.shape().check_rank("peer_endpoint", "rank", rank)?;
        let (window, offset) = place(communicator, buffer, offset)?;
        // SAFETY: a window of the communicator, which is there; the out-pointers are written during the call.
        endpoint(communicator, name, |id, to| unsafe { get(window, offset, rank as c_int, id, to) })
    }

    /// As [`peer_endpoint`](crate::nccl::Nccl::peer_endpoint), by the rank's number in a team of logical
    /// endpoints (`ncclGetCftDeviceLeInfo`, 2.31).
    ///
    /// # Errors
    /// As of [`peer_endpoint`](crate::nccl::Nccl::peer_endpoint).
    pub fn cft_endpoint<T: Element>(
        &self,
        buffer: &Buffer<T>,
        offset: usize,
        team: Team,
        rank: usize,
    ) -> Result<Endpoint> {
        let (name, communicator) = ("ncclGetCftDeviceLeInfo", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclGetCftDeviceLeInfo, name)?;
        let size = Shape { rank: team.rank, world_size: team.ranks };
        size.check_rank("cft_endpoint", "rank", rank)?;
        let (window, offset) = place(communicator, buffer, offset)?;
        let get = |id, to| {
            // SAFETY: as above, and a rank of the team.
            unsafe { get(window, offset, rank as c_int, team.raw(), id, to) }
        };
        endpoint(communicator, name, get)
    }

    /// As [`peer_endpoint`](crate::nccl::Nccl::peer_endpoint), for the multicast endpoint
    /// (`ncclGetMultimemDeviceLeInfo`, 2.31).
    ///
    /// # Errors
    /// As of [`peer_endpoint`](crate::nccl::Nccl::peer_endpoint).
    pub fn multimem_endpoint<T: Element>(&self, buffer: &Buffer<T>, offset: usize) -> Result<Endpoint> {
        let (name, communicator) = ("ncclGetMultimemDeviceLeInfo", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclGetMultimemDeviceLeInfo, name)?;
        let (window, offset) = place(communicator, buffer, offset)?;
        // SAFETY: as above.
        endpoint(communicator, name, |id, to| unsafe { get(window, offset, id, to) })
    }
}

/// Returns the window of a buffer, and the offset of an element in it in bytes.
fn place<T: Element>(
    communicator: &Arc<Communicator>,
    buffer: &Buffer<T>,
    offset: usize,
) -> Result<(ncclWindow_t, usize)> {
    communicator.check()?;
    let window = buffer.window_of(communicator)?;
    if offset >= buffer.len() {
        return Err(UsageError::Length {
            operation: "a pointer into a window",
            buffer: "buffer",
            actual: buffer.len(),
            expected: offset.saturating_add(1),
            rule: "more than the offset",
        }
        .into());
    }
    Ok((window, offset * size_of::<T>()))
}

/// An address that the library returns.
fn address(
    communicator: &Communicator,
    name: &'static str,
    get: impl FnOnce(*mut *mut c_void) -> ncclResult_t,
) -> Result<Option<u64>> {
    let mut start = std::ptr::null_mut();
    communicator.call(name, |_| get(&raw mut start))?;
    Ok((!start.is_null()).then_some(start as u64))
}

/// An endpoint that the library returns.
fn endpoint(
    communicator: &Communicator,
    name: &'static str,
    get: impl FnOnce(*mut u32, *mut usize) -> ncclResult_t,
) -> Result<Endpoint> {
    let (mut id, mut offset) = (0, 0);
    communicator.call(name, |_| get(&raw mut id, &raw mut offset))?;
    Ok(Endpoint { id, offset })
}
