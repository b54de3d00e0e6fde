//! Which ranks share a host. They exchange identities, since host names and variables can be wrong.

use crate::os::Surroundings;
use crate::types::error::{Error, Result, UnsupportedError};
use serde::{Deserialize, Serialize};

/// Which ranks share a host.
///
/// Two ranks do if they run under one kernel (its boot id), as one user, in the same network and IPC
/// namespaces, and see the same `/dev/shm`: what they need to share memory. So containers count as hosts of
/// their own unless they were started to share these. Hosts are numbered by their lowest rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTopology {
    /// The host of each rank.
    of_rank: Vec<usize>,
    hosts: Vec<HostRanks>,
    /// Two ranks under one kernel that do not share a host, and what they lack in common.
    apart: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct HostRanks {
    name: String,
    ranks: Vec<usize>,
}

impl HostTopology {
    /// `world_size` ranks, all on this host.
    pub(crate) fn one_host(world_size: usize) -> HostTopology {
        let host = HostRanks { name: crate::os::host_name(), ranks: (0..world_size).collect() };
        HostTopology { of_rank: vec![0; world_size], hosts: vec![host], apart: None }
    }

    /// The topology of ranks with these identities, in rank order.
    pub(crate) fn of(identities: &[HostIdentity]) -> HostTopology {
        let mut seen: Vec<&HostIdentity> = Vec::new();
        let apart = identities.first().and_then(|first| {
            let differs = |(rank, other): (usize, &HostIdentity)| Some((rank, first.differences(other)?));
            let (rank, what) = identities.iter().enumerate().find_map(differs)?;
            Some(format!("ranks 0 and {rank} run under one kernel, and do not share {}", what.join(", nor ")))
        });
        let mut topology = HostTopology { of_rank: Vec::new(), hosts: Vec::new(), apart };
        for (rank, identity) in identities.iter().enumerate() {
            let known = seen.iter().position(|other| identity.shares_host(other));
            let host = known.unwrap_or_else(|| {
                seen.push(identity);
                topology.hosts.push(HostRanks { name: identity.name.clone(), ranks: Vec::new() });
                seen.len() - 1
            });
            topology.of_rank.push(host);
            topology.hosts[host].ranks.push(rank);
        }
        topology
    }

    /// The number of ranks.
    pub(crate) fn world_size(&self) -> usize {
        self.of_rank.len()
    }

    /// The topology of some of the ranks, renumbered.
    pub(crate) fn of_members(&self, members: &[usize]) -> HostTopology {
        let mut topology = HostTopology { of_rank: Vec::new(), hosts: Vec::new(), apart: None };
        let mut seen: Vec<usize> = Vec::new();
        for (rank, member) in members.iter().enumerate() {
            let host = self.of_rank[*member];
            let place = seen.iter().position(|other| *other == host).unwrap_or_else(|| {
                seen.push(host);
                topology.hosts.push(HostRanks { name: self.hosts[host].name.clone(), ranks: Vec::new() });
                seen.len() - 1
            });
            topology.of_rank.push(place);
            topology.hosts[place].ranks.push(rank);
        }
        topology
    }

    /// The number of hosts.
    pub fn num_hosts(&self) -> usize {
        self.hosts.len()
    }

    /// The host of a rank.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn host_of(&self, rank: usize) -> usize {
        self.of_rank[rank]
    }

    /// The ranks of a host, in order. A rank's place in it is its local rank.
    ///
    /// # Panics
    /// If there is no such host.
    pub fn ranks_of(&self, host: usize) -> &[usize] {
        &self.hosts[host].ranks
    }

    /// The host name of a host. Different hosts may have the same name.
    ///
    /// # Panics
    /// If there is no such host.
    pub fn name_of(&self, host: usize) -> &str {
        &self.hosts[host].name
    }

    /// Whether two ranks share a host.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn same_host(&self, rank: usize, other: usize) -> bool {
        self.of_rank[rank] == self.of_rank[other]
    }

    /// An error if the ranks are not all on one host, for backends that need one.
    pub(crate) fn check_one_host(&self) -> Result<()> {
        if self.num_hosts() <= 1 {
            return Ok(());
        }
        let (ranks, hosts) = (self.of_rank.len(), self.num_hosts());
        let slots: Vec<String> =
            self.hosts.iter().map(|host| format!("{}:{}", host.name, host.ranks.len())).collect();
        Err(Error::from(UnsupportedError {
            what: format!("a world of {ranks} ranks without GPUs on {hosts} hosts or containers ({self})"),
            why: format!(
                "the host backend shares memory; between hosts, host memory is UCX's or MPI's work{}",
                self.apart.as_ref().map_or(String::new(), |apart| format!(". Here, {apart}")),
            ),
            remedy: format!(
                "unset PHALANX_BACKEND, and UCX is used; or start the program with an MPI: mpirun -n {ranks} --host {} PROGRAM (or \
                 srun); or start all ranks on one host",
                slots.join(",")
            ),
        }))
    }
}

