//! How new communicators are derived from others: split, shrink, grow.
//!
//! The handle of a new communicator is written when it is ready: of a non-blocking one by another thread,
//! while the caller polls the parent.

use super::init::{begin, connect, device_for_init};
use crate::base::call::{Answer, Code};
use crate::base::handles::Handle;
use crate::base::pointers::{In, Out};
use crate::base::random::mix;
use crate::base::violation::violation;
use crate::nccl::communicator::{Call, Communicator, Need, Phase, enter};
use crate::nccl::config::Config;
use crate::nccl::group::{self, nccl, record};
use crate::nccl::job::Job;
use crate::nccl::result::*;
use crate::nccl::transport::join::UniqueId;
use crate::nccl::transport::mailbox::Stopped;
use crate::nccl::transport::message::{numbers, words};
use crate::nccl::transport::root::Peer;
use std::ffi::c_int;
use std::sync::Arc;

/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;
/// `NCCL_SHRINK_ABORT`.
const SHRINK_ABORT: c_int = 1;

/// The handle of a new communicator; `None` for a rank outside it.
type Derived = Result<Result<Option<Handle>, Code>, Stopped>;

/// Begins a job on a communicator that makes a new one.
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
            parent.random.delay();
            to.set(handle.unwrap_or(0));
            SUCCESS
        }
        Ok(Err(code)) => code,
        Err(Stopped) => INTERNAL_ERROR,
    };
    group::run(Job { function, communicator, body: Box::new(body) })
}

/// A connected communicator of some of the parent's ranks, in the order of `ranks`.
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
        let all = parent.exchange(exchange, parent.all_ranks(), &numbers(&[color as u64, key as u64]))?;
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

/// The ranks that stay. As in NCCL, the caller's list is sorted in place.
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
    Ok(parent.all_ranks().filter(|rank| !excluded.contains(&(*rank as c_int))).collect())
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
            parent.cancel_operations();
        }
        parent.exchange(exchange, ranks.iter().copied(), &[])?;
        let number = number_of_child(parent, exchange, 0);
        let handle = child(function, parent, number, &ranks, config);
        if before > SUCCESS && before != IN_PROGRESS {
            // The parent stays failed: only `ncclCommAbort` may be called.
            parent.fail(before);
        }
        Ok(Ok(Some(handle)))
    })
}

/// Grows a communicator, as one of its ranks.
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
    let given = id.get().map_or(Vec::new(), |id| id.bytes().to_vec());
    derive(function, call, to, move |parent| {
        let all = parent.exchange(exchange, parent.all_ranks(), &given)?;
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
        Ok(match connect(function, &grown, &id, || parent.is_stopped())? {
            SUCCESS => Ok(Some(grown.handle)),
            code => Err(code),
        })
    })
}

/// Joins a growing communicator, as a new rank.
fn join_growing(
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
        connect(function, communicator, &id, || communicator.is_stopped())
    })
}

nccl! {
    fn ncclCommSplit(comm: Handle, color: c_int, key: c_int, newcomm: Out<Handle>, config: In<u8>) {
        record(split(FUNCTION, comm, (color, key), newcomm, config))
    }

    fn ncclCommShrink(
        comm: Handle, exclude: Out<c_int>, count: c_int, newcomm: Out<Handle>, config: In<u8>, flags: c_int,
    ) {
        record(shrink(FUNCTION, comm, (exclude, count), newcomm, config, flags))
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
        record(if comm == 0 {
            join_growing(FUNCTION, ranks, id, rank, newcomm, config)
        } else if rank != -1 {
            Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : the rank of an existing rank must be -1")))
        } else {
            grow(FUNCTION, comm, ranks, id, newcomm, config)
        })
    }
}
