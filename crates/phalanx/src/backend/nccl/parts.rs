//! Collectives that consist of messages, and messages: by own kernels or by calls of the library. All addresses are in device memory.

use super::collective::{Needs, Progress};
use super::communicator::Communicator;
#[cfg(feature = "nccl")]
use super::group;
use crate::contract::{Blocks, Call, Direction, Transfer};
use crate::types::error::Result;
use crate::types::memory::RawStream;
use phalanx_sys::nccl::ncclDataType_t;

/// One message of a collective: bytes to or from a peer.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub direction: Direction,
    pub peer: usize,
    pub bytes: usize,
    pub stream: RawStream,
}

impl Part {
    pub fn of(transfer: &Transfer) -> Part {
        let Transfer { direction, peer, count, dtype, stream, .. } = *transfer;
        Part { direction, peer, bytes: count * dtype.size(), stream }
    }
}

/// The streams of messages that are on several, the last message's last; none if all are on one.
#[cfg(feature = "nccl")]
fn streams_of(parts: &[Part]) -> Vec<RawStream> {
    let of_parts = parts.iter().filter(|part| part.bytes > 0).map(|part| part.stream);
    let mut streams = Vec::new();
    if of_parts.clone().zip(of_parts.clone().skip(1)).all(|(one, next)| one == next) {
        return streams;
    }
    for stream in of_parts.rev() {
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }
    streams.reverse();
    streams
}

/// This rank's messages in a collective that consists of messages: a send and a receive for each peer. A
/// block that is already in place is left out.
pub(crate) fn parts(call: &Call<'_>, rank: usize, ranks: usize) -> Vec<Part> {
    let (flow, stream) = (call.flow(), call.stream);
    let (sends, receives) = (flow.writers.includes(rank), flow.readers.includes(rank));
    let mut parts = Vec::with_capacity(2 * ranks);
    for peer in 0..ranks {
        let (source, target) = (flow.source(rank, peer), flow.target(rank, peer));
        let (from, to) = (call.send.wrapping_add(source.start), call.recv.wrapping_add(target.start));
        if peer == rank && from == to.cast_const() {
            continue;
        }
        if sends && flow.readers.includes(peer) {
            parts.push(Part { direction: Direction::Send(from), peer, bytes: source.len(), stream });
        }
        if receives && flow.writers.includes(peer) {
            parts.push(Part { direction: Direction::Recv(to), peer, bytes: target.len(), stream });
        }
    }
    parts
}

impl Communicator {
    /// `ncclAlltoAllv` of RCCL, in bytes. Otherwise messages are exchanged.
    ///
    /// # Safety
    /// As for [`enqueue`](Communicator::enqueue).
    pub(super) unsafe fn all_to_all_v(
        &self,
        call: &Call<'_>,
        #[cfg_attr(not(feature = "nccl"), expect(unused))] needs: &mut Needs,
    ) -> Result<Progress> {
        #[cfg(feature = "nccl")]
        if call.config.is_none() && self.direct.get().is_some() {
            let (own, others): (Vec<Part>, _) =
                parts(call, self.rank, self.ranks).into_iter().partition(|part| part.peer == self.rank);
            if let [
                Part { direction: Direction::Send(from), bytes: bytes @ 1.., .. },
                Part { direction: Direction::Recv(to), .. },
            ] = own[..]
            {
                let _current = self.device.enter();
                // SAFETY: the caller's contract: this rank's own block, as long in both buffers.
                unsafe { self.device.copy(to, from, bytes, call.stream) }?;
            }
            // SAFETY: the caller's contract.
            return unsafe { self.exchange(others, group::is_open(), needs) };
        }
        let size = call.dtype.size();
        let Some(f) = self.library.ncclAlltoAllv else {
            // SAFETY: the caller's contract.
            return unsafe { self.messages(call) };
        };
        let lens = |blocks: &Blocks<'_>| (0..self.ranks).map(|r| blocks.len(r) * size).collect::<Vec<_>>();
        let offsets =
            |blocks: &Blocks<'_>| (0..self.ranks).map(|r| blocks.offset(r) * size).collect::<Vec<_>>();
        let (send_lens, send_offsets) = (lens(&call.blocks), offsets(&call.blocks));
        let (recv_lens, recv_offsets) = (lens(&call.recv_blocks), offsets(&call.recv_blocks));
        let (send, recv, dtype) = (call.send.cast(), call.recv.cast(), ncclDataType_t::Uint8);
        // SAFETY: the caller's contract; the lists have an entry for each rank and are read during the call.
        let result = unsafe {
            f(
                send,
                send_lens.as_ptr(),
                send_offsets.as_ptr(),
                recv,
                recv_lens.as_ptr(),
                recv_offsets.as_ptr(),
                dtype,
                self.handle(),
                call.stream.0,
            )
        };
        self.progress(result, "ncclAlltoAllv")
    }

