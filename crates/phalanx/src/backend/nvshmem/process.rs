//! This process as a PE: the context that its communicators share, and the stage and slots through which
//! other memory goes.
//!
//! An operation that uses the stage holds `operating`, for as long as peers may read this rank's part.

use super::device;
use super::device::{Pinned, StreamEvent};
use super::pe::{Context, Limits, NvshmemLibrary, PeDevice};
use crate::buffer::stream::GpuStream;
use crate::os::sync::lock;
use crate::rendezvous::environment::number_from_environment;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::memory::RawStream;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

/// Bytes of each half of the stage.
const STAGE: usize = 16 << 20;
/// Most messages sent and not yet fetched by peers.
const OUTGOING: usize = 32;
/// Most parts of messages fetched at once.
const INCOMING: usize = 4;

/// The context, shared by threads that take turns.
pub(crate) struct SharedContext(Context);

// SAFETY: the library accepts calls of any thread, one at a time (NVSHMEM_THREAD_SERIALIZED); the lock around
// this sees to that. What a context borrows out never leaves this module.
unsafe impl Send for SharedContext {}

impl std::ops::Deref for SharedContext {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.0
    }
}

/// What the communicators of this process share.
pub(crate) struct NvshmemProcess {
    /// `None` when it has been finalized.
    context: Mutex<Option<SharedContext>>,
    pub library: &'static NvshmemLibrary,
    pub device: PeDevice,
    pub limits: Limits,
    pub pe: usize,
    pub pes: usize,
    /// Bytes of a half of the stage, and of a slot.
    pub stage: usize,
    pub slot: usize,
    /// The symmetric memory: the stage's two halves, then the slots.
    start: u64,
    /// Pinned memory that mirrors the stage and slots, for host buffers.
    pinned: OnceLock<Pinned>,
    pub operating: Mutex<()>,
    /// A communicator has failed: the GPU may have work that does not end.
    pub is_broken: AtomicBool,
    /// Teams made for communicators and not destroyed.
    pub teams: AtomicUsize,
    free_slots: Mutex<Slots>,
    /// The stream of the last collective of the library.
    last: Mutex<Option<RawStream>>,
    /// Streams with enqueued work: they live as long as this.
    streams: Mutex<Vec<GpuStream>>,
    /// Symmetric memory of the user's, by its start: length in bytes, and its number, the same on all PEs.
    allocations: Mutex<BTreeMap<u64, (u64, u64)>>,
}

// SAFETY: the stream is a handle that `streams` keeps alive; the driver's calls accept it on any thread.
unsafe impl Send for NvshmemProcess {}
// SAFETY: as above.
unsafe impl Sync for NvshmemProcess {}

struct Slots {
    outgoing: Vec<usize>,
    incoming: Vec<usize>,
}

/// Which half of the stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    /// Data for the peers to fetch.
    In,
    /// Data fetched or combined.
    Out,
}

impl NvshmemProcess {
    /// Collective.
    pub fn new(context: Context) -> Result<NvshmemProcess> {
        let stage = stage_from_environment()?.max(context.n_pes() << 10);
        let library = context.library;
        library.need(library.nvshmemx_getmem_on_stream, "nvshmemx_getmem_on_stream")?;
        let slot = (stage / 16).next_multiple_of(64);
        let start = context.reserve(2 * stage + (OUTGOING + INCOMING) * slot)?;
        let device = context.device.clone();
        let streams = Mutex::new(vec![GpuStream::Cuda(device.stream.clone())]);
        let free_slots = Slots {
            outgoing: (0..OUTGOING).rev().collect(),
            incoming: (OUTGOING..OUTGOING + INCOMING).rev().collect(),
        };
        Ok(NvshmemProcess {
            library,
            device,
            limits: context.limits,
            pe: context.my_pe(),
            pes: context.n_pes(),
            stage,
            slot,
            start,
            pinned: OnceLock::new(),
            operating: Mutex::default(),
            is_broken: AtomicBool::new(false),
            teams: AtomicUsize::new(0),
            free_slots: Mutex::new(free_slots),
            last: Mutex::default(),
            streams,
            allocations: Mutex::default(),
            context: Mutex::new(Some(SharedContext(context))),
        })
    }

