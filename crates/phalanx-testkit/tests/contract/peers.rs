//! What the example programs of rsmpi do, written anew. Most of it is the contract's already; the rest is here.
//!
//! | rsmpi's examples | trials |
//! |---|---|
//! | `all_gather`, `all_to_all`, `barrier`, `broadcast`, `gather`, `reduce`, `scatter` | `all_gather`, `all_to_all`, … (the matrix) |
//! | `…_varcount` | `vectors/*` |
//! | `all_gather_bool` | `values/unchecked` |
//! | `arrays`, `struct`, `structured`, `complex_datatype`, `derive_…`, `broadcast_complex`, `complex_numbers` | `plain/*`, `peers/structs` |
//! | `contiguous`, `vector` | `peers/layouts`; ndarray's views: `Strided` |
//! | `buffered`, `ready_send` | `peers/sends_of_each_kind` |
//! | `cartesian`, `cartesian_map`, `null_process` | `topologies/*`, `peers/null_processes` |
//! | `comm_name` | `members/names` |
//! | `duplicate`, `split`, `group` | `peers/duplicates`, `communicators/*`, `topologies/groups` |
//! | `dot_enzyme`, `reduce` with an operation of its own, `scan` | `scans/*`, `peers/dot_products` |
//! | `immediate`, `immediate_all_gather`, `immediate_gather`, `immediate_scatter`, … and `…_varcount` | `requests/*`, `programs/*` |
//! | `immediate_reduce`, `immediate_scan` | `scans/started`, `scans/closures_started` |
//! | `immediate_barrier`, `immediate_multiple_barrier` | `peers/many_barriers` |
//! | `immediate_multiple_requests`, `…_test`, `…_wait`, `immediate_wait_all`, `wait_all`, `wait_any` | `awaiting/*` |
//! | `pack` | `peers/packed` |
//! | `send_receive` | `messages/*`, `any_source/*`, `peers/replaced` |
//! | `spawn`, `spawn_multiple` | `grow` of the fault suite; there are no inter-communicators |
//! | `env_inq`, `time`, `simple`, `readme`, `init_with_threading`, `dyn_communicator` | `jobs/*`, `peers/who_is_where` |
//! | `attributes`, `datatype_dup`, `port` | nothing: no attributes, no types as values, no ports |

use crate::world::{Done, both, outcome, same};
use bytemuck::{Pod, Zeroable};
use libtest_mimic::Trial;
use phalanx::{Comm, Grid, ReduceOp, Request};
use phalanx_testkit::Scenario;
use serde::{Deserialize, Serialize};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("peers/structs", |comm, _| outcome(structs(&comm))),
    Scenario::rank("peers/layouts", |comm, _| outcome(layouts(&comm))),
    Scenario::rank("peers/sends_of_each_kind", |comm, _| outcome(sends_of_each_kind(&comm))),
    Scenario::rank("peers/null_processes", |comm, _| outcome(null_processes(&comm))),
    Scenario::rank("peers/duplicates", |comm, _| outcome(duplicates(&comm))),
    Scenario::rank("peers/dot_products", |comm, _| outcome(dot_products(&comm))),
    Scenario::rank("peers/many_barriers", |comm, _| outcome(many_barriers(&comm))),
    Scenario::rank("peers/packed", |comm, _| outcome(packed(&comm))),
    Scenario::rank("peers/replaced", |comm, _| outcome(replaced(&comm))),
    Scenario::rank("peers/who_is_where", |comm, _| outcome(who_is_where(&comm))),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 5])).collect()
}

fn around(comm: &Comm) -> (usize, usize) {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    ((rank + 1) % ranks, (rank + ranks - 1) % ranks)
}

/// A struct of unlike fields, an array of structs and a pair in it.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Record {
    id: u64,
    points: [Point; 2],
    flags: [u8; 3],
    kind: u8,
    share: f32,
}

#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Point {
    re: f64,
    im: f64,
}

impl Record {
    fn of(rank: usize, number: usize) -> Record {
        let point = |at: usize| Point { re: (rank + at) as f64, im: -((number * at) as f64) };
        let flags = [rank as u8, number as u8, 7];
        Record { id: (rank * 1000 + number) as u64, points: [point(1), point(2)], flags, kind: 9, share: 0.5 }
    }
}

