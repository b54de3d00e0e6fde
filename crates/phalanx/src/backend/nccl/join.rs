//! Setting up a communicator: choosing the GPU, exchanging unique ids, and making the library's communicator.

use super::communicator::Communicator;
use super::device::{self, GpuDevice};
#[cfg(feature = "nccl")]
use super::direct::Direct;
use super::init::CommOrigin;
use super::library::{self, Library};
use super::streams::Events;
use super::{NcclComm, NcclSettings, watchdog};
use crate::buffer::stream::GpuStream;
use crate::contract::{Blocks, Call, Operation};
use crate::control::control_channel::ControlChannel;
use crate::control::host_channel::HostChannel;
use crate::rendezvous::gpus::{Visible, settle as settle_gpu};
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use phalanx_sys::nccl::{Flavour, NCCL_UNIQUE_ID_BYTES, ncclUniqueId};
use std::sync::{Arc, Mutex};

/// The GPUs that a rank can use, or the wanted one. An error if there are none, or the library cannot be
/// loaded.
pub(crate) fn visible(flavour: Flavour, wanted: Option<usize>) -> Result<Visible> {
    let ids = device::ids(flavour)?;
    let library = library::load(flavour)?;
    Visible::here(ids, wanted, library.shares_gpus())
}

/// An error unless this many ranks of this host can have a GPU each.
pub(crate) fn available(flavour: Flavour, ranks: usize) -> Result<()> {
    let gpus = device::count(flavour)?;
    if gpus < ranks {
        return Err(Error::from(UnsupportedError {
            what: format!("{} for {ranks} ranks of this host", flavour.search().name),
            why: format!("each needs a GPU of its own, and this process sees {gpus}"),
            remedy: format!("use fewer ranks, or look at {}", device::hidden_by(flavour)),
        }));
    }
    library::load(flavour).map(drop)
}

impl NcclComm {
    /// Makes the communicator of all ranks of a host channel. Collective.
    ///
    /// This rank uses `gpu`, or else a GPU that the ranks of its host agree on.
    pub fn join(
        host_channel: Box<dyn HostChannel>,
        flavour: Flavour,
        gpu: Option<usize>,
        settings: Arc<NcclSettings>,
    ) -> Result<NcclComm> {
        let (name, seen, topology) =
            (flavour.search().name, visible(flavour, gpu), host_channel.host_topology());
        // SAFETY: nobody else uses `host_channel` yet.
        let tell = |own: &[u8]| unsafe { host_channel.all_gather_bytes(own) };
        let gpu = settle_gpu(name, seen, (host_channel.rank(), &topology), tell)?;
        let library = library::load(flavour)?;
        let ids = match settings.config.unique_ids {
            Some(ids) => ids,
            None if library.ncclCommInitRankScalable.is_some() => ids_for(host_channel.world_size()),
            None => 1,
        };
        // SAFETY: as above.
        let ids = unsafe { exchange_ids(&*host_channel, library, ids) }?;
        let device = GpuDevice::open(flavour, gpu);
        // SAFETY: as above. A rank without a GPU must not leave the others waiting in the library.
        let agreed = unsafe { agree(&*host_channel, device.is_ok(), "open its GPU") };
        let device = device?;
        agreed?;
        let stream = device.default_stream();
        NcclComm::assemble(host_channel, library, device, stream, settings, &CommOrigin::Ids(ids))
    }

