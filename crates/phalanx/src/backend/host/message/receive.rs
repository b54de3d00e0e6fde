//! Receiving: the messages of a mailbox are taken in order, to the receive that they match or to memory of their own.

use super::{
    Arriving, Destination, Header, MessageBytes, MessageOpening, MessageState, Plane, PostedTransfer,
    Unexpected, Way, matches, piece_len, record,
};
use crate::backend::host::tunables::{MESSAGE_STEP, MESSAGE_STREAMING};
use crate::contract::{Direction, Envelope, Transfer, Wanted};
use crate::control::endpoint::Endpoint;
use crate::control::failure::ChannelFailure;
use crate::control::world::Location;
use crate::reduce;
use crate::types::dtype::DType;
use crate::types::error::{Error, Result};

impl MessageState {
    /// Takes messages from a peer's mailbox while a receive is posted.
    #[inline]
    pub(super) fn read(&mut self, endpoint: &Endpoint, peer: usize) -> Result<()> {
        loop {
            let state = &self.peers[peer];
            let is_awaited = state.arriving.is_some() || !state.receives.is_empty();
            if !is_awaited || !self.read_next(endpoint, peer)? {
                return Ok(());
            }
        }
    }

    /// The first message of a peer that no posted receive matches, once all of it is here.
    pub(super) fn look(
        &mut self,
        endpoint: &Endpoint,
        peer: usize,
        wanted: Wanted,
    ) -> Result<Option<Envelope>> {
        let is_wanted = |message: &&Unexpected| {
            message.header.plane == Plane::User as u8 && wanted.includes(peer, message.header.tag)
        };
        loop {
            if let Some(Unexpected { header, .. }) = self.peers[peer].unexpected.iter().find(is_wanted) {
                return Ok(Some(Envelope { source: peer, tag: header.tag, bytes: header.bytes() }));
            }
            if !self.read_next(endpoint, peer)? {
                // The rest of one that is under way comes with the others.
                if !self.peers[peer].is_idle() && !self.active.contains(&peer) {
                    self.active.push(peer);
                }
                return Ok(None);
            }
        }
    }

    /// Takes the next message of a peer's mailbox, or more of the arriving one; false if nothing has come.
    #[inline(always)]
    fn read_next(&mut self, endpoint: &Endpoint, peer: usize) -> Result<bool> {
        let mailbox = endpoint.channel.mailbox(peer, endpoint.rank);
        if self.peers[peer].arriving.is_some() {
            return self.read_arriving(endpoint, peer);
        }
        let state = &mut self.peers[peer];
        let slot = mailbox.slot(state.received);
        // After a failure, the message may be for a receive that was abandoned, and must not reach the next one.
        if !slot.is(state.received + 1) || endpoint.has_failed() {
            return Ok(false);
        }
        let opening = slot.payload().cast::<MessageOpening>();
        // SAFETY: stamped with this message, and the sender's again only when it is taken; any value is valid.
        let header = unsafe { (*opening).header };
        // SAFETY: as above.
        let data = unsafe { &(*opening).data };
        if header.way == Way::Chunk as u8 {
            // The bytes are prefetched while their receive is looked up.
            let chunk = endpoint.channel.mail_chunk(peer, endpoint.rank, data[0] as u16);
            crate::os::first_lines(chunk, header.bytes());
        }
        let mut destination = self.destination(endpoint, peer, &header)?;
        let (target, bytes) = (target(&self.posted, &mut destination), header.bytes());
        match Way::from_code(header.way) {
            Way::Inline => {
                // SAFETY: the target has as many bytes, checked or allocated so; they fit the opening.
                unsafe { reduce::copy_small(target, data.as_ptr().cast(), bytes) }
            }
            Way::Chunk => {
                let chunk = data[0] as u16;
                let source = endpoint.channel.mail_chunk(peer, endpoint.rank, chunk);
                let len = bytes.min(endpoint.channel.layout.mail_piece);
                // SAFETY: written before the opening, and this rank's since; the target has as many bytes.
                unsafe { reduce::copy(target, source, len, false) };
                self.peers[peer].chunks.keep(&endpoint.channel, chunk);
            }
            way @ (Way::Chunks | Way::Direct) => {
                let location = (way == Way::Direct).then(|| Location { segment: data[0], offset: data[1] });
                self.peers[peer].arriving = Some(Arriving { header, location, destination, moved: 0 });
                return Ok(true);
            }
        }
        self.arrived(endpoint, peer, header, destination)?;
        Ok(true)
    }

    /// The receive that a message matches, or memory to put it aside.
    fn destination(&mut self, endpoint: &Endpoint, peer: usize, header: &Header) -> Result<Destination> {
        match self.take_receive(peer, header) {
            Some(index) => {
                self.check_match(endpoint, peer, index, header)?;
                Ok(Destination::Posted(index))
            }
            None => Ok(Destination::Aside(memory_for(endpoint, peer, header.bytes())?)),
        }
    }

    /// The first of the posted receives that a message matches.
    fn take_receive(&mut self, peer: usize, header: &Header) -> Option<usize> {
        let position = self.peers[peer].receives.iter().position(|index| {
            let posted = self.posted(*index);
            matches(header, posted.plane, posted.transfer.tag)
        });
        self.peers[peer].receives.remove(position?)
    }

