//! Addresses of stores: reading them, listening at them, and telling which can never work.

use crate::types::error::Error;
use crate::watch::Reminder;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long a port may be taken: an earlier job's store may still be closing.
const PORT_PATIENCE: Duration = Duration::from_secs(5);
/// Between two attempts to listen.
const PAUSE: Duration = Duration::from_millis(50);

/// What to do about an address that cannot work.
pub(super) const REMEDY: &str = "give the store an address of the host that has it, as the others reach it, with a free port (host:port, in \
                                 PHALANX_STORE or `phalanx launch --store`)";

/// Why no store is at an address, or can be.
#[derive(Debug)]
pub(crate) enum AddressError {
    /// It cannot work, whatever happens elsewhere.
    Hopeless(String),
    /// Its name has no address, as far as the resolver knows now.
    Unresolved(io::Error),
    /// Another program has the port.
    Taken,
}

impl AddressError {
    /// The error of a store, or its client, for this address.
    pub fn into_error(self, address: &str) -> Error {
        let problem = match self {
            AddressError::Hopeless(why) => format!("the store's address {address:?} cannot work: {why}"),
            AddressError::Unresolved(e) => {
                format!("the store's address {address:?} cannot work: the name has no address ({e})")
            }
            AddressError::Taken => format!("the store's address {address} is taken by another program"),
        };
        Error::bootstrap(problem, REMEDY)
    }
}

/// Checks that an address has a host and a port at which others could find a store.
pub(crate) fn check(address: &str) -> Result<(), AddressError> {
    let hopeless = |why: &str| Err(AddressError::Hopeless(why.to_owned()));
    let Some((host, port)) = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()) else {
        return hopeless("it is not of the form host:port");
    };
    match port.parse::<u16>() {
        Err(_) => hopeless("it is not of the form host:port"),
        Ok(0) => hopeless("nobody finds a store by port 0"),
        Ok(_) => host.trim_matches(['[', ']']).parse().map_or(Ok(()), check_ip),
    }
}

fn check_ip(ip: IpAddr) -> Result<(), AddressError> {
    let why = match ip {
        ip if ip.is_multicast() => "it is a multicast address",
        IpAddr::V4(ip) if ip.is_broadcast() => "it is the broadcast address",
        _ => return Ok(()),
    };
    Err(AddressError::Hopeless(why.to_owned()))
}

/// The addresses of a name, without those that no store can have.
pub(super) fn resolve(address: &str) -> Result<Vec<SocketAddr>, AddressError> {
    let found = address.to_socket_addrs().map_err(|e| match e.kind() {
        ErrorKind::InvalidInput => AddressError::Hopeless("it is not of the form host:port".to_owned()),
        _ => AddressError::Unresolved(e),
    })?;
    let mut addresses: Vec<SocketAddr> = Vec::new();
    let mut refused = AddressError::Unresolved(ErrorKind::NotFound.into());
    for address in found {
        match check_ip(address.ip()) {
            Ok(()) if !addresses.contains(&address) => addresses.push(address),
            Ok(()) => {}
            Err(why) => refused = why,
        }
    }
    if addresses.is_empty() { Err(refused) } else { Ok(addresses) }
}

/// The sockets on which a store listens: one for each address of its name, all with one port.
pub(crate) struct Listeners(Vec<TcpListener>);

impl Listeners {
    /// Listens on all addresses that a name has on this host. Port 0 takes a free port.
    pub fn bind(address: &str) -> Result<Listeners, AddressError> {
        Listeners::bind_all(&resolve(address)?)
    }