fn structs(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = around(comm);
    let of = |rank: usize| (0..10).map(|number| Record::of(rank, number)).collect::<Vec<_>>();
    let mut received = vec![Record::zeroed(); 10];
    comm.send_recv(&of(rank), next, &mut received, previous)?;
    same("from the previous", &received, &of(previous))?;
    let mut all = vec![Record::zeroed(); 10 * ranks];
    comm.all_gather(&of(rank), &mut all)?;
    same("from all", all, (0..ranks).flat_map(of).collect::<Vec<_>>())?;
    // Complex numbers: a sum by their own addition.
    let sum = |a: &Point, b: &Point| Point { re: a.re + b.re, im: a.im + b.im };
    let mut total = [Point { re: rank as f64, im: 1.0 }];
    comm.all_reduce_in_place_with(&mut total, sum)?;
    same("a complex sum", total, [Point { re: (ranks * (ranks - 1) / 2) as f64, im: ranks as f64 }])?;
    Ok(())
}

/// A part of a buffer, every other element, and a column.
fn layouts(comm: &Comm) -> Done {
    const SIDE: usize = 6;
    let rank = comm.rank();
    let (next, previous) = around(comm);
    let of = |rank: usize| (0..SIDE * SIDE).map(|cell| (rank * 100 + cell) as u16).collect::<Vec<_>>();
    let own = of(rank);
    let mut row = [0u16; SIDE];
    comm.send_recv(&own[SIDE..2 * SIDE], next, &mut row, previous)?;
    same("a row", &row[..], &of(previous)[SIDE..2 * SIDE])?;
    let every_other = |cells: &[u16]| cells.iter().step_by(2).copied().collect::<Vec<_>>();
    let request = comm.start_send(every_other(&own), next)?;
    let received = comm.start_recv(vec![0u16; SIDE * SIDE / 2], previous)?.wait()?;
    request.wait()?;
    same("every other", received, every_other(&of(previous)))?;
    let column = |cells: &[u16]| cells.iter().skip(2).step_by(SIDE).copied().collect::<Vec<_>>();
    let mut columns = vec![0u16; SIDE * comm.world_size()];
    comm.all_gather(&column(&own), &mut columns)?;
    let expected: Vec<u16> = (0..comm.world_size()).flat_map(|rank| column(&of(rank))).collect();
    same("columns", columns, expected)?;
    Ok(())
}

/// Messages that are sent long before they are received, and whose receive is posted before.
fn sends_of_each_kind(comm: &Comm) -> Done {
    let rank = comm.rank();
    let (next, previous) = around(comm);
    for len in [1usize, 70_001] {
        let ready = comm.start_recv_tagged(vec![0u64; len], previous, 1)?;
        comm.barrier()?;
        // The receiver is ready.
        let sent_ready = comm.start_send_tagged(vec![rank as u64; len], next, 1)?;
        // Nobody has asked for these yet.
        let early: Vec<_> = (0..3u64)
            .map(|number| comm.start_send_tagged(vec![number; len], next, 2))
            .collect::<phalanx::Result<_>>()?;
        comm.barrier()?;
        for number in 0..3u64 {
            let mut received = vec![0u64; len];
            comm.recv_tagged(&mut received, previous, 2)?;
            same("a message in its order", received == vec![number; len], true)?;
        }
        same("what was waited for", ready.wait()? == vec![previous as u64; len], true)?;
        sent_ready.wait()?;
        Request::wait_all(early)?;
    }
    Ok(())
}

/// A line of ranks: those at its ends have nobody beyond.
fn null_processes(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let line = Grid::new(&[ranks], &[false])?;
    let (before, behind) = line.shift(rank, 0, 1);
    let mut around = [77u32; 2];
    comm.neighbor_all_gather(&line.neighbors(rank), &[rank as u32], &mut around)?;
    let expected = [before, behind].map(|neighbor| neighbor.map_or(77, |rank| rank as u32));
    same("beyond the ends nothing comes", around, expected)?;
    same("the ends", (before.is_none(), behind.is_none()), (rank == 0, rank + 1 == ranks))?;
    Ok(())
}

