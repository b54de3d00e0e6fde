//! How communicators beget others: split, shrink, grow.
//!
//! The new communicator's handle is written late, when it is ready; for non-blocking ones by another thread, and the
//! parent is the one to be polled.

use super::communicator::{Call, Communicator, Need, Phase, enter};
use super::config::Config;
use super::group::{self, Job, note};
use super::init::{begin, device_for_init};
use super::result::*;
use super::transport::mailbox::Stopped;
use super::transport::message::{numbers, words};
use super::transport::rendezvous::{self, Peer, UniqueId};
use crate::call::{Answer, Code};
use crate::cuda::device::physical;
use crate::handles::Handle;
use crate::pointers::{In, Out};
use crate::random::mix;
use crate::violation::violation;
use std::ffi::c_int;
use std::sync::Arc;

/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;
/// `NCCL_SHRINK_ABORT`.
const SHRINK_ABORT: c_int = 1;

/// The handle of a new communicator; none for a rank that gets none.
type Derived = Result<Result<Option<Handle>, Code>, Stopped>;

/// Begins a job on a communicator that makes another one.
fn derive(
    function: &'static str,
    call: Call,
    to: Out<Handle>,
    make: impl FnOnce(&Communicator) -> Derived + Send + 'static,
) -> Answer {
    if to.is_null() {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : newcomm argument is NULL")));
    }
    to.set(0);
    let communicator = Arc::clone(&call);
    drop(call);
    let parent = Arc::clone(&communicator);
    let body = move || match make(&parent) {
        Ok(Ok(handle)) => {
            parent.random.dawdle();
            to.set(handle.unwrap_or(0));
            SUCCESS
        }
        Ok(Err(code)) => code,
        Err(Stopped) => INTERNAL_ERROR,
    };
    group::work(Job { function, communicator, body: Box::new(body) })
}

/// A ready communicator of some of the parent's ranks, in this order.
fn child(function: &str, parent: &Communicator, number: u64, ranks: &[u32], config: Config) -> Handle {
    let place = ranks.iter().position(|rank| *rank == parent.rank).unwrap_or_default();
    let peers: Vec<Peer> = ranks.iter().map(|rank| parent.peers()[*rank as usize].clone()).collect();
    let place = (place as u32, ranks.len() as u32);
    let communicator = Communicator::new(function, number, place, parent.device, config);
    communicator.connect(peers);
    communicator.handle
}

fn number_of_child(parent: &Communicator, exchange: u64, part: u64) -> u64 {
    mix(mix(parent.number ^ mix(exchange)) ^ part)
}

fn split(
    function: &'static str,
    comm: Handle,
    (color, key): (c_int, c_int),
    to: Out<Handle>,
    config: In<u8>,
) -> Answer {
    let call = enter(function, comm, Need::Idle)?;
    if color < NO_COLOR {
        return Err(fail(
            INVALID_ARGUMENT,
            format!("CommSplit: color must be nonnegative or NCCL_SPLIT_NOCOLOR, not {color}"),
        ));
    }
    let config = Config::read(function, config, &call.config)?;
    let exchange = call.next_exchange();
    derive(function, call, to, move |parent| {
        let all = parent.exchange(exchange, parent.everyone(), &numbers(&[color as u64, key as u64]))?;
        let mut members: Vec<(c_int, u32)> = Vec::new();
        for (rank, theirs) in all.iter().enumerate() {
            let [their_color, their_key] = words(theirs);
            if their_color as c_int == color {
                members.push((their_key as c_int, rank as u32));
            }
        }
        if color == NO_COLOR {
            return Ok(Ok(None));
        }
        members.sort_unstable();
        let ranks: Vec<u32> = members.into_iter().map(|(_, rank)| rank).collect();
        let number = number_of_child(parent, exchange, color as u64);
        Ok(Ok(Some(child(function, parent, number, &ranks, config))))
    })
}

/// The ranks that stay. As NCCL does, the caller's list is sorted in place.
fn survivors(
    function: &str,
    parent: &Communicator,
    exclude: Out<c_int>,
    count: c_int,
) -> Result<Vec<u32>, Code> {
    if exclude.is_null() || count <= 0 {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : the list of excluded ranks is empty")));
    }
    let excluded = exclude.slice(count as usize);
    excluded.sort_unstable();
    let bad = |rank: &c_int| *rank < 0 || *rank >= parent.ranks as c_int || *rank == parent.rank as c_int;
    let twice = excluded.windows(2).any(|pair| pair[0] == pair[1]);
    if twice || excluded.iter().any(bad) {
        return Err(fail(
            INVALID_ARGUMENT,
            format!("{function} : the excluded ranks {excluded:?} are not valid"),
        ));
    }
    Ok(parent.everyone().filter(|rank| !excluded.contains(&(*rank as c_int))).collect())
}

