//! Transport for the store's connections: messages of MPI, on a communicator of their own.
//!
//! Nothing here waits: sends and receives are MPI's non-blocking calls. If a peer is dead, some of them never
//! complete. Their memory is then leaked, and MPI is not finalised, since finalising could wait for the peer.

use super::{MpiComm, MpiFailure, check};
use crate::contract::{Backend, Departure};
use crate::rendezvous::store::MessageTransport;
use phalanx_sys::mpi::{Handle, Status};
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Probes without a result before a receive gives up for now. A probe that finds nothing still makes MPI
/// progress, so one of the next ones may succeed.
const LOOKS: u32 = 4;

/// Time for pending messages to complete when the process exits.
const FINISHING: Duration = Duration::from_millis(1500);

/// The tag of all messages.
const TAG: c_int = 0;

/// The store's messages, on a communicator without other use.
pub(crate) struct MpiTransport {
    comm: MpiComm,
    sends: Vec<PendingMessage>,
    /// Incomplete sends, per rank.
    unsent: Vec<usize>,
    /// In order of arrival.
    receives: Vec<PendingMessage>,
    has_given_up: bool,
}

/// A message that MPI is sending or receiving, until the request is `None`.
struct PendingMessage {
    peer: c_int,
    request: Option<Handle>,
    bytes: Vec<u8>,
}

impl MpiTransport {
    pub fn new(comm: MpiComm) -> MpiTransport {
        comm.process.transports.fetch_add(1, Ordering::Relaxed);
        let unsent = vec![0; comm.ranks];
        MpiTransport { comm, unsent, sends: Vec::new(), receives: Vec::new(), has_given_up: false }
    }

    /// Calls MPI, unless it is finalised.
    fn call<T>(
        &mut self,
        call: impl FnOnce(&mut MpiTransport) -> Result<T, MpiFailure>,
    ) -> Result<T, String> {
        let process = self.comm.process;
        if process.is_finalized() {
            return Err("MPI is finalised".into());
        }
        call(self).map_err(|failure| {
            // After an error MPI guarantees nothing.
            self.give_up();
            process.error(failure, self.comm.rank, "the job's store", 0).to_string()
        })
    }

    /// Starts to receive the next message from any rank; `false` if there is none.
    fn accept(&mut self) -> Result<bool, MpiFailure> {
        let mpi = &self.comm.process.mpi;
        let (f, constants) = (&mpi.functions, &mpi.constants);
        let (mut there, mut len) = (0, 0);
        let (mut message, mut request, mut status) = (Handle::ZERO, Handle::ZERO, Status::new());
        let from = constants.any_source;
        // SAFETY: the communicator is alive; the variables take the answers.
        unsafe {
            let comm = self.comm.comm;
            let probed = (f.improbe)(from, TAG, comm, &raw mut there, &raw mut message, &raw mut status);
            check("MPI_Improbe", probed)?;
            if there == 0 {
                return Ok(false);
            }
            check("MPI_Get_count", (f.get_count)(&raw const status, constants.byte, &raw mut len))?;
        }
        let mut bytes = vec![0; len.max(0) as usize];
        // SAFETY: the memory has the message's length, and stays where it is until the request is complete:
        // see `drop`.
        check("MPI_Imrecv", unsafe {
            (f.imrecv)(bytes.as_mut_ptr().cast(), len, constants.byte, &raw mut message, &raw mut request)
        })?;
        let peer = status.source(constants.status_source);
        self.receives.push(PendingMessage { peer, request: Some(request), bytes });
        Ok(true)
    }

    /// Takes the first complete message whose sender has no earlier incomplete one.
    fn take_received(&mut self) -> Result<Option<PendingMessage>, MpiFailure> {
        for index in 0..self.receives.len() {
            self.comm.look_after(&mut self.receives[index])?;
            let peer = self.receives[index].peer;
            let is_next = self.receives[..index].iter().all(|earlier| earlier.peer != peer);
            if is_next && self.receives[index].request.is_none() {
                return Ok(Some(self.receives.remove(index)));
            }
        }
        Ok(None)
    }

