//! Who am I, who are the others: from the launcher's variables to a communicator.

mod agreement;
mod job_store;

use crate::backend::host::HostComm;
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
use crate::backend::mpi::Launched;
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
use crate::backend::mpi::MpiComm;
#[cfg(feature = "cuda")]
use crate::backend::nccl::NcclComm;
#[cfg(feature = "cuda")]
use crate::backend::nccl::NcclSettings;
use crate::backend::solo::SoloComm;
use crate::contract::hosts::HostTopology;
use crate::contract::{Backend, BackendKind, Departure, grown_name};
use crate::control::endpoint::{Endpoint, NewChannel};
#[cfg(feature = "cuda")]
use crate::control::host_channel::HostChannel;
use crate::control::join as rendezvous;
use crate::control::world::World;
use crate::rendezvous::environment::{
    Environment, Launcher, Place, check_from_environment, cores_from_environment,
    stopped_timeout_from_environment, timeout_from_environment,
};
use crate::rendezvous::store;
use crate::types::MAX_RANKS;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
#[cfg(feature = "cuda")]
use phalanx_sys::nccl::Flavour;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What a communicator is made with.
pub(crate) struct Settings {
    pub environment: Environment,
    pub timeout: Duration,
    pub backend: Option<BackendKind>,
    pub gpu: Option<usize>,
    /// Whether calls are compared before they move anything.
    pub check: bool,
    /// What rank 0 listens on, if its id does.
    pub listener: Option<TcpListener>,
    #[cfg(feature = "cuda")]
    pub nccl: Arc<crate::backend::nccl::NcclSettings>,
}

/// A communicator that was made: its backend, and its name in flight records, the same on all its ranks.
pub(crate) struct NewComm {
    pub backend: Arc<dyn Backend>,
    pub name: String,
}

impl NewComm {
    fn new(backend: Arc<dyn Backend>, name: String) -> NewComm {
        NewComm { backend, name }
    }
}

/// What [`init`](crate::init) does, and why: see [`choose`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// What would carry the data.
    pub backend: BackendKind,
    /// Why this backend.
    pub reason: String,
    /// The launcher that started this process.
    pub launcher: Option<Launcher>,
}

/// What [`init`](crate::init) would do in this process: no rank is waited for. For diagnoses.
///
/// The launchers that are recognised, in the order in which they count (a program that says its
/// [`place`](crate::Builder::place) itself comes before all): `phalanx launch`, torchrun, Open MPI, Cray
/// PALS, Intel MPI, MPICH and others with PMI, PMIx, Slurm steps. The backend: `PHALANX_BACKEND`; NCCL if each rank of
/// this host has a GPU (the driver and NCCL are loaded to find out; ranks that see other GPUs, if MPI did not start them, or are on other hosts
/// are asked at the start); else RCCL, if the same holds for AMD's GPUs (by HIP and RCCL); for one rank, none is needed; MPI for ranks that an
/// MPI launcher started; else the memory of the host.
///
/// # Errors
/// [`UsageError::Setting`] names a variable that makes no sense, or that is missing; [`Error::Bootstrap`]: ranks of several hosts have no
/// token by which they know each other.
pub fn choose() -> Result<Choice> {
    let environment = Environment::current();
    let choice = Choice::from(&environment, None)?;
    choice.check_meeting(&environment)?;
    check_settings(&environment)?;
    Ok(choice)
}

/// The error that `init` meets on its way if another setting makes no sense.
fn check_settings(environment: &Environment) -> Result<()> {
    timeout_from_environment()?;
    stopped_timeout_from_environment()?;
    cores_from_environment()?;
    check_from_environment()?;
    store::server::silence_from(environment.get("PHALANX_HEARTBEAT_TIMEOUT"))?;
    environment.encrypted()?;
    crate::watch::check_settings()
}

