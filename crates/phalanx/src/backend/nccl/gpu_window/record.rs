//! [`SharedRecord`]: what all ranks see of a registration, in memory that they share.

use super::own::Record;
use super::refused;
use crate::backend::nccl::device::GpuDevice;
use crate::control::flags::Signals;
use crate::control::segment::Segment;
use crate::control::world::World;
use crate::gpu::cuda::gpu_ids;
use crate::gpu::ipc::IpcHandle;
use crate::gpu::kernels::{check, during_captures};
use crate::types::dtype::DType;
use crate::types::error::Result;
use crate::types::memory::GpuId;
use cudarc::driver::sys;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A registration of GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Registration {
    pub nonce: [u64; 2],
    /// The communicator.
    pub channel: u64,
    pub rank: u64,
    pub dtype: DType,
    pub len: u64,
    pub place: Place,
}

/// Where memory is, for other ranks of its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// Where the allocation begins, in its rank's process.
    pub base: u64,
    /// Where the elements begin in it.
    pub offset: u64,
    pub gpu: GpuId,
    pub handle: IpcHandle,
}

impl Place {
    /// Of memory of this process. Its GPU is current.
    pub fn of(device: &GpuDevice, address: u64, are_threads: bool) -> Result<Place> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: out-pointers on the stack; the driver refuses an address that it does not know.
        let found = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address) };
        check("cuMemGetAddressRange", found)?;
        let handle = match are_threads {
            true => IpcHandle::NONE,
            false => during_captures(|| IpcHandle::of(base)).map_err(|error| {
                refused(
                    &format!("other processes cannot open it ({error})"),
                    "allocate it with Comm::alloc_gpu",
                )
            })?,
        };
        Ok(Place { base, offset: address - base, gpu: gpu_ids()?[device.ordinal()], handle })
    }
}

const WORDS: usize = 18;

impl Registration {
    fn words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        words[..2].copy_from_slice(&self.nonce);
        words[2..6].copy_from_slice(&[
            self.channel,
            self.rank,
            self.dtype.code().into(),
            self.dtype.mark(self.len),
        ]);
        words[6..8].copy_from_slice(&[self.place.base, self.place.offset]);
        words[8..10].copy_from_slice(&self.place.gpu.words());
        words[10..].copy_from_slice(&self.place.handle.0);
        words
    }

    /// `None` for words that are of something else.
    fn from_words(words: &[u64; WORDS]) -> Option<Registration> {
        let (dtype, len) = DType::decode(u8::try_from(words[4]).ok()?, words[5])?;
        Some(Registration {
            nonce: [words[0], words[1]],
            channel: words[2],
            rank: words[3],
            dtype,
            len,
            place: Place {
                base: words[6],
                offset: words[7],
                gpu: GpuId::from_words([words[8], words[9]]),
                handle: IpcHandle(std::array::from_fn(|i| words[10 + i])),
            },
        })
    }
}

/// [`Header::state`] while the window is open.
const OPEN: u64 = 1;
/// [`Header::state`] once its rank has released it.
const RELEASED: u64 = 2;

/// The beginning of the segment. The window's rank writes it.
#[repr(C, align(64))]
struct Header {
    state: AtomicU64,
    registration: [AtomicU64; WORDS],
}

/// What one rank writes.
#[repr(C, align(64))]
struct PeerWords {
    /// How often it has the window open.
    holders: AtomicU64,
    signals: Signals,
}

/// Where the ranks' words begin.
const PEERS: usize = size_of::<Header>();

/// The segment of a registration.
pub(super) struct SharedRecord {
    world: Arc<World>,
    segment: Segment,
    ranks: usize,
}

impl SharedRecord {
    /// A segment for a new registration.
    pub fn publish(world: &Arc<World>, ranks: usize, registration: &Registration) -> Result<SharedRecord> {
        let segment = world.create_segment(bytes(ranks))?;
        world.commit(&segment, 0, bytes(ranks))?;
        let record = SharedRecord { world: world.clone(), segment, ranks };
        let header = record.header();
        for (word, value) in header.registration.iter().zip(registration.words()) {
            word.store(value, Ordering::Relaxed);
        }
        header.state.store(OPEN, Ordering::Release);
        Ok(record)
    }

