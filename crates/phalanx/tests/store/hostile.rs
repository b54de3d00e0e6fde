//! Strangers, and those who would like to be ranks.

use super::proxy::Proxy;
use super::{PATIENCE, at, bootstrap_error, connect, eventually, for_each, server};
use phalanx::internal::store::protocol::{Greeting, MAX_JOIN, MAX_REQUEST, Side, VERSION};
use phalanx::internal::store::{Rendezvous, Settings, Store, Token};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long strangers may take, where a test waits for that.
const SHORT: Duration = Duration::from_millis(500);

/// Two ranks that are at work, and must not be disturbed.
fn at_work(auth_timeout: Duration) -> (phalanx::internal::store::Server, Rendezvous, Vec<Store>) {
    let (server, rendezvous) = server(Settings { auth_timeout, ..Settings::default() });
    let stores = (0..2).map(|rank| connect(&rendezvous, rank, 2)).collect();
    (server, rendezvous, stores)
}

fn they_work(stores: &[Store]) {
    let all = for_each(stores, |rank, store| store.exchange("work", &[rank as u8], PATIENCE).unwrap());
    assert!(all.iter().all(|values| *values == [[0], [1]]));
    assert!(stores.iter().all(|store| store.lost().is_empty()));
}

/// Waits until the other side has closed the connection, and answers what it has sent before.
fn until_closed(stream: &mut TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
        Err(e) => panic!("it was not closed: {e}"),
    }
    bytes
}

fn greeting() -> [u8; Greeting::LEN] {
    Greeting { side: Side::Client, version: VERSION, encrypted: false, nonce: [7; 32] }.encode()
}

#[test]
fn another_token_is_not_let_in() {
    let (_server, mut rendezvous, stores) = at_work(SHORT);
    rendezvous.token = Token::new("another token of these tests").unwrap();
    let (error, _) = bootstrap_error(Store::connect(&rendezvous, 0, 2, PATIENCE));
    assert!(error.contains("another token") && error.contains("PHALANX_TOKEN"), "{error}");
    they_work(&stores);
}

#[test]
fn a_recorded_session_cannot_be_played_again() {
    let (_server, rendezvous) = server(Settings::default());
    let proxy = Proxy::to(&rendezvous.address);
    let store = connect(&at(proxy.address.to_string()), 0, 1);
    assert_eq!(store.add("count", 1, PATIENCE).unwrap(), 1);
    drop(store);

    let mut replay = TcpStream::connect(&rendezvous.address).unwrap();
    replay.write_all(&proxy.tape()).unwrap();
    // A greeting of its own, and nothing that would tell whether the recording was good.
    assert_eq!(until_closed(&mut replay).len(), Greeting::LEN);
}

#[test]
fn a_frame_that_was_changed_on_the_way_cuts_the_rank_off() {
    let (_server, rendezvous) = server(Settings::default());
    let proxy = Proxy::to(&rendezvous.address);
    let far = connect(&at(proxy.address.to_string()), 0, 2);
    let near = connect(&rendezvous, 1, 2);
    proxy.tamper();
    let (error, missing) = bootstrap_error(far.add("count", 1, PATIENCE));
    assert!(error.contains("is lost"), "{error}");
    assert_eq!(missing, [0]);
    eventually("the other rank knows", || near.lost().iter().any(|lost| lost.rank == 0));
    assert!(near.lost()[0].why.contains("it sent what no rank sends"), "{:?}", near.lost());
}

#[test]
fn an_impostor_that_does_not_know_the_token_is_seen_through() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rendezvous = at(listener.local_addr().unwrap().to_string());
    let impostor = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.read_exact(&mut [0; Greeting::LEN]).unwrap();
        let ours = Greeting { side: Side::Server, version: VERSION, encrypted: false, nonce: [1; 32] };
        stream.write_all(&ours.encode()).unwrap();
        // A welcome without a key.
        stream.write_all(&[[2, 0, 0, 0].as_slice(), &[0, 200], &[0; 32]].concat()).unwrap();
        std::thread::sleep(Duration::from_millis(200));
    });
    let (error, _) = bootstrap_error(Store::connect(&rendezvous, 0, 1, PATIENCE));
    assert!(error.contains("does not prove that it is this job's store"), "{error}");
    impostor.join().unwrap();
}

