//! Objects: collectives and messages of values whose lengths and contents only their rank knows, and those that fail on one rank.

use crate::world::{Done, both, outcome, same};
use libtest_mimic::Trial;
use phalanx::{Comm, Error, ObjectError, Result};
use phalanx_testkit::Scenario;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("objects/every_collective", |comm, _| outcome(every_collective(&comm))),
    Scenario::rank("objects/messages", |comm, _| outcome(messages(&comm))),
    Scenario::rank("objects/refused_messages", |comm, _| outcome(refused_messages(&comm))),
    Scenario::rank("objects/not_serialized", |comm, _| outcome(not_serialized(&comm))),
    Scenario::rank("objects/not_deserialized", |comm, _| outcome(not_deserialized(&comm))),
    Scenario::rank("objects/too_long", |comm, _| outcome(too_long(&comm))),
    Scenario::rank("objects/other_types", |comm, _| outcome(other_types(&comm))),
    Scenario::rank("objects/other_calls", |comm, _| outcome(other_calls(&comm))),
    Scenario::rank("objects/split_by_key", |comm, _| outcome(split_by_key(&comm))),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 5, 8])).collect()
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Found {
    Nothing,
    Words(BTreeMap<String, u64>),
    Bytes { name: Option<String>, bytes: Vec<u8> },
}

/// Objects of very different lengths: one byte, some words, more than a piece of a message.
fn found(from: usize, to: usize) -> Found {
    match (from * 3 + to) % 4 {
        0 => Found::Nothing,
        1 => Found::Words(
            (0..from as u64 + 2).map(|count| (format!("{from} to {to} {count}"), count)).collect(),
        ),
        2 => Found::Bytes { name: None, bytes: Vec::new() },
        _ => Found::Bytes { name: Some("ä".repeat(to)), bytes: vec![from as u8; 70_001 * (from + 1)] },
    }
}

fn every_collective(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for root in 0..ranks {
        let from_root = comm.broadcast_object((rank == root).then(|| found(root, 7)), root)?;
        same("broadcast_object", from_root, found(root, 7))?;
        let gathered = comm.gather_object(&found(rank, root), root)?;
        let expected: Vec<Found> = (0..ranks).map(|from| found(from, root)).collect();
        same("gather_object", gathered, (rank == root).then_some(expected))?;
        let parts = (rank == root).then(|| (0..ranks).map(|to| found(root, to)).collect());
        same("scatter_objects", comm.scatter_objects(parts, root)?, found(root, rank))?;
    }
    let all: Vec<Found> = (0..ranks).map(|from| found(from, 2)).collect();
    same("all_gather_object", comm.all_gather_object(&found(rank, 2))?, all)?;
    let received = comm.all_to_all_objects((0..ranks).map(|to| found(rank, to)).collect())?;
    same("all_to_all_objects", received, (0..ranks).map(|from| found(from, rank)).collect::<Vec<_>>())?;
    // Nothing to say takes no bytes.
    same("units", comm.all_gather_object(&())?.len(), ranks)?;
    Ok(())
}

/// Each rank sends to each other in turn, several objects in a row.
fn messages(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let long = |from: usize| vec![from as u64; 300_000];
    for (from, to) in
        (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))).filter(|(from, to)| from != to)
    {
        if rank == from {
            comm.send_object(&found(from, to), to)?;
            comm.send_object(&long(from), to)?;
            comm.send_object(&"last", to)?;
        } else if rank == to {
            same("the first", comm.recv_object::<Found>(from)?, found(from, to))?;
            same("the long one", comm.recv_object::<Vec<u64>>(from)? == long(from), true)?;
        }
        if rank == to {
            let error = object_error(comm.recv_object::<String>(from))?;
            let expected =
                (from, "send_object::<&str>".to_owned(), "recv_object::<alloc::string::String>".to_owned());
            let ObjectError::Mismatch { rank, theirs, ours, .. } = error else { return Err(error.into()) };
            same("another type", (rank, theirs, ours), expected)?;
        }
    }
    Ok(())
}