    /// Makes the library's communicator of the ranks of `host_channel`.
    pub(super) fn assemble(
        host_channel: Box<dyn HostChannel>,
        library: &'static Library,
        device: GpuDevice,
        stream: GpuStream,
        settings: Arc<NcclSettings>,
        origin: &CommOrigin,
    ) -> Result<NcclComm> {
        let (rank, ranks) = (host_channel.rank(), host_channel.world_size());
        // SAFETY: nobody else uses `host_channel` yet.
        let control_channel =
            unsafe { host_channel.split_channel(Some(0), rank as i64) }?.expect("everybody has a colour");
        let host_channel: Arc<dyn HostChannel> = host_channel.into();
        let control_channel = ControlChannel::new(control_channel, host_channel.clone());
        let communicator =
            Arc::new(Communicator::new(library, device, control_channel, (rank, ranks), &settings.config));
        communicator.adopt(&stream)?;
        let config = settings.config.raw(library);
        // SAFETY: as above. A rank that cannot begin must not leave the others waiting in the library.
        let agreed = unsafe { agree(&*host_channel, config.is_ok(), "make the settings") };
        let (config, ()) = (config?, agreed?);
        communicator.make(origin, config)?;
        // SAFETY: as above.
        let arrived = unsafe { host_channel.collective(&Call::empty(Operation::Barrier)) };
        // A communicator without a watchdog, or that other ranks failed to make, must not stay in the
        // library.
        arrived.and_then(|()| watchdog::watch(&communicator)).map_err(|error| communicator.fail(error))?;
        #[cfg(feature = "nccl")]
        if library.flavour() == Flavour::Nccl {
            // SAFETY: as above.
            let direct = unsafe { Direct::set_up(&*host_channel, &device, settings.algorithm) };
            if let Some(direct) = direct.map_err(|error| communicator.fail(error))? {
                let _ = communicator.direct.set(direct);
            }
        }
        Ok(NcclComm {
            communicator,
            host_channel,
            stream,
            settings,
            messages: Arc::default(),
            events: Events::default(),
            portable: Mutex::default(),
            #[cfg(feature = "nccl")]
            far: Mutex::default(),
        })
    }
}

/// Ranks of a unique id, if nothing sets their number: all of them connect to the rank that made it, while it is the only one.
const RANKS_OF_AN_ID: usize = 512;

/// The number of unique ids for so many ranks. A test may lower [`RANKS_OF_AN_ID`].
fn ids_for(ranks: usize) -> usize {
    let fewer = std::env::var("PHALANX_TEST_RANKS_OF_AN_ID").ok();
    let ranks_of_an_id = fewer.and_then(|number| number.parse().ok()).filter(|ranks| *ranks > 0);
    ranks.div_ceil(ranks_of_an_id.unwrap_or(RANKS_OF_AN_ID))
}

/// Exchanges `count` unique ids, made by evenly spread ranks. Collective.
///
/// # Safety
/// As for [`Backend::collective`].
unsafe fn exchange_ids(
    host_channel: &dyn HostChannel,
    library: &Library,
    count: usize,
) -> Result<Vec<ncclUniqueId>> {
    let ranks = host_channel.world_size();
    if !(1..=ranks).contains(&count) {
        let expected = format!("1 to the number of ranks, {ranks}");
        return Err(
            UsageError::Setting { name: "unique_ids".into(), value: count.to_string(), expected }.into()
        );
    }
    let mut ids = vec![ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] }; count];
    let mut made: Result<()> = Ok(());
    for (number, id) in ids.iter_mut().enumerate() {
        let root = number * ranks / count;
        if host_channel.rank() == root {
            let get = library.need(library.ncclGetUniqueId, "ncclGetUniqueId")?;
            // SAFETY: an out-pointer that is valid, written during the call.
            let result = unsafe { get(&raw mut *id) };
            if result != phalanx_sys::nccl::ncclResult_t::Success {
                made = Err(library.error(result, "ncclGetUniqueId").into());
            }
        }
        let start = id.internal.as_mut_ptr();
        let blocks = Blocks::Equal(NCCL_UNIQUE_ID_BYTES);
        let call = Call { send: start, recv: start, blocks, root, ..Call::empty(Operation::Broadcast) };
        // Sent even after an error: the other ranks wait for it.
        // SAFETY: the caller's contract; the id's bytes are valid, in place.
        unsafe { host_channel.collective(&call) }?;
    }
    made.map(|()| ids)
}

/// An error that names the first rank that could not do something. Collective.
///
/// # Safety
/// As for [`Backend::collective`].
pub(super) unsafe fn agree(host_channel: &dyn HostChannel, could: bool, what: &str) -> Result<()> {
    let mut all = vec![[0u64; 1]; host_channel.world_size()];
    // SAFETY: the caller's contract.
    unsafe { host_channel.all_gather_words(&[u64::from(could)], all.as_flattened_mut()) }?;
    match all.iter().position(|could| *could == [0]) {
        None => Ok(()),
        Some(rank) => Err(Error::from(UnsupportedError {
            what: "the communicator of GPUs".into(),
            why: format!("rank {rank} could not {what}"),
            remedy: "see that rank's error".into(),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_worlds_have_several_ids() {
        let worlds = [1, 8, RANKS_OF_AN_ID, RANKS_OF_AN_ID + 1, 10_000];
        assert_eq!(worlds.map(ids_for), [1, 1, 1, 2, 20]);
    }
}
