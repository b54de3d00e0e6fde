//! Finds the job's store and joins it.
//!
//! | started by | the store is in | its address | its token |
//! |---|---|---|---|
//! | `phalanx launch` | the (first) launcher | `PHALANX_STORE` | `PHALANX_TOKEN`, set by the launcher |
//! | torchrun, one host | rank 0 | sent over the Unix socket of `control/join/` | made there, sent with it |
//! | torchrun, several hosts | rank 0 | `MASTER_ADDR` and `MASTER_PORT` + 1000 | `PHALANX_TOKEN` or `PHALANX_TOKEN_FILE`, by the user |
//! | `srun`, several hosts | rank 0 | `PHALANX_STORE`, or one that follows from the step (`slurm.rs`) | by the user, or made there and sealed by MUNGE |
//! | the program, with a `UniqueId` | rank 0 | in the id | in the id |
//! | MPI's, several hosts | rank 0 | no port: MPI carries the bytes | made there, sent over MPI |
//!
//! torchrun's own store has `MASTER_PORT`, and the port after it is a favourite of the next job on the same
//! host. `PHALANX_STORE` names another address for any launcher.

use super::slurm;
use crate::contract::{Backend, Departure};
use crate::control::host_channel::HostChannel;
use crate::rendezvous::environment::{Environment, Place, RESTART_COUNT, setting};
use crate::rendezvous::store::address::{self, Listeners};
use crate::rendezvous::store::cipher::encrypted_from;
use crate::rendezvous::store::{Host, Rendezvous, Server, Settings, Store, Token, server};
use crate::types::error::{Error, Result, UsageError};
use std::time::Duration;

/// Added to torchrun's port.
const PORT_OFFSET: u16 = 1000;

/// Joins the job's store. Rank 0 hosts it, on `listener` if there is one, unless `phalanx launch` does.
pub(crate) fn open_store(
    environment: &Environment,
    place: &Place,
    listener: Option<Listeners>,
    timeout: Duration,
) -> Result<Store> {
    let silence = server::silence_from(environment.get("PHALANX_HEARTBEAT_TIMEOUT"))?;
    if slurm::applies(environment, place)? {
        return slurm::open_store(environment, place, silence, timeout);
    }
    let rendezvous = environment.rendezvous(place)?;
    let encrypted = environment.encrypted()?;
    match rendezvous {
        Some(rendezvous) if rendezvous.host == Host::Rank(0) && place.rank == 0 => {
            let server = host(&rendezvous, settings(place, silence), listener, timeout)?;
            Ok(Store::connect(&rendezvous, 0, place.world_size, timeout)?.hosting(server))
        }
        Some(rendezvous) => Store::connect(&rendezvous, place.rank, place.world_size, timeout),
        None => open_local_store(place, silence, encrypted, timeout),
    }
}

pub(super) fn settings(place: &Place, silence: Duration) -> Settings {
    Settings { ranks: u32::try_from(place.world_size).ok(), silence, ..Settings::default() }
}

pub(super) fn host(
    rendezvous: &Rendezvous,
    settings: Settings,
    listener: Option<Listeners>,
    timeout: Duration,
) -> Result<Server> {
    let settings = Settings {
        ranks_job: Some(rendezvous.job.clone()),
        epoch: rendezvous.epoch,
        encrypted: rendezvous.encrypted,
        ..settings
    };
    match listener {
        Some(listener) => Server::on(listener, rendezvous.token.clone(), settings),
        None => Server::for_hosts(&rendezvous.address, rendezvous.token.clone(), settings, timeout),
    }
}

/// A store for ranks of one host without any setting: rank 0 starts one with a random token, and sends
/// address and token to the others when they join.
fn open_local_store(place: &Place, silence: Duration, encrypted: bool, timeout: Duration) -> Result<Store> {
    let host = super::processes::meet(place, &[], timeout)?.0;
    let mut announcement = vec![0; 128];
    let mut hosted = None;
    if place.rank == 0 {
        let token =
            Token::random().map_err(|e| Error::system("getrandom", e, "the store needs a random token"))?;
        let settings = Settings { encrypted, ..settings(place, silence) };
        let server = Server::start("127.0.0.1:0", token.clone(), settings)?;
        let text = format!("{} {}", server.address(), token.reveal());
        announcement[..text.len()].copy_from_slice(text.as_bytes());
        hosted = Some(server);
    }
    // SAFETY: this thread alone has the channel.
    announcement = unsafe { host.all_gather_bytes(&announcement) }?.swap_remove(0);
    host.depart(Departure::Left);
    let text = String::from_utf8_lossy(&announcement);
    let (address, token) = text.trim_end_matches('\0').split_once(' ').unwrap_or_default();
    let token = Token::new(token)
        .ok_or_else(|| Error::bootstrap("rank 0 could not begin the job's store", "see its own output"))?;
    let rendezvous = Rendezvous {
        address: address.to_owned(),
        token,
        job: String::new(),
        epoch: 0,
        host: Host::Rank(0),
        encrypted,
    };
    let store = Store::connect(&rendezvous, place.rank, place.world_size, timeout)?;
    Ok(match hosted {
        Some(server) => store.hosting(server),
        None => store,
    })
}