fn shrink(
    function: &'static str,
    comm: Handle,
    (exclude, count): (Out<c_int>, c_int),
    to: Out<Handle>,
    config: In<u8>,
    flags: c_int,
) -> Answer {
    let aborts = flags == SHRINK_ABORT;
    let call = enter(function, comm, if aborts { Need::Any } else { Need::Idle })?;
    if !(0..=SHRINK_ABORT).contains(&flags) {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : invalid flags {flags}")));
    }
    let ranks = survivors(function, &call, exclude, count)?;
    let config = Config::read(function, config, &call.config)?;
    let exchange = call.next_exchange();
    let before = call.state().result;
    derive(function, call, to, move |parent| {
        if aborts {
            parent.give_up_operations();
        }
        parent.exchange(exchange, ranks.iter().copied(), &[])?;
        let number = number_of_child(parent, exchange, 0);
        let handle = child(function, parent, number, &ranks, config);
        if before > SUCCESS && before != IN_PROGRESS {
            // The parent stays as it is: good for nothing but Abort.
            parent.fail(before);
        }
        Ok(Ok(Some(handle)))
    })
}

/// An existing rank takes part in growing its communicator.
fn grow(
    function: &'static str,
    comm: Handle,
    ranks: c_int,
    id: In<UniqueId>,
    to: Out<Handle>,
    config: In<u8>,
) -> Answer {
    let call = enter(function, comm, Need::Ready)?;
    if ranks <= call.ranks as c_int {
        return Err(fail(
            INVALID_ARGUMENT,
            format!("{function} : {ranks} ranks are not more than {}", call.ranks),
        ));
    }
    let config = Config::read(function, config, &call.config)?;
    let exchange = call.next_exchange();
    let told = id.get().map_or(Vec::new(), |id| id.bytes().to_vec());
    derive(function, call, to, move |parent| {
        let all = parent.exchange(exchange, parent.everyone(), &told)?;
        let ids: Vec<[u8; 128]> = all.into_iter().filter_map(|bytes| bytes.try_into().ok()).collect();
        let [id] = ids[..] else {
            violation(function, format!("{} ranks gave a unique id; exactly one must", ids.len()));
        };
        let id = UniqueId::from_bytes(id);
        let number = match id.parts() {
            Ok((number, _)) => number,
            Err(code) => return Ok(Err(code)),
        };
        let place = (parent.rank, ranks as u32);
        let grown = Communicator::new(function, number, place, parent.device, config);
        let stop = || parent.is_stopped();
        match rendezvous::meet(function, &id, place, physical(parent.device), &grown.mailbox, stop)? {
            Ok(peers) => {
                grown.connect(peers);
                Ok(Ok(Some(grown.handle)))
            }
            Err(code) => Ok(Err(code)),
        }
    })
}

/// A new rank joins a communicator that grows.
fn join(
    function: &'static str,
    ranks: c_int,
    id: In<UniqueId>,
    rank: c_int,
    to: Out<Handle>,
    config: In<u8>,
) -> Answer {
    let Some(id) = id.get().filter(|_| !to.is_null() && rank >= 0 && rank < ranks) else {
        return Err(fail(
            INVALID_ARGUMENT,
            format!("{function} : a new rank needs a unique id, a rank and newcomm"),
        ));
    };
    let config = Config::read(function, config, &Config::default())?;
    let (number, _) = id.parts()?;
    let place = (rank as u32, ranks as u32);
    let device = device_for_init(function)?;
    let communicator = Communicator::new(function, number, place, device, config);
    to.set(communicator.handle);
    begin(function, communicator, to, move |communicator| {
        let stop = || communicator.is_stopped();
        Ok(match rendezvous::meet(function, &id, place, physical(device), &communicator.mailbox, stop)? {
            Ok(peers) => {
                communicator.connect(peers);
                SUCCESS
            }
            Err(code) => code,
        })
    })
}

exported! {
    fn ncclCommSplit(comm: Handle, color: c_int, key: c_int, newcomm: Out<Handle>, config: In<u8>) {
        note(split(FUNCTION, comm, (color, key), newcomm, config))
    }

    fn ncclCommShrink(
        comm: Handle, exclude: Out<c_int>, count: c_int, newcomm: Out<Handle>, config: In<u8>, flags: c_int,
    ) {
        note(shrink(FUNCTION, comm, (exclude, count), newcomm, config, flags))
    }

    fn ncclCommGetUniqueId(comm: Handle, id: Out<UniqueId>) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        if id.is_null() || call.state().phase == Phase::Revoked {
            return Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : no id, or the communicator was revoked")));
        }
        id.set(UniqueId::new());
        Ok(())
    }

    fn ncclCommGrow(
        comm: Handle, ranks: c_int, id: In<UniqueId>, rank: c_int, newcomm: Out<Handle>, config: In<u8>,
    ) {
        note(if comm == 0 {
            join(FUNCTION, ranks, id, rank, newcomm, config)
        } else if rank != -1 {
            Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : the rank of an existing rank must be -1")))
        } else {
            grow(FUNCTION, comm, ranks, id, newcomm, config)
        })
    }
}
