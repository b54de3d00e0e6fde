//! Ranks of several hosts agree on a backend: each says where it is, what it was told and which GPUs it sees, and all come
//! to the same answer.

use super::hosts::{HostTopology, Identity};
use crate::backend::BackendKind;
use crate::error::{Error, Result, UnsupportedError};
use serde::{Deserialize, Serialize};

/// The backends on GPUs, in the order of preference.
const ON_GPUS: [BackendKind; 2] = [BackendKind::Nccl, BackendKind::Rccl];

/// What a rank says of itself.
#[derive(Serialize, Deserialize)]
pub(super) struct Introduction {
    identity: Identity,
    /// The name of the backend that it was told to use.
    wanted: Option<String>,
    /// How many GPUs it could use with each of [`ON_GPUS`], or why none.
    gpus: [std::result::Result<usize, String>; ON_GPUS.len()],
}

impl Introduction {
    /// Of this process. It looks for GPUs only if they may be used.
    pub fn own(wanted: Option<BackendKind>, gpus: impl Fn(BackendKind) -> Result<usize>) -> Introduction {
        let look = |backend: BackendKind| {
            if wanted.is_none_or(|wanted| wanted == backend) {
                gpus(backend).map_err(|error| error.to_string())
            } else {
                Err("they were not asked for".to_owned())
            }
        };
        let wanted = wanted.map(|backend| backend.name().to_owned());
        Introduction { identity: Identity::own(), wanted, gpus: ON_GPUS.map(look) }
    }
}

/// Tells all ranks of this one and learns of them; answers where they are and what carries their data: what all were told to
/// use; a backend on GPUs if each rank has one; else `otherwise`. `exchange` gives what a rank says and gets what all say.
/// Collective; an error is the same on all ranks.
pub(super) fn reach(
    own: &Introduction,
    exchange: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>>,
    otherwise: BackendKind,
) -> Result<(HostTopology, BackendKind)> {
    let all = exchange(&postcard::to_allocvec(own).expect("plain data"))?;
    let all = all.iter().enumerate().map(|(rank, bytes)| {
        postcard::from_bytes(bytes).map_err(|_| {
            Error::bootstrap(
                format!("rank {rank} does not say where it is in a way that can be understood"),
                "use one version of phalanx in all processes of the job",
            )
        })
    });
    agree(&all.collect::<Result<Vec<Introduction>>>()?, otherwise)
}

fn agree(all: &[Introduction], otherwise: BackendKind) -> Result<(HostTopology, BackendKind)> {
    let identities: Vec<Identity> = all.iter().map(|one| one.identity.clone()).collect();
    let topology = HostTopology::of(&identities);
    let wanted = &all[0].wanted;
    if let Some(rank) = all.iter().position(|one| one.wanted != *wanted) {
        let name = |wanted: &Option<String>| wanted.clone().unwrap_or_else(|| "no backend".into());
        return Err(Error::bootstrap(
            format!(
                "rank 0 was told to use {}, and rank {rank} on {} to use {}",
                name(wanted),
                topology.name_of(topology.host_of(rank)),
                name(&all[rank].wanted),
            ),
            "set PHALANX_BACKEND to the same on all hosts, and Builder::backend in all ranks",
        ));
    }
    let lacking = |index: usize| (0..all.len()).find(|rank| !has_gpu(all, &topology, *rank, index));
    let wants = |backend: BackendKind| wanted.as_ref().is_none_or(|wanted| wanted == backend.name());
    let candidates = (0..ON_GPUS.len()).filter(|index| wants(ON_GPUS[*index]));
    if let Some(index) = candidates.clone().find(|index| lacking(*index).is_none()) {
        return Ok((topology, ON_GPUS[index]));
    }
    // Some have GPUs, or all were told to use them: going on without would be a surprise.
    let has_any = |index: &usize| all.iter().any(|one| matches!(one.gpus[*index], Ok(1..)));
    let is_told = wanted.is_some();
    let meant = candidates.clone().find(|index| is_told || (topology.num_hosts() > 1 && has_any(index)));
    match meant {
        None => {
            let others = [BackendKind::Nvshmem, BackendKind::Host, BackendKind::Mpi];
            let told = others.into_iter().find(|other| wanted.as_deref() == Some(other.name()));
            Ok((topology, told.unwrap_or(otherwise)))
        }
        Some(index) => {
            let rank = lacking(index).expect("or it had been chosen");
            Err(no_gpu(all, &topology, rank, index))
        }
    }
}

