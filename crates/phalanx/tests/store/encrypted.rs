//! The same with encryption.

use super::proxy::Proxy;
use super::{PATIENCE, SILENCE, at, bootstrap_error, connect, eventually, for_each, server};
use phalanx::internal::store::cipher::{Cipher, Identity};
use phalanx::internal::store::protocol::Greeting;
use phalanx::internal::store::{Rendezvous, Server, Settings, Store};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

fn encrypted_server() -> (Server, Rendezvous) {
    let (server, rendezvous) = server(Settings { silence: SILENCE, encrypted: true, ..Settings::default() });
    (server, Rendezvous { encrypted: true, ..rendezvous })
}

fn through(address: SocketAddr) -> Rendezvous {
    Rendezvous { encrypted: true, ..at(address.to_string()) }
}

#[test]
fn ranks_meet_exchange_and_notice_who_is_lost() {
    let (_server, rendezvous) = encrypted_server();
    let mut stores: Vec<_> = (0..4).map(|rank| connect(&rendezvous, rank, 4)).collect();
    for round in 0..20u8 {
        let all = for_each(&stores, |rank, store| {
            store.exchange("round", &vec![rank as u8 ^ round; 60_000], PATIENCE).unwrap()
        });
        let expected: Vec<Vec<u8>> = (0..4).map(|rank| vec![rank ^ round; 60_000]).collect();
        assert!(all.iter().all(|values| *values == expected), "round {round}");
    }
    // Longer than the silence that means loss: the signs of life are encrypted, too.
    std::thread::sleep(Duration::from_secs(2));
    assert!(stores[0].lost().is_empty());
    drop(stores.pop());
    let (error, missing) = bootstrap_error(stores[0].exchange("without one", b"", PATIENCE));
    assert_eq!(missing, [3], "{error}");
}

#[test]
fn nobody_reads_along() {
    const SECRET: &[u8] = b"what only the ranks of the job may know";
    for encrypted in [false, true] {
        let (_server, rendezvous) = server(Settings { silence: SILENCE, encrypted, ..Settings::default() });
        let proxy = Proxy::to(&rendezvous.address);
        let rendezvous = Rendezvous { encrypted, ..at(proxy.address.to_string()) };
        let store = connect(&rendezvous, 0, 1);
        store.exchange("secret", SECRET, PATIENCE).unwrap();
        let can_be_read = proxy.tape().windows(SECRET.len()).any(|bytes| bytes == SECRET);
        assert_eq!(can_be_read, !encrypted, "encrypted: {encrypted}");
    }
}

#[test]
fn one_that_encrypts_and_one_that_does_not_are_told_so() {
    for encrypted in [false, true] {
        let (_server, rendezvous) = server(Settings { silence: SILENCE, encrypted, ..Settings::default() });
        let other = Rendezvous { encrypted: !encrypted, ..rendezvous };
        let (error, _) = bootstrap_error(Store::connect(&other, 0, 1, PATIENCE));
        assert!(error.contains("PHALANX_STORE_TLS"), "{error}");
    }
}

/// Has a TLS session of its own with each side, and passes on all that they say.
fn stand_between(client: TcpStream, to: &str) -> std::io::Result<()> {
    let mut sides = [client, TcpStream::connect(to)?];
    // The greetings are in the clear.
    for (from, to) in [(0, 1), (1, 0)] {
        let mut greeting = [0; Greeting::LEN];
        sides[from].read_exact(&mut greeting)?;
        sides[to].write_all(&greeting)?;
    }
    let mut ends = [Cipher::server(&Identity::new()?)?, Cipher::client()?];
    let mut wires = [Vec::new(), Vec::new()];
    ends[1].flush(&mut wires[1])?;
    sides.iter().try_for_each(|side| side.set_read_timeout(Some(Duration::from_millis(10))))?;
    loop {
        for (from, to) in [(0, 1), (1, 0)] {
            let (mut bytes, mut said) = ([0; 4096], Vec::new());
            match sides[from].read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(n) => ends[from].open(&bytes[..n], &mut said, &mut wires[from])?,
                Err(_) => {}
            }
            ends[to].seal(&said, &mut wires[to])?;
            for (side, wire) in sides.iter_mut().zip(&mut wires) {
                side.write_all(wire)?;
                wire.clear();
            }
        }
    }
}

#[test]
fn somebody_in_the_middle_is_seen_through() {
    let (_server, rendezvous) = encrypted_server();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let middle = through(listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let _ = stand_between(client.unwrap(), &rendezvous.address);
        }
    });
    // The store cannot open what was sealed for another session, and says nothing.
    let (error, _) = bootstrap_error(Store::connect(&middle, 0, 1, PATIENCE));
    assert!(error.contains("ends the connection without a welcome"), "{error}");
}

#[test]
fn garbage_instead_of_a_handshake_harms_nobody() {
    let (_server, rendezvous) = encrypted_server();
    let stores: Vec<_> = (0..2).map(|rank| connect(&rendezvous, rank, 2)).collect();
    let mut stranger = TcpStream::connect(&rendezvous.address).unwrap();
    let greeting = Greeting {
        side: phalanx::internal::store::protocol::Side::Client,
        version: phalanx::internal::store::protocol::VERSION,
        encrypted: true,
        nonce: [3; 32],
    };
    stranger.write_all(&greeting.encode()).unwrap();
    stranger.write_all(&[0x55; 10_000]).unwrap();
    let mut all = Vec::new();
    let _ = stranger.read_to_end(&mut all);
    assert!(all.len() < 200, "cut off: {} bytes", all.len());
    let values = for_each(&stores, |_, store| store.exchange("still", b"here", PATIENCE).unwrap());
    eventually("they work", || values.iter().all(|value| value.len() == 2));
}
