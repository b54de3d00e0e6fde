//! FIFOs for kernels of programs: `gpu/kernels/phalanx.cuh`.

use super::peer_memory::{LocalMemory, PeerMemory};
use super::setup::Direct;
use super::tunables::{INBOX_BYTES, MAX_RANKS};
use crate::backend::nccl::NcclComm;
use crate::backend::nccl::communicator::Communicator;
use crate::control::host_channel::HostChannel;
use crate::types::error::Result;
use cudarc::driver::DeviceRepr;
use std::sync::Arc;

/// `phalanx::Peers` as a kernel's parameter, for `LaunchArgs::arg` of cudarc: see
/// [`Peers::argument`](crate::nccl::Peers::argument).
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PeersArgument {
    inboxes: [u64; MAX_RANKS],
    own: u64,
    abort: u64,
    rank: u32,
    ranks: u32,
}

// SAFETY: the structure of the header, of addresses and numbers alone.
unsafe impl DeviceRepr for PeersArgument {}

/// Their memory, and what a kernel is told of it.
pub(crate) struct PeerFifos {
    pub memory: Arc<PeerMemory>,
    pub argument: PeersArgument,
    /// Lines of 128 bytes arrive whole.
    pub nvlink: bool,
    /// Bytes that they take of this rank's GPU.
    pub bytes: usize,
}

impl Direct {
    /// FIFOs between all ranks; or why a rank cannot have them. Collective.
    ///
    /// # Safety
    /// As for `Backend::collective` of the host channel.
    unsafe fn make_fifos(
        &self,
        host_channel: &dyn HostChannel,
        communicator: &Communicator,
    ) -> Result<Result<PeerFifos>> {
        let (device, rank, ranks) = (&communicator.device, communicator.rank, self.topology.ranks);
        let bytes = INBOX_BYTES * (ranks - 1);
        let _current = device.enter();
        let local = LocalMemory::new(host_channel, device, bytes);
        // SAFETY: the caller's contract.
        let memory = match unsafe { PeerMemory::exchange(host_channel, device, local, 0, true) }? {
            Ok(memory) => Arc::new(memory),
            Err(reason) => return Ok(Err(reason)),
        };
        self.keep(memory.clone());
        let argument = PeersArgument {
            inboxes: memory.inboxes(rank, ranks),
            own: memory.starts[rank],
            abort: self.abort_word(),
            rank: rank as u32,
            ranks: ranks as u32,
        };
        let nvlink = memory.nvlink;
        Ok(Ok(PeerFifos { memory, argument, nvlink, bytes }))
    }
}

impl NcclComm {
    /// [`Direct::make_fifos`] over the host channel.
    ///
    /// # Safety
    /// As for `Backend::collective`.
    pub(crate) unsafe fn make_fifos(&self, direct: &Direct) -> Result<Result<PeerFifos>> {
        let communicator = &self.communicator;
        // SAFETY: the caller's contract.
        self.on_host_channel(&communicator.auxiliary_call(), |channel| unsafe {
            direct.make_fifos(channel, communicator)
        })
    }
}