impl Choice {
    fn from(environment: &Environment, wanted: Option<BackendKind>) -> Result<Choice> {
        let launcher = environment.launcher()?;
        let world_size = launcher.as_ref().map_or(Some(1), |launcher| launcher.world_size);
        let is_mpi = launcher.as_ref().is_some_and(Launcher::starts_mpi);
        let may_be_elsewhere =
            |launcher: &&Launcher| !launcher.is_one_host() || launcher.world_size.is_none();
        let elsewhere = launcher.as_ref().filter(may_be_elsewhere);
        let ranks = Ranks {
            all: world_size,
            here: elsewhere.map_or(world_size, |launcher| launcher.local_world_size).unwrap_or(1),
            may_be_elsewhere: elsewhere.is_some(),
            are_of_mpi: is_mpi,
            are_threads: false,
        };
        let (backend, reason) = decide(environment, wanted, &ranks)?;
        Ok(Choice { backend, reason, launcher })
    }

    /// The error that `init` meets on its way if the launcher, or the user, has not said what the ranks need to find each other.
    fn check_meeting(&self, environment: &Environment) -> Result<()> {
        let without_us = matches!(self.backend, BackendKind::Solo | BackendKind::Mpi);
        let launcher = self.launcher.as_ref().filter(|launcher| {
            let is_alone = launcher.world_size == Some(1) && launcher.is_one_host();
            !(without_us || is_alone || launcher.meets_over_mpi(environment))
        });
        let Some(launcher) = launcher else { return Ok(()) };
        let place = launcher.place(environment)?;
        if place.one_host { Ok(()) } else { environment.rendezvous(&place).map(drop) }
    }
}

/// What a process with these variables takes itself for: its rank, and how many there are (`None`: only MPI knows). For the
/// fuzzer of all that is decoded of them.
pub fn launched(variables: &[(&str, &str)]) -> Result<Option<(usize, Option<usize>)>> {
    let environment = Environment::of(variables);
    environment.backend()?;
    let Some(launcher) = environment.launcher()? else { return Ok(None) };
    if launcher.world_size.is_some() {
        let place = launcher.place(&environment)?;
        environment.rendezvous(&place)?;
    }
    Ok(Some((launcher.rank, launcher.world_size)))
}

/// The ranks of a communicator that is to be made, as far as a process knows before it meets the others.
struct Ranks {
    /// How many there are; `None` if only MPI knows.
    all: Option<usize>,
    /// How many there are on this host.
    here: usize,
    /// Whether some may be on other hosts, with whom the backend is yet to be agreed.
    may_be_elsewhere: bool,
    are_of_mpi: bool,
    /// Whether they are threads of this process, which see what it sees.
    are_threads: bool,
}

impl Ranks {
    /// So many threads of this process.
    fn threads(ranks: usize) -> Ranks {
        Ranks { all: Some(ranks), here: ranks, may_be_elsewhere: false, are_of_mpi: false, are_threads: true }
    }
}

/// Which backend carries a communicator, and why.
fn decide(
    environment: &Environment,
    wanted: Option<BackendKind>,
    ranks: &Ranks,
) -> Result<(BackendKind, String)> {
    let forced = match wanted {
        Some(backend) => Some((backend, "Builder::backend")),
        None => environment.backend()?.map(|backend| (backend, "PHALANX_BACKEND")),
    };
    let gpus = |backend: BackendKind| gpus_for(backend, ranks.here);
    let (nccl, rccl, nvshmem) = (BackendKind::Nccl, BackendKind::Rccl, BackendKind::Nvshmem);
    match forced {
        Some((BackendKind::Solo, name)) if ranks.all != Some(1) => {
            let expected = "another, since there are more ranks than this one".into();
            Err(UsageError::Setting { name: name.into(), value: "solo".into(), expected }.into())
        }
        // Several processes say which GPUs they see when they meet.
        Some((backend, name))
            if [nccl, rccl, nvshmem].contains(&backend) && (ranks.are_threads || ranks.all == Some(1)) =>
        {
            gpus(backend).map(|()| (backend, format!("{name} asks for it")))
        }
        Some((backend, name)) => Ok((backend, format!("{name} asks for it"))),
        None => Ok(match gpus(nccl) {
            Ok(()) if ranks.may_be_elsewhere => {
                let over_mpi = ranks.are_of_mpi && environment.get("PHALANX_STORE").is_none();
                let way = if over_mpi { ", over MPI" } else { "" };
                (
                    nccl,
                    format!("each rank of this host has a GPU; the other hosts are asked at the start{way}"),
                )
            }
            Ok(()) => (nccl, "each rank has a GPU".to_owned()),
            Err(_) if gpus(rccl).is_ok() => (rccl, "each rank has an AMD GPU".to_owned()),
            Err(_) if ranks.all == Some(1) => (BackendKind::Solo, "there is one rank".to_owned()),
            Err(_) if ranks.are_of_mpi => {
                (BackendKind::Mpi, "an MPI launcher started the ranks, and not each has a GPU".to_owned())
            }
            Err(why) if !ranks.are_threads && gpus_for(nccl, 1).is_ok() => (
                BackendKind::Host,
                format!(
                    "several ranks, and {why}; NCCL if the others see other GPUs, which they are asked at the start"
                ),
            ),
            Err(why) => (
                BackendKind::Host,
                format!("several ranks without GPUs, not started as those of MPI ({why})"),
            ),
        }),
    }
}

