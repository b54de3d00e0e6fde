//! Who is lost, why, and how soon everybody knows.

use super::proxy::Proxy;
use super::{PATIENCE, SILENCE, at, bootstrap_error, connect, eventually, for_each, server};
use phalanx::internal::store::{Host, Lost, Settings, Store, Subscriber};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// By when a loss must be known to all: 2 s, and 1 s for a machine that has other things to do.
const LIMIT: Duration = Duration::from_secs(3);

/// Ranks 0 and 1 of three, connected directly, and rank 2 over a wire.
fn three() -> (phalanx::internal::store::Server, Vec<Store>, Store, Proxy) {
    let (server, rendezvous) = server(Settings { silence: SILENCE, ..Settings::default() });
    let proxy = Proxy::to(&rendezvous.address);
    let far = connect(&at(proxy.address.to_string()), 2, 3);
    let near = (0..2).map(|rank| connect(&rendezvous, rank, 3)).collect();
    (server, near, far, proxy)
}

/// Waits until every one of `stores` knows that exactly `rank` is lost, and answers why.
fn all_lose(stores: &[&Store], rank: usize, started: Instant) -> Vec<String> {
    let whys = stores.iter().map(|store| {
        eventually("the loss is known", || !store.lost().is_empty());
        let lost = store.lost();
        assert_eq!(lost.iter().map(|lost| lost.rank).collect::<Vec<_>>(), [rank], "{lost:?}");
        lost[0].why.clone()
    });
    let whys = whys.collect();
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    whys
}

#[test]
fn a_connection_that_closes_without_goodbye_is_a_lost_rank() {
    let (_server, near, far, proxy) = three();
    let started = Instant::now();
    proxy.close();
    let whys = all_lose(&[&near[0], &near[1]], 2, started);
    assert!(whys[0].contains("without a goodbye"), "{}", whys[0]);
    assert_eq!(whys[0], whys[1], "the same verdict");
    // It knows that it is cut off itself.
    let whys = all_lose(&[&far], 2, started);
    assert!(whys[0].contains("cut off from the store"), "{}", whys[0]);
}

#[test]
fn a_rank_that_cannot_be_heard_is_lost_to_all_and_told_so() {
    let (_server, near, far, proxy) = three();
    let started = Instant::now();
    proxy.mute();
    let whys = all_lose(&[&near[0], &near[1], &far], 2, started);
    assert!(whys.iter().all(|why| *why == whys[0]), "{whys:?}");
    assert!(whys[0].contains("nothing was heard"), "{}", whys[0]);
}

#[test]
fn a_rank_that_hears_nothing_gives_up_and_says_so() {
    let (_server, near, far, proxy) = three();
    let started = Instant::now();
    proxy.deafen();
    let whys = all_lose(&[&far], 2, started);
    assert!(whys[0].contains("cut off from the store"), "{}", whys[0]);
    let whys = all_lose(&[&near[0], &near[1]], 2, started);
    assert!(whys[0].contains("could not hear the store"), "{}", whys[0]);
}

#[test]
fn a_rank_that_is_cut_off_both_ways_is_lost_on_both_sides() {
    let (_server, near, far, proxy) = three();
    let started = Instant::now();
    proxy.mute();
    proxy.deafen();
    all_lose(&[&near[0], &near[1]], 2, started);
    all_lose(&[&far], 2, started);
}

#[test]
fn the_loss_of_a_rank_ends_waiting_for_it() {
    let (_server, near, far, proxy) = three();
    let started = Instant::now();
    let errors = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            proxy.close();
        });
        for_each(&near, |_, store| bootstrap_error(store.exchange("k", b"", PATIENCE)))
    });
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    assert!(errors.iter().all(|(_, missing)| *missing == [2]), "{errors:?}");
    assert!(errors[0].0.contains("rank 2 will not come"), "{}", errors[0].0);
    assert_eq!(errors[0], errors[1]);
    let (error, missing) = bootstrap_error(far.exchange("k", b"", PATIENCE));
    assert!(error.contains("is lost"), "{error}");
    assert_eq!(missing, [2]);
}

