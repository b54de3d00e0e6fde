//! Assigns a GPU to each rank.
//!
//! The ranks of a host exchange the ids of the GPUs they see: a launcher may show each process all of them,
//! in any order, or only one. Each rank gets a GPU of its own, if possible the one with its number on the
//! host.

use crate::contract::hosts::HostTopology;
use crate::types::error::Result;
use crate::types::error::{Error, UnsupportedError};
use crate::types::memory::GpuId;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// The GPUs that a rank can use.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Visible {
    /// GPU ids with their ordinals in the rank's process.
    gpus: Vec<(usize, GpuId)>,
    process: u32,
    /// Whether the rank may share a GPU with another process.
    shares: bool,
}

impl Visible {
    /// Lists the GPUs that this process sees, or only the one that the user set for this rank.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is none with that number.
    pub fn here(all: Vec<GpuId>, wanted: Option<usize>, shares: bool) -> Result<Visible> {
        if let Some(number) = wanted.filter(|number| *number >= all.len()) {
            return Err(Error::from(UnsupportedError {
                what: format!("GPU {number}"),
                why: format!("this process sees {} GPUs", all.len()),
                remedy: "name another (Builder::gpu), or look at CUDA_VISIBLE_DEVICES (for AMD's, HIP_VISIBLE_DEVICES and \
                         ROCR_VISIBLE_DEVICES)"
                    .into(),
            }));
        }
        let is_wanted = |(number, _): &(usize, GpuId)| wanted.is_none_or(|wanted| wanted == *number);
        let gpus = all.into_iter().enumerate().filter(is_wanted).collect();
        Ok(Visible { gpus, process: std::process::id(), shares })
    }

    pub fn is_empty(&self) -> bool {
        self.gpus.is_empty()
    }
}

/// The GPUs of a rank, or why it has none.
pub(crate) type GpuReport = std::result::Result<Visible, String>;

/// The ordinal of each rank's GPU in its process; or else a rank without one.
pub(crate) fn share_out(
    reports: &[&GpuReport],
    topology: &HostTopology,
) -> std::result::Result<Vec<usize>, usize> {
    let mut numbers = vec![0; reports.len()];
    for host in 0..topology.num_hosts() {
        let ranks = topology.ranks_of(host);
        let mut seen = Vec::with_capacity(ranks.len());
        for rank in ranks {
            seen.push(reports[*rank].as_ref().map_err(|_| *rank)?);
        }
        let shared = share_out_on_host(&seen).map_err(|index| ranks[index])?;
        ranks.iter().zip(shared).for_each(|(rank, number)| numbers[*rank] = number);
    }
    Ok(numbers)
}

fn share_out_on_host(seen: &[&Visible]) -> std::result::Result<Vec<usize>, usize> {
    let mut holders = HashMap::new();
    for rank in 0..seen.len() {
        if !find(rank, seen, &mut holders, &mut HashSet::new()) {
            return shared(seen).ok_or(rank);
        }
    }
    let number_of = |(rank, visible): (usize, &&Visible)| {
        let own = visible.gpus.iter().find(|(_, id)| holders.get(id) == Some(&rank));
        own.expect("it was found").0
    };
    Ok(seen.iter().enumerate().map(number_of).collect())
}

/// Finds a GPU for a rank; its holder looks for another one (an augmenting path of a bipartite matching).
fn find(
    rank: usize,
    seen: &[&Visible],
    holders: &mut HashMap<GpuId, usize>,
    tried: &mut HashSet<GpuId>,
) -> bool {
    let gpus = &seen[rank].gpus;
    let in_turn = || (0..gpus.len()).map(|step| gpus[(rank + step) % gpus.len()].1);
    let found = in_turn()
        .find(|id| !holders.contains_key(id))
        .or_else(|| in_turn().find(|id| tried.insert(*id) && find(holders[id], seen, holders, tried)));
    if let Some(id) = found {
        holders.insert(id, rank);
    }
    found.is_some()
}

/// Puts several processes on each GPU, evenly; `None` if a rank does not share.
fn shared(seen: &[&Visible]) -> Option<Vec<usize>> {
    let processes: HashSet<u32> = seen.iter().map(|visible| visible.process).collect();
    let may_share = seen.iter().all(|visible| visible.shares && !visible.is_empty());
    let number = |(rank, visible): (usize, &&Visible)| visible.gpus[rank % visible.gpus.len()].0;
    (may_share && processes.len() == seen.len()).then(|| seen.iter().enumerate().map(number).collect())
}

