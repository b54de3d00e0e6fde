//! Messages between ranks, which are threads of one process or of several: the same way for all.
//!
//! Each process listens at an abstract Unix socket. Whoever has something for a rank of it connects once and sends
//! messages; a thread for each connection puts what arrives into the ranks' mailboxes. Sending never waits. Ranks meet
//! ([`rendezvous`]) at the process that made their unique id, which is in no one's way afterwards.

pub mod mailbox;
pub mod message;
pub mod rendezvous;

use crate::lock;
use crate::random::mix;
use crate::violation::violation;
use mailbox::Mailbox;
use message::{Message, Tag};
use std::collections::{HashMap, HashSet};
use std::io::{BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

/// Where a process listens: the name of its socket.
pub type Address = String;

/// A rank of a communicator: the communicator's number, which all its ranks know, and the rank.
pub type Place = (u64, u32);

struct Endpoint {
    address: Address,
    links: Mutex<HashMap<Address, Sender<Item>>>,
    boxes: Mutex<HashMap<Place, Arc<Mailbox>>>,
    /// Communicators that ended here: what still arrives for them is dropped.
    ended: Mutex<HashSet<Place>>,
    gone: Mutex<HashSet<Address>>,
}

/// What the thread of a connection does next.
enum Item {
    Send(Message),
    /// Answers when everything before it has been written.
    Flush(Sender<()>),
}

/// A number that no other process and no other call gets.
pub fn unique() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    mix(mix(time.as_nanos() as u64) ^ mix(u64::from(std::process::id())) ^ mix(count).rotate_left(32))
}

fn endpoint() -> &'static Endpoint {
    static ENDPOINT: OnceLock<Endpoint> = OnceLock::new();
    ENDPOINT.get_or_init(|| {
        let address = format!("emulated-nccl-{}-{:016x}", std::process::id(), unique());
        let listening =
            SocketAddr::from_abstract_name(&address).and_then(|name| UnixListener::bind_addr(&name));
        let listener =
            listening.unwrap_or_else(|error| violation("transport", format!("cannot listen: {error}")));
        std::thread::spawn(move || {
            listener.incoming().flatten().for_each(|stream| {
                std::thread::spawn(move || receive(stream));
            })
        });
        Endpoint {
            address,
            links: Mutex::default(),
            boxes: Mutex::default(),
            ended: Mutex::default(),
            gone: Mutex::default(),
        }
    })
}

/// Where this process listens.
pub fn address() -> &'static Address {
    &endpoint().address
}

/// Sends a message to a process, later.
pub fn send(to: &Address, message: Message) {
    let mut links = lock(&endpoint().links);
    let link = links.entry(to.clone()).or_insert_with(|| connect(to.clone()));
    // If its thread is gone, so is the process that it wrote to.
    let _ = link.send(Item::Send(message));
}

/// Waits until everything for a process has been written, so that it arrives even if this process ends.
pub fn flush(to: &Address) {
    let (sender, written) = mpsc::channel();
    if let Some(link) = lock(&endpoint().links).get(to) {
        // As above.
        let _ = link.send(Item::Flush(sender));
    }
    // An error is an answer, too: there is nobody left to write to.
    let _ = written.recv();
}

fn connect(to: Address) -> Sender<Item> {
    let (sender, items) = mpsc::channel();
    std::thread::spawn(move || {
        let work = || -> std::io::Result<()> {
            let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&to)?)?;
            message::write_text(&mut stream, address())?;
            for item in items {
                match item {
                    Item::Send(message) => stream.write_all(&message.encode())?,
                    // Who asked may have gone.
                    Item::Flush(written) => drop(written.send(())),
                }
            }
            Ok(())
        };
        if work().is_err() {
            lost(&to);
        }
    });
    sender
}

fn receive(stream: UnixStream) {
    let mut stream = BufReader::new(stream);
    let Ok(from) = message::read_text(&mut stream) else { return };
    while let Ok(message) = Message::read(&mut stream) {
        deliver(message);
    }
    // Whatever the reason, this process will hear nothing more from there.
    let _ = stream.read(&mut [0]);
    lost(&from);
}

fn deliver(message: Message) {
    if message.tag == Tag::Hello {
        return rendezvous::arrive(message);
    }
    if let Some(mailbox) = mailbox((message.communicator, message.to)) {
        mailbox.put(message);
    }
}

/// The mailbox of a rank in this process; none if its communicator has ended.
pub fn mailbox(place: Place) -> Option<Arc<Mailbox>> {
    if lock(&endpoint().ended).contains(&place) {
        return None;
    }
    Some(Arc::clone(lock(&endpoint().boxes).entry(place).or_default()))
}

/// Ends a rank's mailbox.
pub fn end(place: Place) {
    lock(&endpoint().ended).insert(place);
    lock(&endpoint().boxes).remove(&place);
}

/// Whether a process has ended, as far as this one knows.
pub fn is_gone(address: &Address) -> bool {
    lock(&endpoint().gone).contains(address)
}

fn lost(address: &Address) {
    if !lock(&endpoint().gone).insert(address.clone()) {
        return;
    }
    super::communicator::peer_process_ended(address);
    wake();
}

/// Lets everyone who waits at a mailbox look whether to stop.
pub fn wake() {
    let boxes: Vec<Arc<Mailbox>> = lock(&endpoint().boxes).values().cloned().collect();
    boxes.iter().for_each(|mailbox| mailbox.wake());
}
