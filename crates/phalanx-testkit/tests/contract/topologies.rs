//! Groups of ranks, grids, exchanges with neighbors, and halos.

use crate::world::{Done, both, outcome, same};
use libtest_mimic::Trial;
use phalanx::{Comm, Error, Grid, Neighbors, RankGroup};
use phalanx_testkit::Scenario;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("topologies/groups", |comm, _| outcome(groups(&comm))),
    Scenario::rank("topologies/differing_groups", |comm, _| outcome(differing_groups(&comm))),
    Scenario::rank("topologies/hosts", |comm, _| outcome(hosts(&comm))),
    Scenario::rank("topologies/sub_grids", |comm, _| outcome(sub_grids(&comm))),
    Scenario::rank("topologies/neighbors_of_a_grid", |comm, _| outcome(neighbors_of_a_grid(&comm))),
    Scenario::rank("topologies/neighbors_of_a_graph", |comm, _| outcome(neighbors_of_a_graph(&comm))),
    Scenario::rank("topologies/halos", |comm, _| outcome(halos(&comm))),
    Scenario::rank("topologies/reordered", |comm, _| outcome(reordered(&comm))),
    Scenario::rank("topologies/refused", |comm, _| outcome(refused(&comm))),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 4, 6, 8])).collect()
}

fn groups(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let all = comm.rank_group();
    let reversed = RankGroup::new((0..ranks).rev().filter(|rank| rank % 3 != 1))?;
    for group in [&reversed, &all.difference(&reversed), &all, &RankGroup::default()] {
        match comm.split_group(group)? {
            None => same("left out", group.contains(rank), false)?,
            Some(part) => {
                same("rank", Some(part.rank()), group.place_of(rank))?;
                let members = part.all_gather_value(rank as u64)?;
                same("members", members, group.ranks().iter().map(|rank| *rank as u64).collect::<Vec<_>>())?;
            }
        }
    }
    // Three groups at once, and one that some ranks are outside of.
    let own = RankGroup::new((rank % 3..ranks).step_by(3))?;
    let part = comm.split_group(&own)?.ok_or("no communicator")?;
    same("one of three groups", part.all_gather_value(rank)?, own.ranks().to_vec())?;
    let first = if rank % 3 == 0 { own } else { RankGroup::default() };
    let part = comm.split_group(&first)?;
    same("in the first group", part.is_some(), rank % 3 == 0)?;
    if let Some(part) = part {
        same("the first group", part.all_gather_value(rank)?, first.ranks().to_vec())?;
    }
    Ok(())
}

/// Groups that differ between their ranks are an error on every rank, and nobody waits.
fn differing_groups(comm: &Comm) -> Done {
    let (rank, last) = (comm.rank(), comm.world_size() - 1);
    let group = RankGroup::from(if rank == last { last..last + 1 } else { 0..last + 1 });
    let error = comm.split_group(&group).err().map(|error| error.to_string()).unwrap_or_default();
    let says = if last == 0 { "" } else { &format!("those of ranks 0 and {last} differ") };
    same(&error, error.contains(says) && error.is_empty() == (last == 0), true)?;
    same("outside", comm.split_group(&RankGroup::from(last..last + 2)).is_err(), true)?;
    same("afterwards", comm.all_gather_value(1u8)?.len(), last + 1)?;
    Ok(())
}

fn hosts(comm: &Comm) -> Done {
    let topology = comm.host_topology();
    let host = topology.host_of(comm.rank());
    let here = comm.split_by_host()?;
    let expected: Vec<u64> = topology.ranks_of(host).iter().map(|rank| *rank as u64).collect();
    same("ranks of this host", here.all_gather_value(comm.rank() as u64)?, expected)?;
    Ok(())
}

/// Grids of all ranks: sizes, and which dimensions are rings.
fn grids(ranks: usize) -> phalanx::Result<Vec<Grid>> {
    let lists: [(&[usize], &[bool]); 5] = [
        (&[0], &[false]),
        (&[0], &[true]),
        (&[0, 0], &[true, false]),
        (&[0, 0, 0], &[false, true, true]),
        (&[1, 0], &[true, true]),
    ];
    lists.iter().map(|(sizes, periodic)| Grid::balanced(ranks, sizes, periodic)).collect()
}

fn sub_grids(comm: &Comm) -> Done {
    let rank = comm.rank();
    let grid = Grid::balanced(comm.world_size(), &[0, 0, 0], &[true, false, true])?;
    for dimensions in [&[0][..], &[1, 2], &[0, 1, 2]] {
        let (part, sub) = comm.split_sub_grid(&grid, dimensions)?;
        same("ranks", (sub.ranks(), sub.sizes().len()), (part.world_size(), dimensions.len()))?;
        let coordinates = grid.coordinates(rank);
        let own: Vec<usize> = dimensions.iter().map(|dimension| coordinates[*dimension]).collect();
        same("coordinates", sub.coordinates(part.rank()), own)?;
        same("sum", part.all_reduce_value(1u32, phalanx::ReduceOp::Sum)?, sub.ranks() as u32)?;
    }
    Ok(())
}

