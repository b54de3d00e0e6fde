//! The steps of a message: a part to a slot, its header to the receiver, from there to where it belongs, and the receipt.

use super::gpu::Event;
use super::message::{Header, Moving, State, Step};
use super::{NvshmemComm, gpu};
use crate::contract::{Direction, OperationId, Transfer};
use crate::control::control_channel::AnnouncedCall;
use crate::control::host_channel::HostChannel;
use crate::types::dtype::DType;
use crate::types::error::Result;
use crate::types::memory::{RawStream, Space};

/// Tells a peer. The words are kept until the ticket is settled.
fn tell(channel: &dyn HostChannel, peer: usize, tag: u32, words: &Header, len: usize) -> Result<OperationId> {
    let transfer = Transfer::host(Direction::Send(words.as_ptr().cast()), peer, tag, DType::U64, len);
    // SAFETY: the words are boxed, and kept by the caller.
    unsafe { channel.post(transfer) }
}

impl NvshmemComm {
    /// Takes as many steps as it can without waiting.
    pub(crate) fn advance(&self, state: &mut State, moving: &mut Moving) -> Result<()> {
        loop {
            let step = std::mem::replace(&mut moving.step, Step::Begin);
            let next = match moving.transfer.direction {
                Direction::Send(source) => self.advance_send(state, moving, source, step)?,
                Direction::Recv(target) => self.advance_recv(state, moving, target, step)?,
            };
            let is_over = !next.1 || matches!(next.0, Step::Done);
            moving.step = next.0;
            if is_over {
                return Ok(());
            }
        }
    }

    /// The next step, and whether it is another.
    fn advance_send(
        &self,
        state: &mut State,
        moving: &mut Moving,
        source: *const u8,
        step: Step,
    ) -> Result<(Step, bool)> {
        let Transfer { peer, space, .. } = moving.transfer;
        let process = &self.process;
        match step {
            Step::Begin if moving.bytes() == 0 => Ok((self.tell_part(moving, 0, 0)?, true)),
            Step::Begin => {
                let Some(slot) = process.take_outgoing() else { return Ok((Step::Begin, false)) };
                let bytes = (moving.bytes() - moving.done).min(process.slot);
                let stream = self.stream_or_own(moving.transfer.stream);
                // SAFETY: the contract of `post`: the source has so many bytes; the slot is this transfer's.
                let filled =
                    unsafe { self.fill(slot, source.wrapping_add(moving.done), space, bytes, stream) };
                match filled {
                    Ok(filled) => Ok((Step::Filling { slot, bytes, filled }, true)),
                    Err(error) => {
                        process.free(slot);
                        Err(error)
                    }
                }
            }
            Step::Filling { slot, bytes, filled } => {
                process.device.enter()?;
                if !filled.is_past()? {
                    return Ok((Step::Filling { slot, bytes, filled }, false));
                }
                let mut receipt = Box::new(0u64);
                let direction = Direction::Recv((&raw mut *receipt).cast());
                let told_back = Transfer::host(direction, peer, slot as u32, DType::U64, 1);
                // SAFETY: the word is boxed, and kept until the ticket is settled.
                let ticket = unsafe { self.messages.receipts.post(told_back) }?;
                state.lent.push((slot, ticket, receipt));
                let telling = self.tell_part(moving, bytes, slot)?;
                moving.done += bytes;
                Ok((telling, true))
            }
            Step::Telling { ticket, .. } if self.messages.headers.test(ticket)? => Ok((moving.next(), true)),
            step => Ok((step, false)),
        }
    }

    /// Tells the receiver where a part is.
    fn tell_part(&self, moving: &Moving, bytes: usize, slot: usize) -> Result<Step> {
        let mut header = Box::new([0; AnnouncedCall::WORDS + 2]);
        let subject = AnnouncedCall::message(moving.ticket as u64 + 1, &moving.transfer);
        header[..AnnouncedCall::WORDS].copy_from_slice(&subject.words());
        header[AnnouncedCall::WORDS..].copy_from_slice(&[bytes as u64, slot as u64]);
        let len = header.len();
        let Transfer { peer, tag, .. } = moving.transfer;
        let ticket = tell(&*self.messages.headers, peer, tag, &header, len)?;
        Ok(Step::Telling { ticket, _words: header })
    }