/// The error for a rank that has no GPU.
pub(crate) fn lacking(library: &str, reports: &[&GpuReport], topology: &HostTopology, rank: usize) -> Error {
    let host = topology.host_of(rank);
    let why = match reports[rank] {
        Ok(visible) => {
            let numbers: Vec<String> = visible.gpus.iter().map(|(number, _)| number.to_string()).collect();
            let which = if numbers.is_empty() { String::new() } else { format!(" ({})", numbers.join(", ")) };
            let (sees, ranks) = (visible.gpus.len(), topology.ranks_of(host).len());
            format!("it may use {sees}{which}, and {ranks} ranks of its host need one each")
        }
        Err(why) => why.clone(),
    };
    Error::from(UnsupportedError {
        what: format!("{library} for {} ranks", reports.len()),
        why: format!("rank {rank} on {} has no GPU of its own: {why}", topology.name_of(host)),
        remedy: "start as many ranks on each host as it has GPUs (`phalanx doctor` there says what it finds), let processes \
                 share them (NCCL does from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1), or do without: \
                 PHALANX_BACKEND=host, or PHALANX_BACKEND=mpi under mpirun or srun"
            .into(),
    })
}

pub(crate) use together::settle;

mod together {
    use super::*;

    /// Returns the ordinal of this rank's GPU. `exchange` gathers the reports of all ranks. Collective. An
    /// error is the same on all ranks, except that a rank that cannot list its GPUs gets its own error.
    pub(crate) fn settle(
        library: &str,
        own: Result<Visible>,
        (rank, topology): (usize, &HostTopology),
        exchange: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>>,
    ) -> Result<usize> {
        let (reports, failed) = match own {
            Ok(visible) => (Ok(visible), None),
            Err(error) => (Err(error.to_string()), Some(error)),
        };
        let all = exchange(&postcard::to_allocvec::<GpuReport>(&reports).expect("plain data"))?;
        if let Some(error) = failed {
            return Err(error);
        }
        let unclear = |_| Err("what it says of its GPUs cannot be understood".to_owned());
        let all: Vec<GpuReport> =
            all.iter().map(|reports| postcard::from_bytes(reports).unwrap_or_else(unclear)).collect();
        let all: Vec<&GpuReport> = all.iter().collect();
        share_out(&all, topology)
            .map(|numbers| numbers[rank])
            .map_err(|rank| lacking(library, &all, topology, rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(process: u32, gpus: &[u8], shares: bool) -> GpuReport {
        let gpus = gpus.iter().enumerate().map(|(number, id)| (number, GpuId([*id; 16]))).collect();
        Ok(Visible { gpus, process, shares })
    }

    fn on_one_host(reports: &[GpuReport]) -> std::result::Result<Vec<usize>, usize> {
        share_out(&reports.iter().collect::<Vec<_>>(), &HostTopology::one_host(reports.len()))
    }

    #[test]
    fn each_rank_has_a_gpu_of_its_own() {
        // All see all: the rank's number.
        assert_eq!(on_one_host(&[0, 1, 2].map(|rank_| rank(rank_, &[7, 8, 9], false))), Ok(vec![0, 1, 2]));
        // Each sees one, or has it first.
        assert_eq!(on_one_host(&[rank(0, &[7], false), rank(1, &[8], false)]), Ok(vec![0, 0]));
        assert_eq!(on_one_host(&[rank(0, &[7, 8], false), rank(1, &[8, 7], false)]), Ok(vec![0, 0]));
        // Who came first gives way.
        let reports = [rank(0, &[7, 8], false), rank(1, &[7], false), rank(2, &[9, 8, 7], false)];
        assert_eq!(on_one_host(&reports), Ok(vec![1, 0, 0]));
        // More than ranks.
        assert_eq!(on_one_host(&[rank(0, &[1, 2, 3], false), rank(1, &[1, 2, 3], false)]), Ok(vec![0, 1]));
    }

    #[test]
    fn who_has_none_is_named() {
        assert_eq!(on_one_host(&[rank(0, &[7], false), rank(1, &[7], false)]), Err(1));
        assert_eq!(on_one_host(&[rank(0, &[7, 8], false), rank(1, &[], false)]), Err(1));
        assert_eq!(on_one_host(&[rank(0, &[7, 8], false), Err("no driver".into())]), Err(1));
        let reports = [rank(0, &[7], false), rank(1, &[7], false)];
        let error =
            lacking("nccl", &reports.iter().collect::<Vec<_>>(), &HostTopology::one_host(2), 1).to_string();
        assert!(error.contains("rank 1") && error.contains("may use 1 (0), and 2 ranks"), "{error}");
    }

    #[test]
    fn processes_share_if_all_may() {
        let four = |shares| [0, 1, 2, 3].map(|process| rank(process, &[7, 8], shares));
        assert_eq!(on_one_host(&four(true)), Ok(vec![0, 1, 0, 1]));
        assert_eq!(on_one_host(&four(false)), Err(2));
        let mut threads = four(true);
        threads[3] = rank(2, &[7, 8], true);
        assert_eq!(on_one_host(&threads), Err(2));
        // None is shared if there are enough.
        assert_eq!(on_one_host(&[rank(0, &[8, 7], true), rank(1, &[8, 7], true)]), Ok(vec![0, 1]));
    }
}