#[test]
fn leaving_in_good_order_is_no_loss() {
    let (_server, near, far, _proxy) = three();
    drop(far);
    let (error, missing) = bootstrap_error(near[0].exchange("k", b"", PATIENCE));
    assert!(error.contains("rank 2 will not come: it has left"), "{error}");
    assert_eq!(missing, [2]);
    std::thread::sleep(LIMIT);
    assert!(near.iter().all(|store| store.lost().is_empty()));
}

#[test]
fn quiet_ranks_stay_alive() {
    let (_server, near, far, _proxy) = three();
    std::thread::sleep(2 * LIMIT);
    assert!(near.iter().chain([&far]).all(|store| store.lost().is_empty()));
    assert!(far.wait_for_loss(0, Duration::from_millis(10)).is_empty());
}

#[test]
fn a_newcomer_hears_of_those_that_are_lost_already() {
    let (_server, rendezvous) = server(Settings { silence: SILENCE, ..Settings::default() });
    let proxy = Proxy::to(&rendezvous.address);
    let _far = connect(&at(proxy.address.to_string()), 1, 3);
    proxy.close();
    let store = connect(&rendezvous, 0, 3);
    eventually("the loss is known", || store.lost().iter().any(|lost| lost.rank == 1));
}

#[test]
fn the_end_of_a_store_without_goodbye_is_the_loss_of_its_host() {
    let (_server, rendezvous) = server(Settings { silence: SILENCE, ..Settings::default() });
    let proxy = Proxy::to(&rendezvous.address);
    let mut hosted = at(proxy.address.to_string());
    hosted.host = Host::Rank(0);
    let store = connect(&hosted, 1, 2);
    proxy.close();
    let lost = store.wait_for_loss(0, PATIENCE);
    assert_eq!(lost[0].rank, 0);
    assert!(lost[0].why.contains("it hosts the store"), "{}", lost[0].why);
}

#[cfg(target_os = "linux")]
#[test]
fn a_fork_neither_speaks_nor_leaves_for_its_parent() {
    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(status: i32) -> !;
    }
    let (server, rendezvous) = server(Settings { silence: SILENCE, ..Settings::default() });
    let store = connect(&rendezvous, 0, 1);
    // SAFETY: the child makes calls that need no other thread, and ends without running anything else.
    let child = unsafe { fork() };
    if child == 0 {
        let refused = store.set("k", b"of the fork", PATIENCE).is_err();
        drop(store);
        drop(server);
        // SAFETY: it ends this process.
        unsafe { _exit(if refused { 0 } else { 1 }) }
    }
    let mut status = -1;
    // SAFETY: a child of this process, and a place for its status.
    let waited = unsafe { waitpid(child, &mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    store.set("k", b"of the parent", PATIENCE).unwrap();
    assert_eq!(store.lost(), []);
}

/// Holds up the thread that receives, from its first message until the test lets it go.
struct Busy(Barrier);

impl Subscriber for Busy {
    fn on_message(&self, _: usize, _: &[u8]) {
        self.0.wait();
        self.0.wait();
    }

    fn on_loss(&self, _: &[Lost], _: bool) {}
}

#[test]
fn a_rank_that_speaks_before_it_has_read_the_goodbye_still_reads_it() {
    let (server, rendezvous) = server(Settings::default());
    let rank = connect(&rendezvous, 0, 1);
    let busy = Arc::new(Busy(Barrier::new(2)));
    rank.set_subscriber(busy.clone());
    rank.send(&[0], b"first").unwrap();
    busy.0.wait();
    drop(server);
    // The store's host answers the first with a reset; the second cannot be sent.
    for _ in 0..2 {
        let _ = rank.send(&[0], b"too late");
        std::thread::sleep(Duration::from_millis(50));
    }
    busy.0.wait();
    eventually("the end", || rank.has_ended());
    assert!(rank.lost().is_empty(), "it has ended in good order: {:?}", rank.lost());
}