    /// Fails the communicator if the receive and the message differ in type or length.
    fn check_match(&self, endpoint: &Endpoint, peer: usize, index: usize, header: &Header) -> Result<()> {
        let PostedTransfer { transfer, plane, number, .. } = self.posted(index);
        let marked = transfer.dtype.mark((transfer.count * transfer.dtype.size()) as u64);
        if (header.dtype, header.marked) == (transfer.dtype.code(), marked) {
            return Ok(());
        }
        let dtype = DType::decode(header.dtype, header.marked).map_or(DType::U8, |(dtype, _)| dtype);
        let sent = Transfer {
            direction: Direction::Send(std::ptr::null()),
            peer: endpoint.rank,
            dtype,
            count: header.bytes() / dtype.size(),
            ..*transfer
        };
        let (ours, theirs) = ((endpoint.rank, record(transfer, *plane)), (peer, record(&sent, *plane)));
        let (lower, higher) = if ours.0 < theirs.0 { (ours, theirs) } else { (theirs, ours) };
        Err(endpoint.fail(&ChannelFailure::Mismatch { sequence: *number, lower, higher }))
    }

    /// Takes what there is of the arriving message. True once it is complete.
    fn read_arriving(&mut self, endpoint: &Endpoint, peer: usize) -> Result<bool> {
        let state = &mut self.peers[peer];
        let Some(arriving) = &mut state.arriving else { unreachable!("asked by the caller") };
        let target = target(&self.posted, &mut arriving.destination);
        let bytes = arriving.header.bytes();
        let streaming = bytes >= MESSAGE_STREAMING;
        match arriving.location {
            None => {
                let layout = &endpoint.channel.layout;
                while arriving.moved < bytes {
                    let Some(chunk) = state.chunks.full(&endpoint.channel) else { return Ok(false) };
                    let source = endpoint.channel.mail_chunk(peer, endpoint.rank, chunk);
                    let at = arriving.moved % layout.mail_chunk;
                    let len = piece_len(layout, bytes, arriving.moved);
                    // SAFETY: the sender has written this piece of the chunk, which is this rank's since; in bounds of the target.
                    unsafe { reduce::copy(target.add(arriving.moved), source.add(at), len, streaming) };
                    arriving.moved += len;
                    if at + len == layout.mail_chunk || arriving.moved == bytes {
                        state.chunks.keep(&endpoint.channel, chunk);
                    }
                    endpoint.announce_progress();
                }
            }
            Some(location) => {
                let source = endpoint.world.resolve(location, bytes, &mut state.mapped);
                let source = source.map_err(|error| endpoint.fail_refused(&error))?;
                while arriving.moved < bytes {
                    let len = (bytes - arriving.moved).min(MESSAGE_STEP);
                    // SAFETY: the sender keeps its buffer until the message is taken, or until it has
                    // failed and this rank has left the gate; in bounds of the target.
                    endpoint.inside(1, || unsafe {
                        let source = source.add(arriving.moved);
                        reduce::copy(target.add(arriving.moved), source, len, streaming);
                    })?;
                    arriving.moved += len;
                }
            }
        }
        let arrived = state.arriving.take().expect("asked by the caller");
        self.arrived(endpoint, peer, arrived.header, arrived.destination)?;
        Ok(true)
    }

    /// Completes the receive of a message that has arrived, or keeps the message until one is posted.
    #[inline]
    fn arrived(
        &mut self,
        endpoint: &Endpoint,
        peer: usize,
        header: Header,
        destination: Destination,
    ) -> Result<()> {
        let state = &mut self.peers[peer];
        state.received += 1;
        endpoint.channel.mailbox(peer, endpoint.rank).taken_messages.set(state.received);
        endpoint.announce_progress();
        match destination {
            Destination::Posted(index) => self.finish(index),
            Destination::Aside(bytes) => {
                let message = Unexpected { header, bytes };
                // Its receive may have been posted meanwhile.
                match self.take_receive(peer, &header) {
                    Some(index) => self.deliver_unexpected(endpoint, index, &message)?,
                    None => self.peers[peer].unexpected.push_back(message),
                }
            }
        }
        Ok(())
    }

    /// Gives a message that was put aside to its receive.
    pub(super) fn deliver_unexpected(
        &mut self,
        endpoint: &Endpoint,
        id: usize,
        message: &Unexpected,
    ) -> Result<()> {
        let transfer = self.posted(id).transfer;
        self.check_match(endpoint, transfer.peer, id, &message.header)?;
        let Direction::Recv(target) = transfer.direction else { unreachable!("a receive") };
        // SAFETY: the target has as many bytes as were sent, just checked; the message has arrived.
        unsafe { reduce::copy(target, message.bytes.as_ptr().cast(), message.bytes.len(), false) };
        self.finish(id);
        Ok(())
    }
}

/// Where a message is written.
fn target(posted: &[Option<PostedTransfer>], destination: &mut Destination) -> *mut u8 {
    match destination {
        Destination::Aside(bytes) => bytes.as_mut_ptr().cast(),
        Destination::Posted(index) => {
            match posted[*index].as_ref().expect("queues hold posted transfers").transfer.direction {
                Direction::Recv(target) => target,
                Direction::Send(_) => unreachable!("the queue holds receives"),
            }
        }
    }
}

/// Memory for a message that no receive expects.
fn memory_for(endpoint: &Endpoint, peer: usize, bytes: usize) -> Result<MessageBytes> {
    let mut memory = MessageBytes::new();
    memory.try_reserve_exact(bytes).map_err(|_| {
        let why = format!(
            "a message of {bytes} bytes from rank {peer} has come before its receive: post the receive first, send less at \
             once, or free memory"
        );
        endpoint.fail_refused(&Error::system("memory for a message", std::io::ErrorKind::OutOfMemory.into(), why))
    })?;
    // SAFETY: there is room, and bytes that may be anything need not be written.
    unsafe { memory.set_len(bytes) };
    Ok(memory)
}