    /// This thread's turn in the library, with the device current.
    pub fn enter(&self) -> Result<LibraryTurn<'_>> {
        let turn = LibraryTurn(lock(&self.context));
        turn.context()?.enter()?;
        Ok(turn)
    }

    /// Ends the library in this process. Collective over all PEs.
    pub fn finalize(&self) -> Result<()> {
        let Some(SharedContext(context)) = lock(&self.context).take() else { return Ok(()) };
        context.finalize()
    }

    /// A place in the stage.
    pub fn at(&self, half: Half, offset: usize) -> *mut u8 {
        (self.start as *mut u8).wrapping_add(self.host_offset(half, offset))
    }

    /// Its counterpart on the host.
    pub fn on_host(&self, half: Half, offset: usize) -> Result<*mut u8> {
        Ok(self.pinned()?.wrapping_add(self.host_offset(half, offset)))
    }

    fn host_offset(&self, half: Half, offset: usize) -> usize {
        debug_assert!(offset <= self.stage, "the stage has no such place");
        if half == Half::In { offset } else { self.stage + offset }
    }

    /// A slot for a part of a message.
    pub fn slot_at(&self, slot: usize) -> *mut u8 {
        (self.start as *mut u8).wrapping_add(2 * self.stage + slot * self.slot)
    }

    /// Its counterpart on the host.
    pub fn slot_on_host(&self, slot: usize) -> Result<*mut u8> {
        Ok(self.pinned()?.wrapping_add(2 * self.stage + slot * self.slot))
    }

    fn pinned(&self) -> Result<*mut u8> {
        if let Some(pinned) = self.pinned.get() {
            return Ok(pinned.start);
        }
        let made = Pinned::new(&self.device, 2 * self.stage + (OUTGOING + INCOMING) * self.slot)?;
        // The thread that comes second drops its own.
        Ok(self.pinned.get_or_init(|| made).start)
    }

    /// A free slot for a part to send; none if all are in use.
    pub fn take_outgoing(&self) -> Option<usize> {
        lock(&self.free_slots).outgoing.pop()
    }

    /// A free slot for a part to receive; none if all are in use.
    pub fn take_incoming(&self) -> Option<usize> {
        lock(&self.free_slots).incoming.pop()
    }

    pub fn free(&self, slot: usize) {
        let mut slots = lock(&self.free_slots);
        let list = if slot < OUTGOING { &mut slots.outgoing } else { &mut slots.incoming };
        list.push(slot);
    }

    /// Puts a stream behind the library's last collective: a team carries out one at a time.
    pub fn order(&self, stream: RawStream) -> Result<()> {
        self.device.enter()?;
        match *lock(&self.last) {
            Some(last) if last != stream => StreamEvent::behind(last)?.hold(stream),
            _ => Ok(()),
        }
    }

    /// Notes a collective of the library that was enqueued.
    pub fn enqueued(&self, stream: RawStream) {
        *lock(&self.last) = Some(stream);
    }

    /// Keeps a stream alive on which work will be enqueued.
    pub fn adopt(&self, stream: &GpuStream) -> Result<()> {
        let of_device = stream.cuda().is_some_and(|stream| self.device.check(stream).is_ok());
        if !of_device {
            return Err(UsageError::Memory {
                memory: format!("a stream of {}", stream.describe()),
                wanted: format!("GPU {} of nvshmem (and its primary context)", self.gpu()),
                remedy: "make the stream on the communicator's GPU (Comm::gpu)",
            }
            .into());
        }
        let mut streams = lock(&self.streams);
        if !streams.iter().any(|known| known.raw() == stream.raw()) {
            streams.push(stream.clone());
        }
        Ok(())
    }

    pub fn gpu(&self) -> usize {
        self.device.context.ordinal()
    }

    /// Allocates symmetric memory for the user: its start and its number. Collective over all PEs.
    pub fn allocate(&self, bytes: usize) -> Result<(u64, u64)> {
        let turn = self.enter()?;
        let context = turn.context()?;
        let start = context.reserve_zeroed(bytes)?;
        let number = context.next_allocation();
        lock(&self.allocations).insert(start, (bytes as u64, number));
        Ok((start, number))
    }

    /// Frees it. Collective over all PEs.
    pub fn release(&self, start: u64, number: u64) -> Result<()> {
        let turn = self.enter()?;
        lock(&self.allocations).remove(&start);
        turn.context()?.give_back(start, number)
    }

    /// The name of an address in symmetric memory, the same on every PE; 0 for other memory.
    pub fn place(&self, address: *const u8, bytes: usize) -> u64 {
        let address = address as u64;
        let allocations = lock(&self.allocations);
        let Some((start, (len, number))) = allocations.range(..=address).next_back() else { return 0 };
        let offset = address - start;
        if offset + bytes as u64 > *len || offset >= 1 << 40 { 0 } else { number << 40 | offset }
    }
}

impl Drop for NvshmemProcess {
    fn drop(&mut self) {
        if self.is_broken.load(Ordering::Relaxed) {
            // Copies may still use the pinned memory.
            std::mem::forget(self.pinned.take());
        }
    }
}

/// A thread's turn in the library.
pub(crate) struct LibraryTurn<'a>(MutexGuard<'a, Option<SharedContext>>);

impl LibraryTurn<'_> {
    pub fn context(&self) -> Result<&Context> {
        match &*self.0 {
            Some(context) => Ok(context),
            None => Err(Error::from(UnsupportedError {
                what: "an operation of NVSHMEM".into(),
                why: "the library was finalized, with the communicator of all ranks".into(),
                remedy: "finalize that communicator last".into(),
            })),
        }
    }
}

fn stage_from_environment() -> Result<usize> {
    let expected = "a number of bytes from 4096 to 4294967296";
    let bytes = number_from_environment("PHALANX_NVSHMEM_STAGE", 1 << 12..=1 << 32, expected)?;
    Ok(bytes.map_or(STAGE, |bytes| bytes.next_multiple_of(1 << 10)))
}

/// Whether this process can be a PE; an error says what is missing.
pub(crate) fn available() -> Result<()> {
    if device::count()? == 0 {
        return Err(Error::from(UnsupportedError {
            what: "NVSHMEM".into(),
            why: "this process sees no GPU".into(),
            remedy: "look at CUDA_VISIBLE_DEVICES".into(),
        }));
    }
    super::pe::version().map(drop)
}

impl NvshmemProcess {
    /// The stream that may have work of the library.
    pub fn last(&self) -> Option<RawStream> {
        *lock(&self.last)
    }

    /// Notes that a stream's work is complete.
    pub fn is_done(&self, stream: RawStream) {
        let mut last = lock(&self.last);
        if *last == Some(stream) {
            *last = None;
        }
    }
}