/// What a rank sends to its neighbor behind or before it in a dimension.
fn cell(from: usize, side: usize, place: usize) -> u32 {
    (from * 1000 + side * 100 + place) as u32
}

fn neighbors_of_a_grid(comm: &Comm) -> Done {
    let rank = comm.rank();
    for grid in grids(comm.world_size())? {
        let neighbors = grid.neighbors(rank);
        let sides = neighbors.sources().len();
        for len in [0, 1, 3, 5001] {
            let block = |from, side| (0..len).map(move |place| cell(from, side, place));
            // Beyond the edge the buffer keeps what it held.
            let expected = |side_of_sender: fn(usize) -> usize| -> Vec<u32> {
                let blocks = neighbors.sources().iter().enumerate().map(|(side, source)| match source {
                    Some(source) => block(*source, side_of_sender(side)).collect(),
                    None => vec![7; len],
                });
                blocks.collect::<Vec<Vec<u32>>>().concat()
            };
            let mut recv = vec![7; sides * len];
            comm.neighbor_all_gather(&neighbors, &block(rank, 0).collect::<Vec<_>>(), &mut recv)?;
            same(&format!("{grid:?}, {len} gathered"), recv == expected(|_| 0), true)?;

            let send: Vec<u32> = (0..sides).flat_map(|side| block(rank, side)).collect();
            let mut recv = vec![7; sides * len];
            comm.neighbor_all_to_all(&neighbors, &send, &mut recv)?;
            // The block from behind is the one that its sender has sent to the rank before it.
            same(&format!("{grid:?}, {len} exchanged"), recv == expected(|side| side ^ 1), true)?;
        }
    }
    Ok(())
}

/// Each rank sends to the next, twice to the one behind that, and to rank 0; blocks have lengths of their own.
fn neighbors_of_a_graph(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let destinations = |from: usize| [(from + 1) % ranks, (from + 2) % ranks, (from + 2) % ranks, 0];
    let edges: Vec<(usize, usize, usize)> = (0..ranks)
        .flat_map(|from| destinations(from).into_iter().enumerate().map(move |(edge, to)| (from, edge, to)))
        .collect();
    let arriving: Vec<(usize, usize)> =
        edges.iter().filter(|(_, _, to)| *to == rank).map(|(from, edge, _)| (*from, *edge)).collect();
    let neighbors = Neighbors::new(arriving.iter().map(|(from, _)| *from), destinations(rank));
    let len = |from: usize, edge: usize| (from + 3 * edge) % 5;
    let block = |from: usize, edge: usize| (0..len(from, edge)).map(move |place| cell(from, edge, place));

    let send: Vec<u32> = (0..4).flat_map(|edge| block(rank, edge)).collect();
    let send_counts: Vec<usize> = (0..4).map(|edge| len(rank, edge)).collect();
    let recv_counts: Vec<usize> = arriving.iter().map(|(from, edge)| len(*from, *edge)).collect();
    let expected: Vec<u32> = arriving.iter().flat_map(|(from, edge)| block(*from, *edge)).collect();
    let mut recv = vec![7; expected.len()];
    comm.neighbor_all_to_all_v(&neighbors, &send, &send_counts, &mut recv, &recv_counts)?;
    same("neighbor_all_to_all_v", recv, expected)?;

    let counts: Vec<usize> = arriving.iter().map(|(from, _)| len(*from, 0)).collect();
    let expected: Vec<u32> = arriving.iter().flat_map(|(from, _)| block(*from, 0)).collect();
    let mut recv = vec![7; expected.len()];
    comm.neighbor_all_gather_v(&neighbors, &block(rank, 0).collect::<Vec<_>>(), &mut recv, &counts)?;
    same("neighbor_all_gather_v", recv, expected)?;

    // Nobody at all.
    comm.neighbor_all_gather(&Neighbors::new([], []), &[1u8], &mut [])?;
    comm.neighbor_all_to_all::<u8>(&Neighbors::new([], []), &[], &mut [])?;
    Ok(())
}

