//! Many ranks that come at once, with strangers among them.

use super::{bootstrap_error, token};
use phalanx::internal::store::{Host, Rendezvous, Server, Settings, Store};
use std::io::Write;
use std::net::TcpStream;
use std::sync::Barrier;
use std::time::Duration;

/// Longer than the ranks of the largest crowd take to meet on two cores.
const PATIENCE: Duration = Duration::from_secs(120);

/// Ranks that come at once, and exchange their numbers. The store does not know how many will come. Among them are strangers that
/// say nothing, or garbage.
fn meet(ranks: usize, encrypted: bool) {
    let settings = Settings { encrypted, ..Settings::default() };
    let server = Server::start("127.0.0.1:0", token(), settings).unwrap();
    let address = server.address();
    let rendezvous = Rendezvous {
        address: address.to_string(),
        token: token(),
        job: String::new(),
        epoch: 0,
        host: Host::Launcher,
        encrypted,
    };
    let start = Barrier::new(ranks + 2);
    let is_over = Barrier::new(2);
    std::thread::scope(|scope| {
        let strangers = scope.spawn(|| {
            start.wait();
            let strangers: Vec<_> = (0..100)
                .filter_map(|number| {
                    let mut stream = TcpStream::connect(address).ok()?;
                    if number % 2 == 0 {
                        let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
                    }
                    Some(stream)
                })
                .collect();
            is_over.wait();
            strangers.len()
        });
        let (start, rendezvous) = (&start, &rendezvous);
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let join = move || {
                    start.wait();
                    let store = Store::connect(rendezvous, rank, ranks, PATIENCE)?;
                    let all = store.exchange("numbers", &(rank as u32).to_le_bytes(), PATIENCE)?;
                    Ok((store, all))
                };
                std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, join).unwrap()
            })
            .collect();
        start.wait();
        let outcomes: Vec<phalanx::Result<_>> =
            threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        is_over.wait();
        assert_eq!(strangers.join().unwrap(), 100);
        let failed = outcomes.iter().filter(|outcome| outcome.is_err()).count();
        let (stores, failures): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
        if let Some(failure) = failures.into_iter().next() {
            panic!("{failed} of {ranks} ranks failed, one of them: {}", bootstrap_error(failure.map(drop)).0);
        }
        let expected: Vec<Vec<u8>> = (0..ranks as u32).map(|rank| rank.to_le_bytes().to_vec()).collect();
        let stores: Vec<Store> = stores
            .into_iter()
            .map(|joined| {
                let (store, all) = joined.unwrap();
                assert!(all == expected && store.lost().is_empty());
                store
            })
            .collect();
        // Each waits until the store has read its goodbye.
        let mut stores = stores.into_iter();
        while stores.len() > 0 {
            let some: Vec<Store> = stores.by_ref().take(64).collect();
            scope.spawn(move || drop(some));
        }
    });
}

#[test]
fn encrypted_ranks_that_come_at_once_all_get_in() {
    meet(256, true);
}

#[test]
fn two_thousand_ranks_that_come_at_once_all_get_in() {
    meet(2048, false);
}
