//! Ranks started by an MPI launcher: they use the MPI backend, or find each other over MPI.

mod store;

use super::hosts::{across_hosts, check_for_hosts};
use super::processes::{introduction, on_one_host};
use super::{NewComm, Settings, agreement};
use crate::backend::mpi::{Launched, MpiComm};
use crate::contract::{Backend, BackendKind, Departure};
use crate::rendezvous::environment::{Environment, Launcher, Place};
use crate::types::error::Result;
use std::sync::Arc;
use store::open_store_over_mpi;

/// Creates the communicator of all ranks of the MPI job.
pub(super) fn join_mpi(
    launcher: Option<&Launcher>,
    environment: &Environment,
    settings: &Settings,
) -> Result<NewComm> {
    let place = launcher.and_then(|launcher| launcher.place(environment).ok());
    let name = place.map_or_else(|| "MPI_COMM_WORLD".to_owned(), |place| place.job);
    let world = mpi_world(launcher, settings)?;
    let host = crate::os::host_name();
    let all = world.all_gather_bytes(&[&[u8::from(settings.check)], host.as_bytes()].concat())?;
    let host_of = |rank: usize| String::from_utf8_lossy(&all[rank][1..]).into_owned();
    agreement::check_settings(all.iter().map(|rank| rank[0] == 1), host_of)?;
    Ok(NewComm::new(Arc::new(world), name))
}

fn mpi_world(launcher: Option<&Launcher>, settings: &Settings) -> Result<MpiComm> {
    let launched = Launched {
        launcher: launcher.map_or("nobody", |launcher| launcher.name),
        rank: launcher.map_or(0, |launcher| launcher.rank),
        world_size: launcher.and_then(|launcher| launcher.world_size),
    };
    MpiComm::world(&launched, settings.timeout, settings.check)
}

/// The communicator of MPI ranks on possibly several hosts. They exchange introductions over MPI. For NCCL
/// they then join a store whose connections MPI carries.
pub(super) fn over_mpi(
    launcher: &Launcher,
    environment: &Environment,
    settings: &Settings,
) -> Result<NewComm> {
    let own = introduction(environment, settings)?;
    let world = mpi_world(Some(launcher), settings)?;
    let introductions = agreement::decode(&world.all_gather_bytes(&own.to_bytes())?)?;
    let topology = agreement::topology(&introductions);
    let backend = agreement::agree(&introductions, &topology, BackendKind::Mpi)?;
    crate::os::log::info!(backend = backend.name(), hosts = %topology, "the ranks have agreed, over MPI");
    let launcher = launcher.with_world_size(world.world_size());
    if topology.num_hosts() == 1 && ![BackendKind::Mpi, BackendKind::Ucx].contains(&backend) {
        world.depart(Departure::Left);
        return on_one_host(Some(backend), &launcher, environment, settings);
    }
    check_for_hosts(backend, &topology)?;
    let place = launcher.place(environment);
    // The job's name may differ between hosts.
    let job = place.as_ref().map_or("MPI_COMM_WORLD", |place| &place.job);
    let job = String::from_utf8_lossy(&world.all_gather_bytes(job.as_bytes())?[0]).into_owned();
    if backend == BackendKind::Mpi {
        return Ok(NewComm::new(Arc::new(world), job));
    }
    let place = Place { job, ..place? };
    let store = open_store_over_mpi(world, environment, &place, &topology, settings.timeout)?;
    across_hosts(backend, store, topology, place, settings)
}
