//! [`Neighbors`]: the ranks that a rank exchanges with, and the collectives among them.

use super::Grid;
use crate::api::comm::Comm;
use crate::buffer::{Source, Target};
use crate::types::dtype::Plain;
use crate::types::error::{Result, UsageError};

/// The tag of neighbors' messages: below that of objects.
const TAG: u32 = 32_765;

/// The ranks from which a rank receives, and those to which it sends.
///
/// [`Grid::neighbors`] makes those of a grid, [`Neighbors::new`] those of any graph (`MPI_Dist_graph_create_adjacent`). A `None` is a place
/// beyond the edge of a grid: nothing is sent there, and its block keeps what it held.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Neighbors {
    sources: Vec<Option<usize>>,
    destinations: Vec<Option<usize>>,
    /// The order in which the receives are posted: that in which the sources send, if one is there several times.
    receive_order: Vec<usize>,
}

impl Neighbors {
    /// Any ranks. Each rank has lists of its own: if rank 2 lists rank 5 among its destinations, rank 5 lists rank 2 among its sources, as
    /// many times. The first block that goes from a rank to another is the first that arrives from it.
    pub fn new(
        sources: impl IntoIterator<Item = usize>,
        destinations: impl IntoIterator<Item = usize>,
    ) -> Neighbors {
        let sources: Vec<Option<usize>> = sources.into_iter().map(Some).collect();
        let receive_order = (0..sources.len()).collect();
        Neighbors { sources, destinations: destinations.into_iter().map(Some).collect(), receive_order }
    }

    /// The ranks whose blocks arrive, in the order of the blocks.
    pub fn sources(&self) -> &[Option<usize>] {
        &self.sources
    }

    /// The ranks to which blocks go, in the order of the blocks.
    pub fn destinations(&self) -> &[Option<usize>] {
        &self.destinations
    }
}

impl Grid {
    /// A rank's neighbors in the grid: for each dimension the one before and the one behind it, both as sources and as destinations.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn neighbors(&self, rank: usize) -> Neighbors {
        self.neighbors_along(rank, 0..self.sizes().len())
    }

    pub(super) fn neighbors_along(
        &self,
        rank: usize,
        dimensions: impl IntoIterator<Item = usize>,
    ) -> Neighbors {
        let pairs = dimensions.into_iter().flat_map(|dimension| {
            let (before, behind) = self.shift(rank, dimension, 1);
            [before, behind]
        });
        let ranks: Vec<Option<usize>> = pairs.collect();
        // In a ring of two, or of one, both neighbors are one rank. What it sends first goes to the rank before it, and so comes from the one
        // behind.
        let receive_order = (0..ranks.len()).map(|place| place ^ 1).collect();
        Neighbors { sources: ranks.clone(), destinations: ranks, receive_order }
    }
}

/// # Exchanges with neighbors
///
/// Every rank calls them, in one order; a rank waits for its neighbors only. They are messages with the tag 32765, in a
/// [group](Comm::group), on host memory. A block of another length than its receiver expects is a [`MismatchError`](crate::MismatchError),
/// as for messages.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::Grid;
///
/// phalanx::try_run(4, |comm| -> phalanx::Result<()> {
///     let ring = Grid::new(&[4], &[true])?;
///     let mut around = [0; 2];
///     comm.neighbor_all_gather(&ring.neighbors(comm.rank()), &[comm.rank()as u32], &mut around)?;
///     assert_eq!(around.map(|rank| rank as usize), [(comm.rank() + 3) % 4, (comm.rank() + 1) % 4]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
impl Comm {
    /// Sends one buffer to all destinations, and collects the sources' buffers, in the order of the sources.
    ///
    /// `recv.len()` is the number of sources × `send.len()`. `MPI_Neighbor_allgather`.
    #[doc(alias = "MPI_Neighbor_allgather")]
    pub fn neighbor_all_gather<T: Plain>(
        &self,
        neighbors: &Neighbors,
        send: &[T],
        recv: &mut [T],
    ) -> Result<()> {
        let counts = vec![send.len(); neighbors.sources.len()];
        self.neighbor_exchange("neighbor_all_gather", neighbors, Sent::Whole(send), recv, &counts)
    }

    /// [`neighbor_all_gather`](Comm::neighbor_all_gather) of blocks of different lengths: `counts[i]` elements come from source `i`, and
    /// `recv.len()` is their sum. `MPI_Neighbor_allgatherv`.
    pub fn neighbor_all_gather_v<T: Plain>(
        &self,
        neighbors: &Neighbors,
        send: &[T],
        recv: &mut [T],
        counts: &[usize],
    ) -> Result<()> {
        self.neighbor_exchange("neighbor_all_gather_v", neighbors, Sent::Whole(send), recv, counts)
    }