    /// The segment with this id, which may be any number; it may be of something else. `None` if there is none.
    pub fn find(world: &Arc<World>, ranks: usize, id: u64) -> Option<SharedRecord> {
        let segment = world.find_segment(id, bytes(ranks))?;
        Some(SharedRecord { world: world.clone(), segment, ranks })
    }

    /// The registration, if the segment has one that is open. What it says is to be compared before it is used.
    pub fn registration(&self) -> Option<Registration> {
        let header = self.header();
        if !self.is_open() {
            return None;
        }
        Registration::from_words(&header.registration.each_ref().map(|word| word.load(Ordering::Relaxed)))
    }

    #[inline]
    pub fn is_open(&self) -> bool {
        self.header().state.load(Ordering::SeqCst) == OPEN
    }

    /// Enters: false if it has been released meanwhile. Either the rank sees here that it is, or its owner sees that the rank is inside.
    pub fn hold(&self, rank: usize) -> bool {
        self.peer(rank).holders.fetch_add(1, Ordering::SeqCst);
        let is_open = self.is_open();
        if !is_open {
            self.let_go(rank);
        }
        is_open
    }

    pub fn let_go(&self, rank: usize) {
        self.peer(rank).holders.fetch_sub(1, Ordering::SeqCst);
    }

    pub fn signals(&self, rank: usize) -> &Signals {
        &self.peer(rank).signals
    }

    fn header(&self) -> &Header {
        // SAFETY: the segment is longer, and aligned to a page; its words are atomics for all ranks, for which any contents are valid.
        unsafe { &*self.segment.memory.as_ptr().cast::<Header>() }
    }

    fn peer(&self, rank: usize) -> &PeerWords {
        assert!(rank < self.ranks, "a rank of the communicator");
        // SAFETY: as above; the segment has words for each rank.
        unsafe { &*self.segment.memory.as_ptr().add(PEERS).cast::<PeerWords>().add(rank) }
    }
}

impl Record for SharedRecord {
    fn id(&self) -> u64 {
        self.segment.id
    }

    fn given(&self, rank: usize) -> u64 {
        self.signals(rank).given()
    }

    fn release(&self) {
        self.header().state.store(RELEASED, Ordering::SeqCst);
    }

    fn is_held_by(&self, rank: usize, has_exited: bool) -> bool {
        self.peer(rank).holders.load(Ordering::SeqCst) != 0 && !has_exited
    }

    /// Gives the segment back.
    fn close(&self) -> bool {
        self.world.close_segment(&self.segment, true);
        true
    }
}

/// Bytes of a segment for so many ranks.
fn bytes(ranks: usize) -> usize {
    PEERS + ranks * size_of::<PeerWords>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registration() -> Registration {
        Registration {
            nonce: [3, 4],
            channel: 5,
            rank: 1,
            dtype: DType::F32,
            len: 100,
            place: Place {
                base: 0x1000,
                offset: 0x100,
                gpu: GpuId(std::array::from_fn(|i| i as u8)),
                handle: IpcHandle(std::array::from_fn(|i| i as u64 * 7)),
            },
        }
    }

    #[test]
    fn a_registration_is_found_until_it_is_closed() {
        let world = Arc::new(World::threads().unwrap());
        let record = SharedRecord::publish(&world, 3, &registration()).unwrap();
        let found = SharedRecord::find(&world, 3, record.id()).unwrap();
        assert_eq!(found.registration(), Some(registration()));
        assert!(found.hold(2) && record.is_held_by(2, false) && !record.is_held_by(0, false));
        record.release();
        assert!(!found.hold(2) && record.is_held_by(2, false));
        assert_eq!(found.registration(), None);
        found.let_go(2);
        assert!(!record.is_held_by(2, false));
        record.close();
        assert!(SharedRecord::find(&world, 3, found.id()).is_none());
    }

    #[test]
    fn any_number_is_an_id_of_nothing() {
        let world = Arc::new(World::threads().unwrap());
        let record = SharedRecord::publish(&world, 3, &registration()).unwrap();
        let mut id = record.id();
        for _ in 0..10_000 {
            id = id.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            assert!(id == record.id() || SharedRecord::find(&world, 3, id).is_none());
        }
        // More ranks than it was made for.
        assert!(SharedRecord::find(&world, 1000, record.id()).is_none());
    }
}
