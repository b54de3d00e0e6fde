//! Windows between hosts: GPU memory goes in pieces through page-locked memory at both ends, and between them over a [`Carrier`](crate::contract::carrier::Carrier).
//!
//! Each rank that has such a window, or opens one, has a thread (`service.rs`). It carries out what other ranks ask of this rank's windows
//! (`server.rs`, `part.rs`), after it has checked that they have them open and stay inside; and this rank's own copies (`client.rs`), for which the
//! program's streams wait with a word of page-locked memory (`cuStreamWaitValue32`). It never waits for the GPU or the network itself.
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
use super::remote::CopyStream;
use super::{refused, stale};
use crate::backend::nccl::communicator::{Communicator, ENDING};
use crate::backend::nccl::device::GpuEvent;
use crate::buffer::stream::GpuStream;
use crate::contract::carrier::{CarrierAddress, MakeCarrier};
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
use note::{Cutter, Introduction, store_key};
use part::{FarRecord, Part};
use server::Server;
use service::{Order, Service, Shared};
use staging::{Staging, Tools};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// This rank's end of the windows between hosts of a communicator.
pub(crate) struct Far {
    /// Under which the store knows it.
    id: u64,
    shared: Arc<Shared>,
    /// Stagings that are not in use.
    pool: Arc<Mutex<Vec<Staging>>>,
    thread: Option<JoinHandle<()>>,
}

impl Far {
    /// Starts the service, and tells the store where it is.
    pub fn start(
        communicator: &Arc<Communicator>,
        store: &Store,
        carrier: Option<MakeCarrier>,
    ) -> Result<Arc<Far>> {
        let remedy = "build phalanx with the feature multi-host, for a 64-bit little-endian machine";
        let carrier =
            carrier.ok_or_else(|| refused("the ranks are on several hosts, and UCX is not built in", remedy))?;
        let carrier = carrier(communicator.rank, communicator.ranks)?;
        let device = communicator.device;
        let tools = {
            let (to_gpu, to_host) =
                during_captures(|| Ok::<_, Error>((device.new_stream()?, device.new_stream()?)))?;
            Tools { carrier, device, to_gpu, to_host }
        };
        let server = Server::new(&device)?;
        let id = random_number("ranks of other hosts find windows by a number")?;
        let introduction = Introduction {
            channel: communicator.control_channel.id(),
            rank: communicator.rank as u64,
            address: tools.carrier.address().clone(),
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
    pub fn register(self: &Arc<Far>, region: GpuRegion) -> Result<Box<dyn GpuWindow>> {
        let communicator = &self.shared.communicator;
        let need = "a registration needs a number of its own";
        let nonce = [random_number(need)?, random_number(need)?];
        let bytes = (region.len * region.dtype.size()) as u64;
        let elements = (region.dtype, region.len as u64);
        let part = Arc::new(Part::new(nonce, (region.address, bytes), elements, communicator.ranks));
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
        let staging = match lock(&self.pool).pop() {
            Some(staging) => staging,
            None => Staging::new(&communicator.device)?,
        };
        staging.reset();
        let copies = CopyStream::new(communicator, rank, stream)?;
        let opened = Arc::new(Opened::new(copies, key.nonce, staging, self.pool.clone()));
        let (channel, marked) = (communicator.control_channel.id(), dtype.mark(len));
        let order = Order::Open { opened: opened.clone(), address, channel, dtype: dtype.code(), marked };
        self.shared.order(order);
        let answered = || Ok(opened.state() != State::Asked);
        if let Err(error) = communicator.wait_for_rank(Operation::OneSided, rank, answered) {
            self.shared.order(Order::Close(opened));
            return Err(error);
        }
        if opened.state() == State::Refused {
            return Err(unknown(rank));
        }
        communicator.keep_copies(&opened.copies);
        Ok(Box::new(FarWindow { far: self.clone(), opened }))
    }

    /// Where the service with this window is: what the store has of it, if it is the rank's in this communicator.
    fn find(&self, store: &Store, key: GpuWindowKey, rank: usize) -> Result<CarrierAddress> {
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

fn unknown(rank: usize) -> Error {
    stale(
        rank,
        "that rank has released it, or it is of another communicator or job, or it was changed on the way",
    )
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

    /// Hands work to the service, and makes the stream wait for it.
    fn enqueue(&self, work: Work) -> Result<()> {
        let device = &self.far.shared.communicator.device;
        let copies = &self.opened.copies;
        let _current = device.enter();
        let ready = GpuEvent::new(device)?;
        {
            let mut tickets = lock(&self.opened.tickets);
            ready.record(&copies.stream)?;
            let ticket = tickets.wrapping_add(1);
            let word = self.opened.staging().word().as_ptr() as u64;
            let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
            // SAFETY: a word of page-locked memory, which is there until the stream has gone on.
            let held =
                unsafe { sys::cuStreamWaitValue32_v2(copies.stream.raw().0.cast(), word, ticket, flags) };
            check("cuStreamWaitValue32", held)?;
            *tickets = ticket;
            self.far.shared.order(Order::Work(self.opened.clone(), Job { ticket, ready, work }));
        }
        copies.last.record(&copies.stream)
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
        if blocks.iter().all(|block| block.len * element == 0) {
            return Ok(());
        }
        // The caller's contract makes the copies sound that the service makes: the stream, to which the buffer is lent, waits for them.
        self.enqueue(Work::Copy { direction, local: local as u64, pieces: Cutter::new(blocks, element) })
    }

    fn signal(&self) -> Result<()> {
        self.check()?;
        self.enqueue(Work::Signal)
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
        }
        self.far.shared.order(Order::Close(self.opened.clone()));
        if self.opened.copies.rank == communicator.rank {
            // Whoever drops its own window releases it next.
            self.far.shared.parts.close(&self.opened.nonce, communicator.rank);
        }
    }
}
