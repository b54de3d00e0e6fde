//! Ranks with a store connection each, as on several hosts; here they are threads.

use super::HostComm;
use crate::contract::hosts::HostTopology;
use crate::contract::{Backend, BackendKind, Call, Departure, Operation};
use crate::control::endpoint::Endpoint;
use crate::control::host_channel::HostChannel;
use crate::control::relay::growth::enter;
use crate::rendezvous::store::{Host, Rendezvous, Server, Settings, Store, Token};
use crate::types::error::{Error, PeerEvent, Result};
use crate::types::{MAX_HOST_RANKS, MAX_RANKS};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A store that is in nobody's hands, as that of a launcher.
fn store() -> (Server, Rendezvous) {
    let token = Token::random().unwrap();
    let server = Server::start("127.0.0.1:0", token.clone(), Settings::default()).unwrap();
    let address = server.address().to_string();
    let host = Host::Launcher;
    (server, Rendezvous { address, token, job: String::new(), epoch: 0, host, encrypted: false })
}

/// Runs ranks.
fn run<R: Send>(ranks: usize, f: impl Fn(HostComm) -> R + Sync) -> Vec<R> {
    let (_server, rendezvous) = store();
    let body = &|rank| {
        let store = Store::connect(&rendezvous, rank, ranks, TIMEOUT).unwrap();
        store.exchange("all", &[], TIMEOUT).unwrap();
        f(HostComm::new(Endpoint::over(store, rank, HostTopology::one_host(ranks), TIMEOUT).unwrap()))
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || body(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn tell(comm: &HostComm, word: u64) -> Result<Vec<u64>> {
    let mut all = vec![[0u64; 1]; comm.world_size()];
    // SAFETY: one thread has the communicator.
    unsafe { comm.all_gather_words(&[word], all.as_flattened_mut()) }?;
    Ok(all.into_iter().flatten().collect())
}

fn barrier(comm: &HostComm) -> Result<()> {
    // SAFETY: as above; there is no memory.
    unsafe { comm.collective(&Call::empty(Operation::Barrier)) }
}

fn part(comm: &HostComm, color: u32) -> HostComm {
    // SAFETY: as above.
    HostComm::new(unsafe { comm.split_channel(Some(color), 0) }.unwrap().unwrap().into_endpoint())
}

#[test]
fn words_arrive_everywhere_and_in_their_operation() {
    run(4, |comm| {
        let rank = comm.rank() as u64;
        for round in 0..100 {
            let told = tell(&comm, round * 10 + rank).unwrap();
            assert_eq!(told, (0..4).map(|rank| round * 10 + rank).collect::<Vec<_>>());
        }
        barrier(&comm).unwrap();
        comm.depart(Departure::Left);
    });
}

#[test]
fn who_is_dropped_has_left() {
    let errors = run(2, |comm| {
        barrier(&comm).unwrap();
        if comm.rank() == 1 { None } else { barrier(&comm).err() }
    });
    let Some(Error::Peer(peer)) = &errors[0] else { panic!("{errors:?}") };
    assert_eq!((peer.rank, peer.event), (1, PeerEvent::Left));
}

#[test]
fn longer_blocks_travel_in_lines_and_the_longest_are_refused() {
    run(3, |comm| {
        let broadcast = |bytes: &mut [u8], root| {
            let start = bytes.as_mut_ptr();
            let blocks = crate::contract::Blocks::Equal(bytes.len());
            let call = Call { send: start, recv: start, root, blocks, ..Call::empty(Operation::Broadcast) };
            // SAFETY: one thread has the communicator; the bytes are its own.
            unsafe { comm.collective(&call) }
        };
        for root in [0, 2, 1, 1] {
            let mut bytes = [0u8; 500];
            if comm.rank() == root {
                bytes = std::array::from_fn(|index| (index + root) as u8);
            }
            broadcast(&mut bytes, root).unwrap();
            assert!(bytes.iter().enumerate().all(|(index, byte)| *byte == (index + root) as u8));
        }
        // More of them than an operation has slots: nobody waits for what was not opened.
        for _ in 0..3 {
            let error = broadcast(&mut [0; 1000], 0).unwrap_err().to_string();
            assert!(error.contains("a few words"), "{error}");
        }
        broadcast(&mut [0; 500], 0).unwrap();
        barrier(&comm).unwrap();
    });
}

#[test]
fn parts_have_channels_of_their_own() {
    run(4, |comm| {
        for round in 0..20 {
            let part = part(&comm, comm.rank() as u32 % 2);
            assert_eq!(part.world_size(), 2);
            let told = tell(&part, comm.rank() as u64 + round).unwrap();
            let first = comm.rank() as u64 % 2 + round;
            assert_eq!(told, [first, first + 2]);
            part.depart(Departure::Left);
        }
        barrier(&comm).unwrap();
    });
}

#[test]
fn one_verdict_on_calls_that_differ() {
    let errors = run(3, |comm| {
        barrier(&comm).unwrap();
        let result = if comm.rank() == 1 { barrier(&comm) } else { tell(&comm, 1).map(drop) };
        // Those who noticed nothing do now.
        let error = result.and_then(|()| barrier(&comm)).unwrap_err();
        assert_eq!(barrier(&comm).unwrap_err().to_string(), error.to_string());
        error
    });
    for error in &errors {
        assert!(matches!(error, Error::Mismatch(_)), "{error}");
        assert_eq!(error.to_string(), errors[0].to_string());
    }
}

#[test]
fn one_verdict_on_a_rank_that_does_not_come() {
    let errors = run(3, |comm| {
        barrier(&comm).unwrap();
        comm.set_timeout(Duration::from_secs(1));
        if comm.rank() == 2 {
            std::thread::sleep(Duration::from_secs(3));
        }
        barrier(&comm).unwrap_err()
    });
    let verdicts = errors.iter().map(|error| {
        let Error::Timeout(timeout) = error else { panic!("{error}") };
        let missing: Vec<usize> = timeout.missing.iter().map(|missing| missing.rank).collect();
        (missing, timeout.reporter, timeout.waited)
    });
    let verdicts: Vec<_> = verdicts.collect();
    assert_eq!(verdicts[0].0, [2]);
    assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]), "{verdicts:?}");
}