/// The communicator that the environment of this process asks for.
pub(crate) fn init(mut settings: Settings) -> Result<NewComm> {
    // Closed at the end of this, if what is made needs no port.
    let listener = settings.listener.take();
    let environment = &settings.environment;
    let choice = Choice::from(environment, settings.backend)?;
    let launcher = choice.launcher.as_ref();
    tracing::info!(
        backend = choice.backend.name(),
        reason = choice.reason,
        launcher = launcher.map_or("none", |launcher| launcher.name),
        recognised_by = ?launcher.map(|launcher| launcher.recognised_by),
        ignored = ?launcher.map(|launcher| &launcher.ignored),
        "communicator"
    );
    match choice.backend {
        _ if launcher.is_some_and(|launcher| launcher.meets_over_mpi(environment)) => {
            over_mpi(launcher.expect("asked just now"), environment, &settings)
        }
        BackendKind::Host | BackendKind::Nccl | BackendKind::Rccl | BackendKind::Nvshmem
            if launcher.is_some_and(|launcher| !launcher.is_one_host()) =>
        {
            on_hosts(launcher.expect("asked just now"), environment, &settings, listener)
        }
        BackendKind::Solo => Ok(NewComm::new(Arc::new(SoloComm::new(settings.timeout)), own_name())),
        BackendKind::Mpi => join_mpi(launcher, environment, &settings),
        backend => match launcher.filter(|launcher| launcher.world_size != Some(1)) {
            None => of_host(backend, thread_ranks(1, settings.timeout)?.remove(0), own_name(), &settings),
            Some(launcher) => on_one_host(None, launcher, environment, &settings),
        },
    }
}

/// The communicator of processes that share a host's memory. What carries their data they agree on when they meet, if they have
/// not done so before.
fn on_one_host(
    agreed: Option<BackendKind>,
    launcher: &Launcher,
    environment: &Environment,
    settings: &Settings,
) -> Result<NewComm> {
    let place = launcher.place(environment)?;
    let word = match agreed {
        Some(_) => Vec::new(),
        None => introduction(environment, settings)?.to_bytes(),
    };
    let (host, words) = join(&place, &word, settings.timeout)?;
    let backend = match agreed {
        Some(backend) => backend,
        None => {
            let topology = HostTopology::one_host(place.world_size);
            let otherwise = if launcher.starts_mpi() { BackendKind::Mpi } else { BackendKind::Host };
            let backend = agreement::agree(&agreement::heard(&words)?, &topology, otherwise)?;
            tracing::info!(backend = backend.name(), "the ranks have agreed");
            backend
        }
    };
    if backend == BackendKind::Mpi {
        drop(host);
        return join_mpi(Some(launcher), environment, settings);
    }
    of_host(backend, host, place.job, settings)
}

/// The communicator of ranks that are in the memory of one host.
fn of_host(backend: BackendKind, host: HostComm, name: String, settings: &Settings) -> Result<NewComm> {
    match backend {
        BackendKind::Nccl | BackendKind::Rccl => on_gpu(backend, host, name, settings),
        BackendKind::Nvshmem => as_pe(host, name, settings),
        _ => Ok(NewComm::new(Arc::new(host), name)),
    }
}