    /// A collective as messages: this rank's sends and receives in one group.
    ///
    /// # Safety
    /// As for [`enqueue`](Communicator::enqueue).
    pub(super) unsafe fn messages(&self, call: &Call<'_>) -> Result<Progress> {
        let parts = parts(call, self.rank, self.ranks);
        // SAFETY: the caller's contract; the parts lie in the buffers.
        self.grouped(|| parts.into_iter().try_for_each(|part| unsafe { self.message(part) }))
    }

    /// Enqueues messages, all at once: by own kernels those that they carry, and the others by the library. In a group, the kernels wait for
    /// its end; beside the library's part, until that is enqueued ([`launch_beside`](Communicator::launch_beside)).
    ///
    /// # Safety
    /// As for [`enqueue`](Communicator::enqueue).
    pub(crate) unsafe fn exchange(
        &self,
        #[cfg_attr(not(feature = "nccl"), expect(unused_mut))] mut parts: Vec<Part>,
        is_grouped: bool,
        needs: &mut Needs,
    ) -> Result<Progress> {
        #[cfg(feature = "nccl")]
        if let Some(direct) = self.direct.get() {
            needs.streams = streams_of(&parts);
            let (own, others) = parts.into_iter().partition(|part| direct.carries(part, self.rank));
            parts = others;
            needs.own_kernels = direct.prepare_messages(&self.device, self.rank, &own)?;
            needs.by_library = !parts.is_empty();
            if !is_grouped {
                if needs.by_library {
                    self.run_beside(needs)?;
                }
                // SAFETY: the caller's contract.
                unsafe { self.launch_own_kernels(needs) }?;
            }
            if parts.is_empty() {
                if !is_grouped && !needs.streams.is_empty() {
                    self.rejoin(needs)?;
                }
                return Ok(Progress::Enqueued);
            }
        }
        // Not behind the kernels that were just launched: they run beside.
        if is_grouped || !needs.has_own_kernels() {
            parts.iter().try_for_each(|part| self.come_after_last(part.stream))?;
        }
        parts.iter().for_each(|part| self.note_enqueuing(part.stream));
        // SAFETY: the caller's contract.
        self.grouped(|| parts.into_iter().try_for_each(|part| unsafe { self.message(part) }))
    }

    /// Enqueues one message. An empty one is skipped on both sides.
    unsafe fn message(&self, part: Part) -> Result<()> {
        let Part { direction, peer, bytes, stream } = part;
        if bytes == 0 {
            return Ok(());
        }
        let (library, dtype) = (self.library, ncclDataType_t::Uint8);
        let (peer, comm, stream) = (peer as i32, self.handle(), stream.0);
        // SAFETY: the caller's contract.
        let progress = unsafe {
            match direction {
                Direction::Send(source) => {
                    let send = library.need(library.ncclSend, "ncclSend")?;
                    self.progress(send(source.cast(), bytes, dtype, peer, comm, stream), "ncclSend")
                }
                Direction::Recv(target) => {
                    let recv = library.need(library.ncclRecv, "ncclRecv")?;
                    self.progress(recv(target.cast(), bytes, dtype, peer, comm, stream), "ncclRecv")
                }
            }
        };
        progress.map(drop)
    }
}
