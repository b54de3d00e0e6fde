//! Agrees on a backend: each rank sends its host, its settings and its GPUs, and all make the same choice
//! from them.

use crate::contract::BackendKind;
use crate::contract::hosts::{HostIdentity, HostTopology};
use crate::rendezvous::gpus::{GpuReport, Visible, lacking, share_out};
use crate::types::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Backends that need GPUs, in order of preference.
const ON_GPUS: [BackendKind; 2] = [BackendKind::Nccl, BackendKind::Rccl];

/// A rank's introduction: its input to the agreement.
#[derive(Serialize, Deserialize)]
pub(crate) struct Introduction {
    identity: HostIdentity,
    /// Name of the backend set by the user.
    wanted: Option<String>,
    /// The GPUs that it could use with each of [`ON_GPUS`], or why there are none.
    gpus: [GpuReport; ON_GPUS.len()],
    /// Whether the user set its GPU, and there are GPUs, for each of [`ON_GPUS`].
    insists: [bool; ON_GPUS.len()],
    /// Whether calls are to be compared before they move data.
    check: bool,
    /// Whether contributions are to be combined in rank order.
    reproducible: bool,
}

impl Introduction {
    /// Makes this process's introduction. It looks for GPUs only if they may be used: `gpus` returns all of
    /// them, or only the one that the user set.
    pub fn own(
        wanted: Option<BackendKind>,
        gpu: Option<usize>,
        [check, reproducible]: [bool; 2],
        gpus: impl Fn(BackendKind, Option<usize>) -> Result<Visible>,
    ) -> Introduction {
        let may_use = |backend: BackendKind| wanted.is_none_or(|wanted| wanted == backend);
        let look = |backend: BackendKind| {
            if may_use(backend) {
                gpus(backend, gpu).map_err(|error| error.to_string())
            } else {
                Err("they were not asked for".to_owned())
            }
        };
        let has_some =
            |backend: BackendKind| may_use(backend) && gpus(backend, None).is_ok_and(|gpus| !gpus.is_empty());
        let insists = ON_GPUS.map(|backend| gpu.is_some() && has_some(backend));
        let wanted = wanted.map(|backend| backend.name().to_owned());
        Introduction {
            identity: HostIdentity::own(),
            wanted,
            gpus: ON_GPUS.map(look),
            insists,
            check,
            reproducible,
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("plain data")
    }
}

/// Decodes the introductions of all ranks, in rank order.
pub(crate) fn decode(words: &[Vec<u8>]) -> Result<Vec<Introduction>> {
    let read = |(rank, word): (usize, &Vec<u8>)| {
        postcard::from_bytes(word).map_err(|_| {
            Error::bootstrap(
                format!("rank {rank} does not say where it is in a way that can be understood"),
                "use one version of phalanx in all processes of the job",
            )
        })
    };
    words.iter().enumerate().map(read).collect()
}

/// The hosts of the ranks, from their introductions.
pub(crate) fn topology(all: &[Introduction]) -> HostTopology {
    let identities: Vec<HostIdentity> = all.iter().map(|one| one.identity.clone()).collect();
    HostTopology::of(&identities)
}

/// The common backend: the one set by the user (on all ranks, if they are on several hosts); a backend on
/// GPUs if each rank has one; else `otherwise`. The same on all ranks, as is an error.
pub(crate) fn agree(
    all: &[Introduction],
    topology: &HostTopology,
    otherwise: BackendKind,
) -> Result<BackendKind> {
    // On one host, ranks without a setting follow the others.
    let first = match topology.num_hosts() {
        1 => all.iter().position(|one| one.wanted.is_some()).unwrap_or(0),
        _ => 0,
    };
    let wanted = &all[first].wanted;
    let differs =
        |one: &Introduction| one.wanted != *wanted && (topology.num_hosts() > 1 || one.wanted.is_some());
    if let Some(rank) = all.iter().position(differs) {
        let name = |wanted: &Option<String>| wanted.clone().unwrap_or_else(|| "no backend".into());
        return Err(Error::bootstrap(
            format!(
                "rank {first} was told to use {}, and rank {rank} on {} to use {}",
                name(wanted),
                topology.name_of(topology.host_of(rank)),
                name(&all[rank].wanted),
            ),
            "set PHALANX_BACKEND to the same for all ranks, and Builder::backend in all of them",
        ));
    }
    let host_of = |rank| topology.name_of(topology.host_of(rank)).into();
    check_settings(all.iter().map(|one| one.check), host_of)?;
    compare(all.iter().map(|one| one.reproducible), host_of, ORDER)?;
    let reports = |index: usize| all.iter().map(|one| &one.gpus[index]).collect::<Vec<&GpuReport>>();
    let without = |index: usize| share_out(&reports(index), topology).err();
    let wants = |backend: BackendKind| wanted.as_ref().is_none_or(|wanted| wanted == backend.name());
    let candidates = (0..ON_GPUS.len()).filter(|index| wants(ON_GPUS[*index]));
    if let Some(index) = candidates.clone().find(|index| without(*index).is_none()) {
        return Ok(ON_GPUS[index]);
    }
    // Some ranks have GPUs, or the user asked for them: falling back to host memory would be a surprise.
    let has_any =
        |index: &usize| all.iter().any(|one| one.gpus[*index].as_ref().is_ok_and(|gpus| !gpus.is_empty()));
    let insist = |index: &usize| all.iter().any(|one| one.insists[*index]);
    let would_surprise = |index: &usize| insist(index) || (topology.num_hosts() > 1 && has_any(index));
    let meant = candidates.clone().find(|index| wanted.is_some() || would_surprise(index));
    match meant {
        None => {
            let others = [BackendKind::Nvshmem, BackendKind::Host, BackendKind::Mpi, BackendKind::Ucx];
            let reports = others.into_iter().find(|other| wanted.as_deref() == Some(other.name()));
            // Host memory of several hosts is UCX's work.
            let is_far = otherwise == BackendKind::Host && topology.num_hosts() > 1;
            Ok(reports.unwrap_or(if is_far { BackendKind::Ucx } else { otherwise }))
        }
        Some(index) => {
            let rank = without(index).expect("or it had been chosen");
            Err(lacking(ON_GPUS[index].name(), &reports(index), topology, rank))
        }
    }
}

/// Compares the ranks' settings, in rank order. Ranks that compare their calls would wait for those that do not.
pub(crate) fn check_settings(
    check: impl Iterator<Item = bool>,
    host_of: impl Fn(usize) -> String,
) -> Result<()> {
    compare(check, host_of, CHECK)
}

/// What a setting tells a rank, its variable, and the builder's method.
type SettingNames = [&'static str; 3];
const CHECK: SettingNames = ["compare calls", "PHALANX_CHECK", "Builder::check"];
const ORDER: SettingNames = ["combine in rank order", "PHALANX_REPRODUCIBLE", "Builder::reproducible"];

/// Compares a setting of all ranks, in rank order.
fn compare(
    values: impl Iterator<Item = bool>,
    host_of: impl Fn(usize) -> String,
    [what, variable, method]: SettingNames,
) -> Result<()> {
    let all: Vec<bool> = values.collect();
    let Some(other) = all.iter().position(|value| *value != all[0]) else { return Ok(()) };
    let named = |rank: usize| format!("rank {rank} on {}", host_of(rank));
    let (with, without) = if all[0] { (0, other) } else { (other, 0) };
    Err(Error::bootstrap(
        format!("{} was told to {what} ({variable}=1), and {} was not", named(with), named(without)),
        format!("set {variable} to the same for all ranks, on all hosts, and {method} in all of them"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::Surroundings;
    use crate::types::memory::GpuId;

    /// An introduction with this many GPUs, the same on all ranks.
    fn seen(gpus: std::result::Result<usize, &str>) -> GpuReport {
        let ids = |gpus| (0..gpus).map(|number| GpuId([number as u8; 16])).collect();
        let seen = gpus.map(|gpus| Visible::here(ids(gpus), None, false).unwrap());
        seen.map_err(str::to_owned)
    }

    fn rank(host: &str, wanted: Option<BackendKind>, gpus: std::result::Result<usize, &str>) -> Introduction {
        let place = Surroundings { boot: host.into(), namespaces: [1, 2], shared_memory: 4, user: 5 };
        Introduction {
            identity: HostIdentity::new(host, Some(place)),
            wanted: wanted.map(|backend| backend.name().to_owned()),
            gpus: [seen(gpus), Err("no HIP".into())],
            insists: [false; 2],
            check: false,
            reproducible: false,
        }
    }

    #[test]
    fn settings_are_the_same_for_all() {
        let checks = |check| Introduction { check, ..rank("beta", None, Err("no driver")) };
        let first = || rank("alpha", None, Err("no driver"));
        assert!(agreed(&[first(), checks(false)]).is_ok());
        let error = agreed(&[first(), checks(false), checks(true)]).unwrap_err().to_string();
        let says = "rank 2 on beta was told to compare calls (PHALANX_CHECK=1), and rank 0 on alpha was not";
        assert!(error.contains(says), "{error}");
    }

    fn agreed(all: &[Introduction]) -> Result<(HostTopology, BackendKind)> {
        let topology = topology(all);
        agree(all, &topology, BackendKind::Host).map(|backend| (topology, backend))
    }

    #[test]
    fn each_rank_needs_a_gpu_of_its_host() {
        let [a, b] = [|gpus| rank("alpha", None, gpus), |gpus| rank("beta", None, gpus)];
        let (topology, backend) = agreed(&[a(Ok(2)), b(Ok(1)), a(Ok(2))]).unwrap();
        assert_eq!((topology.num_hosts(), backend), (2, BackendKind::Nccl));
        let none = || Err("no driver");
        assert_eq!(agreed(&[a(none()), a(none())]).unwrap().1, BackendKind::Host);
        assert_eq!(agreed(&[a(none()), b(none())]).unwrap().1, BackendKind::Ucx);
        let error = agreed(&[a(Ok(2)), a(Ok(2)), b(none())]).unwrap_err().to_string();
        assert!(error.contains("rank 2 on beta") && error.contains("no driver"), "{error}");
        let error = agreed(&[a(Ok(1)), b(Ok(1)), a(Ok(1))]).unwrap_err().to_string();
        assert!(
            error.contains("rank 2 on alpha") && error.contains("it may use 1 (0), and 2 ranks"),
            "{error}"
        );
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
        let on_one = |second| agreed(&[rank("alpha", host, Ok(2)), rank("alpha", second, Ok(2))]);
        assert_eq!(on_one(None).unwrap().1, BackendKind::Host);
        let error = on_one(nccl).unwrap_err().to_string();
        assert!(error.contains("told to use host, and rank 1 on alpha to use nccl"), "{error}");
    }

    #[test]
    fn who_names_a_gpu_does_not_do_without() {
        let gpu = |gpus| Introduction { insists: [true, false], ..rank("alpha", None, gpus) };
        let error = agreed(&[gpu(Ok(1)), gpu(Ok(1))]).unwrap_err().to_string();
        assert!(error.contains("rank 1 on alpha has no GPU of its own"), "{error}");
        let error =
            agreed(&[rank("alpha", None, Ok(2)), gpu(Err("there is no GPU 99"))]).unwrap_err().to_string();
        assert!(error.contains("there is no GPU 99"), "{error}");
        assert_eq!(agreed(&[gpu(Ok(2)), gpu(Ok(2))]).unwrap().1, BackendKind::Nccl);
        // AMD GPUs are chosen if there are no NVIDIA GPUs.
        let amd = Introduction {
            insists: [false, true],
            gpus: [Err("no driver".into()), Err("there is no GPU 99".into())],
            ..rank("alpha", None, Err(""))
        };
        let error = agreed(&[amd]).unwrap_err().to_string();
        assert!(error.contains("rccl") && error.contains("there is no GPU 99"), "{error}");
    }

    #[test]
    fn ranks_of_mpi_stay_with_it_unless_each_has_a_gpu() {
        let over_mpi = |all: &[Introduction]| agree(all, &topology(all), BackendKind::Mpi);
        let both = |wanted, gpus| [rank("alpha", wanted, gpus), rank("beta", wanted, gpus)];
        assert_eq!(over_mpi(&both(None, Ok(1))).unwrap(), BackendKind::Nccl);
        assert_eq!(over_mpi(&both(None, Err("no driver"))).unwrap(), BackendKind::Mpi);
        assert_eq!(over_mpi(&both(Some(BackendKind::Mpi), Ok(1))).unwrap(), BackendKind::Mpi);
        let error = over_mpi(&[rank("alpha", None, Ok(1)), rank("beta", None, Ok(0))]).unwrap_err();
        assert!(error.to_string().contains("PHALANX_BACKEND=mpi"), "{error}");
    }
}