/// A duplicate has messages of its own, and outlives what it was made of.
fn duplicates(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = around(comm);
    let first = comm.split(Some(0), 0)?.ok_or("no duplicate")?;
    let second = first.split(Some(0), 0)?.ok_or("no duplicate")?;
    same("the same rank", (second.rank(), second.world_size()), (rank, ranks))?;
    // Received in another order than sent: the communicators tell them apart.
    let to_first = first.start_send(vec![1u8], next)?;
    let to_second = second.start_send(vec![2u8], next)?;
    let mut received = [0u8; 2];
    second.recv(&mut received[..1], previous)?;
    first.recv(&mut received[1..], previous)?;
    same("each its own", received, [2, 1])?;
    to_first.wait()?;
    to_second.wait()?;
    first.finalize()?;
    same("it goes on", second.all_reduce_value(1u32, ReduceOp::Sum)?, ranks as u32)?;
    Ok(())
}

/// Parts of a dot product, summed; and the largest by an operation of its own.
fn dot_products(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let part = |rank: usize| (0..100).map(|i| (rank * 100 + i) as f64).collect::<Vec<_>>();
    let dot: f64 = part(rank).iter().map(|x| x * 2.0).sum();
    let total = comm.all_reduce_value(dot, ReduceOp::Sum)?;
    same("the dot product", total, (0..ranks).flat_map(part).map(|x| x * 2.0).sum::<f64>())?;
    let farther = |a: &f64, b: &f64| if b.abs() > a.abs() { *b } else { *a };
    let mut farthest = [if rank % 2 == 0 { -(rank as f64) - 0.5 } else { rank as f64 }];
    comm.all_reduce_in_place_with(&mut farthest, farther)?;
    let last = ranks - 1;
    let expected = if last % 2 == 0 { -(last as f64) - 0.5 } else { last as f64 };
    same("the farthest", farthest, [expected])?;
    Ok(())
}

fn many_barriers(comm: &Comm) -> Done {
    let barriers: Vec<_> = (0..10).map(|_| comm.start_barrier()).collect::<phalanx::Result<_>>()?;
    Request::wait_all(barriers)?;
    let barriers = (0..5).map(|_| comm.start_barrier().map(Some));
    let mut barriers = barriers.collect::<phalanx::Result<Vec<_>>>()?;
    while let Some((_, barrier)) = Request::wait_any(&mut barriers) {
        barrier?;
    }
    Ok(())
}

/// Unlike values in one message.
fn packed(comm: &Comm) -> Done {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Parts(u8, Vec<f64>, Option<String>);
    let of = |rank: usize| Parts(rank as u8, vec![0.25; rank + 1], (rank % 2 == 1).then(|| "odd".to_owned()));
    let (rank, (next, previous)) = (comm.rank(), around(comm));
    if comm.world_size() > 1 {
        // Even ranks send first.
        let send = || comm.send_object(&of(rank), next);
        let received: Parts = if rank % 2 == 0 && rank + 1 < comm.world_size() {
            send()?;
            comm.recv_object(previous)?
        } else {
            let received = comm.recv_object(previous)?;
            send()?;
            received
        };
        same("the parts", received, of(previous))?;
    }
    Ok(())
}

/// One buffer that is sent and received into.
fn replaced(comm: &Comm) -> Done {
    let (rank, (next, previous)) = (comm.rank(), around(comm));
    let mut buffer = vec![rank as i32; 5000];
    let sent = buffer.clone();
    comm.send_recv_in_place(&mut buffer, next, previous)?;
    same("replaced", buffer == vec![previous as i32; 5000], true)?;
    // Both ways: what comes back is what was sent.
    comm.send_recv_in_place(&mut buffer, previous, next)?;
    same("and back", buffer, sent)?;
    Ok(())
}

/// The names of the hosts, and which ranks are there.
fn who_is_where(comm: &Comm) -> Done {
    let topology = comm.host_topology();
    let own = topology.name_of(topology.host_of(comm.rank())).to_owned();
    same("a name", own.is_empty(), false)?;
    let names: Vec<String> = comm.all_gather_object(&own)?;
    same("one for each rank", names.len(), comm.world_size())?;
    let here = comm.split_by_host()?;
    let ranks: Vec<u64> = here.all_gather_value(comm.rank() as u64)?;
    let expected = topology.ranks_of(topology.host_of(comm.rank())).iter().map(|rank| *rank as u64);
    same("the ranks of this host", ranks, expected.collect::<Vec<_>>())?;
    Ok(())
}
