//! [`Comm::split_by_gpu_link`]: communicators of the ranks whose GPUs NVLink connects.

use super::comm::Comm;
use crate::gpu::cuda::{PeerLink, gpu_ids, link};
use crate::types::error::{Result, UnsupportedError};
use crate::types::memory::GpuId;
use serde::{Deserialize, Serialize};

/// Where a rank's GPU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    host: usize,
    gpu: GpuId,
}

/// The ranks whose GPUs a rank's GPU reaches, or why they could not be found.
type Reached = std::result::Result<Vec<bool>, String>;

impl Comm {
    /// The communicator of the ranks whose GPUs NVLink connects, directly or over others, in the order of their ranks here.
    ///
    /// For example, eight GPUs of a host with NVSwitch are one communicator; four GPUs in two pairs with a bridge each are two; GPUs on PCIe
    /// alone are one each. Ranks that share a GPU come together. A GPU that a process does not see (`CUDA_VISIBLE_DEVICES`) is connected
    /// for it to none.
    ///
    /// Collective, as [`split`](Comm::split). `cuDeviceGetP2PAttribute`.
    ///
    /// ```no_run
    /// let comm = phalanx::init()?;
    /// let linked = comm.split_by_gpu_link()?;
    /// println!("rank {} is linked with {} ranks", comm.rank(), linked.world_size() - 1);
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`UnsupportedError`], the same on every rank, if the ranks have no GPUs of NVIDIA's, or if a driver does not say how they are linked.
    pub fn split_by_gpu_link(&self) -> Result<Comm> {
        let refused = |why: String| UnsupportedError {
            what: format!("split_by_gpu_link on the {} backend", self.backend()),
            why,
            remedy: "split by something else: split_by_host, split_by".into(),
        };
        let Some(own) = self.gpu().filter(|_| self.stream.cuda_stream().is_some()) else {
            return Err(refused("the ranks have no GPUs of NVIDIA's".into()).into());
        };
        // A rank that fails takes part, so that all ranks end alike.
        let ids = gpu_ids().map_err(|error| error.to_string());
        let gpu = ids.as_ref().map_or(GpuId([0; 16]), |ids| ids[own]);
        let places =
            self.all_gather_object(&Place { host: self.host_topology().host_of(self.rank()), gpu })?;
        let reached =
            ids.and_then(|ids| reached(self.rank(), own, &places, &ids).map_err(|error| error.to_string()));
        let all: Vec<Reached> = self.all_gather_object(&reached)?;
        let rows = all.into_iter().enumerate();
        let rows = rows.map(|(rank, row)| row.map_err(|why| refused(format!("rank {rank}: {why}"))));
        let first = first_of_each(&rows.collect::<std::result::Result<Vec<_>, _>>()?);
        self.split_with_color(first[self.rank()])
    }
}

/// Which ranks have a GPU that this rank's GPU, number `own` of those in `ids`, reaches over NVLink.
fn reached(rank: usize, own: usize, places: &[Place], ids: &[GpuId]) -> Result<Vec<bool>> {
    let is_reached = |place: &Place| {
        let seen = ids.iter().position(|id| *id == place.gpu).filter(|_| place.host == places[rank].host);
        seen.map_or(Ok(false), |ordinal| Ok(ordinal == own || link(own, ordinal)? == PeerLink::NvLink))
    };
    places.iter().map(is_reached).collect()
}

/// The lowest rank that each rank is connected with, directly or over others. Two ranks are connected if one reaches the other.
fn first_of_each(reached: &[Vec<bool>]) -> Vec<usize> {
    let mut first: Vec<usize> = (0..reached.len()).collect();
    // The lower number wanders along the links, one in each round.
    loop {
        let before = first.clone();
        for (from, row) in reached.iter().enumerate() {
            for (to, _) in row.iter().enumerate().filter(|(_, is_reached)| **is_reached) {
                let lowest = first[from].min(first[to]);
                (first[from], first[to]) = (lowest, lowest);
            }
        }
        if first == before {
            return first;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::first_of_each;

    fn first_of(ranks: usize, links: &[(usize, usize)]) -> Vec<usize> {
        let mut reached = vec![vec![false; ranks]; ranks];
        links.iter().for_each(|(from, to)| reached[*from][*to] = true);
        first_of_each(&reached)
    }

    #[test]
    fn ranks_are_connected_over_others_and_in_one_direction() {
        assert_eq!(first_of(4, &[]), [0, 1, 2, 3]);
        assert_eq!(first_of(5, &[(0, 2), (1, 3)]), [0, 1, 0, 1, 4]);
        // A ring whose numbers are out of order, and one end that only the other reaches.
        assert_eq!(first_of(6, &[(5, 1), (3, 5), (1, 4), (4, 0)]), [0, 0, 2, 0, 0, 0]);
    }
}