#[test]
fn who_leaves_and_who_gives_up_is_named() {
    let errors = run(3, |comm| {
        barrier(&comm).unwrap();
        if comm.rank() == 1 {
            comm.depart(Departure::Panicked);
            return None;
        }
        barrier(&comm).err()
    });
    for error in [&errors[0], &errors[2]] {
        let Some(Error::Peer(peer)) = error else { panic!("{error:?}") };
        assert_eq!((peer.rank, peer.event), (1, PeerEvent::Panicked));
        assert_eq!(error.as_ref().unwrap().to_string(), errors[0].as_ref().unwrap().to_string());
    }
    let errors = run(3, |comm| {
        barrier(&comm).unwrap();
        if comm.rank() == 1 {
            comm.abort();
        }
        barrier(&comm).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Aborted { rank: 1 })), "{errors:?}");
}

#[test]
fn survivors_shrink_and_go_on() {
    let sums = run(4, |comm| {
        barrier(&comm).unwrap();
        if comm.rank() == 2 {
            comm.depart(Departure::Panicked);
            return None;
        }
        let since = Instant::now();
        assert!(matches!(barrier(&comm), Err(Error::Peer(_))));
        let (shrunk, round) = comm.endpoint.shrink().unwrap();
        let shrunk = HostComm::new(shrunk);
        assert!(since.elapsed() < TIMEOUT, "{:?}", since.elapsed());
        let told = tell(&shrunk, comm.rank() as u64).unwrap();
        assert_eq!((told, round), (vec![0, 1, 3], 1));
        barrier(&shrunk).unwrap();
        Some(shrunk.rank())
    });
    assert_eq!(sums, [Some(0), Some(1), None, Some(2)]);
}

