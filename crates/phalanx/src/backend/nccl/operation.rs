//! An operation from its call to its end: host memory in, the library, host memory out.

use super::arrival::Arrival;
use super::collective::{Needs, Progress};
use super::communicator::{Communicator, OwnKernel};
use super::group;
use super::parts::Part;
use super::staging::{Return, Stage};
use crate::contract::{Call, Direction, Operation, Transfer};
use crate::control::control_channel::AnnouncedCall;
use crate::os::RunInstant;
use crate::types::error::{Error, Result, UsageError};
use crate::types::memory::{RawStream, Space};
use std::sync::Arc;

/// An operation that the library has taken.
pub(crate) struct EnqueuedOperation {
    pub communicator: Arc<Communicator>,
    /// Ranks to wait for before the group's end, if in a group.
    pub arrival: Option<Arrival>,
    announced: AnnouncedCall,
    stream: RawStream,
    progress: Progress,
    needs: Needs,
    returns: Vec<Return>,
}

/// What follows when operations are enqueued.
pub(crate) struct Aftermath;

impl Aftermath {
    /// Waits for what is in progress, launches the own kernels that run beside it, and waits for what is in host memory.
    pub fn of_all(started: Vec<EnqueuedOperation>) -> Result<()> {
        let since = RunInstant::now();
        let mut outcome = Ok(());
        for one in &started {
            outcome = outcome.and(one.communicator.settle_unless_failed(&one.announced, since));
        }
        // What the library carries out has its place in the streams only now.
        let beside = || started.iter().filter(|one| one.needs.runs_beside());
        outcome = outcome
            .and_then(|()| beside().try_for_each(EnqueuedOperation::launch_beside))
            .and_then(|()| started.iter().try_for_each(EnqueuedOperation::rejoin));
        // The peers of kernels that were not launched would wait for them.
        outcome = outcome.map_err(|error| beside().fold(error, |error, one| one.refused(error)));
        for mut one in started {
            outcome = match outcome {
                Ok(()) => one.complete(),
                Err(error) => {
                    one.abandon();
                    Err(error)
                }
            };
        }
        outcome
    }
}

impl EnqueuedOperation {
    /// Waits for what is still to be enqueued, and for host memory.
    fn finish(mut self) -> Result<()> {
        if self.progress == Progress::InProgress
            && let Err(error) = self.communicator.settle(&self.announced, RunInstant::now())
        {
            self.abandon();
            return Err(error);
        }
        if self.needs.runs_beside()
            && let Err(error) = self.launch_beside().and_then(|()| self.rejoin())
        {
            let error = self.refused(error);
            self.abandon();
            return Err(error);
        }
        if self.is_simple() { Ok(()) } else { self.complete() }
    }

    /// Launches its own kernels, if it has some, at the group's end.
    pub fn launch_own_kernels(&self) -> Result<()> {
        // SAFETY: the contract of `collective`, whose memory is valid until the group has ended.
        unsafe { self.communicator.launch_own_kernels(&self.needs) }
    }

    pub fn has_library_part(&self) -> bool {
        #[cfg(feature = "nccl")]
        return self.needs.by_library;
        #[cfg(not(feature = "nccl"))]
        return true;
    }

    /// Lets its own kernels run beside what the library carries out of the group.
    pub fn run_beside(&mut self) -> Result<()> {
        self.communicator.run_beside(&mut self.needs)
    }

    fn launch_beside(&self) -> Result<()> {
        let _locked = self.communicator.lock_library()?;
        // SAFETY: the contract of `collective`: the memory is lent until the operation, or its group, has ended.
        unsafe { self.communicator.launch_beside(&self.needs) }
    }

    /// Orders its streams behind the operations before.
    fn rejoin(&self) -> Result<()> {
        let _locked = self.communicator.lock_library()?;
        self.communicator.rejoin(&self.needs)?;
        self.communicator.come_after_last(self.stream)
    }

    /// The error for an operation that the library rejected.
    pub fn refused(&self, error: Error) -> Error {
        self.communicator.refused(error, &self.announced)
    }

