//! Ranks that reach the store through the launcher of their host.

use super::{PATIENCE, SILENCE, bootstrap_error, connect, eventually, for_each, server};
use phalanx::internal::store::protocol::{Carried, Reply, Request};
use phalanx::internal::store::{Carrier, Rendezvous, Role, Server, Settings, Store, Token};
use std::io::Write;
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// The launcher of a host with some ranks, and where they find it.
fn host(above: &Rendezvous, ranks: u32, settings: Settings) -> (Server, Rendezvous) {
    let settings = Settings { ranks: Some(ranks), ..settings };
    let server = Server::carrying(above, settings, PATIENCE).unwrap();
    let rendezvous = Rendezvous { address: server.address().to_string(), ..above.clone() };
    (server, rendezvous)
}

/// A store, two hosts with two ranks each, and a rank with a connection of its own.
fn five_ranks(settings: &Settings) -> (Server, [Server; 2], Vec<Store>) {
    let (store, mut above) = server(settings.clone());
    above.encrypted = settings.encrypted;
    let (one, first) = host(&above, 2, settings.clone());
    let (other, second) = host(&above, 2, settings.clone());
    let places = [&first, &first, &second, &second, &above];
    let ranks = places.iter().enumerate().map(|(rank, place)| connect(place, rank, 5)).collect();
    (store, [one, other], ranks)
}

#[test]
fn carried_ranks_have_the_same_store_as_others() {
    for encrypted in [false, true] {
        let (_store, _hosts, ranks) = five_ranks(&Settings { encrypted, ..Settings::default() });
        for round in 0..3u8 {
            let all = for_each(&ranks, |rank, store| {
                store.exchange("round", &[rank as u8, round], PATIENCE).unwrap()
            });
            let expected: Vec<Vec<u8>> = (0..5).map(|rank| vec![rank, round]).collect();
            assert!(all.iter().all(|values| *values == expected), "{all:?}");
        }
        let got = for_each(&ranks, |rank, store| {
            if rank == 3 {
                store.set("id", b"of rank 3", PATIENCE).unwrap();
            }
            store.get("id", PATIENCE).unwrap()
        });
        assert!(got.iter().all(|value| value == b"of rank 3"));
        let mut sums = for_each(&ranks, |_, store| store.add("count", 2, PATIENCE).unwrap());
        sums.sort_unstable();
        assert_eq!(sums, [2, 4, 6, 8, 10]);
        let (error, _) = bootstrap_error(ranks[0].get("nothing", Duration::from_millis(50)));
        assert!(error.contains("\"nothing\""), "{error}");
    }
}

#[test]
fn a_carried_rank_that_leaves_is_not_waited_for() {
    let (_store, _hosts, mut ranks) = five_ranks(&Settings::default());
    drop(ranks.remove(1));
    let (error, missing) = bootstrap_error(ranks[0].exchange("k", b"", PATIENCE));
    assert!(missing == [1] && error.contains("it has left"), "{error}");
    assert!(ranks.iter().all(|rank| rank.lost().is_empty()));
    assert!(ranks[0].set("still", b"there", PATIENCE).is_ok());
}

