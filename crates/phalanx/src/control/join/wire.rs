//! The messages of a join, as bytes: a rank's hello, its payload, and rank 0's refusal.

use crate::os::{CpuSet, LocalConnection};
use crate::types::MAX_HOST_RANKS;
use crate::types::error::{BootstrapError, Error};
use std::io;

/// First word of every message: the protocol and its version.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"PHALANX\x05");

/// The longest reason for a refusal, in bytes.
pub(super) const MAX_REASON: usize = 4096;

/// The longest payload of a rank, in bytes.
pub(super) const MAX_PAYLOAD: usize = 1 << 16;

/// Rank of a joiner in its hello: rank 0 gives it one.
pub(super) const JOINER: u32 = u32::MAX;

/// The first message of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) job: u128,
    pub(super) rank: u32,
    pub(super) world_size: u32,
    /// The cores it may use: a launcher may have bound each rank to one of its own.
    pub(super) cpus: CpuSet,
}

pub(super) const HELLO_LEN: usize = 32 + size_of::<CpuSet>();

impl Hello {
    pub(super) fn to_bytes(self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.job.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.rank.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.world_size.to_le_bytes());
        for (word, cpus) in bytes[32..].chunks_exact_mut(8).zip(self.cpus) {
            word.copy_from_slice(&cpus.to_le_bytes());
        }
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; HELLO_LEN]) -> Option<Hello> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        if bytes[..8] != MAGIC.to_le_bytes() {
            return None;
        }
        let job = u128::from_le_bytes(bytes[8..24].try_into().expect("16 bytes"));
        let mut cpus = [0; size_of::<CpuSet>() / 8];
        for (cpus, word) in cpus.iter_mut().zip(bytes[32..].chunks_exact(8)) {
            *cpus = u64::from_le_bytes(word.try_into().expect("8 bytes"));
        }
        Some(Hello { job, rank: word(24), world_size: word(28), cpus })
    }
}

/// A payload as it is sent: its length, and its bytes.
pub(super) fn framed(payload: &[u8]) -> Vec<u8> {
    assert!(payload.len() <= MAX_PAYLOAD, "a payload of {} bytes", payload.len());
    [&(payload.len() as u32).to_le_bytes(), payload].concat()
}

pub(super) fn receive_payload(connection: &LocalConnection) -> io::Result<Vec<u8>> {
    let mut len = [0; 4];
    connection.receive(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_PAYLOAD {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut payload = vec![0; len];
    connection.receive(&mut payload)?;
    Ok(payload)
}

/// A refusal: a zero, the reason, and the ranks that are missing.
pub(super) fn refuse(connection: &LocalConnection, reason: &str, missing: &[usize]) -> io::Result<()> {
    let reason = &reason.as_bytes()[..reason.len().min(MAX_REASON)];
    let mut bytes = Vec::with_capacity(16 + reason.len() + 4 * missing.len());
    bytes.extend_from_slice(&0u64.to_le_bytes());
    bytes.extend_from_slice(&(reason.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(missing.len() as u32).to_le_bytes());
    bytes.extend_from_slice(reason);
    for rank in missing {
        bytes.extend_from_slice(&(*rank as u32).to_le_bytes());
    }
    connection.send(&bytes)
}

pub(super) fn refusal(connection: &LocalConnection) -> io::Result<Error> {
    let number = || -> io::Result<usize> {
        let mut bytes = [0; 4];
        connection.receive(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes) as usize)
    };
    let (reason_len, missing_len) = (number()?, number()?);
    let mut reason = vec![0; reason_len.min(MAX_REASON)];
    connection.receive(&mut reason)?;
    let missing = (0..missing_len.min(MAX_HOST_RANKS)).map(|_| number()).collect::<io::Result<_>>()?;
    Ok(BootstrapError {
        problem: format!("rank 0 says: {}", String::from_utf8_lossy(&reason)),
        remedy: "all ranks have ended the attempt".into(),
        missing,
    }
    .into())
}

pub(super) fn receive_id(connection: &LocalConnection) -> io::Result<u64> {
    let mut id = [0; 8];
    connection.receive(&mut id)?;
    Ok(u64::from_le_bytes(id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::join::hash;

    #[test]
    fn hello_survives_the_wire_and_garbage_does_not() {
        let hello = Hello { job: hash("job"), rank: 3, world_size: 7, cpus: [5; 128] };
        assert_eq!(Hello::from_bytes(&hello.to_bytes()), Some(hello));
        assert_eq!(Hello::from_bytes(&[0; HELLO_LEN]), None);
        assert_eq!(Hello::from_bytes(&[0xff; HELLO_LEN]), None);
        assert_ne!(hash("job"), hash("job "));
    }
}
