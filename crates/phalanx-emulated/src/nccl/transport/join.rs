//! Unique ids, and how a rank finds the other ranks of one.

use super::endpoint::{address, is_gone, send, unique};
use super::mailbox::{Mailbox, Stopped};
use super::message::{Address, Message, Tag, numbers, words};
use super::root::{self, Peer, ROOT, USED};
use crate::base::call::Code;
use crate::base::violation::violation;
use crate::nccl::result::{INVALID_ARGUMENT, SUCCESS, SYSTEM_ERROR, fail};

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UniqueId([u8; 128]);

const MAGIC: u64 = 0x656d_756c_6174_6564;

impl UniqueId {
    /// An id whose root is this process.
    pub fn new() -> UniqueId {
        let mut bytes = [0; 128];
        let name = address().as_bytes();
        let head = numbers(&[MAGIC, unique(), name.len() as u64]);
        bytes[..24].copy_from_slice(&head);
        bytes[24..24 + name.len()].copy_from_slice(name);
        UniqueId(bytes)
    }

    /// The communicator's number and the root's address.
    pub fn parts(&self) -> Result<(u64, Address), Code> {
        let [magic, number, len] = words(&self.0);
        let name =
            self.0.get(24..24 + len.min(104) as usize).map(|name| String::from_utf8_lossy(name).into_owned());
        name.filter(|_| magic == MAGIC)
            .map(|name| (number, name))
            .ok_or_else(|| fail(INVALID_ARGUMENT, "the unique id was not made by ncclGetUniqueId"))
    }

    /// Its bytes.
    pub fn bytes(&self) -> [u8; 128] {
        self.0
    }

    /// The id with these bytes.
    pub fn from_bytes(bytes: [u8; 128]) -> UniqueId {
        UniqueId(bytes)
    }
}

/// Waits until all ranks of an id have arrived and returns where they are, or the code of an error. `stop`
/// ends the wait.
pub fn join(
    function: &str,
    id: &UniqueId,
    (rank, ranks): (u32, u32),
    device: usize,
    mailbox: &Mailbox,
    stop: impl Fn() -> bool,
) -> Result<Result<Vec<Peer>, Code>, Stopped> {
    let (number, root) = match id.parts() {
        Ok(parts) => parts,
        Err(code) => return Ok(Err(code)),
    };
    let mut body = numbers(&[u64::from(ranks), device as u64]);
    body.extend(address().as_bytes());
    send(&root, Message { communicator: number, from: rank, to: ROOT, tag: Tag::Hello, body });
    let table = match mailbox.take(ROOT, Tag::Table, || stop() || is_gone(&root)) {
        Ok(table) => table,
        Err(Stopped) if is_gone(&root) && !stop() => {
            return Ok(Err(fail(SYSTEM_ERROR, "the process that made the unique id is gone")));
        }
        Err(Stopped) => return Err(Stopped),
    };
    let [status] = words(&table);
    if status == USED {
        violation(function, "the unique id was used for a communicator before");
    }
    if status != SUCCESS as u64 {
        return Ok(Err(fail(status as Code, String::from_utf8_lossy(&table[8..]))));
    }
    Ok(Ok(root::decode(&table[8..])))
}
