//! A wire that can be cut, held up, tapped and tampered with.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Passes one connection on to the store.
pub struct Proxy {
    pub address: SocketAddr,
    wire: Arc<Wire>,
}

#[derive(Default)]
struct Wire {
    /// Bytes from the client are thrown away.
    mute: AtomicBool,
    /// Bytes from the store are thrown away.
    deaf: AtomicBool,
    /// The next byte from the client is changed.
    tamper: AtomicBool,
    /// What the client has sent.
    tape: Mutex<Vec<u8>>,
    ends: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    pub fn to(store: &str) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let wire = Arc::new(Wire::default());
        let (store, of_thread) = (store.to_owned(), wire.clone());
        std::thread::spawn(move || {
            let client = listener.accept().unwrap().0;
            let store = TcpStream::connect(store).unwrap();
            of_thread.ends.lock().unwrap().extend([client.try_clone().unwrap(), store.try_clone().unwrap()]);
            let (from_store, to_client) = (store.try_clone().unwrap(), client.try_clone().unwrap());
            let wire = of_thread.clone();
            std::thread::spawn(move || pass(from_store, to_client, &wire.deaf, |_| ()));
            pass(client, store, &of_thread.mute, |bytes| {
                of_thread.tape.lock().unwrap().extend_from_slice(bytes);
                if of_thread.tamper.swap(false, Ordering::Relaxed) {
                    let last = bytes.len() - 1;
                    bytes[last] ^= 1;
                }
            });
        });
        Proxy { address, wire }
    }

    /// From now on the store hears nothing.
    pub fn mute(&self) {
        self.wire.mute.store(true, Ordering::Relaxed);
    }

    /// From now on the client hears nothing.
    pub fn deafen(&self) {
        self.wire.deaf.store(true, Ordering::Relaxed);
    }

    pub fn tamper(&self) {
        self.wire.tamper.store(true, Ordering::Relaxed);
    }

    /// Both sides see the connection end.
    pub fn close(&self) {
        for end in self.wire.ends.lock().unwrap().iter() {
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    pub fn tape(&self) -> Vec<u8> {
        self.wire.tape.lock().unwrap().clone()
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, swallow: &AtomicBool, mut see: impl FnMut(&mut [u8])) {
    let mut bytes = [0; 4096];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        see(&mut bytes[..n]);
        if !swallow.load(Ordering::Relaxed) && to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