    /// On device memory with no resources to free: nothing follows after enqueuing.
    fn is_simple(&self) -> bool {
        self.returns.is_empty() && self.needs.is_empty()
    }

    /// Brings host memory back, once the operation is enqueued.
    fn complete(mut self) -> Result<()> {
        // SAFETY: the contract of `collective`: the buffers are lent until the operation is enqueued.
        if let Err(error) = unsafe { self.communicator.follow(&mut self.needs) } {
            self.abandon();
            return Err(error);
        }
        self.communicator.release(&mut self.needs);
        if self.returns.is_empty() {
            return Ok(());
        }
        let communicator = self.communicator.clone();
        let current = communicator.device.enter();
        let brought =
            self.returns.iter().try_for_each(|back| back.download(&communicator.device, self.stream));
        drop(current);
        if let Err(error) = brought.and_then(|()| communicator.wait_for(self.stream, &self.announced)) {
            self.abandon();
            return Err(error);
        }
        for back in self.returns {
            back.finish(&communicator.stages);
        }
        Ok(())
    }

    /// The library has dropped it; copies to the device may still be under way, and are waited for.
    pub fn cancel(&mut self) {
        self.arrival = None;
        if self.is_simple() {
            return;
        }
        // The library has not joined the streams.
        let mut streams = self.returns.iter().map(Return::stream).chain([self.stream]);
        if streams.any(|stream| self.communicator.wait_for(stream, &self.announced).is_err()) {
            return self.abandon();
        }
        self.communicator.release(&mut self.needs);
        self.returns.drain(..).for_each(|back| back.discard(&self.communicator.stages));
    }

    /// Leaks the stages of a failed operation, since the GPU may still use them.
    fn abandon(&mut self) {
        if !self.is_simple() {
            crate::os::log::warn!("memory that a failed operation may still use is leaked");
            std::mem::forget((std::mem::take(&mut self.needs), std::mem::take(&mut self.returns)));
        }
    }
}

/// Carries a collective out, or queues it in a group.
///
/// # Safety
/// The contract of `Backend::collective`.
#[inline]
pub(crate) unsafe fn collective(communicator: &Arc<Communicator>, call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's contract.
    unsafe { collective_with(communicator, call, communicator.own_kernel(call), Needs::default()) }
}

/// [`collective`] with its own kernel, reduction operator and stages.
///
/// # Safety
/// As for [`collective`].
#[inline(always)]
pub(crate) unsafe fn collective_with(
    communicator: &Arc<Communicator>,
    call: &Call<'_>,
    own_kernel: Option<OwnKernel<'_>>,
    mut needs: Needs,
) -> Result<()> {
    communicator.admit(call.operation)?;
    let (announced, arrival) = communicator.next_collective(call, own_kernel.is_some());
    let (mut returns, brought) = (Vec::new(), &mut None);
    let call = match call.spaces {
        [Space::Device, Space::Device] => call,
        _ => {
            // SAFETY: the caller's contract.
            let on_device = unsafe { bring(communicator, call, &mut returns) };
            // The others would wait for this rank.
            brought.insert(on_device.map_err(|error| communicator.fail(error))?)
        }
    };
    // SAFETY: as above; the addresses are on the device now.
    let enqueue =
        |needs: &mut Needs| unsafe { communicator.carry_out(call, own_kernel, group::is_open(), needs) };
    launch(communicator, (&announced, arrival), call.stream, &mut needs, &mut returns, enqueue)
}

