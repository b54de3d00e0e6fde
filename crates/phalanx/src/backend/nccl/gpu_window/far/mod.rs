//! Windows of communicators on several hosts. Who opens a window asks its rank, by a message. Ranks of one host then copy as in `remote.rs`.
//! Between hosts GPU memory goes in pieces through page-locked memory at both ends, and between them over a [`Messenger`](crate::contract::messenger::Messenger).
//!
//! Each rank that has such a window, or opens one, has a thread (`service.rs`). It carries out what other ranks ask of this rank's windows
//! (`server.rs`, `part.rs`), after it has checked that they have them open and stay inside; and with streams of the windows, which wait for it
//! (`cuStreamWaitValue32`), this rank's own copies (`client.rs`). It never waits for the GPU or the network itself.
//!
//! A descriptor has the number of the rank's service. Under that the job's store has where the service is, with the key of messages to it: so
//! only ranks of the job reach it.

mod client;
mod note;
mod part;
mod server;
mod service;
mod staging;

use super::own::OwnWindow;
use super::record::Place;
use super::remote::{CopyStream, Mapped};
use super::{refused, stale, unknown};
use crate::backend::nccl::communicator::{Communicator, ENDING};
use crate::backend::nccl::device::GpuEvent;
use crate::buffer::stream::GpuStream;
use crate::contract::messenger::{MakeMessenger, MessengerAddress};
use crate::contract::{
    CopyDirection, GpuBlock, GpuRegion, GpuWindow, GpuWindowKey, Operation, RemoteGpuWindow,
};
use crate::gpu::kernels::{check, during_captures};
use crate::os::random_number;
use crate::os::sync::lock;
use crate::rendezvous::store::Store;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result};
use client::{Job, Opened, State, Work};
use cudarc::driver::sys;
use note::{Cutter, Introduction, Piece, store_key};
use part::{FarRecord, Part};
use server::Server;
use service::{Order, Service, Shared};
use staging::{Lane, SLOTS, Tools, Way};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// This rank's end of the windows between hosts of a communicator.
pub(crate) struct Far {
    /// Under which the store knows it.
    id: u64,
    shared: Arc<Shared>,
    /// Lanes that are not in use.
    pool: Arc<Mutex<Vec<Lane>>>,
    thread: Option<JoinHandle<()>>,
}

impl Far {
    /// Starts the service, and tells the store where it is.
    pub fn start(
        communicator: &Arc<Communicator>,
        store: &Store,
        messenger: Option<MakeMessenger>,
    ) -> Result<Arc<Far>> {
        let remedy = "build phalanx with the feature multi-host, for a 64-bit little-endian machine";
        let messenger = messenger
            .ok_or_else(|| refused("the ranks are on several hosts, and UCX is not built in", remedy))?;
        let messenger = messenger(communicator.rank, communicator.ranks)?;
        let device = communicator.device;
        let tools = {
            let (to_gpu, to_host) =
                during_captures(|| Ok::<_, Error>((device.new_stream()?, device.new_stream()?)))?;
            Tools { messenger, device, to_gpu, to_host }
        };
        let server = Server::new(&device)?;
        let id = random_number("ranks of other hosts find windows by a number")?;
        let introduction = Introduction {
            channel: communicator.control_channel.id(),
            rank: communicator.rank as u64,
            address: tools.messenger.address().clone(),
        };
        let introduction = postcard::to_allocvec(&introduction).expect("plain data");
        store.set(&store_key(id), &introduction, communicator.control_channel.timeout())?;
        let shared = Arc::new(Shared::new(communicator));
        let service = Service::new(shared.clone(), tools, server);
        let thread = std::thread::Builder::new().name("phalanx-far".into());
        let remedy = "GPU memory that ranks of other hosts access needs one: raise `ulimit -u`";
        let thread = thread.spawn(move || service.run());
        let thread = Some(thread.map_err(|error| Error::system("starting a thread", error, remedy))?);
        Ok(Arc::new(Far { id, shared, pool: Arc::default(), thread }))
    }

    /// Opens memory of this rank, whose work is complete, to the others.
    pub fn register(self: &Arc<Far>, region: GpuRegion, place: Option<Place>) -> Result<Box<dyn GpuWindow>> {
        let communicator = &self.shared.communicator;
        let need = "a registration needs a number of its own";
        let nonce = [random_number(need)?, random_number(need)?];
        let bytes = (region.len * region.dtype.size()) as u64;
        let elements = (region.dtype, region.len as u64);
        let part = Part::new(nonce, (region.address, bytes), elements, place, communicator.ranks);
        let part = Arc::new(part);
        self.shared.parts.add(&part);
        let record = FarRecord { far: self.clone(), part };
        Ok(Box::new(OwnWindow::new(communicator.clone(), record, nonce)))
    }

