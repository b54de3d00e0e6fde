//! Steps of Slurm on several hosts, without an MPI and without a token: rank 0 makes one, and hands it to the others at a *meeting point*, a
//! port of its host. MUNGE seals it for processes of this user, so that the port may answer anybody.

use super::job_store::{host, settings};
use crate::rendezvous::environment::{Environment, Place, setting};
use crate::rendezvous::munge;
use crate::rendezvous::store::address::{Listeners, host_and_port, resolve};
use crate::rendezvous::store::{Host, Store, Token};
use crate::types::error::{Error, Result};
use crate::watch::Reminder;
use crate::watch::deadline::after;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The ports of stores that nobody chose: below those that kernels give to clients. The next one is the meeting point's.
const FIRST_PORT: u16 = 16384;
const PORTS: u64 = 16382;

/// Between two looks of the meeting point, or two attempts to reach it.
const PAUSE: Duration = Duration::from_millis(20);
/// The longest that one answer may take.
const ANSWER: Duration = Duration::from_secs(5);

/// Whether the ranks of a step get their token here.
pub(super) fn applies(environment: &Environment, place: &Place) -> Result<bool> {
    let needs_token = place.launcher == "Slurm" && !place.one_host;
    Ok(needs_token && environment.token_if_set()?.is_none() && munge::is_there())
}

/// Joins the store of the step. Rank 0 hosts it.
pub(super) fn open_store(
    environment: &Environment,
    place: &Place,
    silence: Duration,
    timeout: Duration,
) -> Result<Store> {
    let deadline = after(Instant::now(), timeout);
    let left = || deadline.saturating_duration_since(Instant::now());
    let address = match environment.get("PHALANX_STORE") {
        Some(address) => address.to_owned(),
        None => address_of(environment, place)?,
    };
    let (name, port) = host_and_port(&address).map_err(|error| error.into_error(&address))?;
    let next = port.checked_add(1).ok_or_else(|| setting("PHALANX_STORE", &address, "a port below 65535"))?;
    let meeting_point =
        if name.contains(':') { format!("[{name}]:{next}") } else { format!("{name}:{next}") };
    if place.rank > 0 {
        let token = ask(&meeting_point, &place.known_as, deadline)?;
        let rendezvous = environment.rendezvous_at(place, address, Host::Rank(0), token)?;
        let store = Store::connect(&rendezvous, place.rank, place.world_size, left())?;
        store.exchange(MET, &[], left())?;
        return Ok(store);
    }
    let token =
        Token::random().map_err(|e| Error::system("getrandom", e, "the store needs a random token"))?;
    let rendezvous = environment.rendezvous_at(place, address, Host::Rank(0), token.clone())?;
    let server = host(&rendezvous, settings(place, silence), None, left())?;
    let _meeting_point =
        MeetingPoint::open(&meeting_point, format!("{}\n{}", place.known_as, token.reveal()))?;
    let store = Store::connect(&rendezvous, 0, place.world_size, left())?.hosting(server);
    // Until all have the token.
    store.exchange(MET, &[], left())?;
    Ok(store)
}

/// The exchange after which all ranks have the token.
const MET: &str = "phalanx/met";

/// An address that follows from the step: a port of the first host, on which rank 0 is.
fn address_of(environment: &Environment, place: &Place) -> Result<String> {
    let hosts = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"].map(|name| environment.get(name));
    let first = hosts.into_iter().flatten().next().and_then(first_host);
    let is_elsewhere = place.rank == 0 && environment.get("SLURM_NODEID").is_some_and(|node| node != "0");
    let Some(first) = first.filter(|_| !is_elsewhere) else {
        return Err(Error::bootstrap(
            "the first host of this step is not that of rank 0, or SLURM_STEP_NODELIST does not name it",
            "export PHALANX_STORE=HOST:PORT before srun, with rank 0's host and a free port, of which the next one is free, too",
        ));
    };
    // FNV-1a: the same on all ranks, and seldom that of another step.
    let hash = place
        .known_as
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let port = u64::from(FIRST_PORT) + hash % (PORTS / 2) * 2;
    Ok(format!("{first}:{port}"))
}

/// The first of Slurm's list of hosts: `n[08-11,20]-ib,m1` begins with `n08-ib`.
fn first_host(list: &str) -> Option<String> {
    let (mut name, mut rest) = (String::new(), list);
    while let Some(at) = rest.find(['[', ',']) {
        name.push_str(&rest[..at]);
        if rest[at..].starts_with(',') {
            return Some(name);
        }
        let (numbers, behind) = rest[at + 1..].split_once(']')?;
        name.push_str(numbers.split(['-', ',']).next()?);
        rest = behind;
    }
    name.push_str(rest);
    Some(name).filter(|name| !name.is_empty())
}