/// The communicator of ranks that are on several hosts, as far as the launcher knows.
fn on_hosts(
    launcher: &Launcher,
    environment: &Environment,
    settings: &Settings,
    listener: Option<TcpListener>,
) -> Result<NewComm> {
    let (place, timeout) = (launcher.place(environment)?, settings.timeout);
    let own = introduction(environment, settings)?;
    let store = job_store::open_store(environment, &place, listener, timeout)?;
    let otherwise = if launcher.starts_mpi() { BackendKind::Mpi } else { BackendKind::Host };
    let told = agreement::heard(&store.exchange("phalanx/hosts", &own.to_bytes(), timeout)?)?;
    let topology = agreement::topology(&told);
    let backend = agreement::agree(&told, &topology, otherwise)?;
    tracing::info!(backend = backend.name(), hosts = %topology, "the ranks have agreed");
    if backend == BackendKind::Mpi {
        drop(store);
        return join_mpi(Some(launcher), environment, settings);
    }
    if topology.num_hosts() == 1 {
        // The launcher's nodes are parts of one host.
        drop(store);
        return on_one_host(Some(backend), launcher, environment, settings);
    }
    check_for_hosts(backend, &topology)?;
    across_hosts(backend, store, topology, place, settings)
}

/// What this rank says of itself to the others.
fn introduction(environment: &Environment, settings: &Settings) -> Result<agreement::Introduction> {
    let wanted = settings.backend.map_or_else(|| environment.backend(), |backend| Ok(Some(backend)))?;
    Ok(agreement::Introduction::own(wanted, settings.gpu, visible_gpus))
}

/// Whether a backend's ranks can be on several hosts. The same answer on all.
fn check_for_hosts(backend: BackendKind, topology: &HostTopology) -> Result<()> {
    match backend {
        BackendKind::Host => crate::os::check_process_ranks().and_then(|()| topology.check_one_host()),
        BackendKind::Nvshmem => Err(Error::from(UnsupportedError {
            what: format!("the backend nvshmem on several hosts ({topology})"),
            why: "its ranks meet in the memory of one".into(),
            remedy: "use NCCL (PHALANX_BACKEND=nccl), or start all ranks on one host".into(),
        })),
        _ => Ok(()),
    }
}

/// The communicator of ranks with GPUs on several hosts, which have met in a store.
fn across_hosts(
    backend: BackendKind,
    store: store::Store,
    topology: HostTopology,
    place: Place,
    settings: &Settings,
) -> Result<NewComm> {
    let control = HostComm::new(Endpoint::over(store, place.rank, topology, settings.timeout)?);
    on_gpu(backend, control, place.job, settings)
}

#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
fn join_mpi(launcher: Option<&Launcher>, environment: &Environment, settings: &Settings) -> Result<NewComm> {
    let place = launcher.and_then(|launcher| launcher.place(environment).ok());
    let name = place.map_or_else(|| "MPI_COMM_WORLD".to_owned(), |place| place.job);
    Ok(NewComm::new(Arc::new(mpi_world(launcher, settings)?), name))
}

#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
fn mpi_world(launcher: Option<&Launcher>, settings: &Settings) -> Result<MpiComm> {
    let launched = Launched {
        launcher: launcher.map_or("nobody", |launcher| launcher.name),
        rank: launcher.map_or(0, |launcher| launcher.rank),
        world_size: launcher.and_then(|launcher| launcher.world_size),
    };
    MpiComm::world(&launched, settings.timeout, settings.check)
}