/// `ranks 0, 1 on alpha; ranks 2, 3 on beta`.
impl std::fmt::Display for HostTopology {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, host) in self.hosts.iter().enumerate() {
            let ranks: Vec<String> = host.ranks.iter().map(usize::to_string).collect();
            let (separator, noun) =
                (if index > 0 { "; " } else { "" }, if ranks.len() == 1 { "rank" } else { "ranks" });
            write!(f, "{separator}{noun} {} on {}", ranks.join(", "), host.name)?;
        }
        Ok(())
    }
}

/// A rank's own description of its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostIdentity {
    /// For people only.
    name: String,
    place: Option<Surroundings>,
}

impl HostIdentity {
    pub fn own() -> HostIdentity {
        HostIdentity { name: crate::os::host_name(), place: Surroundings::own() }
    }

    /// A rank with unknown surroundings shares its host with no other.
    fn shares_host(&self, other: &HostIdentity) -> bool {
        self.place.is_some() && self.place == other.place
    }

    /// What it lacks in common with another under the same kernel; `None` if nothing, or the kernels differ.
    fn differences(&self, other: &HostIdentity) -> Option<Vec<&'static str>> {
        let differences = self.place.as_ref()?.differences(other.place.as_ref()?);
        (!differences.is_empty()).then_some(differences)
    }

    #[cfg(test)]
    pub fn new(name: &str, place: Option<Surroundings>) -> HostIdentity {
        HostIdentity { name: name.to_owned(), place }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(name: &str, change: impl FnOnce(&mut Surroundings)) -> HostIdentity {
        let mut place = Surroundings { boot: "b".into(), namespaces: [1, 2], shared_memory: 4, user: 5 };
        change(&mut place);
        HostIdentity { name: name.into(), place: Some(place) }
    }

    #[test]
    fn hosts_are_told_apart_by_what_they_are_and_not_by_name() {
        let here = || identity("node", |_| ());
        let elsewhere = [
            identity("node", |place| place.boot = "c".into()),
            identity("node", |place| place.namespaces[0] = 9),
            identity("node", |place| place.namespaces[1] = 9),
            identity("node", |place| place.shared_memory = 9),
            identity("node", |place| place.user = 9),
            HostIdentity { name: "node".into(), place: None },
        ];
        for there in elsewhere {
            let topology = HostTopology::of(&[here(), there.clone(), here()]);
            assert_eq!((topology.num_hosts(), topology.ranks_of(0)), (2, &[0, 2][..]), "{there:?}");
            assert!(topology.same_host(0, 2) && !topology.same_host(0, 1));
            assert_eq!(topology.host_of(1), 1);
        }
        // Two that cannot say where they are do not share it.
        let unknown = || HostIdentity { name: "node".into(), place: None };
        assert_eq!(HostTopology::of(&[unknown(), unknown()]).num_hosts(), 2);
        // Another name alone is no other host.
        assert_eq!(HostTopology::of(&[here(), identity("alias", |_| ())]).num_hosts(), 1);
    }

    #[test]
    fn several_hosts_are_ucxs_or_mpis_work_and_the_error_says_how() {
        let far = || identity("beta", |place| place.boot = "c".into());
        let near = || identity("alpha", |_| ());
        HostTopology::of(&[near(), near()]).check_one_host().unwrap();
        let error = HostTopology::of(&[near(), near(), far()]).check_one_host().unwrap_err();
        let text = error.to_string();
        for part in ["ranks 0, 1 on alpha; rank 2 on beta", "mpirun -n 3 --host alpha:2,beta:1", "MPI's work"]
        {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn containers_of_one_host_are_told_what_they_do_not_share() {
        let here = || identity("node", |_| ());
        let error =
            |there| HostTopology::of(&[here(), here(), there]).check_one_host().unwrap_err().to_string();
        for (there, says) in [
            (identity("node", |place| place.namespaces[0] = 9), "network namespace"),
            (identity("node", |place| place.namespaces[1] = 9), "--ipc=host"),
            (identity("node", |place| place.shared_memory = 9), "/dev/shm"),
            (identity("node", |place| place.user = 9), "the user"),
        ] {
            let error = error(there);
            assert!(error.contains("ranks 0 and 2 run under one kernel") && error.contains(says), "{error}");
        }
        assert!(!error(identity("beta", |place| place.boot = "c".into())).contains("one kernel"));
    }

    #[test]
    fn this_process_shares_its_host_with_itself() {
        let own = HostIdentity::own();
        if cfg!(target_os = "linux") {
            assert!(own.shares_host(&own));
            assert_eq!(HostTopology::one_host(3).ranks_of(0), [0, 1, 2]);
        }
    }
}