/// Waits for the arrival, calls the library under its lock, and finishes the operation; in a group, at the
/// group's end.
#[inline(always)]
fn launch(
    communicator: &Arc<Communicator>,
    (announced, mut arrival): (&AnnouncedCall, Option<Arrival>),
    stream: RawStream,
    needs: &mut Needs,
    returns: &mut Vec<Return>,
    enqueue: impl FnOnce(&mut Needs) -> Result<Progress>,
) -> Result<()> {
    let grouped = group::is_open();
    let arrived = match &mut arrival {
        Some(arrival) if !grouped => communicator.wait_for_arrival(arrival),
        _ => Ok(()),
    };
    let enqueued = arrived.and_then(|()| communicator.lock_library()).and_then(|_locked| enqueue(needs));
    let is_simple = needs.is_empty() && returns.is_empty() && !needs.runs_beside();
    if matches!(enqueued, Ok(Progress::Enqueued)) && is_simple && !grouped {
        // The common case: nothing to bring, nothing to keep.
        return Ok(());
    }
    let started = EnqueuedOperation {
        communicator: communicator.clone(),
        arrival,
        announced: *announced,
        stream,
        progress: Progress::Enqueued,
        needs: std::mem::take(needs),
        returns: std::mem::take(returns),
    };
    see_to(started, enqueued, grouped)
}

/// Finishes an operation at once, or leaves that to the group's end.
#[cold]
fn see_to(mut started: EnqueuedOperation, enqueued: Result<Progress>, grouped: bool) -> Result<()> {
    let outcome = enqueued.map(|progress| started.progress = progress).map_err(|error| {
        started.cancel();
        started.refused(error)
    });
    if grouped {
        group::defer(started);
        return outcome;
    }
    outcome.and_then(|()| started.finish())
}

/// An error for host memory in a collective on a stream that is captured.
#[cold]
pub(crate) fn check_host_memory(communicator: &Communicator, call: &Call<'_>) -> Result<()> {
    let used = call.flow().used(communicator.rank, communicator.ranks);
    match call.spaces.into_iter().zip(used).any(|(space, bytes)| space == Space::Host && bytes > 0) {
        true => refuse_captured(communicator, call.stream),
        false => Ok(()),
    }
}

/// Host memory is brought to the GPU and back, for which the host waits.
fn refuse_captured(communicator: &Communicator, stream: RawStream) -> Result<()> {
    let remedy = "use GPU memory, and let nccl::Graph capture the operation";
    communicator.device.refuse_captured(stream, "host memory", remedy)
}

/// Messages that start together start now, or when a graph is launched.
fn refuse_partly_captured(communicator: &Communicator, transfers: &[Transfer]) -> Result<()> {
    let mut streams = transfers.iter().filter(|transfer| transfer.count > 0).map(|transfer| transfer.stream);
    let Some(first) = streams.next() else { return Ok(()) };
    let device = &communicator.device;
    for stream in streams.filter(|stream| *stream != first) {
        let _current = device.enter();
        if device.is_captured(stream)? != device.is_captured(first)? {
            let what = "one of the streams of messages that start together";
            let remedy = "capture all of these streams, or none; nccl::Graph captures a whole group";
            return Err(UsageError::Captured { what, remedy }.into());
        }
    }
    Ok(())
}

/// Brings host memory to the device: the call with the addresses there.
///
/// # Safety
/// The contract of `Backend::collective`.
unsafe fn bring<'a>(
    communicator: &Communicator,
    call: &Call<'a>,
    returns: &mut Vec<Return>,
) -> Result<Call<'a>> {
    let Communicator { device, stages, rank, ranks, .. } = communicator;
    let [sent, received] = call.flow().used(*rank, *ranks);
    let (send, recv) = (call.send.addr(), call.recv.addr());
    let overlap =
        call.spaces == [Space::Host; 2] && (send < recv + received && recv < send + sent || send == recv);
    let mut moved = Call { spaces: [Space::Device; 2], ..*call };
    let _current = device.enter();
    if overlap {
        // In place: one stage for both.
        let start = call.send.min(call.recv.cast_const());
        let end = (send + sent).max(recv + received);
        let all = end - start.addr();
        let stage = stages.take(device, all)?;
        // SAFETY: both buffers are readable, and the larger holds the smaller.
        unsafe { stage.fill(device, start, all, call.stream) }?;
        moved.send = stage.address().wrapping_add(send - start.addr());
        moved.recv = stage.address().wrapping_add(recv - start.addr());
        let target = if received == 0 { std::ptr::null_mut() } else { call.recv };
        returns.push(stage.returning(call.stream, (recv - start.addr(), target, received)));
        return Ok(moved);
    }
    if call.spaces[0] == Space::Host && sent > 0 {
        let stage: Stage = stages.take(device, sent)?;
        // SAFETY: the caller's contract: readable where it is read.
        unsafe { stage.fill(device, call.send, sent, call.stream) }?;
        moved.send = stage.address();
        returns.push(stage.returning(call.stream, (0, std::ptr::null_mut(), 0)));
    }
    if call.spaces[1] == Space::Host && received > 0 {
        let stage = stages.take(device, received)?;
        moved.recv = stage.address();
        returns.push(stage.returning(call.stream, (0, call.recv, received)));
    }
    Ok(moved)
}

