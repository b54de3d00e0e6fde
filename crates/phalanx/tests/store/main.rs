//! The store from outside: what it does for the ranks of a job, and what it does not let others do.

mod carried;
mod crowd;
mod encrypted;
mod hostile;
mod joining;
mod liveness;
mod proxy;

use phalanx::internal::store::{Host, Rendezvous, Server, Settings, Store, Token};
use std::time::{Duration, Instant};

/// Longer than anything here takes when it works.
const PATIENCE: Duration = Duration::from_secs(20);

fn token() -> Token {
    Token::new("the token of these tests").unwrap()
}

/// How long a member may be silent where a test waits for its loss.
const SILENCE: Duration = Duration::from_millis(1400);

fn server(settings: Settings) -> (Server, Rendezvous) {
    let server = Server::start("127.0.0.1:0", token(), settings).unwrap();
    let rendezvous = at(server.address().to_string());
    (server, rendezvous)
}

fn at(address: String) -> Rendezvous {
    Rendezvous {
        address,
        token: token(),
        job: String::new(),
        epoch: 0,
        host: Host::Launcher,
        encrypted: false,
    }
}

fn connect(rendezvous: &Rendezvous, rank: usize, size: usize) -> Store {
    Store::connect(rendezvous, rank, size, PATIENCE).unwrap()
}

/// Calls `f` for each rank in a thread of its own.
fn for_each<R: Send>(stores: &[Store], f: impl Fn(usize, &Store) -> R + Sync) -> Vec<R> {
    let f = &f;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            stores.iter().enumerate().map(|(rank, store)| scope.spawn(move || f(rank, store))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The error of a bootstrap step: its text and the ranks that are missing.
fn bootstrap_error<T>(result: phalanx::Result<T>) -> (String, Vec<usize>) {
    match result.err().expect("an error") {
        phalanx::Error::Bootstrap(error) => (error.to_string(), error.missing),
        error => panic!("another kind of error: {error}"),
    }
}

fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_true() {
        assert!(started.elapsed() < PATIENCE, "not after {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn everybody_gets_everybodys_value_in_rank_order() {
    let (_server, rendezvous) = server(Settings::default());
    let stores: Vec<_> = (0..4).map(|rank| connect(&rendezvous, rank, 4)).collect();
    for round in 0..20u8 {
        let all =
            for_each(&stores, |rank, store| store.exchange("round", &[rank as u8, round], PATIENCE).unwrap());
        let expected: Vec<Vec<u8>> = (0..4).map(|rank| vec![rank, round]).collect();
        assert!(all.iter().all(|values| *values == expected), "{all:?}");
    }
}

#[test]
fn large_values_and_long_keys_pass_and_larger_ones_are_refused() {
    let (_server, rendezvous) = server(Settings::default());
    let stores: Vec<_> = (0..2).map(|rank| connect(&rendezvous, rank, 2)).collect();
    let largest = vec![7; 64 << 10];
    let key = "k".repeat(256);
    let all = for_each(&stores, |_, store| store.exchange(&key, &largest, PATIENCE).unwrap());
    assert!(all.iter().all(|values| values.iter().all(|value| *value == largest)));
    let (error, _) = bootstrap_error(stores[0].exchange("k", &vec![0; (64 << 10) + 1], PATIENCE));
    assert!(error.contains("65537 bytes") && error.contains("at most 65536"), "{error}");
    assert!(stores[0].set(&"k".repeat(257), b"", PATIENCE).is_err());
    assert!(stores[0].set("k", b"still there", PATIENCE).is_ok());
}

#[test]
fn values_counters_and_waiting() {
    let (_server, rendezvous) = server(Settings::default());
    let stores: Vec<_> = (0..3).map(|rank| connect(&rendezvous, rank, 3)).collect();
    let got = for_each(&stores, |rank, store| {
        if rank == 0 {
            std::thread::sleep(Duration::from_millis(50));
            store.set("id", b"of rank 0", PATIENCE).unwrap();
        }
        store.get("id", PATIENCE).unwrap()
    });
    assert!(got.iter().all(|value| value == b"of rank 0"));

    let winners = for_each(&stores, |rank, store| store.set_first("first", &[rank as u8], PATIENCE).unwrap());
    assert!(winners.iter().all(|winner| *winner == winners[0]), "{winners:?}");

    let mut sums = for_each(&stores, |_, store| store.add("count", 2, PATIENCE).unwrap());
    sums.sort_unstable();
    assert_eq!(sums, [2, 4, 6]);

    let (error, missing) = bootstrap_error(stores[1].get("nothing", Duration::from_millis(50)));
    assert!(error.contains("\"nothing\"") && error.contains("50"), "{error}");
    assert!(missing.is_empty());
}

#[test]
fn a_timeout_names_the_missing_ranks_the_same_to_everybody() {
    let (_server, rendezvous) = server(Settings::default());
    let stores: Vec<_> = [0, 2, 3].into_iter().map(|rank| connect(&rendezvous, rank, 5)).collect();
    let started = Instant::now();
    let errors = for_each(&stores, |rank, store| {
        // The first deadline counts for all.
        let timeout = if rank == 0 { Duration::from_millis(300) } else { PATIENCE };
        bootstrap_error(store.exchange("k", b"", timeout))
    });
    assert!(started.elapsed() < PATIENCE / 2, "{:?}", started.elapsed());
    assert!(errors.iter().all(|(_, missing)| *missing == [1, 4]), "{errors:?}");
    assert!(errors[0].0.contains("these ranks have not come: [1, 4]"), "{}", errors[0].0);
    // Who comes late gets the same verdict, at once.
    let late = connect(&rendezvous, 4, 5);
    assert_eq!(bootstrap_error(late.exchange("k", b"", PATIENCE)).1, [1, 4]);
}

#[test]
fn many_requests_at_once_from_many_threads_of_a_rank() {
    let (_server, rendezvous) = server(Settings::default());
    let store = connect(&rendezvous, 0, 1);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let store = &store;
            scope.spawn(move || {
                for n in 0..50 {
                    let key = format!("{thread}/{n}");
                    store.set(&key, key.as_bytes(), PATIENCE).unwrap();
                    assert_eq!(store.get(&key, PATIENCE).unwrap(), key.as_bytes());
                }
            });
        }
    });
}

#[test]
fn a_store_that_ends_in_good_order_loses_nobody() {
    let (server, rendezvous) = server(Settings::default());
    let store = connect(&rendezvous, 0, 1);
    drop(server);
    let (error, _) = bootstrap_error(store.get("k", PATIENCE));
    assert!(error.contains("ended in good order"), "{error}");
    assert_eq!(store.lost(), []);
}

#[test]
fn nothing_is_left_behind() {
    let address = {
        let (server, rendezvous) = server(Settings::default());
        let stores: Vec<_> = (0..4).map(|rank| connect(&rendezvous, rank, 4)).collect();
        drop(stores);
        drop(server);
        rendezvous.address
    };
    // The port can be had again at once.
    drop(Server::start(&address, token(), Settings::default()).unwrap());
}
