//! [`Parts`]: the windows of this rank that ranks of other hosts access, as the service and their owners see them.

use super::Far;
use super::note::{Nonce, Note, Range, Verdict, fit};
use super::service::Order;
use crate::backend::nccl::communicator::ENDING;
use crate::backend::nccl::gpu_window::own::Record;
use crate::backend::nccl::gpu_window::record::Place;
use crate::gpu::backoff::Backoff;
use crate::os::sync::lock;
use crate::types::dtype::DType;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A registration.
pub(super) struct Part {
    pub nonce: Nonce,
    pub start: u64,
    pub bytes: u64,
    pub elements: (DType, u64),
    /// For ranks of this host.
    place: Option<Place>,
    is_released: AtomicBool,
    /// By rank.
    peers: Box<[Peer]>,
}

#[derive(Default)]
struct Peer {
    /// How often the rank has it open.
    holders: AtomicU64,
    signals: AtomicU64,
    /// Pieces for the rank that this rank's GPU copies.
    pieces: AtomicU64,
}

impl Part {
    pub fn new(
        nonce: Nonce,
        (start, bytes): (u64, u64),
        elements: (DType, u64),
        place: Option<Place>,
        ranks: usize,
    ) -> Part {
        let peers = (0..ranks).map(|_| Peer::default()).collect();
        Part { nonce, start, bytes, elements, place, is_released: AtomicBool::new(false), peers }
    }

    /// The ranks that have it open.
    pub fn holders(&self) -> impl Iterator<Item = usize> + '_ {
        let holds = |rank: &usize| self.peers[*rank].holders.load(Ordering::SeqCst) != 0;
        (0..self.peers.len()).filter(holds)
    }

    /// A piece has been copied.
    pub fn end_piece(&self, rank: usize) {
        self.peers[rank].pieces.fetch_sub(1, Ordering::SeqCst);
    }

    fn has_pieces(&self) -> bool {
        self.peers.iter().any(|peer| peer.pieces.load(Ordering::SeqCst) != 0)
    }
}

/// All windows of this rank, by their numbers. The service alone opens them and begins pieces.
#[derive(Default)]
pub(super) struct Parts {
    parts: Mutex<HashMap<Nonce, Arc<Part>>>,
    /// Set at the end of the service: no piece is under way, and none begins.
    is_over: AtomicBool,
}

impl Parts {
    pub fn add(&self, part: &Arc<Part>) {
        lock(&self.parts).insert(part.nonce, part.clone());
    }

    /// Forgets a window. Whether nothing of the service touches its memory any more.
    fn remove(&self, part: &Part) -> bool {
        lock(&self.parts).remove(&part.nonce);
        let mut backoff = Backoff::new();
        while part.has_pieces() {
            if backoff.since.elapsed() >= ENDING {
                return false;
            }
            backoff.pause();
        }
        true
    }

    /// A rank opens a window: either it sees that this is released (`None`), or the owner that it is open. A rank of this host is told where
    /// the memory is.
    pub fn open(
        &self,
        nonce: Nonce,
        (rank, is_here): (usize, bool),
        dtype: u8,
        marked: u64,
    ) -> Option<Option<Place>> {
        let parts = lock(&self.parts);
        let asked = DType::decode(dtype, marked);
        let part = parts.get(&nonce).filter(|part| asked == Some(part.elements))?;
        let holders = &part.peers[rank].holders;
        holders.fetch_add(1, Ordering::SeqCst);
        if part.is_released.load(Ordering::SeqCst) {
            holders.fetch_sub(1, Ordering::SeqCst);
            return None;
        }
        Some(part.place.filter(|_| is_here))
    }

