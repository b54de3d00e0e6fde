//! This process's socket, its connections to other processes, and the mailboxes of its ranks.

use super::mailbox::Mailbox;
use super::message::{self, Address, Message, Tag};
use super::root;
use crate::base::lock::lock;
use crate::base::random::mix;
use crate::base::violation::violation;
use std::collections::{HashMap, HashSet};
use std::io::{BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

/// A rank of a communicator: the communicator's number, which is the same on all ranks, and the rank.
pub type Place = (u64, u32);

struct Endpoint {
    address: Address,
    links: Mutex<HashMap<Address, Sender<Item>>>,
    mailboxes: Mutex<HashMap<Place, Arc<Mailbox>>>,
    /// Ranks whose communicators ended here: messages for them are dropped.
    ended: Mutex<HashSet<Place>>,
    /// Processes that have ended, as far as this one knows.
    gone: Mutex<HashSet<Address>>,
    on_loss: OnceLock<fn(&Address)>,
}

/// An instruction for the thread of a connection.
enum Item {
    Send(Message),
    /// Acknowledge when everything before it has been written.
    Flush(Sender<()>),
}

/// A number that is unique among all processes and calls.
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
            mailboxes: Mutex::default(),
            ended: Mutex::default(),
            gone: Mutex::default(),
            on_loss: OnceLock::new(),
        }
    })
}

/// Where this process listens.
pub fn address() -> &'static Address {
    &endpoint().address
}

/// Sends a message to a process in the background.
pub fn send(to: &Address, message: Message) {
    let mut links = lock(&endpoint().links);
    let link = links.entry(to.clone()).or_insert_with(|| connect(to.clone()));
    // Without the connection's thread the process is gone, and the message with it.
    let _ = link.send(Item::Send(message));
}

/// Waits until everything for a process has been written, so that it arrives also if this process ends.
pub fn flush(to: &Address) {
    let (sender, written) = mpsc::channel();
    if let Some(link) = lock(&endpoint().links).get(to) {
        // As in `send`.
        let _ = link.send(Item::Flush(sender));
    }
    // An error means that the process is gone.
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
                    // The caller may have given up.
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
    // The connection has ended or is broken: no more messages will come.
    let _ = stream.read(&mut [0]);
    lost(&from);
}

fn deliver(message: Message) {
    if message.tag == Tag::Hello {
        return root::arrive(message).into_iter().for_each(|(to, answer)| send(&to, answer));
    }
    if let Some(mailbox) = mailbox((message.communicator, message.to)) {
        mailbox.put(message);
    }
}

/// The mailbox of a rank of this process; `None` if its communicator has ended.
pub fn mailbox(place: Place) -> Option<Arc<Mailbox>> {
    if lock(&endpoint().ended).contains(&place) {
        return None;
    }
    Some(Arc::clone(lock(&endpoint().mailboxes).entry(place).or_default()))
}

/// Removes a rank's mailbox.
pub fn end(place: Place) {
    lock(&endpoint().ended).insert(place);
    lock(&endpoint().mailboxes).remove(&place);
}

/// Whether a process has ended, as far as this one knows.
pub fn is_gone(address: &Address) -> bool {
    lock(&endpoint().gone).contains(address)
}

/// Sets the function to call when a process has ended.
pub fn set_on_loss(on_loss: fn(&Address)) {
    endpoint().on_loss.get_or_init(|| on_loss);
}

fn lost(address: &Address) {
    if !lock(&endpoint().gone).insert(address.clone()) {
        return;
    }
    endpoint().on_loss.get().into_iter().for_each(|on_loss| on_loss(address));
    wake();
}

/// Wakes all waits at mailboxes, which check whether to stop.
pub fn wake() {
    let mailboxes: Vec<Arc<Mailbox>> = lock(&endpoint().mailboxes).values().cloned().collect();
    mailboxes.iter().for_each(|mailbox| mailbox.wake());
}