/// Some ranks of the largest world, of which the others never come: all find the same error, which names these.
#[test]
fn the_largest_world_has_one_verdict() {
    const HERE: [usize; 4] = [0, MAX_HOST_RANKS, MAX_RANKS / 2 + 1, MAX_RANKS - 1];
    let (_server, rendezvous) = store();
    let connected = &std::sync::Barrier::new(HERE.len());
    let body = &|rank| {
        let store = Store::connect(&rendezvous, rank, MAX_RANKS, TIMEOUT).unwrap();
        connected.wait();
        let topology = HostTopology::one_host(MAX_RANKS);
        let comm = HostComm::new(Endpoint::over(store, rank, topology, Duration::from_millis(500)).unwrap());
        barrier(&comm).unwrap_err()
    };
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let threads = HERE.map(|rank| scope.spawn(move || body(rank)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for error in errors {
        let Error::Timeout(error) = error else { panic!("{error}") };
        let missing: Vec<usize> = error.missing.iter().map(|missing| missing.rank).collect();
        assert!((0..MAX_RANKS).filter(|rank| !HERE.contains(rank)).eq(missing));
    }
}

/// Two members with a store; `new_ranks` runs beside them.
fn growing<R: Send>(
    member: impl Fn(HostComm) -> R + Sync,
    new_ranks: impl FnOnce(&Rendezvous) + Send,
) -> [R; 2] {
    let (_server, rendezvous) = store();
    let start = |rank| {
        let store = Store::connect(&rendezvous, rank, 2, TIMEOUT).unwrap();
        // What is sent to a rank that is not there is lost.
        store.exchange("all", &[], TIMEOUT).unwrap();
        member(HostComm::new(Endpoint::over(store, rank, HostTopology::one_host(2), TIMEOUT).unwrap()))
    };
    std::thread::scope(|scope| {
        let members = [0, 1].map(|rank| scope.spawn(move || start(rank)));
        new_ranks(&rendezvous);
        members.map(|member| member.join().unwrap())
    })
}

fn grow(comm: &HostComm, joiners: usize) -> Result<HostComm> {
    // SAFETY: one thread has the communicator.
    unsafe { comm.grow_with(joiners, BackendKind::Nccl) }.map(|(grown, _)| grown)
}

/// Waits for the next place.
fn new_rank(rendezvous: &Rendezvous) -> HostComm {
    let since = Instant::now();
    loop {
        if let Some(met) = enter(rendezvous, TIMEOUT).unwrap() {
            assert_eq!(met.backend, "nccl");
            return HostComm::grown(met, TIMEOUT).unwrap();
        }
        assert!(since.elapsed() < TIMEOUT, "nobody has asked");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn new_ranks_get_the_next_places() {
    let works = |comm: HostComm| {
        assert_eq!(tell(&comm, comm.rank() as u64).unwrap(), [0, 1, 2, 3]);
        comm.depart(Departure::Left);
        comm.rank()
    };
    let member = |comm: HostComm| {
        assert_eq!(works(grow(&comm, 2).unwrap()), comm.rank());
        // The old one works on.
        assert_eq!(tell(&comm, 7).unwrap(), [7, 7]);
    };
    growing(member, |rendezvous| {
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|_| scope.spawn(|| works(new_rank(rendezvous))));
            let mut ranks = ranks.map(|rank| rank.join().unwrap());
            ranks.sort_unstable();
            assert_eq!(ranks, [2, 3]);
        });
    });
}

/// Nobody gets a communicator with a rank that is lost while all meet, and the members may meet again.
#[test]
fn a_new_rank_that_is_lost_in_the_meeting_is_made_up_for() {
    let member = |comm: HostComm| {
        let Err(Error::Bootstrap(error)) = grow(&comm, 1) else { panic!("it has grown") };
        assert_eq!(error.missing, [2], "{error}");
        let grown = grow(&comm, 1).unwrap();
        assert_eq!(tell(&grown, grown.rank() as u64).unwrap(), [0, 1, 2]);
        grown.depart(Departure::Left);
    };
    growing(member, |rendezvous| {
        let since = Instant::now();
        while Store::enter(rendezvous, TIMEOUT).unwrap().is_none() {
            assert!(since.elapsed() < TIMEOUT, "nobody has asked");
        }
        assert_eq!(tell(&new_rank(rendezvous), 2).unwrap(), [0, 1, 2]);
    });
}

/// Rank 2 is lost, and so is each rank that comes in its place.
#[test]
fn a_rebuild_ends_by_its_deadline_although_all_newcomers_are_lost() {
    const LIMIT: Duration = Duration::from_secs(2);
    let (_server, rendezvous) = store();
    let member = |rank| {
        let store = Store::connect(&rendezvous, rank, 3, TIMEOUT).unwrap();
        store.exchange("all", &[], TIMEOUT).unwrap();
        let comm = HostComm::new(Endpoint::over(store, rank, HostTopology::one_host(3), LIMIT).unwrap());
        if rank == 2 {
            return;
        }
        let comm = crate::Comm::new(Arc::new(comm), "world".into());
        let since = Instant::now();
        let error = comm.rebuild().expect_err("nobody has come");
        assert!(since.elapsed() < 4 * LIMIT, "{error} after {:?}", since.elapsed());
    };
    std::thread::scope(|scope| {
        let members = [0, 1, 2].map(|rank| scope.spawn(move || member(rank)));
        let since = Instant::now();
        while !members.iter().all(|member| member.is_finished()) && since.elapsed() < 2 * TIMEOUT {
            drop(Store::enter(&rendezvous, TIMEOUT));
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}

#[test]
fn who_does_not_come_is_named_and_who_comes_then_has_no_place() {
    let given_up = std::sync::Barrier::new(3);
    let member = |comm: HostComm| {
        comm.set_timeout(Duration::from_millis(300));
        let Err(Error::Bootstrap(error)) = grow(&comm, 2) else { panic!("it has grown") };
        assert_eq!(error.missing, [2, 3], "{error}");
        comm.set_timeout(TIMEOUT);
        assert_eq!(tell(&comm, 1).unwrap(), [1, 1]);
        given_up.wait();
        barrier(&comm).unwrap();
    };
    growing(member, |rendezvous| {
        given_up.wait();
        assert!(enter(rendezvous, TIMEOUT).unwrap().is_none());
    });
}

#[test]
fn members_that_grow_by_different_numbers_get_a_mismatch() {
    let member = |comm: HostComm| {
        let error = grow(&comm, 1 + comm.rank()).err().expect("a mismatch");
        assert!(matches!(error, Error::Mismatch(_)), "{error}");
    };
    growing(member, |_| ());
}