    /// Listens as soon as the name has an address on this host and the port is free, before the deadline. A port may be taken for
    /// [`PORT_PATIENCE`]; a name server may get to know a host only after it has started.
    pub fn bind_by(address: &str, deadline: Instant) -> Result<Listeners, AddressError> {
        let started = Instant::now();
        let mut reminder = Reminder::start(started);
        loop {
            let error = match Listeners::bind(address) {
                Ok(listeners) => return Ok(listeners),
                Err(error) => error,
            };
            let now = Instant::now();
            let may_change = match &error {
                AddressError::Hopeless(_) => false,
                AddressError::Unresolved(_) => true,
                AddressError::Taken => now < started + PORT_PATIENCE,
            };
            if !may_change || now >= deadline {
                return Err(error);
            }
            if let (AddressError::Unresolved(e), Some(waited)) = (&error, reminder.due(now)) {
                crate::os::log::say(format_args!(
                    "for {waited:.0?} the store's name in {address:?} has had no address ({e}); it is looked up again"
                ));
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn bind_all(addresses: &[SocketAddr]) -> Result<Listeners, AddressError> {
        // A port that is free on one address may be taken on another.
        const ATTEMPTS: usize = 16;
        for _ in 1..ATTEMPTS {
            match Listeners::bind_once(addresses) {
                Err(AddressError::Taken) if addresses[0].port() == 0 => {}
                outcome => return outcome,
            }
        }
        Listeners::bind_once(addresses)
    }

    fn bind_once(addresses: &[SocketAddr]) -> Result<Listeners, AddressError> {
        let mut listeners: Vec<TcpListener> = Vec::new();
        let mut elsewhere = Vec::new();
        for address in addresses {
            let mut address = *address;
            if let (0, Some(first)) = (address.port(), listeners.first()) {
                let bound = first.local_addr().map_err(|e| AddressError::Hopeless(e.to_string()))?;
                address.set_port(bound.port());
            }
            let bound = TcpListener::bind(address);
            match bound.and_then(|listener| crate::os::queue_more(&listener).map(|()| listener)) {
                Ok(listener) => listeners.push(listener),
                Err(e) if e.kind() == ErrorKind::AddrInUse => return Err(AddressError::Taken),
                Err(e) if e.kind() == ErrorKind::AddrNotAvailable || crate::os::lacks_family(&e) => {
                    elsewhere.push(format!("{} is none of this host's", address.ip()));
                }
                Err(e) => {
                    return Err(AddressError::Hopeless(format!("the store cannot listen on {address}: {e}")));
                }
            }
        }
        if listeners.is_empty() {
            Err(AddressError::Hopeless(elsewhere.join(", ")))
        } else {
            Ok(Listeners(listeners))
        }
    }

    /// The first address.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.0[0].local_addr()
    }

    /// The sockets, whose calls do not wait.
    pub fn into_nonblocking(self) -> io::Result<Vec<TcpListener>> {
        self.0.iter().try_for_each(|listener| listener.set_nonblocking(true))?;
        Ok(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn addresses_that_can_never_work_are_told() {
        for (address, says) in [
            ("alpha", "host:port"),
            (":5", "host:port"),
            ("alpha:", "host:port"),
            ("alpha:65536", "host:port"),
            ("alpha:0", "port 0"),
            ("224.0.0.1:5", "multicast"),
            ("[ff02::1]:5", "multicast"),
            ("255.255.255.255:5", "broadcast"),
        ] {
            let error = check(address).unwrap_err().into_error(address).to_string();
            assert!(error.contains(says) && error.contains(address), "{address}: {error}");
        }
        for address in ["alpha:5", "127.0.0.1:29400", "[fe80::1]:5", "0.0.0.0:5"] {
            assert!(check(address).is_ok(), "{address}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_name_with_several_addresses_is_listened_to_on_all() {
        let addresses = ["127.0.0.1:0", "192.0.2.1:0", "127.0.0.2:0"].map(|address| address.parse().unwrap());
        let listeners = Listeners::bind_all(&addresses).unwrap();
        let port = listeners.address().unwrap().port();
        for host in ["127.0.0.1", "127.0.0.2"] {
            TcpStream::connect((host, port)).unwrap();
        }
        let taken = [format!("127.0.0.3:{port}"), format!("127.0.0.2:{port}")]
            .map(|address| address.parse().unwrap());
        assert!(matches!(Listeners::bind_all(&taken), Err(AddressError::Taken)));
    }
}