#[test]
fn another_version_and_another_program_are_named() {
    for (answer, says) in [
        (
            Greeting { side: Side::Server, version: 99, encrypted: false, nonce: [1; 32] }.encode().to_vec(),
            "version 99",
        ),
        (b"HTTP/1.1 400 Bad Request\r\nServer: some web server\r\n\r\n".to_vec(), "no store of phalanx"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let rendezvous = at(listener.local_addr().unwrap().to_string());
        let other = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            stream.write_all(&answer).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let (error, _) = bootstrap_error(Store::connect(&rendezvous, 0, 1, PATIENCE));
        assert!(error.contains(says), "{error}");
        other.join().unwrap();
    }
}

#[test]
fn port_scanners_learn_nothing_and_harm_nobody() {
    let (_server, rendezvous, stores) = at_work(SHORT);
    for _ in 0..200 {
        drop(TcpStream::connect(&rendezvous.address).unwrap());
    }
    let mut silent = TcpStream::connect(&rendezvous.address).unwrap();
    they_work(&stores);
    assert_eq!(until_closed(&mut silent), b"", "the store does not speak first");
    they_work(&stores);
}

#[test]
fn garbage_is_cut_off() {
    let (_server, rendezvous, stores) = at_work(SHORT);
    let wrong_side =
        Greeting { side: Side::Server, version: VERSION, encrypted: false, nonce: [0; 32] }.encode().to_vec();
    for garbage in
        [b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n".to_vec(), vec![0xff; 5000], wrong_side]
    {
        let mut stream = TcpStream::connect(&rendezvous.address).unwrap();
        stream.write_all(&garbage).unwrap();
        assert_eq!(until_closed(&mut stream), b"");
    }
    // After a greeting, too; and who skips the proof is not told what was wrong.
    for garbage in [vec![0; 5000], vec![3, 0, 0, 0, 1, 2, 3]] {
        let mut stream = TcpStream::connect(&rendezvous.address).unwrap();
        stream.write_all(&greeting()).unwrap();
        stream.write_all(&garbage).unwrap();
        assert_eq!(until_closed(&mut stream).len(), Greeting::LEN);
    }
    they_work(&stores);
}

#[test]
fn huge_lengths_are_refused_before_they_come() {
    let (_server, rendezvous, stores) = at_work(PATIENCE);
    for length in [u32::MAX, u32::try_from(MAX_REQUEST).unwrap(), MAX_JOIN as u32 + 1] {
        let mut stream = TcpStream::connect(&rendezvous.address).unwrap();
        stream.write_all(&greeting()).unwrap();
        let started = Instant::now();
        stream.write_all(&length.to_le_bytes()).unwrap();
        assert_eq!(until_closed(&mut stream).len(), Greeting::LEN);
        assert!(started.elapsed() < PATIENCE / 2, "at once, not when its time was up");
    }
    they_work(&stores);
}

#[test]
fn a_slow_client_gets_no_more_time_than_a_silent_one() {
    let (_server, rendezvous, stores) = at_work(SHORT);
    let mut slow = TcpStream::connect(&rendezvous.address).unwrap();
    let started = Instant::now();
    let sent = greeting().into_iter().take_while(|byte| {
        std::thread::sleep(Duration::from_millis(50));
        slow.write_all(&[*byte]).is_ok()
    });
    assert!(sent.count() < Greeting::LEN);
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
    they_work(&stores);
}

#[test]
fn too_many_connections_do_not_keep_a_rank_out() {
    let (_server, rendezvous) = server(Settings { auth_timeout: PATIENCE, ..Settings::default() });
    let mut crowd: Vec<TcpStream> =
        (0..200).map(|_| TcpStream::connect(&rendezvous.address).unwrap()).collect();
    let stores = [connect(&rendezvous, 0, 2), connect(&rendezvous, 1, 2)];
    they_work(&stores);
    // The oldest had to go.
    assert_eq!(until_closed(&mut crowd[0]), b"");
    let newest = crowd.last_mut().unwrap();
    newest.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(newest.read(&mut [0]).is_err_and(|e| e.kind() == ErrorKind::WouldBlock), "it is still served");
}
