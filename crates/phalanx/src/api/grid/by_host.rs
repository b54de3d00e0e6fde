//! Ranks reordered so that neighbors in a grid share hosts.

use super::Grid;
use crate::api::comm::Comm;
use crate::contract::hosts::HostTopology;
use crate::types::error::Result;

impl Comm {
    /// A communicator of the same ranks in another order: one in which more neighbors in the grid share a host, if there is one.
    /// `MPI_Cart_create` with `reorder`.
    ///
    /// Where all hosts have as many ranks, each gets a block of the grid with as little surface as the sizes allow. The order is never
    /// worse than the present one, and on one host it stays. On MPI all ranks count as on one host
    /// ([`host_topology`](Comm::host_topology)).
    ///
    /// Collective, with the same grid on every rank; [`Comm::split`] with another key.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// phalanx::try_run(4, |comm| -> phalanx::Result<()> {
    ///     let grid = phalanx::Grid::new(&[2, 2], &[true, true])?;
    ///     let comm = comm.reorder_by_host(&grid)?;
    ///     let neighbors = grid.neighbors(comm.rank());
    ///     # let _ = neighbors;
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`UsageError::Setting`](crate::UsageError::Setting) for a grid of another number of ranks.
    pub fn reorder_by_host(&self, grid: &Grid) -> Result<Comm> {
        grid.check_ranks("reorder_by_host", self)?;
        let order = order(grid, &self.host_topology());
        let place = order.iter().position(|rank| *rank == self.rank()).expect("every rank has a place");
        Ok(self.split(Some(0), place as i64)?.expect("a rank with a colour"))
    }
}

/// The rank at each place of the grid.
fn order(grid: &Grid, topology: &HostTopology) -> Vec<usize> {
    let present: Vec<usize> = (0..grid.ranks()).collect();
    let host_by_host: Vec<usize> =
        (0..topology.num_hosts()).flat_map(|host| topology.ranks_of(host)).copied().collect();
    let orders = [Some(present), Some(host_by_host), in_blocks(grid, topology)];
    let best = orders.into_iter().flatten().min_by_key(|order| links_between_hosts(grid, topology, order));
    best.expect("there is the present order")
}

/// How many pairs of neighbors are on two hosts.
fn links_between_hosts(grid: &Grid, topology: &HostTopology, order: &[usize]) -> usize {
    let links = (0..grid.ranks()).flat_map(|place| {
        let next = (0..grid.sizes().len()).filter_map(move |dimension| grid.shift(place, dimension, 1).1);
        next.map(move |next| (place, next))
    });
    links.filter(|(place, next)| !topology.same_host(order[*place], order[*next])).count()
}

/// Each host has a block of the grid, if that is possible.
fn in_blocks(grid: &Grid, topology: &HostTopology) -> Option<Vec<usize>> {
    let each = topology.ranks_of(0).len();
    if (0..topology.num_hosts()).any(|host| topology.ranks_of(host).len() != each) {
        return None;
    }
    let blocks = blocks(grid.sizes(), each);
    let block = blocks.into_iter().min_by_key(|block| links_between_blocks(grid, block))?;
    let mut taken = vec![0; topology.num_hosts()];
    let rank_at = |place: usize| {
        // The number of its block, row-major.
        let coordinates = grid.coordinates(place).into_iter().zip(grid.sizes()).zip(&block);
        let host = coordinates
            .fold(0, |host, ((coordinate, size), block)| host * (size / block) + coordinate / block);
        taken[host] += 1;
        topology.ranks_of(host)[taken[host] - 1]
    };
    Some((0..grid.ranks()).map(rank_at).collect())
}

/// All blocks of so many cells of which the sizes are multiples.
fn blocks(sizes: &[usize], cells: usize) -> Vec<Vec<usize>> {
    let Some((size, others)) = sizes.split_first() else {
        return if cells == 1 { vec![Vec::new()] } else { Vec::new() };
    };
    let parts = (1..=*size).filter(|part| size.is_multiple_of(*part) && cells.is_multiple_of(*part));
    parts
        .flat_map(|part| {
            blocks(others, cells / part).into_iter().map(move |rest| [&[part][..], &rest[..]].concat())
        })
        .collect()
}

/// How many pairs of neighbors are in two blocks.
fn links_between_blocks(grid: &Grid, block: &[usize]) -> usize {
    let dimensions = grid.sizes().iter().zip(grid.periodic()).zip(block);
    let links = dimensions.map(|((size, periodic), part)| {
        let cuts = size / part - usize::from(!periodic || part == size);
        cuts * (grid.ranks() / size)
    });
    links.sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::hosts::HostIdentity;
    use crate::os::Surroundings;

    /// A topology in which each rank is on this host.
    fn hosts(of_ranks: &[usize]) -> HostTopology {
        let identity = |host: &usize| {
            let boot = format!("h{host}");
            HostIdentity::new(
                &boot,
                Some(Surroundings { boot: boot.clone(), namespaces: [1, 2], shared_memory: 4, user: 5 }),
            )
        };
        HostTopology::of(&of_ranks.iter().map(identity).collect::<Vec<_>>())
    }

    fn links(grid: &Grid, topology: &HostTopology) -> [usize; 2] {
        let present: Vec<usize> = (0..grid.ranks()).collect();
        [present, order(grid, topology)].map(|order| links_between_hosts(grid, topology, &order))
    }

    #[test]
    fn hosts_get_blocks_with_little_surface() {
        // Two rows of eight on two hosts that have every other rank: each host gets a half.
        let grid = Grid::new(&[2, 8], &[false, false]).unwrap();
        let every_other: Vec<usize> = (0..16).map(|rank| rank % 2).collect();
        assert_eq!(links(&grid, &hosts(&every_other)), [14, 2]);
        // Squares in place of rows, where the grid ends at its edges.
        let rows: Vec<usize> = (0..16).map(|rank| rank / 4).collect();
        assert_eq!(links(&Grid::new(&[4, 4], &[false; 2]).unwrap(), &hosts(&rows)), [12, 8]);
        assert_eq!(links(&Grid::new(&[4, 4], &[true; 2]).unwrap(), &hosts(&rows)), [16, 16]);
        // Cubes in place of halves of planes.
        let halves: Vec<usize> = (0..64).map(|rank| rank / 8).collect();
        assert_eq!(links(&Grid::new(&[4, 4, 4], &[false; 3]).unwrap(), &hosts(&halves)), [64, 48]);
    }

    #[test]
    fn every_rank_has_one_place_and_no_order_is_worse_than_the_present_one() {
        for ranks in 1..=24 {
            for hosts_of in [1, 2, 3, 5] {
                for sizes in [&[0][..], &[0, 0], &[0, 0, 0]] {
                    let grid = Grid::balanced(ranks, sizes, &vec![ranks % 2 == 0; sizes.len()]).unwrap();
                    let topology = hosts(&(0..ranks).map(|rank| rank * 7 % hosts_of).collect::<Vec<_>>());
                    let [present, new] = links(&grid, &topology);
                    assert!(new <= present, "{grid:?}, {topology}");
                    let mut order = order(&grid, &topology);
                    order.sort_unstable();
                    assert!(order.iter().copied().eq(0..ranks), "{grid:?}, {topology}");
                }
            }
        }
    }

    #[test]
    fn on_one_host_the_order_stays() {
        let grid = Grid::new(&[3, 4], &[true, false]).unwrap();
        assert!(order(&grid, &HostTopology::one_host(12)).into_iter().eq(0..12));
    }
}