impl Environment {
    /// Finds the job's store; `None` if no variable names one and all ranks are on this host.
    pub(crate) fn rendezvous(&self, place: &Place) -> Result<Option<Rendezvous>> {
        let (address, host) = match self.get("PHALANX_STORE") {
            // Variables set by hand say nothing of a launcher's own numbers.
            Some(address)
                if place.launcher == "phalanx launch" && self.get("PHALANX_LOCAL_WORLD_SIZE").is_some() =>
            {
                (address.to_owned(), Host::Launcher)
            }
            Some(address) => (address.to_owned(), Host::Rank(0)),
            None if place.one_host => return Ok(None),
            None if place.launcher == "Slurm" => return Err(self.no_store_in_slurm(place)),
            None => (self.beside_torchruns_store()?, Host::Rank(0)),
        };
        self.rendezvous_at(place, address, host, self.token()?).map(Some)
    }

    /// The job's store at an address, with a token.
    pub(crate) fn rendezvous_at(
        &self,
        place: &Place,
        address: String,
        host: Host,
        token: Token,
    ) -> Result<Rendezvous> {
        address::check(&address).map_err(|error| error.into_error(&address))?;
        let restarts = [RESTART_COUNT, "TORCHELASTIC_RESTART_COUNT"];
        let epoch = match self.number(restarts[0])? {
            Some(epoch) => epoch,
            None => self.number(restarts[1])?.unwrap_or(0),
        };
        let epoch = u32::try_from(epoch)
            .map_err(|_| setting(restarts[0], &epoch.to_string(), "a number of restarts"))?;
        // The launcher's name for a job is a secret of its ranks, and its store has no others.
        let job = if host == Host::Launcher { String::new() } else { place.known_as.clone() };
        Ok(Rendezvous { address, token, job, epoch, host, encrypted: self.encrypted()? })
    }

    pub(crate) fn encrypted(&self) -> Result<bool> {
        encrypted_from(self.get("PHALANX_STORE_TLS"))
    }