/// The communicator of the ranks of MPI that may be on several hosts. They tell each other over MPI where they are and what
/// they have; those of NCCL then meet in a store whose connections MPI carries.
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
fn over_mpi(launcher: &Launcher, environment: &Environment, settings: &Settings) -> Result<NewComm> {
    let own = introduction(environment, settings)?;
    let world = mpi_world(Some(launcher), settings)?;
    let told = agreement::heard(&world.tell_bytes(&own.to_bytes())?)?;
    let topology = agreement::topology(&told);
    let backend = agreement::agree(&told, &topology, BackendKind::Mpi)?;
    tracing::info!(backend = backend.name(), hosts = %topology, "the ranks have agreed, over MPI");
    let launcher = launcher.with_world_size(world.world_size());
    if topology.num_hosts() == 1 && backend != BackendKind::Mpi {
        world.depart(Departure::Left);
        return on_one_host(Some(backend), &launcher, environment, settings);
    }
    check_for_hosts(backend, &topology)?;
    let place = launcher.place(environment);
    // A launcher may call the job something else on each host.
    let job = place.as_ref().map_or("MPI_COMM_WORLD", |place| &place.job);
    let job = String::from_utf8_lossy(&world.tell_bytes(job.as_bytes())?[0]).into_owned();
    if backend == BackendKind::Mpi {
        return Ok(NewComm::new(Arc::new(world), job));
    }
    let place = Place { job, ..place? };
    let store = job_store::open_store_over_mpi(world, environment, &place, &topology, settings.timeout)?;
    across_hosts(backend, store, topology, place, settings)
}

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
fn over_mpi(launcher: &Launcher, environment: &Environment, settings: &Settings) -> Result<NewComm> {
    join_mpi(Some(launcher), environment, settings)
}

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
fn join_mpi(_: Option<&Launcher>, _: &Environment, _: &Settings) -> Result<NewComm> {
    Err(Error::from(UnsupportedError {
        what: "the backend mpi".into(),
        why: "it is written for 64-bit little-endian machines".into(),
        remedy: "use the host backend, with `phalanx launch`".into(),
    }))
}

/// Which library of GPUs a backend is.
#[cfg(feature = "cuda")]
fn flavour(backend: BackendKind) -> Flavour {
    if backend == BackendKind::Rccl { Flavour::Rccl } else { Flavour::Nccl }
}

#[cfg(feature = "cuda")]
fn gpus_for(backend: BackendKind, ranks: usize) -> Result<()> {
    match backend {
        BackendKind::Nvshmem => crate::backend::nvshmem::available(),
        _ => crate::backend::nccl::available(flavour(backend), ranks),
    }
}

#[cfg(not(feature = "cuda"))]
fn gpus_for(backend: BackendKind, _ranks: usize) -> Result<()> {
    Err(Error::from(UnsupportedError {
        what: format!("the backend {backend}"),
        why: "phalanx was built without its feature `cuda`".into(),
        remedy: "build it with the feature".into(),
    }))
}

/// The GPUs that this process could use with a backend, or of them the one with this number.
#[cfg(feature = "cuda")]
fn visible_gpus(backend: BackendKind, wanted: Option<usize>) -> Result<crate::rendezvous::gpus::Visible> {
    crate::backend::nccl::visible(flavour(backend), wanted)
}

#[cfg(not(feature = "cuda"))]
fn visible_gpus(backend: BackendKind, _wanted: Option<usize>) -> Result<crate::rendezvous::gpus::Visible> {
    gpus_for(backend, 1).map(|()| unreachable!("an error"))
}