    /// Opens a window of a rank.
    pub fn open(
        self: &Arc<Far>,
        store: &Store,
        key: GpuWindowKey,
        rank: usize,
        (dtype, len): (DType, u64),
        stream: &GpuStream,
    ) -> Result<Box<dyn RemoteGpuWindow>> {
        let communicator = &self.shared.communicator;
        let address = self.find(store, key, rank)?;
        let lane = match lock(&self.pool).pop() {
            Some(lane) => lane,
            None => Lane::new(&communicator.device)?,
        };
        lane.staging.reset();
        let begun = GpuEvent::new(&communicator.device)?;
        let copies = CopyStream::new(communicator, rank, stream)?;
        let opened = Arc::new(Opened::new(copies, key.nonce, lane, self.pool.clone()));
        let (channel, marked) = (communicator.control_channel.id(), dtype.mark(len));
        let order = Order::Open { opened: opened.clone(), address, channel, dtype: dtype.code(), marked };
        self.shared.order(order);
        // A rank that has left has released all.
        let has_left = || rank != communicator.rank && communicator.control_channel.has_left(rank);
        let answered = || match opened.state() {
            State::Asked if has_left() => Err(unknown(rank)),
            state => Ok(state != State::Asked),
        };
        if let Err(error) = communicator.wait_for_rank(Operation::OneSided, rank, answered) {
            self.shared.order(Order::Close(opened));
            return Err(error);
        }
        if opened.state() == State::Refused {
            return Err(unknown(rank));
        }
        let mapped = opened.place().and_then(|place| {
            let staged = |error: &Error| {
                crate::os::log::debug!(rank, "copies to a rank of this host are staged: {error}");
            };
            // SAFETY: the rank keeps its memory while this one has the window open there.
            unsafe { Mapped::open(communicator, rank, place) }.inspect_err(staged).ok()
        });
        communicator.keep_copies(&opened.copies);
        Ok(Box::new(FarWindow { far: self.clone(), opened, mapped, begun }))
    }

    /// Where the service with this window is: what the store has of it, if it is the rank's in this communicator.
    fn find(&self, store: &Store, key: GpuWindowKey, rank: usize) -> Result<MessengerAddress> {
        let channel = &self.shared.communicator.control_channel;
        // A number that nobody has is taken, so that nobody waits for it.
        let found = store.set_first(&store_key(key.segment), &[], channel.timeout())?;
        let introduction = postcard::from_bytes::<Introduction>(&found).ok();
        introduction
            .filter(|found| (found.channel, found.rank) == (channel.id(), rank as u64))
            .map(|found| found.address)
            .ok_or_else(|| unknown(rank))
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.shared.communicator.check_owner().is_err() {
            // The thread is the parent's.
            return std::mem::forget(thread);
        }
        self.shared.order(Order::End);
        let _ = thread.join();
    }
}

/// A window of another rank, open here.
struct FarWindow {
    far: Arc<Far>,
    opened: Arc<Opened>,
    /// The memory itself, if this rank's GPU reaches it.
    mapped: Option<Mapped>,
    /// Behind the program's work before the steps.
    begun: GpuEvent,
}

impl FarWindow {
    /// An error if nothing can be enqueued any more.
    fn check(&self) -> Result<()> {
        let communicator = &self.far.shared.communicator;
        communicator.check_owner()?;
        communicator.check()?;
        self.opened.copies.check()?;
        if self.opened.state() == State::Released {
            return Err(stale(self.opened.copies.rank, "that rank has released it"));
        }
        let remedy = "enqueue the copies outside of the graph: it could be launched when the memory is gone";
        let stream = self.opened.copies.stream.raw();
        communicator.device.refuse_captured(stream, "a copy to another rank", remedy)
    }