    fn beside_torchruns_store(&self) -> std::result::Result<String, UsageError> {
        let part = |name: &str| self.get(name).unwrap_or("").to_owned();
        let (host, port) = (part("MASTER_ADDR"), part("MASTER_PORT"));
        if host.is_empty() {
            let expected = "the address (host:port) of the job's store, since its ranks are on several hosts; or \
                            start them with mpirun or srun --mpi=pmix";
            return Err(setting("PHALANX_STORE", "", expected));
        }
        let number: u16 = port
            .trim()
            .parse()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(|| setting("MASTER_PORT", &port, "a port number, 1 to 65535"))?;
        let port = number.checked_add(PORT_OFFSET).unwrap_or(number - PORT_OFFSET);
        // An IPv6 address needs brackets before a port.
        Ok(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
    }

    /// For ranks of a step on several hosts, without an MPI and without a store.
    fn no_store_in_slurm(&self, place: &Place) -> Error {
        let hosts = self.get("SLURM_STEP_NODELIST").unwrap_or_default();
        Error::bootstrap(
            format!(
                "srun started {} ranks on several hosts ({hosts}) without an MPI, and nothing says where they meet",
                place.world_size
            ),
            "with an MPI library on each host: srun --mpi=pmi2 PROGRAM, or pmix (srun --mpi=list shows what there is). Without, over \
             UCX or NCCL: in the batch script before srun, export PHALANX_TOKEN=$(openssl rand -hex 32) \
             PHALANX_STORE=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29400",
        )
    }

    fn token(&self) -> Result<Token> {
        self.token_if_set()?.ok_or_else(|| {
            Error::bootstrap(
                "the ranks are on several hosts, and nothing says how they know each other: neither \
                 PHALANX_TOKEN nor PHALANX_TOKEN_FILE is set",
                "make a secret (openssl rand -hex 32), give each host a file with it that only you can read, \
                 and set PHALANX_TOKEN_FILE to its path on all hosts; or start the ranks with an MPI's mpirun or \
                 srun",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(launcher: &'static str, rank: usize, one_host: bool) -> Place {
        let job = || "job".to_owned();
        Place { launcher, rank, world_size: 2, job: job(), meeting: job(), known_as: job(), one_host }
    }

    fn rendezvous(variables: &[(&str, &str)], place: &Place) -> Result<Option<Rendezvous>> {
        Environment::of(variables).rendezvous(place)
    }

    const TOKEN: (&str, &str) = ("PHALANX_TOKEN", "0123456789abcdef");

    #[test]
    fn each_launcher_has_its_place_for_the_store() {
        let launched = place("phalanx launch", 1, true);
        let by_hand = [("PHALANX_STORE", "127.0.0.1:5"), TOKEN, ("PHALANX_RESTART_COUNT", "2")];
        let by_launcher = [&by_hand[..], &[("PHALANX_LOCAL_WORLD_SIZE", "2")]].concat();
        for (variables, host) in [(&by_hand[..], Host::Rank(0)), (&by_launcher, Host::Launcher)] {
            let found = rendezvous(variables, &launched).unwrap().unwrap();
            assert_eq!((&*found.address, found.epoch, found.host), ("127.0.0.1:5", 2, host));
        }

        let torchrun = |host, port, place: &Place| {
            let variables =
                [("MASTER_ADDR", host), ("MASTER_PORT", port), ("TORCHELASTIC_RESTART_COUNT", "1"), TOKEN];
            rendezvous(&variables, place)
        };
        let several = place("torchrun", 1, false);
        let found = torchrun("alpha", "29500", &several).unwrap().unwrap();
        assert_eq!((&*found.address, found.epoch, found.host), ("alpha:30500", 1, Host::Rank(0)));
        assert_eq!(torchrun("fe80::1", "65000", &several).unwrap().unwrap().address, "[fe80::1]:64000");
        // An id is for one communicator, however often its ranks were restarted.
        let restarted =
            Environment::of(&[("PHALANX_RESTART_COUNT", "1"), ("TORCHELASTIC_RESTART_COUNT", "2")]);
        let found = restarted.with_id("alpha:5", TOKEN.1).rendezvous(&several).unwrap().unwrap();
        assert_eq!((&*found.address, found.epoch), ("alpha:5", 0));
        assert!(torchrun("alpha", "many", &several).unwrap_err().to_string().contains("MASTER_PORT"));
        // On one host no port has to be agreed on.
        assert!(torchrun("localhost", "29500", &place("torchrun", 1, true)).unwrap().is_none());
    }

    #[test]
    fn a_step_of_slurm_is_told_what_to_do_in_slurms_words() {
        let variables = [("SLURM_STEP_NODELIST", "h[0-1]")];
        let error = rendezvous(&variables, &place("Slurm", 0, false)).unwrap_err().to_string();
        for part in ["h[0-1]", "srun --mpi=pmi2", "srun --mpi=list", "scontrol show hostnames"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn several_hosts_need_a_token() {
        let several = place("torchrun", 0, false);
        let with = |extra: &[(&str, &str)]| {
            rendezvous(&[&[("MASTER_ADDR", "alpha"), ("MASTER_PORT", "29500")], extra].concat(), &several)
        };
        assert!(with(&[TOKEN]).is_ok());
        assert!(with(&[]).unwrap_err().to_string().contains("PHALANX_TOKEN_FILE"));
        let error = with(&[("PHALANX_TOKEN", "secret")]).unwrap_err().to_string();
        assert!(error.contains("at least 16 characters") && !error.contains("\"secret\""), "{error}");
        let error = with(&[("PHALANX_TOKEN_FILE", "/nowhere/token")]).unwrap_err().to_string();
        assert!(error.contains("/nowhere/token"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn ranks_of_one_host_find_a_store_without_variables() {
        let meeting = format!("local store {}", std::process::id());
        let job = Place { meeting, ..place("torchrun", 0, true) };
        let stores = std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| {
                let job = Place { rank, ..job.clone() };
                scope.spawn(move || {
                    open_store(&Environment::of(&[]), &job, None, Duration::from_secs(20)).unwrap()
                })
            });
            ranks.map(|rank| rank.join().unwrap())
        });
        let exchanged = std::thread::scope(|scope| {
            let ranks = stores.each_ref().map(|store| {
                scope.spawn(move || store.exchange("k", b"x", Duration::from_secs(20)).unwrap())
            });
            ranks.map(|rank| rank.join().unwrap())
        });
        assert_eq!(exchanged, [[b"x"; 2]; 2]);
    }
}
