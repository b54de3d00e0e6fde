//! Who is let in: numbers, sizes and epochs that cannot be right.

use super::{PATIENCE, bootstrap_error, connect, eventually, server, token};
use phalanx::internal::store::{Host, Member, Rendezvous, Role, Server, Settings, Store};
use std::net::TcpListener;
use std::time::{Duration, Instant};

fn join(rendezvous: &Rendezvous, rank: usize, size: usize) -> String {
    bootstrap_error(Store::connect(rendezvous, rank, size, PATIENCE)).0
}

#[test]
fn a_second_process_with_the_same_rank_is_refused() {
    let (_server, rendezvous) = server(Settings::default());
    let store = connect(&rendezvous, 1, 2);
    let error = join(&rendezvous, 1, 2);
    assert!(error.contains("two processes claim to be rank 1"), "{error}");
    // Nobody waits in vain for what cannot come right.
    let started = Instant::now();
    let (error, _) = bootstrap_error(store.exchange("k", b"", PATIENCE));
    assert!(error.contains("two processes claim to be rank 1"), "{error}");
    assert!(started.elapsed() < PATIENCE / 2);
}

#[test]
fn who_is_already_there_knows_the_reason_although_the_store_ends() {
    let (server, rendezvous) = server(Settings::default());
    let store = connect(&rendezvous, 1, 2);
    join(&rendezvous, 1, 2);
    // As a launcher does that has heard of it.
    drop(server);
    eventually("the end of the store has arrived", || store.has_ended());
    let (error, _) = bootstrap_error(store.exchange("k", b"", PATIENCE));
    assert!(error.contains("two processes claim to be rank 1"), "{error}");
}

#[test]
fn once_all_are_there_a_second_one_disturbs_nobody() {
    let (_server, rendezvous) = server(Settings::default());
    let stores = [connect(&rendezvous, 0, 2), connect(&rendezvous, 1, 2)];
    join(&rendezvous, 1, 2);
    join(&rendezvous, 5, 9);
    let all = super::for_each(&stores, |_, store| store.exchange("k", b"x", PATIENCE).unwrap().len());
    assert_eq!(all, [2, 2]);
}

#[test]
fn ranks_and_sizes_that_cannot_be_are_refused() {
    let settings = || Settings { ranks: Some(4), ..Settings::default() };
    for (rank, size, says) in [
        (4, 4, "there is no rank 4: the ranks are 0 to 3"),
        (0, 5, "rank 0 was told that there are 5 ranks, the store expects 4"),
        (usize::MAX, 4, "there is no rank"),
    ] {
        let (_server, rendezvous) = server(settings());
        let error = join(&rendezvous, rank, size);
        assert!(error.contains(says), "{error}");
    }
    for size in [0, 1_000_000] {
        let (_server, rendezvous) = server(Settings::default());
        let error = join(&rendezvous, 0, size);
        assert!(error.contains("not possible"), "{error}");
    }
}

#[test]
fn another_epoch_is_refused_and_does_no_harm() {
    let (server, mut rendezvous) = server(Settings { epoch: 3, ..Settings::default() });
    for epoch in [2, 4] {
        rendezvous.epoch = epoch;
        let error = join(&rendezvous, 0, 2);
        assert!(error.contains(&format!("rank 0 is of epoch {epoch}")), "{error}");
        assert!(error.contains("in epoch 3"), "{error}");
    }
    rendezvous.epoch = 3;
    let old = connect(&rendezvous, 0, 2);
    old.set("k", b"old", PATIENCE).unwrap();
    server.begin_epoch(4);
    eventually("the old rank is cut off", || !old.lost().is_empty());
    assert!(join(&rendezvous, 1, 2).contains("is of epoch 3"));
    rendezvous.epoch = 4;
    let new = connect(&rendezvous, 0, 2);
    assert!(new.get("k", Duration::from_millis(20)).is_err(), "values of the old epoch are gone");
}

#[test]
fn nodes_and_ranks_do_not_mix() {
    let (server, mut rendezvous) = server(Settings::default());
    let node = Member { role: Role::Node, rank: 0, size: 1 };
    let node = Store::join(&rendezvous, node, PATIENCE).unwrap();
    let rank = connect(&rendezvous, 0, 2);
    assert_eq!(node.exchange("k", b"node", PATIENCE).unwrap(), [b"node"]);
    node.set("v", b"node", PATIENCE).unwrap();
    assert!(rank.get("v", Duration::from_millis(20)).is_err());
    // The nodes stay over a restart of the ranks.
    server.begin_epoch(1);
    rendezvous.epoch = 1;
    drop(rank);
    let _rank = connect(&rendezvous, 0, 3);
    assert_eq!(node.get("v", PATIENCE).unwrap(), b"node");
}

#[test]
fn a_port_that_is_taken_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (error, _) = bootstrap_error(Server::start(&address, token(), Settings::default()));
    assert!(error.contains(&address) && error.contains("taken by another program"), "{error}");
    for (address, says) in [
        ("192.0.2.1:0", "none of this host's"),
        ("127.0.0.1", "\"127.0.0.1\""),
        ("no such host:1", "\"no such host:1\""),
    ] {
        let (error, _) = bootstrap_error(Server::start(address, token(), Settings::default()));
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn a_store_that_is_not_there_is_waited_for_and_then_named() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let rendezvous = Rendezvous {
        address: free.clone(),
        token: token(),
        job: String::new(),
        epoch: 0,
        host: Host::Launcher,
        encrypted: false,
    };
    let (error, _) = bootstrap_error(Store::connect(&rendezvous, 0, 1, Duration::from_millis(300)));
    assert!(error.contains(&free) && error.contains("cannot be reached"), "{error}");

    // It comes later than the rank.
    let rank = std::thread::spawn(move || connect(&rendezvous, 0, 1));
    std::thread::sleep(Duration::from_millis(300));
    let _server = Server::start(&free, token(), Settings::default()).unwrap();
    assert_eq!(rank.join().unwrap().exchange("k", b"", PATIENCE).unwrap().len(), 1);
}
