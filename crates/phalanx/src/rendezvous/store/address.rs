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
    match host_and_port(address)? {
        (_, 0) => Err(AddressError::Hopeless("nobody finds a store by port 0".to_owned())),
        (host, _) => literal_ip(host).map_or(Ok(()), check_ip),
    }
}

/// The address that a host is, if it is not a name.
pub(super) fn literal_ip(host: &str) -> Option<IpAddr> {
    let (ip, _zone) = host.split_once('%').unwrap_or((host, ""));
    ip.parse().ok()
}

/// The two parts of an address. Brackets may be around an IPv6 address, also with a zone, for which the standard library
/// knows numbers only.
pub(crate) fn host_and_port(address: &str) -> Result<(&str, u16), AddressError> {
    let in_host = |c: char| c.is_alphanumeric() || ".-_:%".contains(c);
    let parts = || {
        let (host, port) = address.rsplit_once(':')?;
        let host = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']')?,
            None => host,
        };
        let is_host = !host.is_empty() && host.chars().all(in_host);
        port.parse().ok().filter(|_| is_host).map(|port| (host, port))
    };
    parts().ok_or_else(|| AddressError::Hopeless("it is not of the form host:port".to_owned()))
}

/// What the resolver knows of an address.
pub(super) fn look_up(address: &str) -> Result<impl Iterator<Item = SocketAddr>, AddressError> {
    host_and_port(address)?.to_socket_addrs().map_err(AddressError::Unresolved)
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
pub(crate) fn resolve(address: &str) -> Result<Vec<SocketAddr>, AddressError> {
    let mut addresses: Vec<SocketAddr> = Vec::new();
    let mut refused = AddressError::Unresolved(ErrorKind::NotFound.into());
    for address in look_up(address)? {
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
            ("alpha:5 ", "host:port"),
            ("http://alpha:5", "host:port"),
            ("alpha beta:5", "host:port"),
            ("[fe80::1:5", "host:port"),
            ("[]:5", "host:port"),
            ("alpha:0", "port 0"),
            ("224.0.0.1:5", "multicast"),
            ("[ff02::1]:5", "multicast"),
            ("[ff02::1%lo]:5", "multicast"),
            ("255.255.255.255:5", "broadcast"),
        ] {
            let error = check(address).unwrap_err().into_error(address).to_string();
            assert!(error.contains(says) && error.contains(address), "{address}: {error}");
        }
        for address in ["alpha:5", "127.0.0.1:29400", "[fe80::1]:5", "[fe80::1%lo]:5", "0.0.0.0:5"] {
            assert!(check(address).is_ok(), "{address}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_zone_may_stand_in_brackets() {
        for address in ["fe80::1%lo:5", "[fe80::1%lo]:5", "[fe80::1%1]:5"] {
            let found = resolve(address).unwrap();
            assert!(
                matches!(found[..], [SocketAddr::V6(it)] if it.scope_id() == 1 && it.port() == 5),
                "{address}: {found:?}"
            );
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