    /// Hands a job of so many pieces to the service, and enqueues its steps. `copy` enqueues the copies of a piece.
    fn enqueue(
        &self,
        work: Work,
        pieces: impl Iterator<Item = Piece>,
        count: usize,
        copy: impl Fn(&Piece, usize) -> Result<()>,
    ) -> Result<()> {
        let communicator = &self.far.shared.communicator;
        let copies = &self.opened.copies;
        let _current = communicator.device.enter();
        let mut steps = lock(&self.opened.steps);
        let first = steps.wrapping_add(1);
        *steps = first.wrapping_add(count as u32 + 1);
        // The driver lets a thread wait while a stream is full of work: the service has to know before what that is.
        let job = Job { steps: [first, *steps], work };
        self.far.shared.order(Order::Work(self.opened.clone(), job));
        let begun = self.begun.record(&copies.stream).and_then(|()| self.begun.hold(self.opened.stream()));
        let enqueued = begun.and_then(|()| self.tell(first)).and_then(|()| {
            let mut step = first;
            for piece in pieces {
                step = step.wrapping_add(1);
                self.wait(step)?;
                copy(&piece, step as usize % SLOTS)?;
                self.tell(step)?;
            }
            self.wait(*steps)?;
            self.tell(*steps)
        });
        // Also behind a part of the steps.
        let ended = copies.last.record(self.opened.stream()).and_then(|()| copies.last.hold(&copies.stream));
        enqueued.and(ended).map_err(|error| communicator.fail(error))
    }

    /// Enqueues that the stream waits until a step is granted.
    fn wait(&self, step: u32) -> Result<()> {
        let (stream, word) = (self.opened.stream().raw(), &self.opened.staging().words().granted);
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: a word of page-locked memory, which is there until the stream has done the last step.
        let result =
            unsafe { sys::cuStreamWaitValue32_v2(stream.0.cast(), word.as_ptr() as u64, step, flags) };
        check("cuStreamWaitValue32", result)
    }

    /// Enqueues that the stream says that it has done a step.
    fn tell(&self, step: u32) -> Result<()> {
        let (stream, word) = (self.opened.stream().raw(), &self.opened.staging().words().done);
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: as above.
        let result =
            unsafe { sys::cuStreamWriteValue32_v2(stream.0.cast(), word.as_ptr() as u64, step, flags) };
        check("cuStreamWriteValue32", result)
    }
}

impl RemoteGpuWindow for FarWindow {
    unsafe fn copy(
        &self,
        direction: CopyDirection,
        local: *mut u8,
        element: usize,
        blocks: &[GpuBlock],
    ) -> Result<()> {
        self.check()?;
        if let Some(mapped) = &self.mapped {
            let (device, what) = (&self.far.shared.communicator.device, (direction, local, element));
            // `last` is behind the signals of other threads, too.
            let _steps = lock(&self.opened.steps);
            // SAFETY: the caller's contract; it is closed once the copies are complete.
            return unsafe { mapped.copy(device, &self.opened.copies, what, blocks) };
        }
        if blocks.iter().all(|block| block.len * element == 0) {
            return Ok(());
        }
        let cutter = Cutter::new(blocks, element);
        let way = match direction {
            CopyDirection::Put => Way::ToHost,
            CopyDirection::Get => Way::ToGpu,
        };
        let (device, stream) = (&self.far.shared.communicator.device, self.opened.stream());
        let copy = |piece: &Piece, slot: usize| {
            let start = self.opened.staging().start(slot);
            // SAFETY: the caller's contract; the stream has waited until the place is its own.
            unsafe { staging::copy(device, stream, way, start, piece.parts(local as u64)) }
        };
        let work = Work::Copy { direction, pieces: cutter.clone() };
        self.enqueue(work, cutter.clone(), cutter.count(), copy)
    }

    fn signal(&self) -> Result<()> {
        self.check()?;
        self.enqueue(Work::Signal, std::iter::empty(), 0, |_, _| Ok(()))
    }

    fn is_complete(&self) -> Result<bool> {
        self.far.shared.communicator.check()?;
        self.opened.copies.check()?;
        self.opened.copies.is_complete()
    }

    fn sync(&self) -> Result<()> {
        self.opened.copies.sync(&self.far.shared.communicator)
    }
}

impl Drop for FarWindow {
    fn drop(&mut self) {
        let communicator = &self.far.shared.communicator;
        if communicator.check_owner().is_err() {
            return;
        }
        if let Err(error) = self.opened.copies.last.wait(ENDING) {
            crate::os::log::error!(
                rank = communicator.rank,
                "copies to rank {} are given up: {error}",
                self.opened.copies.rank
            );
            if self.mapped.is_some() {
                // They may be under way: the rank keeps the memory.
                return;
            }
        }
        if let Some(mapped) = &self.mapped {
            // SAFETY: dropped once; its copies are complete.
            unsafe { mapped.close(&communicator.device) };
        }
        self.far.shared.order(Order::Close(self.opened.clone()));
        if self.opened.copies.rank == communicator.rank {
            // Whoever drops its own window releases it next.
            self.far.shared.parts.close(&self.opened.nonce, communicator.rank);
        }
    }
}