#[test]
fn who_cannot_be_a_rank_is_refused_through_its_launcher_too() {
    let (_store, above) = server(Settings::default());
    let (_host, place) = host(&above, 2, Settings::default());
    let _rank = connect(&place, 0, 2);
    for (rank, why) in [(0, "two processes claim to be rank 0"), (2, "there is no rank 2")] {
        let (error, _) = bootstrap_error(Store::connect(&place, rank, 2, PATIENCE));
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_host_that_is_lost_is_lost_everywhere_and_others_keep_what_they_have() {
    let (_store, above) = server(Settings::default());
    let mut carrier = Carrier::connect(&above, PATIENCE).unwrap();
    let join = |rank| Request::Join { role: Role::Rank, rank, size: 4, epoch: 0, job: String::new() };
    (0..2).for_each(|rank| carrier.post(rank, join(rank)));
    let mut welcome = 0;
    while welcome < 2 {
        welcome += carrier.receive().unwrap().iter().map(|reply| reply.ranks.len()).sum::<usize>();
    }
    let (_host, place) = host(&above, 2, Settings::default());
    let others = [connect(&place, 2, 4), connect(&place, 3, 4)];
    let began = Instant::now();
    drop(carrier);
    for store in &others {
        let lost = store.wait_for_loss(1, PATIENCE);
        let mut ranks: Vec<usize> = lost.iter().map(|lost| lost.rank).collect();
        ranks.sort_unstable();
        assert_eq!(ranks, [0, 1]);
    }
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}

#[test]
fn carried_ranks_are_heard_of_and_learn_that_the_store_has_ended() {
    let (store, hosts, ranks) = five_ranks(&Settings { silence: SILENCE, ..Settings::default() });
    // Longer than the silence: heartbeats pass on every connection.
    std::thread::sleep(2 * SILENCE);
    assert!(ranks.iter().all(|rank| rank.lost().is_empty() && !rank.has_ended()));
    drop(store);
    ranks.iter().for_each(|rank| eventually("the end", || rank.has_ended()));
    assert!(ranks.iter().all(|rank| rank.lost().is_empty()), "it has ended in good order");
    drop(hosts);
}

#[test]
fn a_launcher_that_speaks_before_it_has_read_the_goodbye_still_reads_it() {
    let (store, above) = server(Settings::default());
    let mut carrier = Carrier::connect(&above, PATIENCE).unwrap();
    drop(store);
    // The store's host answers the first with a reset; the second cannot be sent.
    for _ in 0..2 {
        carrier.post(0, Request::Heartbeat);
        let _ = carrier.flush();
        std::thread::sleep(Duration::from_millis(50));
    }
    carrier.post(0, Request::Heartbeat);
    let last = carrier.receive().unwrap();
    assert!(matches!(last[..], [Carried { message: Reply::Goodbye, .. }]), "it has ended in good order");
}

#[test]
fn strangers_are_turned_away_by_a_launcher_too() {
    let (_store, above) = server(Settings::default());
    let (_host, place) = host(&above, 1, Settings::default());
    let mut stranger = TcpStream::connect(&place.address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n").unwrap();
    let other = Rendezvous { token: Token::new("another token, also long").unwrap(), ..place.clone() };
    let (error, _) = bootstrap_error(Store::connect(&other, 0, 1, PATIENCE));
    assert!(error.contains("token") || error.contains("prove"), "{error}");
    let rank = connect(&place, 0, 1);
    assert_eq!(rank.exchange("k", b"v", PATIENCE).unwrap(), [b"v"]);
}

/// A host's ranks as stand-ins, which join and exchange 256 bytes each; one that is slow reads nothing for a while.
fn stand_in(above: &Rendezvous, host: Range<u32>, size: u32, is_slow: bool, start: &Barrier) -> Carrier {
    let patience = Duration::from_secs(100);
    start.wait();
    let mut carrier = Carrier::connect(above, patience).unwrap();
    for rank in host.clone() {
        carrier.post(rank, Request::Join { role: Role::Rank, rank, size, epoch: 0, job: String::new() });
        let (key, value) = ("numbers".to_owned(), rank.to_le_bytes().repeat(64));
        carrier.post(rank, Request::Exchange { id: 1, key, value, wait: 100_000 });
    }
    carrier.flush().unwrap();
    if is_slow {
        std::thread::sleep(Duration::from_secs(1));
    }
    loop {
        for Carried { ranks, message } in carrier.receive().unwrap() {
            if let Reply::All { table: Some(table), .. } = message {
                assert_eq!(ranks.len(), host.len());
                assert!(table.values().eq((0..size).map(|rank| rank.to_le_bytes().repeat(64))));
                return carrier;
            }
        }
    }
}

#[test]
fn a_thousand_ranks_of_many_hosts_meet_among_strangers_and_slow_hosts() {
    const RANKS: u32 = 1000;
    const OF_A_HOST: usize = 8;
    let (_store, above) = server(Settings::default());
    let hosts: Vec<u32> = (0..RANKS).step_by(OF_A_HOST).collect();
    let start = Barrier::new(hosts.len() + 1);
    let mut carriers: Vec<Carrier> = std::thread::scope(|scope| {
        let (above, start) = (&above, &start);
        let threads: Vec<_> = hosts
            .iter()
            .map(|first| {
                let host = *first..(*first + OF_A_HOST as u32).min(RANKS);
                let is_slow = first % 5 == 0;
                scope.spawn(move || stand_in(above, host, RANKS, is_slow, start))
            })
            .collect();
        start.wait();
        let strangers: Vec<_> = (0..100)
            .filter_map(|number| {
                let mut stream = TcpStream::connect(&above.address).ok()?;
                if number % 2 == 0 {
                    let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
                }
                Some(stream)
            })
            .collect();
        assert_eq!(strangers.len(), 100);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // A host is lost: all others know each of its ranks.
    let began = Instant::now();
    drop(carriers.swap_remove(0));
    for carrier in &mut carriers {
        let mut lost = 0;
        while lost < OF_A_HOST {
            let replies = carrier.receive().unwrap();
            lost += replies.iter().filter(|reply| matches!(reply.message, Reply::Lost { .. })).count();
        }
    }
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}
