//! GPU memory that other ranks of a host copy to and from, without its rank's doing.
//!
//! A registration is described in a segment of the memory that the ranks share (`record.rs`). A descriptor is only the key to it: what is
//! read there counts, so that a wrong or late descriptor finds nothing. The owner (`own.rs`) gives the memory back when no rank has it
//! open. The others (`remote.rs`) open the allocation (`cuIpcOpenMemHandle`, or peer access between threads) and enqueue copies; lists of
//! short blocks are one kernel (`list.rs`).
//!
//! Where the ranks of a communicator are on several hosts, they agree by messages, and copies between hosts are staged (`far/`).

mod far;
mod list;
mod own;
mod record;
mod remote;

pub(crate) use far::Far;
pub(crate) use remote::CopyStream;

use super::NcclComm;
use super::device::DeviceMemory;
use super::direct::clear;
use crate::buffer::stream::GpuStream;
use crate::contract::{GpuRegion, GpuWindow, GpuWindowKey, GpuWindows, RemoteGpuWindow};
use crate::control::endpoint::Endpoint;
use crate::gpu::kernels::during_captures;
use crate::os::random_number;
use crate::os::sync::lock;
use crate::rendezvous::store::Store;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use own::OwnWindow;
use record::{Place, Registration, SharedRecord};
use remote::RemoteWindow;
use std::sync::Arc;

/// The driver hands memory to other processes in blocks of so many bytes. Short allocations share one; these do not, so that nothing else is
/// handed over with them.
const BLOCK: usize = 2 << 20;

impl NcclComm {
    /// The channel in whose memory, or store, the registrations are; an error if there can be none.
    fn channel_of_windows(&self) -> Result<&Endpoint> {
        self.communicator.check_owner()?;
        self.communicator.check()?;
        if self.communicator.device.cuda().is_none() {
            return Err(refused("the GPU is not NVIDIA's", "use collectives and messages"));
        }
        Ok(self.host_channel.endpoint())
    }

    /// What moves memory between hosts, and the job's store, if the ranks are on several.
    fn far<'a>(&self, endpoint: &'a Endpoint) -> Result<Option<(Arc<Far>, &'a Store)>> {
        let Some(store) = endpoint.world.store() else { return Ok(None) };
        let mut far = lock(&self.far);
        if far.is_none() {
            *far = Some(Far::start(&self.communicator, store, self.settings.messenger)?);
        }
        Ok(far.clone().map(|far| (far, store)))
    }
}

fn refused(why: &str, remedy: &str) -> Error {
    let what = "GPU memory that other ranks access".into();
    UnsupportedError { what, why: why.into(), remedy: remedy.into() }.into()
}

/// The error for a descriptor by which nothing can be opened.
fn stale(rank: usize, why: &str) -> Error {
    UsageError::Setting {
        name: "GpuDescriptor".into(),
        value: format!("of memory of rank {rank}"),
        expected: format!("one of memory that is registered: {why}; get a new one from that rank"),
    }
    .into()
}

fn unknown(rank: usize) -> Error {
    stale(
        rank,
        "that rank has released it, or it is of another communicator or job, or it was changed on the way",
    )
}

impl GpuWindows for NcclComm {
    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.channel_of_windows()?;
        let bytes = bytes.max(1).next_multiple_of(BLOCK);
        let device = &self.communicator.device;
        let _current = device.enter();
        let memory = during_captures(|| {
            let memory = DeviceMemory::new(device, bytes)?;
            clear(device, &memory, bytes)?;
            Ok::<_, Error>(memory)
        })?;
        Ok(memory.into_raw() as u64)
    }

    unsafe fn register(&self, region: GpuRegion, stream: &GpuStream) -> Result<Box<dyn GpuWindow>> {
        let endpoint = self.channel_of_windows()?;
        let (communicator, device) = (&self.communicator, &self.communicator.device);
        if device.is_of_pool(region.address as usize) {
            return Err(refused(
                "the slice is of one of CUDA's pools, as all that cudarc allocates, and other processes cannot open it",
                "allocate it with Comm::alloc_gpu",
            ));
        }
        let _current = device.enter();
        let last = communicator.last_enqueued().map(|(announced, _)| announced);
        communicator.wait_for(stream.raw(), &last.unwrap_or_else(|| communicator.auxiliary_call()))?;
        let place = Place::of(device, region.address, endpoint.world.is_of_threads());
        if let Some((far, _)) = self.far(endpoint)? {
            // Without it, copies inside a host are staged, too.
            return far.register(region, place.ok());
        }
        let need = "a registration needs a number of its own";
        let registration = Registration {
            nonce: [random_number(need)?, random_number(need)?],
            channel: endpoint.id(),
            rank: communicator.rank as u64,
            dtype: region.dtype,
            len: region.len as u64,
            place: place?,
        };
        let record = SharedRecord::publish(&endpoint.world, communicator.ranks, &registration)?;
        Ok(Box::new(OwnWindow::new(communicator.clone(), record, registration.nonce)))
    }

    fn open(
        &self,
        key: GpuWindowKey,
        rank: usize,
        (dtype, len): (DType, usize),
        stream: &GpuStream,
    ) -> Result<Box<dyn RemoteGpuWindow>> {
        let endpoint = self.channel_of_windows()?;
        let communicator = &self.communicator;
        if let Some((far, store)) = self.far(endpoint)? {
            NcclComm::adopt(self, stream)?;
            return far.open(store, key, rank, (dtype, len as u64), stream);
        }
        let nothing = || unknown(rank);
        let record = SharedRecord::find(&endpoint.world, communicator.ranks, key.segment);
        let record = record.ok_or_else(nothing)?;
        let registration = record.registration().ok_or_else(nothing)?;
        let is_the_one = registration.nonce == key.nonce
            && registration.channel == endpoint.id()
            && registration.rank == rank as u64
            && (registration.dtype, registration.len) == (dtype, len as u64);
        if !is_the_one {
            return Err(nothing());
        }
        NcclComm::adopt(self, stream)?;
        let opened = RemoteWindow::open(communicator, record, &registration, stream)?;
        Ok(Box::new(opened.ok_or_else(nothing)?))
    }
}