    /// The window, if the rank has it open.
    fn held<'a>(parts: &'a HashMap<Nonce, Arc<Part>>, nonce: &Nonce, rank: usize) -> Option<&'a Arc<Part>> {
        parts.get(nonce).filter(|part| part.peers[rank].holders.load(Ordering::SeqCst) != 0)
    }

    pub fn close(&self, nonce: &Nonce, rank: usize) {
        if let Some(part) = Self::held(&lock(&self.parts), nonce, rank) {
            part.peers[rank].holders.fetch_sub(1, Ordering::SeqCst);
        }
    }

    pub fn signal(&self, nonce: &Nonce, rank: usize) -> Verdict {
        match Self::held(&lock(&self.parts), nonce, rank) {
            Some(part) => {
                part.peers[rank].signals.fetch_add(1, Ordering::AcqRel);
                Verdict::Done
            }
            None => Verdict::Nothing,
        }
    }

    /// Begins to copy a piece for a rank, whose memory stays until [`Part::end_piece`].
    pub fn begin_piece(&self, nonce: &Nonce, rank: usize, ranges: &[Range]) -> Result<Arc<Part>, Verdict> {
        let parts = lock(&self.parts);
        let part = Self::held(&parts, nonce, rank).ok_or(Verdict::Nothing)?;
        if !fit(ranges, part.bytes) {
            return Err(Verdict::Outside);
        }
        part.peers[rank].pieces.fetch_add(1, Ordering::SeqCst);
        Ok(part.clone())
    }

    /// The service has ended, or copies nothing any more.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

/// A registration as its owner sees it.
pub(super) struct FarRecord {
    pub far: Arc<Far>,
    pub part: Arc<Part>,
}

impl Record for FarRecord {
    fn id(&self) -> u64 {
        self.far.id
    }

    fn given(&self, rank: usize) -> u64 {
        self.part.peers[rank].signals.load(Ordering::Acquire)
    }

    fn release(&self) {
        if !self.part.is_released.swap(true, Ordering::SeqCst) {
            self.far.shared.order(Order::Tell(self.part.clone(), Note::Released { nonce: self.part.nonce }));
        }
    }

    /// A rank of another host that is lost makes no copies: they are made here.
    fn is_held_by(&self, rank: usize, has_exited: bool) -> bool {
        let (peer, shared) = (&self.part.peers[rank], &self.far.shared);
        let is_over = || shared.parts.is_over.load(Ordering::SeqCst);
        let is_here = || shared.communicator.control_channel.shares_host_with(rank);
        let is_lost = has_exited || is_over() && !(self.part.place.is_some() && is_here());
        peer.pieces.load(Ordering::SeqCst) != 0 || peer.holders.load(Ordering::SeqCst) != 0 && !is_lost
    }

    fn close(&self) -> bool {
        self.far.shared.parts.remove(&self.part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::ipc::IpcHandle;
    use crate::types::memory::GpuId;

    #[test]
    fn only_who_has_a_window_open_begins_pieces_and_inside_it() {
        let (parts, elements) = (Parts::default(), (DType::F32, 25));
        let gpu = GpuId(std::array::from_fn(|i| i as u8));
        let place = Place { base: 0x1000, offset: 0, gpu, handle: IpcHandle::NONE };
        let part = Arc::new(Part::new([1, 2], (0x1000, 100), elements, Some(place), 3));
        parts.add(&part);
        let open = |rank, nonce| {
            parts.open(nonce, (rank, rank == 1), elements.0.code(), elements.0.mark(elements.1))
        };
        let begin = |rank, range| parts.begin_piece(&[1, 2], rank, &[range]).map(drop);
        assert_eq!(begin(2, (0, 4)), Err(Verdict::Nothing));
        assert_eq!(parts.signal(&[1, 2], 2), Verdict::Nothing);
        assert_eq!(open(2, [1, 3]), None);
        assert_eq!(parts.open([1, 2], (2, false), DType::I32.code(), DType::I32.mark(25)), None);
        assert_eq!(open(2, [1, 2]), Some(None));
        assert_eq!(open(1, [1, 2]), Some(Some(place)), "of this host");
        parts.close(&[1, 2], 1);
        assert_eq!(begin(1, (0, 4)), Err(Verdict::Nothing));
        assert_eq!(begin(2, (97, 4)), Err(Verdict::Outside));
        assert_eq!(begin(2, (96, 4)), Ok(()));
        part.end_piece(2);
        // Whoever has it open goes on after the release; nobody else opens it.
        part.is_released.store(true, Ordering::SeqCst);
        assert_eq!((open(1, [1, 2]), begin(2, (0, 4))), (None, Ok(())));
        part.end_piece(2);
        parts.close(&[1, 2], 2);
        parts.close(&[1, 2], 2);
        assert_eq!((begin(2, (0, 4)), part.holders().count()), (Err(Verdict::Nothing), 0));
        assert!(parts.remove(&part));
        assert_eq!(open(1, [1, 2]), None);
    }
}
