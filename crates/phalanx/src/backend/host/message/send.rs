//! Sending: posted sends are written to the mailbox of their peer, in order.

use super::{Header, INLINE, MessageOpening, MessageState, Way, piece_len};
use crate::backend::host::tunables::MESSAGE_COPIED;
use crate::contract::{Direction, Transfer};
use crate::control::endpoint::Endpoint;
use crate::control::world::Location;
use crate::reduce;

impl MessageState {
    /// Writes as many of the sends to a peer as its mailbox has room for.
    pub(super) fn write(&mut self, endpoint: &Endpoint, peer: usize) {
        let mailbox = endpoint.channel.mailbox(endpoint.rank, peer);
        while let Some((number, index)) = self.peers[peer].unread.front().copied() {
            if mailbox.taken_messages.get() < number {
                break;
            }
            self.peers[peer].unread.pop_front();
            self.finish(index);
        }
        while let Some(index) = self.peers[peer].sends.front().copied() {
            // After a failure, a message may have been left half-written: nothing may follow it.
            if endpoint.has_failed() || !self.write_message(endpoint, peer, index) {
                break;
            }
            self.peers[peer].sends.pop_front();
        }
    }

    /// Writes a message, or as much as there is room for. True once it is all written.
    fn write_message(&mut self, endpoint: &Endpoint, peer: usize, index: usize) -> bool {
        let mailbox = endpoint.channel.mailbox(endpoint.rank, peer);
        let posted = self.posted(index);
        let (plane, Transfer { direction, tag, dtype, count, .. }) = (posted.plane, posted.transfer);
        let Direction::Send(source) = direction else { unreachable!("the queue holds sends") };
        let bytes = count * dtype.size();
        let state = &mut self.peers[peer];

        if state.opened {
            return self.write_chunks(endpoint, peer, index, source, bytes);
        }
        if !state.has_slot(mailbox) {
            return false;
        }
        let (way, data) = if bytes <= INLINE {
            (Way::Inline, [0; 2])
        } else {
            let location =
                if bytes > MESSAGE_COPIED { endpoint.world.locate(source, bytes) } else { Location::NOWHERE };
            if location.is_readable() {
                (Way::Direct, [location.segment, location.offset])
            } else if bytes <= endpoint.channel.layout.mail_piece {
                let Some(chunk) = state.chunks.take(&endpoint.channel) else { return false };
                let target = endpoint.channel.mail_chunk(endpoint.rank, peer, chunk);
                // SAFETY: the chunk is this rank's; the posted buffer has `bytes` bytes.
                unsafe { reduce::copy(target, source, bytes, false) };
                (Way::Chunk, [chunk.into(), 0])
            } else {
                (Way::Chunks, [0; 2])
            }
        };
        let header = Header {
            tag,
            plane: plane as u8,
            dtype: dtype.code(),
            way: way as u8,
            unused: 0,
            marked: dtype.mark(bytes as u64),
        };
        let slot = mailbox.slot(state.sent);
        state.sent += 1;
        // SAFETY: the slot is free, since the receiver has taken its last message; an opening is what its lines have room for, and so is
        // an inline message.
        unsafe {
            slot.fill(state.sent, |line| {
                let opening = line.cast::<MessageOpening>();
                (&raw mut (*opening).header).write(header);
                let room = (&raw mut (*opening).data).cast::<u64>();
                if way == Way::Inline {
                    reduce::copy_small(room.cast(), source, bytes);
                } else {
                    room.cast::<[u64; 2]>().write(data);
                }
            });
        }
        match way {
            Way::Inline | Way::Chunk => {}
            Way::Direct => {
                let number = state.sent;
                state.unread.push_back((number, index));
                endpoint.announce_progress();
                return true;
            }
            Way::Chunks => {
                state.opened = true;
                return self.write_chunks(endpoint, peer, index, source, bytes);
            }
        }
        endpoint.announce_progress();
        self.finish(index);
        true
    }

    /// Writes as much of a message as there are chunks for. True once it is all written.
    fn write_chunks(
        &mut self,
        endpoint: &Endpoint,
        peer: usize,
        index: usize,
        source: *const u8,
        bytes: usize,
    ) -> bool {
        let state = &mut self.peers[peer];
        let layout = &endpoint.channel.layout;
        while state.written < bytes {
            let at = state.written % layout.mail_chunk;
            if at == 0 {
                let Some(chunk) = state.chunks.take(&endpoint.channel) else {
                    endpoint.announce_progress();
                    return false;
                };
                state.filled = chunk;
            }
            let target = endpoint.channel.mail_chunk(endpoint.rank, peer, state.filled);
            let len = piece_len(layout, bytes, state.written);
            // SAFETY: the chunk is this rank's, behind `at`; the posted buffer has `bytes` bytes.
            unsafe { reduce::copy(target.add(at), source.add(state.written), len, false) };
            state.written += len;
            state.chunks.give(&endpoint.channel, state.filled);
        }
        endpoint.announce_progress();
        state.opened = false;
        state.written = 0;
        self.finish(index);
        true
    }
}
