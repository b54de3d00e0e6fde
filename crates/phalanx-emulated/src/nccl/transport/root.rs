//! The root of a unique id: collects its ranks, and tells all of them where the others are.

use super::message::{Address, Message, Tag, numbers, words};
use crate::base::lock::lock;
use crate::nccl::result::{INVALID_USAGE, SUCCESS};
use crate::nccl::version::{SHARED_GPUS, is_since};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// The sender of tables, and the receiver of hellos.
pub const ROOT: u32 = u32::MAX;
/// The status in the table for a rank with an id that was used before.
pub const USED: u64 = u64::MAX;

/// Where a rank is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub address: Address,
    /// The device's number on the host.
    pub device: usize,
}

/// The ranks of a unique id that have arrived.
#[derive(Default)]
struct Join {
    expected: u64,
    arrived: BTreeMap<u32, Peer>,
    is_over: bool,
}

static JOINS: Mutex<BTreeMap<u64, Join>> = Mutex::new(BTreeMap::new());

/// The messages with which this process, a root, answers the hello of a rank.
pub fn arrive(hello: Message) -> Vec<(Address, Message)> {
    let [ranks, device] = words(&hello.body);
    let from = String::from_utf8_lossy(&hello.body[16..]).into_owned();
    let communicator = hello.communicator;
    let mut joins = lock(&JOINS);
    let join = joins.entry(communicator).or_default();
    if join.is_over {
        return vec![table(from, communicator, hello.from, numbers(&[USED]))];
    }
    if !join.arrived.is_empty() && join.expected != ranks {
        let mut body = numbers(&[INVALID_USAGE as u64]);
        body.extend(b"Bootstrap Root : mismatch in rank count from procs");
        return vec![table(from, communicator, hello.from, body)];
    }
    join.expected = ranks;
    // As in NCCL, a second process with the same rank is ignored and waits for ever.
    join.arrived.entry(hello.from).or_insert(Peer { address: from, device: device as usize });
    if join.arrived.len() as u64 != ranks {
        return Vec::new();
    }
    join.is_over = true;
    let body = encode(&join.arrived);
    let answer = |(rank, peer): (&u32, &Peer)| table(peer.address.clone(), communicator, *rank, body.clone());
    join.arrived.iter().map(answer).collect()
}

fn table(to: Address, communicator: u64, rank: u32, body: Vec<u8>) -> (Address, Message) {
    (to, Message { communicator, from: ROOT, to: rank, tag: Tag::Table, body })
}

fn gpus_are_shared() -> bool {
    let allowed = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value != "0");
    is_since(SHARED_GPUS) && allowed
}

/// A status, then the table of all ranks or the text of an error.
fn encode(arrived: &BTreeMap<u32, Peer>) -> Vec<u8> {
    let peers: Vec<(&u32, &Peer)> = arrived.iter().collect();
    for (n, (rank, peer)) in peers.iter().enumerate() {
        let same = peers[..n].iter().find(|(_, other)| other.device == peer.device);
        if let Some((other, _)) = same.filter(|_| !gpus_are_shared()) {
            let mut body = numbers(&[INVALID_USAGE as u64]);
            let text = if is_since(SHARED_GPUS) {
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

/// The ranks of a table, without its status.
pub fn decode(mut table: &[u8]) -> Vec<Peer> {
    let mut peers = Vec::new();
    while !table.is_empty() {
        let [device, len] = words(table);
        let (name, rest) = table[16..].split_at(len as usize);
        peers.push(Peer { address: String::from_utf8_lossy(name).into_owned(), device: device as usize });
        table = rest;
    }
    peers
}