/// Whether a rank has a GPU of its own.
fn has_gpu(all: &[Introduction], topology: &HostTopology, rank: usize, index: usize) -> bool {
    let here = topology.ranks_of(topology.host_of(rank)).len();
    all[rank].gpus[index].as_ref().is_ok_and(|gpus| *gpus >= here)
}

fn no_gpu(all: &[Introduction], topology: &HostTopology, rank: usize, index: usize) -> Error {
    let host = topology.host_of(rank);
    let why = match &all[rank].gpus[index] {
        Ok(gpus) => {
            format!("it sees {gpus}, and {} ranks of its host need one each", topology.ranks_of(host).len())
        }
        Err(why) => why.clone(),
    };
    Error::from(UnsupportedError {
        what: format!("{} for {} ranks on {} hosts", ON_GPUS[index], all.len(), topology.num_hosts()),
        why: format!("rank {rank} on {} has no GPU of its own: {why}", topology.name_of(host)),
        remedy: "start as many ranks on each host as it has GPUs (`phalanx doctor` there says what it finds), or do \
                 without: PHALANX_BACKEND=mpi, under mpirun or srun"
            .into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::Surroundings;

    fn rank(host: &str, wanted: Option<BackendKind>, gpus: std::result::Result<usize, &str>) -> Introduction {
        let place = Surroundings { boot: host.into(), namespaces: [1, 2, 3], shared_memory: 4, user: 5 };
        Introduction {
            identity: Identity::new(host, Some(place)),
            wanted: wanted.map(|backend| backend.name().to_owned()),
            gpus: [gpus.map_err(str::to_owned), Err("no HIP".into())],
        }
    }

    fn agreed(all: &[Introduction]) -> Result<(HostTopology, BackendKind)> {
        agree(all, BackendKind::Host)
    }

    #[test]
    fn each_rank_needs_a_gpu_of_its_host() {
        let [a, b] = [|gpus| rank("alpha", None, gpus), |gpus| rank("beta", None, gpus)];
        let (topology, backend) = agreed(&[a(Ok(2)), b(Ok(1)), a(Ok(2))]).unwrap();
        assert_eq!((topology.num_hosts(), backend), (2, BackendKind::Nccl));
        let none = || Err("no driver");
        assert_eq!(agreed(&[a(none()), b(none())]).unwrap().1, BackendKind::Host);
        let error = agreed(&[a(Ok(2)), a(Ok(2)), b(none())]).unwrap_err().to_string();
        assert!(error.contains("rank 2 on beta") && error.contains("no driver"), "{error}");
        let error = agreed(&[a(Ok(1)), b(Ok(1)), a(Ok(1))]).unwrap_err().to_string();
        assert!(error.contains("rank 0 on alpha") && error.contains("it sees 1, and 2 ranks"), "{error}");
        // On one host ranks have always done without.
        assert_eq!(agreed(&[a(Ok(1)), a(Ok(1))]).unwrap().1, BackendKind::Host);
    }

    #[test]
    fn what_was_asked_for_counts_and_is_the_same_for_all() {
        let nccl = Some(BackendKind::Nccl);
        assert!(agreed(&[rank("alpha", nccl, Err("no driver")), rank("beta", nccl, Ok(1))]).is_err());
        assert_eq!(agreed(&[rank("alpha", nccl, Ok(1))]).unwrap().1, BackendKind::Nccl);
        let host = Some(BackendKind::Host);
        assert_eq!(
            agreed(&[rank("alpha", host, Ok(1)), rank("beta", host, Ok(1))]).unwrap().1,
            BackendKind::Host
        );
        let error = agreed(&[rank("alpha", host, Ok(1)), rank("beta", None, Ok(1))]).unwrap_err().to_string();
        assert!(error.contains("told to use host, and rank 1 on beta to use no backend"), "{error}");
    }

    #[test]
    fn ranks_of_mpi_stay_with_it_unless_each_has_a_gpu() {
        let over_mpi = |all: &[Introduction]| agree(all, BackendKind::Mpi);
        let both = |wanted, gpus| [rank("alpha", wanted, gpus), rank("beta", wanted, gpus)];
        assert_eq!(over_mpi(&both(None, Ok(1))).unwrap().1, BackendKind::Nccl);
        assert_eq!(over_mpi(&both(None, Err("no driver"))).unwrap().1, BackendKind::Mpi);
        assert_eq!(over_mpi(&both(Some(BackendKind::Mpi), Ok(1))).unwrap().1, BackendKind::Mpi);
        let error = over_mpi(&[rank("alpha", None, Ok(1)), rank("beta", None, Ok(0))]).unwrap_err();
        assert!(error.to_string().contains("PHALANX_BACKEND=mpi"), "{error}");
    }
}
