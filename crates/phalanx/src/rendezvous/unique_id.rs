//! [`UniqueId`]: the address and secret by which ranks find each other without a supported launcher.

use super::store::address::Listeners;
use super::store::server::check_reachable;
use super::store::token::hex;
use crate::os::ForkMark;
use crate::os::sync::lock;
use crate::types::error::{Error, Result, UsageError};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::sync::Mutex;

/// The id of a new communicator: 128 bytes that one rank creates and the program sends to the others, like an
/// `ncclUniqueId`.
///
/// Any channel will do: a broadcast of MPI, a file, a queue.
/// [`Builder::unique_id`](crate::Builder::unique_id) takes the id. An id is for one communicator.
///
/// The bytes are a secret: any process that has them can join as a rank.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::UniqueId;
///
/// let bytes = UniqueId::new()?.to_bytes(); // by rank 0, and to all the others
/// let id = UniqueId::from_bytes(&bytes)?; // by every rank
/// let comm = phalanx::Comm::builder().unique_id(&id, 0, 1).init()?;
/// assert_eq!((comm.rank(), comm.world_size()), (0, 1));
/// # Ok(())
/// # }
/// ```
#[doc(alias("ncclUniqueId", "ncclGetUniqueId"))]
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UniqueId {
    job: [u8; 16],
    token: [u8; 32],
    /// Where rank 0's process listens, for ranks of several hosts.
    address: Option<String>,
}

/// Magic bytes of an id; the last is the version.
const MAGIC: [u8; 8] = *b"phalanx\x01";

/// Listeners of this process's own ids, until rank 0 takes them.
static LISTENERS: Mutex<Vec<Listening>> = Mutex::new(Vec::new());

struct Listening {
    address: String,
    listener: Listeners,
    /// The process that created it: a fork has the descriptor too, and must not answer in rank 0's place.
    fork: ForkMark,
}

impl UniqueId {
    /// Size in bytes, that of `ncclUniqueId`.
    pub const BYTES: usize = 128;

    /// Creates an id for ranks of this host, in any process. Opens no port.
    ///
    /// # Errors
    /// [`Error::System`] if the system gives no random numbers.
    pub fn new() -> Result<UniqueId> {
        let (mut job, mut token) = ([0; 16], [0; 32]);
        getrandom::fill(&mut job).and_then(|()| getrandom::fill(&mut token)).map_err(|error| {
            Error::system("getrandom", std::io::Error::other(error), "a unique id is made of random bytes")
        })?;
        Ok(UniqueId { job, token, address: None })
    }

    /// Creates an id for ranks of several hosts, in the process of rank 0, and listens at once.
    ///
    /// `address` is `host` or `host:port` of this host, as the other ranks reach it; without a port a free
    /// one is taken. Connections that come before rank 0's communicator is made wait. The port is open until
    /// that communicator has ended, could not be made, or needs no port; if rank 0 never uses the id, as long
    /// as the process lives.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if the address is none of this host's, taken, or one that no other host could
    /// reach; [`UsageError::Setting`] if it is too long for the id.
    pub fn listen(address: &str) -> Result<UniqueId> {
        let (host, port) = split(address);
        let wanted = format!("{host}:{port}");
        check_reachable(&wanted)?;
        let listener = Listeners::bind(&wanted).map_err(|e| e.into_error(address))?;
        let bound = listener.address();
        let bound = bound.map_err(|e| Error::system("getsockname", e, "the id tells where it listens"))?;
        if bound.ip().is_unspecified() {
            let problem = format!("no other host could reach this one at {host}");
            return Err(Error::bootstrap(problem, "name the address of this host that the others know"));
        }
        let address = format!("{host}:{}", bound.port());
        let id = UniqueId { address: Some(address.clone()), ..UniqueId::new()? };
        id.encode().ok_or_else(|| {
            let expected = "at most 70 characters with the port, as an id has room for: an IP address".into();
            UsageError::Setting { name: "UniqueId::listen(address)".into(), value: address.clone(), expected }
        })?;
        lock(&LISTENERS).push(Listening { address, listener, fork: ForkMark::of_this_process() });
        Ok(id)
    }

