//! The job's store without a port: MPI carries its bytes.

use crate::backend::mpi::{MpiComm, MpiTransport};
use crate::contract::hosts::HostTopology;
use crate::os::Wire;
use crate::rendezvous::environment::{Environment, Place};
use crate::rendezvous::store::{Host, Rendezvous, Server, Settings, Store, Token, Transport, server};
use crate::start::job_store::settings;
use crate::types::error::{Error, Result, UnsupportedError};
use std::time::Duration;

/// Starts or joins the store in rank 0. Its connections are carried by MPI messages.
pub(super) fn open_store_over_mpi(
    world: MpiComm,
    environment: &Environment,
    place: &Place,
    topology: &HostTopology,
    timeout: Duration,
) -> Result<Store> {
    let silence = server::silence_from(environment.get("PHALANX_HEARTBEAT_TIMEOUT"))?;
    let encrypted = environment.encrypted()?;
    // Only the job's ranks can connect, so they get the whole timeout to authenticate.
    let settings = Settings { encrypted, auth_timeout: timeout, ..settings(place, silence) };
    let hosted = (place.rank == 0).then(|| StoreEnds::begin(place.world_size, settings)).transpose();
    let mut announcement = vec![u8::from(world.is_for_all_threads())];
    if let Ok(Some(hosted)) = &hosted {
        announcement.extend(hosted.token.reveal().bytes());
    }
    let all = world.all_gather_bytes(&announcement)?;
    let hosted = hosted?;
    if let Some(rank) = all.iter().position(|announcement| announcement[0] == 0) {
        return Err(too_few_threads(rank, topology));
    }
    let token = Token::new(&String::from_utf8_lossy(&all[0][1..]))
        .ok_or_else(|| Error::bootstrap("rank 0 could not begin the job's store", "see its own output"))?;
    let address = "rank 0 (over MPI)".to_owned();
    let rendezvous =
        Rendezvous { address, token, job: String::new(), epoch: 0, host: Host::Rank(0), encrypted };
    let (own, server, remote_ends) = match hosted {
        Some(ends) => (ends.own, Some(ends.server), ends.remote_ends),
        None => {
            let (own, other) = Wire::pair().map_err(no_wire)?;
            (own, None, vec![(0, other)])
        }
    };
    let transport = Transport::start(MpiTransport::new(world), remote_ends)?;
    let store = Store::over(own, Some(transport), &rendezvous, place.rank, place.world_size, timeout)?;
    let store = match server {
        Some(server) => store.hosting(server),
        None => store,
    };
    // A message to a member that has not joined is lost.
    store.exchange("phalanx/joined", &[], timeout)?;
    Ok(store)
}

/// Starts the store in rank 0. Returns rank 0's own connection, and those that MPI carries to the others.
struct StoreEnds {
    server: Server,
    token: Token,
    own: Wire,
    remote_ends: Vec<(usize, Wire)>,
}

impl StoreEnds {
    fn begin(ranks: usize, settings: Settings) -> Result<StoreEnds> {
        let token =
            Token::random().map_err(|e| Error::system("getrandom", e, "the store needs a random token"))?;
        let (served, own) = Wire::pair().map_err(no_wire)?;
        let (mut all, mut remote_ends) = (vec![("rank 0".to_owned(), served)], Vec::new());
        for rank in 1..ranks {
            let (served, other) = Wire::pair().map_err(no_wire)?;
            all.push((format!("rank {rank}"), served));
            remote_ends.push((rank, other));
        }
        Ok(StoreEnds { server: Server::over(all, token.clone(), settings)?, token, own, remote_ends })
    }
}

fn no_wire(error: std::io::Error) -> Error {
    Error::system(
        "socketpair",
        error,
        "the store of n ranks takes 2 n descriptors in rank 0: see `ulimit -n`",
    )
}

fn too_few_threads(rank: usize, topology: &HostTopology) -> Error {
    Error::from(UnsupportedError {
        what: format!("GPUs on {} hosts whose ranks meet over MPI", topology.num_hosts()),
        why: format!(
            "rank {rank} on {} has initialised MPI below MPI_THREAD_MULTIPLE, and what is told over MPI meanwhile needs \
             a thread of its own",
            topology.name_of(topology.host_of(rank))
        ),
        remedy: "initialise MPI with MPI_Init_thread and MPI_THREAD_MULTIPLE or leave it to phalanx; or meet over TCP \
                 (PHALANX_STORE=host:port and PHALANX_TOKEN_FILE); or use MPI alone (PHALANX_BACKEND=mpi)"
            .into(),
    })
}