/// A message that its receiver refuses is gone, and the next one arrives.
fn refused_messages(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let long = vec![1u8; 3_000_000];
    if ranks == 1 || rank >= 2 {
        return Ok(());
    }
    if rank == 0 {
        comm.send_object(&long, 1)?;
        comm.send_object(&long, 1)?;
        comm.set_object_limit(100);
        let error = object_error(comm.send_object(&long, 1))?;
        same("the sender's limit", matches!(error, ObjectError::TooLong { rank: 0, limit: 100, .. }), true)?;
        let error = object_error(comm.send_object(&Broken::Fails, 1))?;
        same(
            "at the sender",
            error.to_string().contains(&format!("rank 0 could not be serialized: {POSTCARD}")),
            true,
        )?;
        comm.send_object(&5u32, 1)?;
        return Ok(());
    }
    let error = object_error(comm.recv_object::<String>(0))?;
    same("another type", matches!(error, ObjectError::Mismatch { rank: 0, other_rank: 1, .. }), true)?;
    comm.set_object_limit(1_000_000);
    let error = object_error(comm.recv_object::<Vec<u8>>(0))?;
    let expected =
        ObjectError::TooLong { operation: "recv_object", rank: 0, bytes: 3_000_004, limit: 1_000_000 };
    same("the receiver's limit", error, expected)?;
    let error = object_error(comm.recv_object::<Vec<u8>>(0))?;
    same("the sender's limit", matches!(error, ObjectError::TooLong { rank: 0, limit: 100, .. }), true)?;
    let error = object_error(comm.recv_object::<Broken>(0))?;
    same(
        "at the receiver",
        error.to_string().contains(&format!("rank 0 could not be serialized: {POSTCARD}")),
        true,
    )?;
    same("the next", comm.recv_object::<u32>(0)?, 5)?;
    Ok(())
}

/// What postcard says of a sequence whose length is not told before.
const POSTCARD: &str = "The length of a sequence must be known";

/// An object that cannot be serialized, or deserialized.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Broken {
    Not,
    Fails,
    Panics,
    FailsThere,
}

impl Serialize for Broken {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Broken::Fails => serializer.serialize_seq(None).map(|_| unreachable!("it is broken")),
            Broken::Panics => panic!("a test's panic in serialize"),
            Broken::Not => serializer.serialize_u8(0),
            Broken::FailsThere => serializer.serialize_u8(1),
        }
    }
}

impl<'de> Deserialize<'de> for Broken {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Broken, D::Error> {
        match u8::deserialize(deserializer)? {
            0 => Ok(Broken::Not),
            _ => Err(serde::de::Error::custom("it is broken")),
        }
    }
}

/// The error of an exchange of objects that has failed.
fn object_error<T>(result: Result<T>) -> std::result::Result<ObjectError, String> {
    match result {
        Err(Error::Object(error)) => Ok(*error),
        Err(error) => Err(format!("another error: {error}")),
        Ok(_) => Err("no error".into()),
    }
}

/// Every rank gets the same error, and the communicator works on.
fn fails_alike<T>(comm: &Comm, result: Result<T>, expected: &ObjectError) -> Done {
    let error = object_error(result)?;
    same("the error", &error, expected)?;
    let error = Error::from(error);
    same("fatal", error.is_fatal(), false)?;
    let texts = comm.all_gather_object(&error.to_string())?;
    same("the ranks' errors", texts, vec![error.to_string(); comm.world_size()])?;
    Ok(())
}

fn not_serialized(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for (broken, reason) in [
        (Broken::Fails, POSTCARD.to_owned()),
        (Broken::Panics, "it panicked: a test's panic in serialize".into()),
    ] {
        for at_fault in 0..ranks {
            let of = |other: usize| if other == at_fault { broken } else { Broken::Not };
            let expected =
                |operation| ObjectError::Serialize { operation, rank: at_fault, reason: reason.clone() };
            let own = of(rank);
            fails_alike(comm, comm.all_gather_object(&own), &expected("all_gather_object"))?;
            fails_alike(comm, comm.gather_object(&own, ranks - 1), &expected("gather_object"))?;
            let sent = comm.broadcast_object((rank == at_fault).then_some(own), at_fault);
            fails_alike(comm, sent, &expected("broadcast_object"))?;
            if ranks > 1 {
                // An own object does not travel.
                let parts =
                    |from| (0..ranks).map(|to| if to == from { Broken::Not } else { of(from) }).collect();
                fails_alike(comm, comm.all_to_all_objects(parts(rank)), &expected("all_to_all_objects"))?;
                let sent = comm.scatter_objects((rank == at_fault).then(|| parts(rank)), at_fault);
                fails_alike(comm, sent, &expected("scatter_objects"))?;
            }
        }
    }
    Ok(())
}