/// Halos of three dimensions of different widths, one of them without a halo; `properties.rs` has random ones.
fn halos(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let grid = Grid::balanced(ranks, &[0, 0, 1], &[true, false, true])?;
    let (own, width) = ([3, 2, 4], [1, 2, 0]);
    let place = grid.coordinates(rank);
    let shape: Vec<usize> = own.iter().zip(width).map(|(own, width)| own + 2 * width).collect();
    let whole: Vec<usize> = grid.sizes().iter().zip(own).map(|(ranks, own)| ranks * own).collect();
    let cells: usize = shape.iter().product();
    // A cell of the whole array that this rank's cell is; `None` beyond the edge.
    let global = |cell: usize| {
        let local = [cell / (shape[1] * shape[2]), cell / shape[2] % shape[1], cell % shape[2]];
        let places = (0..3).map(|d| (place[d] * own[d] + local[d]) as isize - width[d] as isize);
        let inside: Vec<isize> = places.collect();
        let is_own = (0..3).all(|d| (width[d]..width[d] + own[d]).contains(&local[d]));
        let wrapped = (0..3).map(|d| {
            let size = whole[d] as isize;
            (grid.periodic()[d] || (0..size).contains(&inside[d]))
                .then(|| inside[d].rem_euclid(size) as usize)
        });
        let index = wrapped.zip(&whole).try_fold(0, |index, (place, size)| Some(index * size + place?));
        (is_own, index)
    };
    let before = |cell| if let (true, Some(index)) = global(cell) { index as f64 } else { -1.0 };
    let mut array: Vec<f64> = (0..cells).map(before).collect();
    let first = comm.start_exchange_halo(&grid, &array, &shape, &width)?;
    let mut second = comm.start_exchange_halo(&grid, &array, &shape, &width)?;
    let mut in_flight = array.clone();
    // Other messages of the same neighbors meanwhile.
    comm.exchange_halo(&grid, &mut array, &shape, &width)?;
    let expected: Vec<f64> =
        (0..cells).map(|cell| global(cell).1.map_or(-1.0, |index| index as f64)).collect();
    same("the array", &array, &expected)?;
    first.finish(&mut in_flight)?;
    same("in flight", &in_flight, &expected)?;
    while !second.is_done() {
        std::thread::yield_now();
    }
    second.finish(&mut in_flight)?;
    same("in flight once more", &in_flight, &expected)?;
    let halo = comm.start_exchange_halo(&grid, &in_flight, &shape, &width)?;
    same("another array", matches!(halo.finish(&mut [0.0]), Err(Error::Usage(_))), true)?;
    Ok(())
}

/// All ranks are there, each once, and at most as many neighbors are on two hosts as before.
fn reordered(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let grid = Grid::balanced(ranks, &[0, 0], &[true, false])?;
    let new = comm.reorder_by_host(&grid)?;
    let mut ranks_there = new.all_gather_value(rank as u64)?;
    let far = |comm: &Comm| {
        let places =
            (0..ranks).flat_map(|place| [0, 1].map(|dimension| (place, grid.shift(place, dimension, 1).1)));
        let topology = comm.host_topology();
        places.filter(|(place, next)| next.is_some_and(|next| !topology.same_host(*place, next))).count()
    };
    same("at most as many", far(&new) <= far(comm), true)?;
    if comm.host_topology().num_hosts() == 1 {
        same("on one host", new.rank(), rank)?;
    }
    ranks_there.sort_unstable();
    same("all are there", ranks_there, (0..ranks as u64).collect::<Vec<_>>())?;
    let other = Grid::new(&[ranks + 1], &[true])?;
    same("another grid", matches!(comm.reorder_by_host(&other), Err(Error::Usage(_))), true)?;
    Ok(())
}

/// Wrong arguments are an error before anything is sent.
fn refused(comm: &Comm) -> Done {
    let ranks = comm.world_size();
    let text = |result: phalanx::Result<()>| match result {
        Err(Error::Usage(error)) => Ok(error.to_string()),
        other => Err(format!("not refused: {other:?}")),
    };
    let grid = Grid::new(&[ranks], &[true])?;
    let other = Grid::new(&[ranks + 1], &[true])?;
    let mut array = [0u8; 12];
    let cases = [
        (text(comm.exchange_halo(&other, &mut array, &[12], &[1]))?, "exchange_halo: grid"),
        (text(comm.exchange_halo(&grid, &mut array, &[3, 4], &[1]))?, "exchange_halo: shape"),
        (text(comm.exchange_halo(&grid, &mut array, &[12], &[]))?, "exchange_halo: width"),
        (text(comm.exchange_halo(&grid, &mut array, &[12], &[5]))?, "3 × width [5]"),
        (text(comm.exchange_halo(&grid, &mut array, &[11], &[1]))?, "it needs 11"),
        (text(comm.split_sub_grid(&other, &[0]).map(drop))?, "split_sub_grid: grid"),
        (text(comm.neighbor_all_gather(&Neighbors::new([ranks], []), &[1u8], &mut [0]))?, "does not exist"),
        (text(comm.neighbor_all_gather(&Neighbors::new([0], []), &[1u8], &mut [0, 0]))?, "it needs 1"),
        (text(comm.neighbor_all_to_all(&Neighbors::new([], [0, 0]), &[1u8], &mut []))?, "it needs 0"),
        (
            text(comm.neighbor_all_gather_v(&Neighbors::new([0], []), &[1u8], &mut [0], &[]))?,
            "one for each neighbor",
        ),
    ];
    for (text, part) in cases {
        same(&text, text.contains(part), true)?;
    }
    same("afterwards", comm.all_gather_value(1u8)?.len(), ranks)?;
    Ok(())
}