/// The communicator on GPUs of the ranks of a host communicator. Collective.
#[cfg(feature = "cuda")]
fn on_gpu(backend: BackendKind, host: HostComm, name: String, settings: &Settings) -> Result<NewComm> {
    let comm = NcclComm::join(Box::new(host), flavour(backend), settings.gpu, settings.nccl.clone())?;
    Ok(NewComm::new(Arc::new(comm), name))
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(backend: BackendKind, host: HostComm, _name: String, _settings: &Settings) -> Result<NewComm> {
    gpus_for(backend, host.world_size())?;
    unreachable!("the error above")
}

/// The communicator of the ranks of a host communicator as PEs of NVSHMEM. Collective.
#[cfg(feature = "cuda")]
fn as_pe(host: HostComm, name: String, settings: &Settings) -> Result<NewComm> {
    let comm = crate::backend::nvshmem::NvshmemComm::join(Box::new(host), settings.gpu, &name)?;
    Ok(NewComm::new(Arc::new(comm), name))
}

#[cfg(not(feature = "cuda"))]
fn as_pe(host: HostComm, name: String, settings: &Settings) -> Result<NewComm> {
    on_gpu(BackendKind::Nvshmem, host, name, settings)
}

fn check_world_size(world_size: usize) -> Result<()> {
    if (1..=MAX_RANKS).contains(&world_size) {
        Ok(())
    } else {
        Err(UsageError::WorldSize { world_size, limit: MAX_RANKS }.into())
    }
}

/// Meets the other processes of this host, tells them a word, and takes this rank's place in their region. Answers what all have
/// told, too.
fn join(place: &Place, word: &[u8], timeout: Duration) -> Result<(HostComm, Vec<Vec<u8>>)> {
    crate::os::check_process_ranks()?;
    // Said before anybody is kept waiting.
    stopped_timeout_from_environment()?;
    cores_from_environment()?;
    let met = rendezvous::meet(place, word, timeout)?;
    let members = (0..place.world_size).collect();
    Ok((HostComm::new(Endpoint::attach(met.world, met.channel, place.rank, members, timeout)), met.words))
}

/// What [`join`](crate::join) answers to the environment of this process.
pub(crate) fn join_grown(settings: Settings) -> Result<NewComm> {
    let environment = &settings.environment;
    let Some(launcher) = environment.launcher()? else {
        return Err(Error::bootstrap(
            "no variable says which job this process is to join",
            "start it with the variables that the job's ranks have (PHALANX_JOB and others)",
        ));
    };
    let place = launcher.place(environment)?;
    crate::os::check_process_ranks()?;
    stopped_timeout_from_environment()?;
    cores_from_environment()?;
    let met = rendezvous::join(&place, settings.timeout)?;
    let (rank, members) = (met.rank, (0..met.world_size).collect());
    let host = HostComm::new(Endpoint::attach(met.world, met.channel, rank, members, settings.timeout));
    let backend = backend_of_members(&met.words[0], environment, &settings)?;
    tracing::info!(backend = backend.name(), rank, "joined a communicator");
    let name = grown_name(met.number);
    match backend {
        BackendKind::Nccl | BackendKind::Rccl => on_gpu(backend, host, name, &settings),
        _ => Ok(NewComm::new(Arc::new(host), name)),
    }
}

/// What carries the data of a communicator that was joined: what its members say.
fn backend_of_members(word: &[u8], environment: &Environment, settings: &Settings) -> Result<BackendKind> {
    let name = String::from_utf8_lossy(word);
    let kinds = [BackendKind::Host, BackendKind::Nccl, BackendKind::Rccl];
    let Some(backend) = kinds.into_iter().find(|kind| kind.name() == name) else {
        return Err(Error::bootstrap(
            format!("the communicator's members do not say what carries its data, but {name:?}"),
            "use one version of phalanx in all processes of the job",
        ));
    };
    let wanted = settings.backend.map_or_else(|| environment.backend(), |backend| Ok(Some(backend)))?;
    match wanted.filter(|wanted| *wanted != backend) {
        None => Ok(backend),
        Some(wanted) => Err(Error::from(UnsupportedError {
            what: format!("joining on the backend {wanted}"),
            why: format!("the communicator that grows is on {backend}; it can be host, nccl or rccl"),
            remedy: "unset PHALANX_BACKEND, or set it to that of the others".into(),
        })),
    }
}

/// A name for a communicator that lives in this process alone.
fn own_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Ranks as threads: see [`run`](crate::run).
pub(crate) fn run_threads<R: Send>(
    ranks: usize,
    settings: &Settings,
    f: impl Fn(NewComm) -> R + Sync,
) -> Result<Vec<R>> {
    check_world_size(ranks)?;
    let (backend, reason) = decide(&settings.environment, settings.backend, &Ranks::threads(ranks))?;
    tracing::info!(backend = backend.name(), reason, ranks, "communicator of threads");
    if backend == BackendKind::Solo {
        return Ok(vec![f(NewComm::new(Arc::new(SoloComm::new(settings.timeout)), own_name()))]);
    }
    let hosts = thread_ranks(ranks, settings.timeout)?;
    let name = own_name();
    let body = |host: HostComm| {
        let comm = match backend {
            BackendKind::Nccl | BackendKind::Rccl => on_gpu(backend, host, name.clone(), settings)?,
            BackendKind::Mpi | BackendKind::Nvshmem => {
                return Err(Error::from(UnsupportedError {
                    what: format!("the backend {backend} for threads"),
                    why: "its ranks are processes".into(),
                    remedy: "start the program with mpirun or `phalanx launch` and use phalanx::init()"
                        .into(),
                }));
            }
            _ => NewComm::new(Arc::new(host), name.clone()),
        };
        Ok(f(comm))
    };
    let body = &body;
    std::thread::scope(|scope| {
        let mut threads = Vec::with_capacity(ranks);
        for host in hosts {
            let name = format!("rank {}", host.rank());
            let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, move || body(host));
            // On an error the communicators of the ranks that were not started are dropped, and those that
            // were are told that these have left.
            threads.push(thread.map_err(|e| {
                let remedy = format!("{ranks} threads are needed: raise `ulimit -u` or use fewer ranks");
                Error::system("starting a thread", e, remedy)
            })?);
        }
        let ended: Vec<_> = threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        let results = ended.into_iter().map(|result| result.unwrap_or_else(|p| std::panic::resume_unwind(p)));
        results.collect()
    })
}

