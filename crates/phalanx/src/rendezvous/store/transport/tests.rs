//! Ranks are threads, and queues have the messages.

use super::*;
use crate::os::sync::lock;
use crate::rendezvous::store::{Host, Rendezvous, Server, Settings, Store, Token};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

const TIMEOUT: Duration = Duration::from_secs(20);

/// What has become of the messages.
#[derive(Default)]
struct Fate {
    /// To and from these nothing comes through.
    cut_off: Mutex<Vec<usize>>,
    /// Who knows that this one is out of reach.
    out_of_reach: Mutex<Option<usize>>,
    gave_up: Mutex<Vec<usize>>,
}

struct Queues {
    rank: usize,
    to: Vec<Sender<(usize, Vec<u8>)>>,
    from: Receiver<(usize, Vec<u8>)>,
    fate: Arc<Fate>,
}

impl MessageTransport for Queues {
    fn send(&mut self, to: usize, bytes: &[u8]) -> std::result::Result<(), String> {
        if *lock(&self.fate.out_of_reach) == Some(to) {
            return Err("it is gone".into());
        }
        let cut_off = lock(&self.fate.cut_off);
        if !cut_off.contains(&to) && !cut_off.contains(&self.rank) {
            // Who has ended receives no more.
            let _ = self.to[to].send((self.rank, bytes.to_vec()));
        }
        Ok(())
    }

    fn unsent(&self, _: usize) -> usize {
        0
    }

    fn flush(&mut self) -> bool {
        true
    }

    fn receive(&mut self) -> std::result::Result<Option<(usize, Vec<u8>)>, String> {
        Ok(self.from.try_recv().ok())
    }

    fn give_up(&mut self) {
        lock(&self.fate.gave_up).push(self.rank);
    }
}

/// The stores of ranks whose messages have this fate.
fn stores(ranks: usize, fate: &Arc<Fate>) -> Vec<Store> {
    let (to, from): (Vec<_>, Vec<_>) = (0..ranks).map(|_| channel()).unzip();
    let mail = |(rank, from)| Queues { rank, to: to.clone(), from, fate: fate.clone() };
    let token = Token::random().unwrap();
    let rendezvous = Rendezvous {
        address: "rank 0".into(),
        token: token.clone(),
        job: String::new(),
        epoch: 0,
        host: Host::Rank(0),
        encrypted: false,
    };
    let wires: Vec<_> = (0..ranks).map(|_| Wire::pair().unwrap()).collect();
    let (mut served, mut far): (Vec<_>, Vec<_>) = wires.into_iter().unzip();
    let own = far.remove(0);
    let all = served.drain(..).enumerate().map(|(rank, wire)| (format!("rank {rank}"), wire)).collect();
    let settings = Settings { ranks: Some(ranks as u32), ..Settings::default() };
    let mut server = Some(Server::over(all, token, settings).unwrap());
    let mut own = Some(own);
    let mut far = Some(far.into_iter().zip(1..).map(|(wire, rank)| (rank, wire)).collect());
    from.into_iter()
        .enumerate()
        .map(|(rank, from)| {
            let (wire, carried) = match own.take() {
                Some(own) => (own, far.take().unwrap()),
                None => {
                    let (own, other) = Wire::pair().unwrap();
                    (own, vec![(0, other)])
                }
            };
            let transport = Transport::start(mail((rank, from)), carried).unwrap();
            let store = Store::over(wire, Some(transport), &rendezvous, rank, ranks, TIMEOUT).unwrap();
            match server.take() {
                Some(server) => store.hosting(server),
                None => store,
            }
        })
        .collect()
}