    /// Sends a block to each destination, and receives one from each source.
    ///
    /// `send` has a block of one length for each destination, `recv` for each source. `MPI_Neighbor_alltoall`.
    #[doc(alias = "MPI_Neighbor_alltoall")]
    pub fn neighbor_all_to_all<T: Plain>(
        &self,
        neighbors: &Neighbors,
        send: &[T],
        recv: &mut [T],
    ) -> Result<()> {
        let operation = "neighbor_all_to_all";
        let send_counts = shares(operation, "send", send.len(), neighbors.destinations.len())?;
        let recv_counts = shares(operation, "recv", recv.len(), neighbors.sources.len())?;
        self.neighbor_exchange(operation, neighbors, Sent::Blocks(send, &send_counts), recv, &recv_counts)
    }

    /// [`neighbor_all_to_all`](Comm::neighbor_all_to_all) of blocks of different lengths: `send_counts[j]` elements go to destination `j`,
    /// `recv_counts[i]` come from source `i`. `MPI_Neighbor_alltoallv`.
    pub fn neighbor_all_to_all_v<T: Plain>(
        &self,
        neighbors: &Neighbors,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<()> {
        let sent = Sent::Blocks(send, send_counts);
        self.neighbor_exchange("neighbor_all_to_all_v", neighbors, sent, recv, recv_counts)
    }

    pub(super) fn neighbor_exchange<T: Plain>(
        &self,
        operation: &'static str,
        neighbors: &Neighbors,
        sent: Sent<'_, T>,
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<()> {
        for rank in neighbors.sources.iter().chain(&neighbors.destinations).flatten() {
            self.shape().check_rank(operation, "neighbor", *rank)?;
        }
        check_blocks(operation, "recv", recv.len(), recv_counts, neighbors.sources.len())?;
        let sends = sent.blocks(operation, neighbors.destinations.len())?;
        let mut rest = recv;
        let blocks =
            recv_counts.iter().map(|count| rest.split_off_mut(..*count).expect("the lengths were checked"));
        let mut receives: Vec<&mut [T]> = blocks.collect();
        self.exchange_blocks(neighbors, &sends, &mut receives)
    }

    /// Sends a block to each destination, and receives one from each source: checked ranks, and as many blocks.
    pub(super) fn exchange_blocks<S: Source, R: Target>(
        &self,
        neighbors: &Neighbors,
        sends: &[S],
        receives: &mut [R],
    ) -> Result<()> {
        let mut receives: Vec<Option<&mut R>> = receives.iter_mut().map(Some).collect();
        self.group(|group| {
            for (block, rank) in sends.iter().zip(&neighbors.destinations) {
                let Some(rank) = rank else { continue };
                group.send_tagged(block, *rank, TAG)?;
            }
            for place in &neighbors.receive_order {
                let Some(rank) = neighbors.sources[*place] else { continue };
                let block = receives[*place].take().expect("each block is received once");
                group.recv_tagged(block, rank, TAG)?;
            }
            Ok(())
        })
    }
}

/// What goes to the destinations.
pub(super) enum Sent<'a, T> {
    /// To each the same.
    Whole(&'a [T]),
    /// A block to each, of these lengths.
    Blocks(&'a [T], &'a [usize]),
}

impl<'a, T> Sent<'a, T> {
    /// A block for each destination.
    fn blocks(self, operation: &'static str, destinations: usize) -> Result<Vec<&'a [T]>> {
        let (mut rest, counts) = match self {
            Sent::Whole(whole) => return Ok(vec![whole; destinations]),
            Sent::Blocks(all, counts) => (all, counts),
        };
        check_blocks(operation, "send", rest.len(), counts, destinations)?;
        let block = |count: &usize| {
            let (block, others) = rest.split_at(*count);
            rest = others;
            block
        };
        Ok(counts.iter().map(block).collect())
    }
}

/// The lengths of the blocks of a buffer that has one length of block for each neighbor.
fn shares(operation: &'static str, buffer: &'static str, len: usize, neighbors: usize) -> Result<Vec<usize>> {
    let block = len.checked_div(neighbors).unwrap_or(0);
    let counts = vec![block; neighbors];
    check_blocks(operation, buffer, len, &counts, neighbors)?;
    Ok(counts)
}

/// An error unless there is a count for each neighbor, and the buffer has as many elements.
fn check_blocks(
    operation: &'static str,
    buffer: &'static str,
    actual: usize,
    counts: &[usize],
    neighbors: usize,
) -> Result<()> {
    if counts.len() != neighbors {
        let (name, value) = (format!("{operation}: {buffer} counts"), format!("{counts:?}"));
        return Err(UsageError::Setting {
            name,
            value,
            expected: format!("{neighbors}, one for each neighbor"),
        }
        .into());
    }
    let expected = counts.iter().fold(0, |sum: usize, count| sum.saturating_add(*count));
    if actual == expected {
        return Ok(());
    }
    let rule = "the sum of the neighbors' blocks";
    Err(UsageError::Length { operation, buffer, actual, expected, rule }.into())
}