/// Communicators for one thread that drives several GPUs. Set-up needs all ranks at once: a thread for each.
#[cfg(feature = "cuda")]
pub(crate) fn gpu_ranks(gpus: &[usize], flavour: Flavour) -> Result<Vec<NewComm>> {
    check_world_size(gpus.len())?;
    crate::backend::nccl::available(flavour, 1)?;
    let settings = NcclSettings::driven_here(check_from_environment()?);
    let hosts = thread_ranks(gpus.len(), timeout_from_environment()?)?;
    std::thread::scope(|scope| {
        let join = |(host, gpu): (HostComm, &usize)| {
            let (gpu, settings) = (*gpu, settings.clone());
            scope.spawn(move || NcclComm::join(Box::new(host), flavour, Some(gpu), settings))
        };
        let threads: Vec<_> = hosts.into_iter().zip(gpus).map(join).collect();
        let joined = threads.into_iter().map(|thread| thread.join().expect("set-up does not panic"));
        let name = own_name();
        joined.map(|nccl| Ok(NewComm::new(Arc::new(nccl?), name.clone()))).collect()
    })
}

/// The host communicators of ranks that are threads of this process.
fn thread_ranks(ranks: usize, timeout: Duration) -> Result<Vec<HostComm>> {
    let world = Arc::new(World::threads()?);
    let channel = NewChannel::create(&world, ranks)?;
    (0..ranks)
        .map(|rank| {
            let opened = NewChannel::open(&world, channel.id())?;
            let members = (0..ranks).collect();
            Ok(HostComm::new(Endpoint::attach(world.clone(), opened, rank, members, timeout)))
        })
        .collect()
}

/// A new channel in host memory between the ranks of a communicator, where its backend has one. Collective.
///
/// # Safety
/// As for [`Backend::split`].
#[cfg(feature = "cuda")]
pub(crate) unsafe fn host_channel(backend: &dyn Backend) -> Result<Option<Box<dyn HostChannel>>> {
    use crate::backend::nvshmem::NvshmemComm;
    if let Some(nccl) = NcclComm::of(backend) {
        // SAFETY: the caller's contract.
        return unsafe { nccl.host_channel() }.map(Some);
    }
    if let Some(nvshmem) = NvshmemComm::of(backend) {
        // SAFETY: the caller's contract.
        return unsafe { nvshmem.host_channel() }.map(Some);
    }
    let Some(host) = (backend as &dyn std::any::Any).downcast_ref::<HostComm>() else { return Ok(None) };
    // SAFETY: the caller's contract.
    unsafe { host.part(Some(0), backend.rank() as i64) }
}