    fn advance_recv(
        &self,
        state: &mut State,
        moving: &mut Moving,
        target: *mut u8,
        step: Step,
    ) -> Result<(Step, bool)> {
        let Transfer { peer, tag, space, .. } = moving.transfer;
        let process = &self.process;
        match step {
            Step::Begin => {
                let mut header: Box<Header> = Box::default();
                let direction = Direction::Recv(header.as_mut_ptr().cast());
                let told = Transfer::host(direction, peer, tag, DType::U64, header.len());
                // SAFETY: the words are boxed, and kept until the ticket is settled.
                let ticket = unsafe { self.messages.headers.post(told) }?;
                Ok((Step::Expecting { ticket, header }, true))
            }
            Step::Expecting { ticket, header } => match self.messages.headers.test(ticket)? {
                true => self.compare(moving, &header).map(|()| (Step::Told { header }, true)),
                false => Ok((Step::Expecting { ticket, header }, false)),
            },
            Step::Told { header } => {
                let (bytes, theirs) =
                    (header[AnnouncedCall::WORDS] as usize, header[AnnouncedCall::WORDS + 1]);
                if bytes == 0 {
                    return Ok((Step::Done, true));
                }
                let Some(slot) = process.take_incoming() else {
                    return Ok((Step::Told { header }, false));
                };
                let stream = self.stream_or_own(moving.transfer.stream);
                // SAFETY: the contract of `post`; the header was compared; the slot is this transfer's.
                let fetched = unsafe {
                    self.get_part(
                        slot,
                        theirs as usize,
                        peer,
                        (target.wrapping_add(moving.done), space),
                        bytes,
                        stream,
                    )
                };
                match fetched {
                    Ok(fetched) => Ok((Step::Fetching { slot, bytes, theirs, fetched }, true)),
                    Err(error) => {
                        process.free(slot);
                        Err(error)
                    }
                }
            }
            Step::Fetching { slot, bytes, theirs, fetched } => {
                process.device.enter()?;
                if !fetched.is_past()? {
                    return Ok((Step::Fetching { slot, bytes, theirs, fetched }, false));
                }
                if space == Space::Host {
                    // SAFETY: the contract of `post`; the copy to pinned memory is complete.
                    unsafe {
                        let target = target.wrapping_add(moving.done);
                        std::ptr::copy_nonoverlapping(
                            process.slot_on_host(slot)?.cast_const(),
                            target,
                            bytes,
                        );
                    }
                }
                process.free(slot);
                // The peer takes it when it comes by; this rank need not wait for that.
                let words: Box<Header> = Box::default();
                let ticket = tell(&*self.messages.receipts, peer, theirs as u32, &words, 1)?;
                state.returned.push((ticket, words));
                moving.done += bytes;
                Ok((moving.next(), true))
            }
            step => Ok((step, false)),
        }
    }

    /// Copies a part to a slot, behind the stream's work.
    ///
    /// # Safety
    /// `source` is readable for so many bytes, no more than a slot has; the slot is not in use.
    unsafe fn fill(
        &self,
        slot: usize,
        source: *const u8,
        space: Space,
        bytes: usize,
        stream: RawStream,
    ) -> Result<Event> {
        let process = &self.process;
        process.device.enter()?;
        // SAFETY: the caller's contract; pinned memory mirrors the slots.
        unsafe {
            if space == Space::Device {
                gpu::copy(process.slot_at(slot), source, bytes, stream)?;
            } else {
                let pinned = process.slot_on_host(slot)?;
                std::ptr::copy_nonoverlapping(source, pinned, bytes);
                gpu::copy(process.slot_at(slot), pinned, bytes, stream)?;
            }
        }
        Event::behind(stream)
    }

    /// Gets a part from a peer's slot, behind the stream's work: device memory is there then, host memory in the mirror.
    ///
    /// # Safety
    /// The target takes so many bytes; the peer's slot holds them; the slot here is not in use.
    unsafe fn get_part(
        &self,
        slot: usize,
        theirs: usize,
        peer: usize,
        (target, space): (*mut u8, Space),
        bytes: usize,
        stream: RawStream,
    ) -> Result<Event> {
        let process = &self.process;
        let name = "nvshmemx_getmem_on_stream";
        let get = process.library.need(process.library.nvshmemx_getmem_on_stream, name)?;
        let ours = process.slot_at(slot);
        {
            let _turn = process.enter()?;
            let (source, pe) = (process.slot_at(theirs).cast_const(), self.pes[peer] as i32);
            // SAFETY: initialised; symmetric memory of so many bytes at both ends, a PE that exists.
            unsafe { get(ours.cast(), source.cast(), bytes, pe, stream.0) };
        }
        let to = if space == Space::Device { target } else { process.slot_on_host(slot)? };
        // SAFETY: the caller's contract; pinned memory mirrors the slots.
        unsafe { gpu::copy(to, ours, bytes, stream) }?;
        Event::behind(stream)
    }
}
