//! The worker's part in one-sided access: sends accesses, and answers those of other ranks.

use super::{Operation, Outcome, State, Worker, settled};
use crate::backend::ucx::mail::{Header, Kind};
use crate::backend::ucx::parts::{Access, Parts, Reply, ReplyData, WindowId};
use crate::types::dtype::DType;
use phalanx_sys::ucx::*;
use std::ffi::c_void;

/// A put whose data is on its way into a part.
pub(super) struct Fetching {
    window: WindowId,
    source: usize,
    /// World rank.
    peer: usize,
    state: State,
}

/// An answer that UCX sends.
pub(super) struct Replying {
    operation: usize,
    window: WindowId,
    /// The data, unless it is the part's own.
    _gathered: Vec<u8>,
}

impl Worker {
    /// The parts, for a moment in which UCX is not called.
    pub fn parts(&mut self) -> &mut Parts {
        self.parts.get_mut()
    }

    /// Starts to send an access to a world rank that is another one.
    ///
    /// # Safety
    /// The access, and `len` bytes at `data`, stay as they are until the operation is over.
    pub unsafe fn send_access(
        &mut self,
        peer: usize,
        access: *const Access,
        data: *const u8,
        len: usize,
    ) -> usize {
        let nowhere = (std::ptr::null_mut(), 0);
        let operation = self.insert(Header::default(), (0, 0), peer, nowhere);
        let header = (access.cast::<c_void>(), size_of::<Access>());
        // SAFETY: the caller's contract.
        self.operations[operation].state =
            unsafe { self.start_send(peer, super::ACCESS, header, (data, len), UCP_AM_SEND_FLAG_EAGER) };
        operation
    }

    /// Whether accesses of other ranks wait for something that UCX does.
    pub(super) fn is_serving(&mut self) -> bool {
        self.parts.get_mut().is_busy() || !self.fetching.is_empty() || !self.replying.is_empty()
    }

    /// Goes on with the accesses of other ranks.
    pub(super) fn serve(&mut self) {
        loop {
            for fetch in std::mem::take(&mut self.parts.get_mut().fetches) {
                // SAFETY: a descriptor that was kept; the part is there as long as somebody uses it.
                let state = unsafe { self.fetch(fetch.descriptor, fetch.target, fetch.len) };
                let (window, source, peer) = (fetch.window, fetch.source, fetch.peer);
                self.fetching.push(Fetching { window, source, peer, state });
            }
            for reply in std::mem::take(&mut self.parts.get_mut().replies) {
                self.reply(reply);
            }
            for descriptor in std::mem::take(&mut self.parts.get_mut().unwanted) {
                // SAFETY: a descriptor that was kept and is not received.
                unsafe { (self.ucx.ucp_am_data_release)(self.worker, descriptor) };
            }
            // To ask how a request stands calls nothing back.
            let (ucx, parts) = (self.ucx, self.parts.get_mut());
            let before = self.fetching.len();
            self.fetching.retain_mut(|fetching| match settled(ucx, &mut fetching.state) {
                None => true,
                // After a connection that broke, nothing of that rank is in order any more.
                Some(outcome) => {
                    if outcome == Outcome::Complete {
                        parts.fetched(fetching.window, fetching.source);
                    }
                    false
                }
            });
            if self.fetching.len() == before {
                break;
            }
        }
        let replying = std::mem::take(&mut self.replying);
        self.replying = replying.into_iter().filter(|reply| self.forget(reply.operation).is_err()).collect();
    }

    fn reply(&mut self, reply: Reply) {
        let (data, len) = match &reply.data {
            ReplyData::Nothing => (std::ptr::null(), 0),
            ReplyData::OfPart(data, len) => (*data, *len),
            ReplyData::Gathered(bytes) => (bytes.as_ptr(), bytes.len()),
        };
        let gathered = match reply.data {
            ReplyData::Gathered(bytes) => bytes,
            _ => Vec::new(),
        };
        let header = Header {
            key: self.parts.get_mut().key,
            channel: reply.window.0,
            source: reply.from as u32,
            kind: Kind::Reply as u8,
            dtype: DType::U8.code(),
            number: reply.window.1,
            tag: reply.tag,
            marked: len as u64,
            factor: reply.word,
            ..Header::default()
        };
        // SAFETY: a vector's bytes stay where they are when it moves, and it is kept until the operation is over; so is the part.
        let operation = unsafe { self.send(reply.peer, header, data) };
        self.replying.push(Replying { operation, window: reply.window, _gathered: gathered });
    }

    /// World ranks of the peers with which UCX moves data of a closed window's part.
    pub fn users(&mut self, window: WindowId) -> Vec<usize> {
        self.serve();
        let fetching = self.fetching.iter().filter(|of| of.window == window).map(|of| of.peer);
        let replying = self.replying.iter().filter(|of| of.window == window);
        let to = |reply: &Replying| {
            let Operation { peer, .. } = self.operations[reply.operation];
            peer
        };
        fetching.chain(replying.map(to)).collect()
    }
}