    /// Returns the id as bytes, to send it to the other ranks.
    pub fn to_bytes(&self) -> [u8; UniqueId::BYTES] {
        self.encode().expect("an id that does not fit is not made")
    }

    /// Makes the id from the bytes of [`to_bytes`](UniqueId::to_bytes).
    ///
    /// # Errors
    /// [`UsageError::Setting`] if the bytes are not those of an id.
    pub fn from_bytes(bytes: &[u8; UniqueId::BYTES]) -> Result<UniqueId> {
        let contents = bytes.strip_prefix(&MAGIC);
        let id: Option<UniqueId> = contents.and_then(|contents| postcard::from_bytes(contents).ok());
        id.filter(|id| id.encode().as_ref() == Some(bytes)).ok_or_else(|| {
            let value = format!("{:02x?}…", &bytes[..MAGIC.len()]);
            let expected = format!("the 128 bytes of UniqueId::to_bytes, which begin with {MAGIC:02x?}");
            UsageError::Setting { name: "the unique id".into(), value, expected }.into()
        })
    }

    fn encode(&self) -> Option<[u8; UniqueId::BYTES]> {
        let mut bytes = [0; UniqueId::BYTES];
        let (magic, contents) = bytes.split_at_mut(MAGIC.len());
        magic.copy_from_slice(&MAGIC);
        postcard::to_slice(self, contents).ok()?;
        Some(bytes)
    }

    /// Text that identifies the job: equal on all its ranks, different for every other id.
    pub(crate) fn job(&self) -> String {
        hex(&self.job)
    }

    /// Address and token of the store, if the id is for ranks on several hosts.
    pub(crate) fn store(&self) -> Option<(&str, String)> {
        self.address.as_deref().map(|address| (address, hex(&self.token)))
    }
}

/// The listener of an id that this process created. It is handed out once, since an id is for one
/// communicator, and is closed with that communicator.
pub(crate) fn take_listener(address: &str) -> Result<Listeners> {
    let mut listeners = lock(&LISTENERS);
    listeners.retain(|listening| !listening.fork.is_copy());
    let place = listeners.iter().position(|listening| listening.address == address).ok_or_else(|| {
        let expected = "made by UniqueId::listen in the process of rank 0, for one communicator: this process \
                        does not (or no longer) listen for it";
        let (name, value) = ("the unique id".into(), address.to_owned());
        UsageError::Setting { name, value, expected: expected.into() }
    })?;
    Ok(listeners.swap_remove(place).listener)
}

