//! How ranks find each other: all go to the process that made the unique id, which tells everyone where the others are.

use super::mailbox::{Mailbox, Stopped};
use super::message::{Message, Tag, numbers, words};
use super::{Address, address, is_gone, send, unique};
use crate::call::Code;
use crate::lock;
use crate::nccl::result::{INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, SYSTEM_ERROR, fail};
use crate::settings::settings;
use crate::violation::violation;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UniqueId([u8; 128]);

const MAGIC: u64 = 0x656d_756c_6174_6564;
/// Who a table is from.
const ROOT: u32 = u32::MAX;
/// The answer to those who come with an id that was used before.
const USED: u64 = u64::MAX;

/// Where a rank is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub address: Address,
    /// Which device of the host.
    pub device: usize,
}

#[derive(Default)]
struct Meeting {
    expected: u64,
    there: BTreeMap<u32, Peer>,
    over: bool,
}

static MEETINGS: Mutex<BTreeMap<u64, Meeting>> = Mutex::new(BTreeMap::new());

impl UniqueId {
    /// An id whose ranks meet in this process.
    pub fn new() -> UniqueId {
        let mut bytes = [0; 128];
        let name = address().as_bytes();
        let head = numbers(&[MAGIC, unique(), name.len() as u64]);
        bytes[..24].copy_from_slice(&head);
        bytes[24..24 + name.len()].copy_from_slice(name);
        UniqueId(bytes)
    }

    /// The communicator's number, and where its ranks meet.
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

/// Goes to the meeting and waits until everybody is there. `stop` says when to give up.
pub fn meet(
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
    Ok(Ok(decode(&table[8..])))
}

/// A rank has arrived at this process.
pub fn arrive(message: Message) {
    let [ranks, device] = words(&message.body);
    let from = String::from_utf8_lossy(&message.body[16..]).into_owned();
    let mut meetings = lock(&MEETINGS);
    let meeting = meetings.entry(message.communicator).or_default();
    if meeting.over {
        return table(&from, message.communicator, message.from, numbers(&[USED]));
    }
    if !meeting.there.is_empty() && meeting.expected != ranks {
        let mut body = numbers(&[INVALID_USAGE as u64]);
        body.extend(b"Bootstrap Root : mismatch in rank count from procs");
        return table(&from, message.communicator, message.from, body);
    }
    meeting.expected = ranks;
    // As in NCCL, a second one with the same rank is not heard, and waits for ever.
    meeting.there.entry(message.from).or_insert(Peer { address: from, device: device as usize });
    if meeting.there.len() as u64 == ranks {
        meeting.over = true;
        let body = tell(&meeting.there);
        for (rank, peer) in &meeting.there {
            table(&peer.address, message.communicator, *rank, body.clone());
        }
    }
}

fn table(to: &Address, communicator: u64, rank: u32, body: Vec<u8>) {
    send(to, Message { communicator, from: ROOT, to: rank, tag: Tag::Table, body });
}

/// The release that lets several ranks use one GPU, if it is told to.
const SHARED: i32 = 23003;

fn gpus_are_shared() -> bool {
    let told = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value != "0");
    settings().nccl_version >= SHARED && told
}

/// What everybody is told: the table, or why there is none.
fn tell(there: &BTreeMap<u32, Peer>) -> Vec<u8> {
    let peers: Vec<(&u32, &Peer)> = there.iter().collect();
    for (n, (rank, peer)) in peers.iter().enumerate() {
        let same = peers[..n].iter().find(|(_, other)| other.device == peer.device);
        if let Some((other, _)) = same.filter(|_| !gpus_are_shared()) {
            let mut body = numbers(&[INVALID_USAGE as u64]);
            let text = if settings().nccl_version >= SHARED {
                "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this \
                 configuration."
                    .into()
            } else {
                let device = peer.device;
                format!("Duplicate GPU detected : rank {other} and rank {rank} both on CUDA device {device}")
            };
            body.extend(text.as_bytes());
            return body;
        }
    }
    let mut body = numbers(&[SUCCESS as u64]);
    for (_, peer) in peers {
        body.extend(numbers(&[peer.device as u64, peer.address.len() as u64]));
        body.extend(peer.address.as_bytes());
    }
    body
}

fn decode(mut table: &[u8]) -> Vec<Peer> {
    let mut peers = Vec::new();
    while !table.is_empty() {
        let [device, len] = words(table);
        let (name, rest) = table[16..].split_at(len as usize);
        peers.push(Peer { address: String::from_utf8_lossy(name).into_owned(), device: device as usize });
        table = rest;
    }
    peers
}
