//! Objects as messages between two ranks.
//!
//! A message is a header, then the note and the bytes in pieces. A receiver that refuses an object still takes the pieces, into memory of one
//! piece, since the sender waits until they are received.

use super::{FAILED, Header, Packed, cut, fingerprint, unpack};
use crate::api::comm::Comm;
use crate::types::error::Result;
use crate::types::object_error::ObjectError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::any::type_name;

/// The tag of objects. The next one is the smallest that an MPI need not have.
const TAG: u32 = 32_766;
/// The most bytes of one message.
const PIECE: usize = 1 << 20;

impl Comm {
    /// Sends an object to a peer, which calls [`recv_object`](Comm::recv_object). It may wait for that. mpi4py's `send`.
    ///
    /// The messages have the tag 32766. Objects between two ranks arrive in the order in which they were sent.
    ///
    /// # Errors
    /// [`ObjectError::Serialize`] and [`ObjectError::TooLong`], which the receiver gets too.
    #[doc(alias = "send_object_list")]
    pub fn send_object<T: Serialize>(&self, object: &T, peer: usize) -> Result<()> {
        let operation = "send_object";
        self.check_other(operation, peer)?;
        let (rank, packed) = (self.rank(), Packed::of([Some(object)]));
        let note = cut(packed.failure.clone().unwrap_or_else(|| type_name::<T>().to_owned()));
        let header = Header::new(fingerprint(type_name::<T>()), &packed, self.object_limit(), &note);
        self.send_tagged(&header.to_array(), peer, TAG)?;
        self.send_tagged(note.as_bytes(), peer, TAG)?;
        if let Some(reason) = packed.failure {
            return Err(ObjectError::Serialize { operation, rank, reason }.into());
        }
        let Header { longest: bytes, limit, .. } = header;
        if bytes > limit {
            return Err(ObjectError::TooLong { operation, rank, bytes, limit }.into());
        }
        packed.bytes.chunks(PIECE).try_for_each(|piece| self.send_tagged(piece, peer, TAG))
    }

    /// Receives an object that a peer sends with [`send_object`](Comm::send_object). mpi4py's `recv`.
    ///
    /// # Errors
    /// [`ObjectError`], after which the message is gone and the next can be received.
    pub fn recv_object<T: DeserializeOwned>(&self, peer: usize) -> Result<T> {
        let operation = "recv_object";
        self.shape().check_rank(operation, "peer", peer)?;
        let mut header = [0; Header::LEN];
        self.recv_tagged(&mut header, peer, TAG)?;
        let header = Header::from_array(header);
        let mut note = vec![0; header.note_len()];
        self.recv_tagged(&mut note, peer, TAG)?;
        let note = || String::from_utf8_lossy(&note).into_owned();

        let Header { longest: bytes, .. } = header;
        if bytes == FAILED {
            return Err(ObjectError::Serialize { operation, rank: peer, reason: note() }.into());
        }
        let limit = header.limit.min(self.object_limit() as u64);
        if bytes > limit {
            if bytes <= header.limit {
                self.discard(bytes as usize, peer)?;
            }
            return Err(ObjectError::TooLong { operation, rank: peer, bytes, limit }.into());
        }
        if header.fingerprint != fingerprint(type_name::<T>()) {
            self.discard(bytes as usize, peer)?;
            let (theirs, ours) =
                (format!("send_object::<{}>", note()), format!("recv_object::<{}>", type_name::<T>()));
            return Err(ObjectError::Mismatch { rank: peer, theirs, other_rank: self.rank(), ours }.into());
        }
        let mut object = vec![0; bytes as usize];
        object.chunks_mut(PIECE).try_for_each(|piece| self.recv_tagged(piece, peer, TAG))?;
        unpack(operation, peer, &object)
    }

    /// Receives the pieces of an object that nobody wants.
    fn discard(&self, bytes: usize, peer: usize) -> Result<()> {
        let mut piece = vec![0u8; PIECE.min(bytes)];
        (0..bytes)
            .step_by(PIECE)
            .try_for_each(|start| self.recv_tagged(&mut piece[..PIECE.min(bytes - start)], peer, TAG))
    }
}