fn for_each<R: Send>(stores: &[Store], f: impl Fn(usize, &Store) -> R + Sync) -> Vec<R> {
    let f = &f;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            stores.iter().enumerate().map(|(rank, store)| scope.spawn(move || f(rank, store))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All leave, each by itself.
fn leave(stores: Vec<Store>) {
    std::thread::scope(|scope| {
        for store in stores {
            scope.spawn(move || {
                store.finish(TIMEOUT);
                drop(store);
            });
        }
    });
}

#[test]
fn a_store_without_a_port_does_what_others_do_and_ends_in_good_order() {
    let fate = Arc::new(Fate::default());
    let stores = stores(3, &fate);
    for round in 0..20u8 {
        let all =
            for_each(&stores, |rank, store| store.exchange("k", &[rank as u8, round], TIMEOUT).unwrap());
        let expected: Vec<Vec<u8>> = (0..3).map(|rank| vec![rank, round]).collect();
        assert!(all.iter().all(|values| *values == expected), "{all:?}");
    }
    // In many pieces.
    let long = vec![7; 64 << 10];
    let all = for_each(&stores, |_, store| store.exchange("long", &long, TIMEOUT).unwrap());
    assert!(all.iter().flatten().all(|value| *value == long));
    let since = Instant::now();
    leave(stores);
    assert!(since.elapsed() < FLUSH_SILENT, "{:?}", since.elapsed());
    assert!(lock(&fate.gave_up).is_empty());
}

#[test]
fn whose_messages_do_not_come_is_lost_by_silence() {
    let fate = Arc::new(Fate::default());
    let mut stores = stores(3, &fate);
    lock(&fate.cut_off).push(2);
    let lost = for_each(&stores, |_, store| store.wait_for_loss(0, TIMEOUT));
    let names = |rank: usize| (lost[rank][0].rank, lost[rank][0].why.clone());
    for rank in [0, 1] {
        assert!(names(rank).0 == 2 && names(rank).1.contains("nothing was heard"), "{:?}", names(rank));
    }
    assert!(names(2).0 == 0 && names(2).1.contains("rank 0"), "{:?}", names(2));
    // Who is cut off, and who has a line to it, does not wait for the end of it for long.
    let since = Instant::now();
    let cut_off = stores.remove(2);
    std::thread::scope(|scope| {
        scope.spawn(move || drop(cut_off));
        leave(stores);
    });
    assert!(since.elapsed() < FLUSH_SILENT * 2, "{:?}", since.elapsed());
    let mut gave_up = lock(&fate.gave_up).clone();
    gave_up.sort_unstable();
    assert_eq!(gave_up, [0, 2]);
}

#[test]
fn whom_no_message_reaches_is_lost_at_once() {
    let fate = Arc::new(Fate::default());
    let stores = stores(3, &fate);
    *lock(&fate.out_of_reach) = Some(1);
    let since = Instant::now();
    let lost = stores[2].wait_for_loss(0, TIMEOUT);
    assert_eq!(lost[0].rank, 1, "{lost:?}");
    assert!(since.elapsed() < crate::rendezvous::store::server::SILENCE, "{:?}", since.elapsed());
    // The others go on.
    stores[2].set("k", b"v", TIMEOUT).unwrap();
    assert_eq!(stores[0].get("k", TIMEOUT).unwrap(), b"v");
}

#[test]
fn a_store_that_has_ended_is_known_to_all() {
    let fate = Arc::new(Fate::default());
    let mut stores = stores(2, &fate);
    drop(stores.remove(0));
    let error = stores[0].get("k", TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("rank 0 has ended in good order"), "{error}");
    assert_eq!(stores[0].lost(), []);
}

#[test]
fn a_silent_peer_takes_no_time_from_one_that_is_heard() {
    let fate = Arc::new(Fate::default());
    let (to, from): (Vec<_>, Vec<_>) = (0..3).map(|_| channel()).unzip();
    let from = from.into_iter().next().unwrap();
    let mail = Queues { rank: 0, to: to.clone(), from, fate: fate.clone() };
    let (ends, carried): (Vec<_>, Vec<_>) = [1, 2]
        .map(|peer| {
            let (end, other) = Wire::pair().unwrap();
            (end, (peer, other))
        })
        .into_iter()
        .unzip();
    let transport = Transport::start(mail, carried).unwrap();
    ends.iter().for_each(|end| end.shutdown(Shutdown::Write).unwrap());
    let ending = std::thread::spawn(move || drop(transport));
    // Longer than the silent one is waited for.
    let words = 3 * FLUSH_SILENT.as_secs();
    for word in 0..words {
        to[0].send((1, vec![word as u8])).unwrap();
        std::thread::sleep(Duration::from_millis(500));
    }
    to[0].send((1, Vec::new())).unwrap();
    ending.join().unwrap();
    let mut heard = Vec::new();
    (&ends[0]).read_to_end(&mut heard).unwrap();
    assert_eq!(heard, (0..words as u8).collect::<Vec<_>>());
    assert_eq!(*lock(&fate.gave_up), [0]);
}