/// The host and the port of an address; 0 if it has none.
fn split(address: &str) -> (String, u16) {
    if let Ok(IpAddr::V6(address)) = address.parse() {
        return (format!("[{address}]"), 0);
    }
    let with_port = address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let (host, port) = with_port.unwrap_or((address, 0));
    (host.to_owned(), port)
}

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UniqueId").field("address", &self.address).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BackendKind, Comm, ReduceOp};
    use std::net::TcpStream;
    use std::time::{Duration, Instant};

    #[test]
    fn bytes_are_an_id_or_an_error() {
        for id in [UniqueId::new().unwrap(), UniqueId::listen("127.0.0.1").unwrap()] {
            let bytes = id.to_bytes();
            assert!(UniqueId::from_bytes(&bytes).unwrap() == id);
            for (at, other) in [(7, 2), (8 + 16 + 32, 7), (UniqueId::BYTES - 1, 1)] {
                let mut broken = bytes;
                broken[at] = other;
                let error = UniqueId::from_bytes(&broken).unwrap_err().to_string();
                assert!(error.contains("UniqueId::to_bytes"), "{at}: {error}");
            }
        }
        assert!(UniqueId::from_bytes(&[0; UniqueId::BYTES]).is_err());
        assert!(UniqueId::from_bytes(&[0xff; UniqueId::BYTES]).is_err());
        assert!(UniqueId::new().unwrap() != UniqueId::new().unwrap());
    }

    #[test]
    fn an_id_tells_no_secret_when_it_is_shown() {
        let id = UniqueId::new().unwrap();
        let shown = format!("{id:?} {:?}", Comm::builder().unique_id(&id, 0, 1));
        assert!(!shown.contains(&hex(&id.token)), "{shown}");
    }

    #[test]
    fn addresses_are_those_that_others_can_use() {
        assert_eq!(split("alpha"), ("alpha".into(), 0));
        assert_eq!(split("alpha:5"), ("alpha".into(), 5));
        assert_eq!(split("fe80::1"), ("[fe80::1]".into(), 0));
        assert_eq!(split("[fe80::1]:5"), ("[fe80::1]".into(), 5));
        for (address, what) in
            [("0.0.0.0", "reach"), ("192.0.2.1", "none of this host's"), ("no such host", "address")]
        {
            let error = UniqueId::listen(address).unwrap_err().to_string();
            assert!(error.contains(what), "{address}: {error}");
        }
    }

    #[test]
    fn an_id_of_several_hosts_is_for_one_communicator_of_the_process_that_made_it() {
        let id = UniqueId::listen("127.0.0.1").unwrap();
        let sum_of = |rank: usize| {
            let id = UniqueId::from_bytes(&id.to_bytes()).unwrap();
            let comm = Comm::builder().backend(BackendKind::Host).unique_id(&id, rank, 2).init()?;
            let mut sum = [rank as u64 + 1];
            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map(|()| sum[0])
        };
        let sums = std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| scope.spawn(move || sum_of(rank)));
            ranks.map(|rank| rank.join().unwrap())
        });
        for sum in sums {
            match sum {
                Ok(sum) => assert_eq!(sum, 3),
                // They have met, and cannot share memory.
                Err(error) => {
                    assert!(!cfg!(target_os = "linux") && error.to_string().contains("as threads"), "{error}")
                }
            }
        }
        let again = sum_of(0).unwrap_err().to_string();
        assert!(again.contains("one communicator"), "{again}");
    }

    #[test]
    fn an_id_is_used_up_by_whatever_rank_0_makes_of_it() {
        // One that needs no port, one that fails early, and one that nobody joins.
        for (ranks, builder) in [
            (1, Comm::builder()),
            (0, Comm::builder()),
            (2, Comm::builder().timeout(Duration::from_millis(50))),
        ] {
            let id = UniqueId::listen("127.0.0.1").unwrap();
            let address = id.store().unwrap().0.to_owned();
            let made = builder.clone().unique_id(&id, 0, ranks).init();
            assert_eq!(made.is_ok(), ranks == 1, "{made:?}");
            // A copy of this process that another test makes has the descriptor, too, until it ends.
            let until = Instant::now() + Duration::from_secs(10);
            while TcpStream::connect(&address).is_ok() {
                assert!(Instant::now() < until, "{ranks}: {address} is open");
            }
            let again = builder.unique_id(&id, 0, ranks).init().unwrap_err().to_string();
            assert!(again.contains("one communicator"), "{again}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_copy_of_the_process_does_not_listen() {
        unsafe extern "C" {
            fn fork() -> i32;
            fn waitpid(child: i32, status: *mut i32, options: i32) -> i32;
            fn _exit(status: i32) -> !;
        }
        let id = UniqueId::listen("127.0.0.1").unwrap();
        let address = id.store().unwrap().0;
        // So that the copy does not find it locked by a thread that it has not.
        let listeners = lock(&LISTENERS);
        // SAFETY: the copy asks for what it is refused, and ends.
        let child = unsafe { fork() };
        drop(listeners);
        if child == 0 {
            let is_refused = take_listener(address).is_err();
            // SAFETY: ends the copy at once.
            unsafe { _exit(i32::from(!is_refused)) };
        }
        let mut status = -1;
        // SAFETY: the child is this process's, and the variable takes its status.
        assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(take_listener(address).is_ok());
    }
}