/// Answers each connection with the secret, sealed, until it is dropped.
struct MeetingPoint {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MeetingPoint {
    fn open(address: &str, secret: String) -> Result<MeetingPoint> {
        let refused = |e| {
            Error::system("opening the meeting point of a Slurm step", e, "see `ulimit -n` and `ulimit -u`")
        };
        let listeners = Listeners::bind(address).map_err(|error| error.into_error(address))?;
        let listeners = listeners.into_nonblocking().map_err(refused)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let answer = move || {
            while !stopped.load(Ordering::Relaxed) {
                let is_idle = !listeners.iter().any(|listener| answer_one(listener, &secret));
                if is_idle {
                    std::thread::sleep(PAUSE);
                }
            }
        };
        let thread =
            std::thread::Builder::new().name("phalanx-meeting".into()).spawn(answer).map_err(refused)?;
        Ok(MeetingPoint { stop, thread: Some(thread) })
    }
}

/// Answers a connection, if there is one.
fn answer_one(listener: &TcpListener, secret: &str) -> bool {
    let Ok((mut stream, peer)) = listener.accept() else { return false };
    let answered = munge::seal(secret).map_err(io::Error::other).and_then(|credential| {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(ANSWER))?;
        stream.write_all(&credential)
    });
    if let Err(error) = answered {
        crate::os::log::warn!("{peer} gets no token: {error}");
    }
    true
}

impl Drop for MeetingPoint {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Asks at a meeting point for the token of a job, until the deadline.
fn ask(address: &str, job: &str, deadline: Instant) -> Result<Token> {
    let mut reminder = Reminder::start(Instant::now());
    loop {
        let error = match receive(address, deadline) {
            Ok(credential) => {
                let secret = munge::open(&credential)?;
                let token = secret.split_once('\n').filter(|(other, _)| *other == job);
                return token.and_then(|(_, token)| Token::new(token)).ok_or_else(|| {
                    Error::bootstrap(
                        format!("at {address} another job of this user hands out its token"),
                        "export PHALANX_STORE=HOST:PORT before srun, with rank 0's host and another port",
                    )
                });
            }
            Err(error) => error,
        };
        let now = Instant::now();
        if now >= deadline {
            return Err(Error::bootstrap(
                format!("rank 0 hands out no token at {address} ({error})"),
                "see rank 0's own output, and that no firewall is in between",
            ));
        }
        if reminder.due(now).is_some() {
            crate::os::log::say(format_args!("waiting for rank 0 at {address}: {error}"));
        }
        std::thread::sleep(PAUSE);
    }
}

fn receive(address: &str, deadline: Instant) -> io::Result<Vec<u8>> {
    let addresses = resolve(address).map_err(|error| io::Error::other(error.into_error(address)))?;
    let mut error = io::ErrorKind::NotFound.into();
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now()).clamp(PAUSE, ANSWER);
        let answer = TcpStream::connect_timeout(&address, left).and_then(|stream| {
            stream.set_read_timeout(Some(ANSWER))?;
            let mut answer = Vec::new();
            stream.take(munge::LONGEST as u64).read_to_end(&mut answer)?;
            Ok(answer)
        });
        match answer {
            Ok(answer) if !answer.is_empty() => return Ok(answer),
            Ok(_) => error = io::ErrorKind::UnexpectedEof.into(),
            Err(e) => error = e,
        }
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_slurms_lists() {
        for (list, first) in [
            ("h0", "h0"),
            ("h0,h1", "h0"),
            ("h[0-2]", "h0"),
            ("n[08-11,20]-ib,m1", "n08-ib"),
            ("r[1-2]n[3,5].cluster", "r1n3.cluster"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        assert_eq!(first_host(""), None);
        assert_eq!(first_host("h[0-2"), None);
    }

    #[test]
    fn a_steps_address_is_the_same_on_all_its_ranks() {
        let place = |rank| Place {
            launcher: "Slurm",
            rank,
            world_size: 2,
            job: "job".into(),
            meeting: "job".into(),
            known_as: "12.0".into(),
            one_host: false,
        };
        let of = |rank, node| {
            let variables = [("SLURM_STEP_NODELIST", "h[3-4]"), ("SLURM_NODEID", node)];
            address_of(&Environment::of(&variables), &place(rank))
        };
        let address = of(0, "0").unwrap();
        assert_eq!(address, of(1, "1").unwrap());
        let (host, port) = host_and_port(&address).unwrap();
        assert!(host == "h3" && (FIRST_PORT..32767).contains(&port), "{address}");
        assert!(of(0, "1").unwrap_err().to_string().contains("PHALANX_STORE=HOST:PORT"));
    }
}