/// One rank alone cannot make the object of its bytes; the others have theirs.
fn not_deserialized(comm: &Comm) -> Done {
    let rank = comm.rank();
    let sent = (rank == 0).then(|| vec![Broken::FailsThere]);
    let received = comm.broadcast_object(sent, 0);
    if rank == 0 {
        same("at the root", received?, vec![Broken::FailsThere])?;
    } else {
        let error = object_error(received)?;
        let right = matches!(&error, ObjectError::Deserialize { rank: 0, bytes: 2, type_name, .. } if type_name.contains("Broken"));
        same(&format!("elsewhere: {error}"), right, true)?;
    }
    same("afterwards", comm.all_gather_object(&rank)?, (0..comm.world_size()).collect::<Vec<_>>())?;
    Ok(())
}

fn too_long(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let last = ranks - 1;
    if rank == 0 {
        // One rank's limit is everybody's.
        comm.set_object_limit(1000);
    }
    let long = vec![7u8; if rank == last { 999 } else { 5 }];
    let expected = |operation| ObjectError::TooLong { operation, rank: last, bytes: 1001, limit: 1000 };
    fails_alike(comm, comm.all_gather_object(&long), &expected("all_gather_object"))?;
    fails_alike(comm, comm.gather_object(&long, 0), &expected("gather_object"))?;
    fails_alike(comm, comm.broadcast_object(Some(long.clone()), last), &expected("broadcast_object"))?;
    if ranks > 1 {
        let parts = || vec![long.clone(); ranks];
        fails_alike(comm, comm.all_to_all_objects(parts()), &expected("all_to_all_objects"))?;
        fails_alike(comm, comm.scatter_objects(Some(parts()), last), &expected("scatter_objects"))?;
    }
    // As long as the limit is right.
    same("998 bytes", comm.broadcast_object(Some(vec![7u8; 998]), last)?.len(), 998)?;
    Ok(())
}

fn other_types(comm: &Comm) -> Done {
    let (rank, last) = (comm.rank(), comm.world_size() - 1);
    if last == 0 {
        return Ok(());
    }
    let result = if rank == last {
        comm.all_gather_object(&1u32).map(drop)
    } else {
        comm.all_gather_object(&1i32).map(drop)
    };
    let call = |name| format!("all_gather_object::<{name}>(root 0)");
    let expected =
        ObjectError::Mismatch { rank: last, theirs: call("u32"), other_rank: 0, ours: call("i32") };
    fails_alike(comm, result, &expected)
}

fn other_calls(comm: &Comm) -> Done {
    let (rank, last) = (comm.rank(), comm.world_size() - 1);
    if last == 0 {
        return Ok(());
    }
    let result = if rank == last {
        comm.all_gather_object(&1u32).map(drop)
    } else {
        comm.gather_object(&1u32, 1).map(drop)
    };
    let theirs = "all_gather_object::<u32>(root 0)".into();
    let expected = ObjectError::Mismatch {
        rank: last,
        theirs,
        other_rank: 0,
        ours: "gather_object::<u32>(root 1)".into(),
    };
    fails_alike(comm, result, &expected)
}

fn split_by_key(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let key = |rank: usize| (format!("group {}", rank % 3), rank.is_multiple_of(2));
    let part = comm.split_by(&key(rank))?;
    let members: Vec<usize> = (0..ranks).filter(|other| key(*other) == key(rank)).collect();
    same("members", part.all_gather_object(&rank)?, members)?;
    let failing = comm.split_by(if rank == 0 { &Broken::Panics } else { &Broken::Not });
    let reason = "it panicked: a test's panic in serialize".into();
    fails_alike(comm, failing, &ObjectError::Serialize { operation: "split_by", rank: 0, reason })
}