    fn complete_sends(&mut self) -> Result<(), MpiFailure> {
        self.sends.iter_mut().try_for_each(|send| self.comm.look_after(send))?;
        self.sends.retain(|send| {
            self.unsent[send.peer as usize] -= usize::from(send.request.is_none());
            send.request.is_some()
        });
        Ok(())
    }
}

impl MpiComm {
    /// Clears the request of a message if it is complete.
    fn look_after(&self, message: &mut PendingMessage) -> Result<(), MpiFailure> {
        if let Some(request) = &mut message.request {
            // One thread owns the transport.
            if self.test_request(request)? {
                message.request = None;
            }
        }
        Ok(())
    }
}

impl MessageTransport for MpiTransport {
    fn send(&mut self, to: usize, bytes: &[u8]) -> Result<(), String> {
        self.call(|transport| {
            let mpi = &transport.comm.process.mpi;
            let (peer, bytes, mut request) = (to as c_int, bytes.to_vec(), Handle::ZERO);
            // SAFETY: the memory stays where it is until the request is complete: see `drop`.
            check("MPI_Isend", unsafe {
                let (buffer, count) = (transport.comm.no_sentinel(bytes.as_ptr()), bytes.len() as c_int);
                let (byte, comm) = (mpi.constants.byte, transport.comm.comm);
                (mpi.functions.isend)(buffer, count, byte, peer, TAG, comm, &raw mut request)
            })?;
            transport.sends.push(PendingMessage { peer, request: Some(request), bytes });
            transport.unsent[to] += 1;
            Ok(())
        })
    }

    fn unsent(&self, to: usize) -> usize {
        self.unsent[to]
    }

    fn flush(&mut self) -> bool {
        self.call(MpiTransport::complete_sends).is_ok() && self.sends.is_empty()
    }

    fn receive(&mut self) -> Result<Option<(usize, Vec<u8>)>, String> {
        if self.comm.process.is_ending.load(Ordering::Acquire) {
            return Err("this process is at its end".into());
        }
        let received = self.call(|transport| {
            if let Some(message) = transport.take_received()? {
                return Ok(Some(message));
            }
            transport.complete_sends()?;
            let mut in_vain = 0;
            while in_vain < LOOKS {
                in_vain += u32::from(!transport.accept()?);
            }
            transport.take_received()
        })?;
        Ok(received.map(|message| (message.peer as usize, message.bytes)))
    }

    fn give_up(&mut self) {
        self.has_given_up = true;
        self.comm
            .process
            .leave_unfinished("what the job's store said last has not been heard by all, or heard from all");
    }
}

impl MpiTransport {
    /// Completes pending messages when the process exits, for at most [`FINISHING`]: the last words reach
    /// their peers, and MPI can be finalised. Does not wait for a dead peer.
    fn finish(&mut self) {
        let until = Instant::now() + FINISHING;
        while !self.has_given_up && Instant::now() < until {
            let completed = self.call(|transport| {
                transport.complete_sends()?;
                for index in 0..transport.receives.len() {
                    transport.comm.look_after(&mut transport.receives[index])?;
                }
                Ok(())
            });
            let are_over = self.receives.iter().all(|message| message.request.is_none());
            if completed.is_err() || are_over && self.sends.is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        if self.comm.process.is_ending.load(Ordering::Acquire) {
            self.finish();
        }
        let under_way = self.sends.drain(..).chain(self.receives.drain(..)).filter(|m| m.request.is_some());
        let left = under_way.map(std::mem::forget).count();
        if left == 0 && !self.has_given_up {
            self.comm.depart(Departure::Left);
        } else {
            self.give_up();
        }
        self.comm.process.transports.fetch_sub(1, Ordering::Release);
    }
}
