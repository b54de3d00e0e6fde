//! The steps of a message: copy a part to a slot, send its header, fetch it at the receiver, send the
//! receipt.

use super::device::StreamEvent;
use super::message::{MessageState, MovingTransfer, PartHeader, TransferStep};
use super::{NvshmemComm, device};
use crate::contract::{Direction, OperationId, Transfer};
use crate::control::control_channel::AnnouncedCall;
use crate::control::host_channel::HostChannel;
use crate::types::dtype::DType;
use crate::types::error::Result;
use crate::types::memory::{RawStream, Space};

/// Sends words to a peer. The caller keeps them until the operation is complete.
fn post_words(
    channel: &dyn HostChannel,
    peer: usize,
    tag: u32,
    words: &PartHeader,
    len: usize,
) -> Result<OperationId> {
    let transfer = Transfer::host(Direction::Send(words.as_ptr().cast()), peer, tag, DType::U64, len);
    // SAFETY: the words are boxed, and kept by the caller.
    unsafe { channel.post(transfer) }
}

impl NvshmemComm {
    /// Takes as many steps as possible without waiting.
    pub(crate) fn advance(&self, state: &mut MessageState, moving: &mut MovingTransfer) -> Result<()> {
        loop {
            let step = std::mem::replace(&mut moving.step, TransferStep::Begin);
            let next = match moving.transfer.direction {
                Direction::Send(source) => self.advance_send(state, moving, source, step)?,
                Direction::Recv(target) => self.advance_recv(state, moving, target, step)?,
            };
            let is_over = !next.1 || matches!(next.0, TransferStep::Done);
            moving.step = next.0;
            if is_over {
                return Ok(());
            }
        }
    }

    /// The next step, and whether it is a new one.
    fn advance_send(
        &self,
        state: &mut MessageState,
        moving: &mut MovingTransfer,
        source: *const u8,
        step: TransferStep,
    ) -> Result<(TransferStep, bool)> {
        let Transfer { peer, space, .. } = moving.transfer;
        let process = &self.process;
        match step {
            TransferStep::Begin if moving.bytes() == 0 => Ok((self.send_header(moving, 0, 0)?, true)),
            TransferStep::Begin => {
                let Some(slot) = process.take_outgoing() else { return Ok((TransferStep::Begin, false)) };
                let bytes = (moving.bytes() - moving.done).min(process.slot);
                let stream = self.stream_or_own(moving.transfer.stream);
                // SAFETY: the contract of `post`: the source has so many bytes; the slot is this transfer's.
                let filled =
                    unsafe { self.fill(slot, source.wrapping_add(moving.done), space, bytes, stream) };
                match filled {
                    Ok(filled) => Ok((TransferStep::Filling { slot, bytes, filled }, true)),
                    Err(error) => {
                        process.free(slot);
                        Err(error)
                    }
                }
            }
            TransferStep::Filling { slot, bytes, filled } => {
                process.device.enter()?;
                if !filled.is_past()? {
                    return Ok((TransferStep::Filling { slot, bytes, filled }, false));
                }
                let mut receipt = Box::new(0u64);
                let direction = Direction::Recv((&raw mut *receipt).cast());
                let receipt_transfer = Transfer::host(direction, peer, slot as u32, DType::U64, 1);
                // SAFETY: the word is boxed, and kept until the id is settled.
                let id = unsafe { self.messages.receipts.post(receipt_transfer) }?;
                state.awaiting_receipt.push((slot, id, receipt));
                let telling = self.send_header(moving, bytes, slot)?;
                moving.done += bytes;
                Ok((telling, true))
            }
            TransferStep::SendingHeader { id, .. } if self.messages.headers.test(id)? => {
                Ok((moving.next(), true))
            }
            step => Ok((step, false)),
        }
    }

    /// Sends the header of a part.
    fn send_header(&self, moving: &MovingTransfer, bytes: usize, slot: usize) -> Result<TransferStep> {
        let mut header = Box::new([0; AnnouncedCall::WORDS + 2]);
        let announced = AnnouncedCall::message(moving.id as u64 + 1, &moving.transfer);
        header[..AnnouncedCall::WORDS].copy_from_slice(&announced.words());
        header[AnnouncedCall::WORDS..].copy_from_slice(&[bytes as u64, slot as u64]);
        let len = header.len();
        let Transfer { peer, tag, .. } = moving.transfer;
        let id = post_words(&*self.messages.headers, peer, tag, &header, len)?;
        Ok(TransferStep::SendingHeader { id, _words: header })
    }

    fn advance_recv(
        &self,
        state: &mut MessageState,
        moving: &mut MovingTransfer,
        target: *mut u8,
        step: TransferStep,
    ) -> Result<(TransferStep, bool)> {
        let Transfer { peer, tag, space, .. } = moving.transfer;
        let process = &self.process;
        match step {
            TransferStep::Begin => {
                let mut header: Box<PartHeader> = Box::default();
                let direction = Direction::Recv(header.as_mut_ptr().cast());
                let header_transfer = Transfer::host(direction, peer, tag, DType::U64, header.len());
                // SAFETY: the words are boxed, and kept until the id is settled.
                let id = unsafe { self.messages.headers.post(header_transfer) }?;
                Ok((TransferStep::AwaitingHeader { id, header }, true))
            }
            TransferStep::AwaitingHeader { id, header } => match self.messages.headers.test(id)? {
                true => {
                    self.compare(moving, &header).map(|()| (TransferStep::HeaderArrived { header }, true))
                }
                false => Ok((TransferStep::AwaitingHeader { id, header }, false)),
            },
            TransferStep::HeaderArrived { header } => {
                let (bytes, theirs) =
                    (header[AnnouncedCall::WORDS] as usize, header[AnnouncedCall::WORDS + 1]);
                if bytes == 0 {
                    return Ok((TransferStep::Done, true));
                }
                let Some(slot) = process.take_incoming() else {
                    return Ok((TransferStep::HeaderArrived { header }, false));
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
                    Ok(fetched) => Ok((TransferStep::Fetching { slot, bytes, theirs, fetched }, true)),
                    Err(error) => {
                        process.free(slot);
                        Err(error)
                    }
                }
            }
            TransferStep::Fetching { slot, bytes, theirs, fetched } => {
                process.device.enter()?;
                if !fetched.is_past()? {
                    return Ok((TransferStep::Fetching { slot, bytes, theirs, fetched }, false));
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
                // This rank need not wait until the peer takes the receipt.
                let words: Box<PartHeader> = Box::default();
                let id = post_words(&*self.messages.receipts, peer, theirs as u32, &words, 1)?;
                state.returned.push((id, words));
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
    ) -> Result<StreamEvent> {
        let process = &self.process;
        process.device.enter()?;
        // SAFETY: the caller's contract; pinned memory mirrors the slots.
        unsafe {
            if space == Space::Device {
                device::copy(process.slot_at(slot), source, bytes, stream)?;
            } else {
                let pinned = process.slot_on_host(slot)?;
                std::ptr::copy_nonoverlapping(source, pinned, bytes);
                device::copy(process.slot_at(slot), pinned, bytes, stream)?;
            }
        }
        StreamEvent::behind(stream)
    }

    /// Gets a part from a peer's slot, behind the stream's work: to device memory, or to the pinned mirror of
    /// host memory.
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
    ) -> Result<StreamEvent> {
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
        unsafe { device::copy(to, ours, bytes, stream) }?;
        StreamEvent::behind(stream)
    }
}