/// Carries messages out together, or queues them in a group; in checked mode both ends of each compare it
/// before.
///
/// # Safety
/// The contract of `Backend::post`, until this returns; for device memory, until the stream's work is
/// complete.
pub(crate) unsafe fn messages(
    communicator: &Arc<Communicator>,
    transfers: &[Transfer],
    is_checked: bool,
) -> Result<()> {
    communicator.admit(Operation::Send)?;
    let mut on_host = transfers.iter().filter(|transfer| transfer.space == Space::Host);
    on_host.try_for_each(|transfer| refuse_captured(communicator, transfer.stream))?;
    refuse_partly_captured(communicator, transfers)?;
    let mut returns = Vec::new();
    // SAFETY: the caller's contract.
    let moved =
        transfers.iter().map(|transfer| unsafe { bring_message(communicator, transfer, &mut returns) });
    // The peers would wait for this rank.
    let moved: Vec<_> = moved.collect::<Result<_>>().map_err(|error| communicator.fail(error))?;
    // Messages are announced last: an earlier error would leave the peers waiting for them.
    let (mut last, mut peers) = (None, Vec::new());
    for transfer in transfers {
        let announced = communicator.next_message(transfer);
        let part = Part::of(transfer);
        let awaited = match is_checked {
            true => communicator.expect_checked(&announced, &part)?,
            false => communicator.expect_peer(&announced, &part),
        };
        peers.extend(awaited);
        if last.is_none() || transfer.count > 0 {
            // Where nothing is enqueued, nothing would be waited for.
            last = Some((announced, transfer.stream));
        }
    }
    let Some((announced, stream)) = last else { return Ok(()) };
    let enqueue = |needs: &mut Needs| {
        let parts = moved.iter().map(Part::of).collect();
        // SAFETY: the caller's contract; the addresses are on the device now.
        unsafe { communicator.exchange(parts, group::is_open(), needs) }
    };
    let arrival = Arrival::with(peers);
    launch(communicator, (&announced, arrival), stream, &mut Needs::default(), &mut returns, enqueue)
}

/// The message with an address on the device; brings host memory there.
///
/// # Safety
/// The contract of `Backend::post`.
unsafe fn bring_message(
    communicator: &Communicator,
    transfer: &Transfer,
    returns: &mut Vec<Return>,
) -> Result<Transfer> {
    if transfer.space == Space::Device {
        return Ok(*transfer);
    }
    let (device, stream) = (&communicator.device, transfer.stream);
    let bytes = transfer.count * transfer.dtype.size();
    let _current = device.enter();
    let stage = communicator.stages.take(device, bytes)?;
    let (direction, back) = match transfer.direction {
        Direction::Send(source) => {
            // SAFETY: the caller's contract.
            unsafe { stage.fill(device, source, bytes, stream) }?;
            (Direction::Send(stage.address()), (std::ptr::null_mut(), 0))
        }
        Direction::Recv(target) => (Direction::Recv(stage.address()), (target, bytes)),
    };
    returns.push(stage.returning(stream, (0, back.0, back.1)));
    Ok(Transfer { direction, space: Space::Device, ..*transfer })
}
