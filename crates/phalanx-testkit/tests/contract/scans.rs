//! Scans, and reductions by closures: what is combined by the ranks' processors on every backend.

use crate::buffers::Memory;
use crate::world::both;
use bytemuck::{Pod, Zeroable};
use libtest_mimic::Trial;
use phalanx::{Comm, PreMulSum, ReduceOp};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario, random, with_number};
use std::fmt::Debug;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("scans/numbers", |comm, _| numbers(&comm)),
    Scenario::rank("scans/bits_of_floats", |comm, _| bits_of_floats(&comm)),
    Scenario::rank("scans/started", |comm, _| started(&comm)),
    Scenario::rank("scans/closures", |comm, _| closures(&comm)),
    Scenario::rank("scans/closures_in_place", |comm, _| closures_in_place(&comm)),
    Scenario::rank("scans/closures_started", |comm, _| closures_started(&comm)),
    Scenario::rank("scans/closures_in_groups", |comm, _| closures_in_groups(&comm)),
    Scenario::rank("scans/closures_of_long_elements", |comm, _| long_elements(&comm)),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 3, 5])).collect()
}

/// Elements: none, in a line, in a slot, in several chunks.
const SIZES: [usize; 5] = [0, 1, 13, 1000, 70_001];

fn expect<T: PartialEq + Debug>(what: &str, actual: &[T], expected: &[T]) -> Result<(), String> {
    match (0..expected.len()).find(|index| actual[*index] != expected[*index]) {
        None => Ok(()),
        Some(index) => Err(format!("{what}: [{index}] = {:?}, not {:?}", actual[index], expected[index])),
    }
}

/// The ranks' elements, combined up to each rank.
pub fn prefixes<T: Copy>(
    ranks: usize,
    of: impl Fn(usize) -> Vec<T>,
    combine: impl Fn(&T, &T) -> T,
) -> Vec<Vec<T>> {
    let mut all = vec![of(0)];
    for rank in 1..ranks {
        all.push(all[rank - 1].iter().zip(&of(rank)).map(|(before, own)| combine(before, own)).collect());
    }
    all
}

/// Every type, with values that any order combines exactly.
fn numbers(comm: &Comm) -> Outcome {
    for dtype in phalanx::DType::ALL {
        with_number!(dtype, T => of_type::<T>(comm)).context(|| format!("{dtype}"))?;
    }
    Ok(String::new())
}

fn of_type<T: Number>(comm: &Comm) -> Result<(), String> {
    let rank = comm.rank();
    let value = |value: usize| T::from_small(value as i32);
    let own = |rank: usize, len: usize| (0..len).map(|i| value((rank + i) % 3)).collect::<Vec<T>>();
    let sum = |rank: usize, i: usize| value((0..=rank).map(|rank| (rank + i) % 3).sum());
    for len in [1, 3001] {
        let mut got = vec![value(1); len];
        comm.scan(&own(rank, len), &mut got, ReduceOp::Sum).context(|| "scan".into())?;
        expect("scan", &got, &(0..len).map(|i| sum(rank, i)).collect::<Vec<_>>())?;

        let mut got = own(rank, len);
        comm.exclusive_scan_in_place(&mut got, ReduceOp::Max).context(|| "exclusive_scan_in_place".into())?;
        let largest = |i: usize| (0..rank).map(|rank| (rank + i) % 3).max().map_or(own(rank, len)[i], value);
        expect("exclusive_scan_in_place", &got, &(0..len).map(largest).collect::<Vec<_>>())?;

        let mut got = own(rank, len);
        // Each rank's factor is another.
        comm.scan_in_place(&mut got, PreMulSum(value(rank % 2))).context(|| "scan of products".into())?;
        let products = |i: usize| value((0..=rank).map(|rank| (rank + i) % 3 * (rank % 2)).sum());
        expect("scan of products", &got, &(0..len).map(products).collect::<Vec<_>>())?;
    }
    let mut mean = [value(6)];
    comm.scan_in_place(&mut mean, ReduceOp::Avg).context(|| "scan of means".into())?;
    expect("scan of means", &mean, &[value(6)])
}

/// Sums are made in rank order, in every kind of memory and by every algorithm.
fn bits_of_floats(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for len in SIZES {
        let of = |rank: usize| random::values::<f32>(77 + rank as u64, len);
        let sums = prefixes(ranks, of, |a, b| a + b);
        let before = if rank == 0 { &vec![-1.0; len] } else { &sums[rank - 1] };
        for memory in Memory::ALL {
            let what = || format!("{len} elements, {memory:?}, rank {rank}");
            let mut send = memory.send(comm, len).context(what)?;
            let mut recv = memory.recv(comm, len).context(what)?;
            send.all().copy_from_slice(&of(rank));
            recv.all().fill(-1.0);
            comm.scan(&send.all()[..], recv.all(), ReduceOp::Sum).context(what)?;
            same(&what(), recv.all(), &sums[rank])?;
            recv.all().fill(-1.0);
            comm.exclusive_scan(&send.all()[..], recv.all(), ReduceOp::Sum).context(what)?;
            same(&what(), recv.all(), before)?;
            comm.scan_in_place(send.all(), ReduceOp::Sum).context(what)?;
            same(&what(), send.all(), &sums[rank])?;
        }
    }
    Ok(String::new())
}

fn same(what: &str, got: &[f32], expected: &[f32]) -> Result<(), String> {
    match (0..expected.len()).find(|index| !got[*index].same(expected[*index])) {
        None => Ok(()),
        Some(index) => Err(format!("{what}: [{index}] is {}, not {}", got[index], expected[index])),
    }
}

/// Several under way at once, with others in between; the last is waited for first.
fn started(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for len in SIZES {
        let what = || format!("{len} elements, rank {rank}");
        let of = |rank: usize| random::values::<f32>(99 + rank as u64, len);
        let sums = prefixes(ranks, of, |a, b| a + b);
        let largest = prefixes(ranks, |rank| vec![rank as u64; len], |a, b| *a.max(b));
        let scan = comm.start_scan(of(rank), ReduceOp::Sum).context(what)?;
        let before = comm.start_exclusive_scan(vec![rank as u64; len], ReduceOp::Max).context(what)?;
        let all = comm.start_all_reduce(vec![1i32; len], ReduceOp::Sum).context(what)?;
        let products = comm.start_scan(vec![1u8; len], PreMulSum(rank as u8 + 1)).context(what)?;
        let triangle = ((rank + 1) * (rank + 2) / 2) as u8;
        expect("start_scan of products", &products.wait().context(what)?, &vec![triangle; len])?;
        expect("start_all_reduce", &all.wait().context(what)?, &vec![ranks as i32; len])?;
        let expected = if rank == 0 { &largest[0] } else { &largest[rank - 1] };
        expect("start_exclusive_scan", &before.wait().context(what)?, expected)?;
        same(&what(), &scan.wait().context(what)?, &sums[rank])?;
    }
    Ok(String::new())
}

/// A matrix, whose product does not commute.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Matrix([[u32; 2]; 2]);

fn product(Matrix(a): &Matrix, Matrix(b): &Matrix) -> Matrix {
    let entry =
        |i: usize, j: usize| a[i][0].wrapping_mul(b[0][j]).wrapping_add(a[i][1].wrapping_mul(b[1][j]));
    Matrix([[entry(0, 0), entry(0, 1)], [entry(1, 0), entry(1, 1)]])
}

fn matrices(rank: usize, len: usize) -> Vec<Matrix> {
    (0..len as u32).map(|i| Matrix([[1, i + rank as u32], [7 * i + 1, 1]])).collect()
}

fn closures(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let root = ranks / 2;
    let zero = Matrix([[0; 2]; 2]);
    for len in SIZES.map(|len| len.min(30_001)) {
        let own = matrices(rank, len);
        let products = prefixes(ranks, |rank| matrices(rank, len), product);
        let all = &products[ranks - 1];

        let mut got = vec![zero; len];
        comm.all_reduce_with(&own, &mut got, product).context(|| "all_reduce_with".into())?;
        expect("all_reduce_with", &got, all)?;

        let mut got = comm.alloc::<Matrix>(len).context(|| "alloc".into())?;
        got.copy_from_slice(&own);
        comm.all_reduce_in_place_with(&mut got, product).context(|| "all_reduce_in_place_with".into())?;
        expect("all_reduce_in_place_with", &got, all)?;

        let mut got = vec![zero; len];
        comm.reduce_with(&own, &mut got, product, root).context(|| "reduce_with".into())?;
        expect("reduce_with", &got, if rank == root { all } else { &own[..0] })?;

        let mut got = vec![zero; len];
        comm.scan_with(&own, &mut got, product).context(|| "scan_with".into())?;
        expect("scan_with", &got, &products[rank])?;

        let mut got = vec![zero; len];
        comm.exclusive_scan_with(&own, &mut got, product).context(|| "exclusive_scan_with".into())?;
        expect("exclusive_scan_with", &got, if rank == 0 { &own[..0] } else { &products[rank - 1] })?;

        let share = len / ranks;
        let mut got = vec![zero; share];
        comm.reduce_scatter_with(&own[..share * ranks], &mut got, product)
            .context(|| "reduce_scatter_with".into())?;
        expect("reduce_scatter_with", &got, &all[rank * share..][..share])?;
    }
    Ok(String::new())
}

const CLOSURE_SIZES: [usize; 4] = [0, 1, 1000, 30_001];

/// What each rank gets of its matrices and the others'.
struct Products {
    own: Vec<Matrix>,
    /// Up to each rank.
    up_to: Vec<Vec<Matrix>>,
}

impl Products {
    fn of(comm: &Comm, len: usize) -> Products {
        let up_to = prefixes(comm.world_size(), |rank| matrices(rank, len), product);
        Products { own: matrices(comm.rank(), len), up_to }
    }

    fn all(&self) -> &[Matrix] {
        &self.up_to[self.up_to.len() - 1]
    }

    /// Of the ranks before this one; rank 0 keeps what it has.
    fn before(&self, rank: usize) -> &[Matrix] {
        if rank == 0 { &self.own } else { &self.up_to[rank - 1] }
    }
}

fn closures_in_place(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let root = ranks / 2;
    for len in CLOSURE_SIZES {
        let products = Products::of(comm, len);
        let mut got = products.own.clone();
        comm.scan_in_place_with(&mut got, product).context(|| "scan_in_place_with".into())?;
        expect("scan_in_place_with", &got, &products.up_to[rank])?;
        let mut got = products.own.clone();
        comm.exclusive_scan_in_place_with(&mut got, product)
            .context(|| "exclusive_scan_in_place_with".into())?;
        expect("exclusive_scan_in_place_with", &got, products.before(rank))?;
        let mut got = products.own.clone();
        comm.reduce_in_place_with(&mut got, product, root).context(|| "reduce_in_place_with".into())?;
        expect("reduce_in_place_with", &got, if rank == root { products.all() } else { &products.own })?;
        let share = len / ranks;
        let mut got = products.own[..share * ranks].to_vec();
        comm.reduce_scatter_in_place_with(&mut got, product)
            .context(|| "reduce_scatter_in_place_with".into())?;
        let mine = rank * share..(rank + 1) * share;
        expect("reduce_scatter_in_place_with", &got[mine.clone()], &products.all()[mine])?;
    }
    Ok(String::new())
}

/// All forms under way at once, with a closure that owns what it uses; the last is waited for first.
fn closures_started(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let root = ranks / 2;
    for len in CLOSURE_SIZES {
        let what = || format!("{len} elements");
        let products = Products::of(comm, len);
        let own = || products.own.clone();
        let times = [product];
        let all = comm.start_all_reduce_with(own(), move |a, b| times[0](a, b)).context(what)?;
        let scan = comm.start_scan_with(own(), product).context(what)?;
        let before = comm.start_exclusive_scan_with(own(), product).context(what)?;
        let at_root = comm.start_reduce_with(own(), product, root).context(what)?;
        let share = len / ranks;
        let (whole, part) = (own()[..share * ranks].to_vec(), vec![Matrix([[0; 2]; 2]); share]);
        let scattered = comm.start_reduce_scatter_with(whole, part, product).context(what)?;
        let sum = comm.all_reduce_value(1u64, ReduceOp::Sum).context(what)?;
        expect("all_reduce_value in between", &[sum], &[ranks as u64])?;
        let (_, part) = scattered.wait().context(what)?;
        expect("start_reduce_scatter_with", &part, &products.all()[rank * share..][..share])?;
        let at_root = at_root.wait().context(what)?;
        expect("start_reduce_with", &at_root, if rank == root { products.all() } else { &products.own })?;
        expect("start_exclusive_scan_with", &before.wait().context(what)?, products.before(rank))?;
        expect("start_scan_with", &scan.wait().context(what)?, &products.up_to[rank])?;
        expect("start_all_reduce_with", &all.wait().context(what)?, products.all())?;

        let mut prepared = comm.prepare_all_reduce_with(own(), product).context(what)?;
        for _ in 0..2 {
            prepared.buffers.copy_from_slice(&products.own);
            prepared.run().context(what)?;
            expect("prepare_all_reduce_with", &prepared.buffers, products.all())?;
        }
    }
    Ok(String::new())
}

/// Closures that borrow, in a group with a message.
fn closures_in_groups(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for len in CLOSURE_SIZES {
        let products = Products::of(comm, len);
        let times = [product];
        let (mut all, mut scan) = (products.own.clone(), products.own.clone());
        let mut before = products.own.clone();
        let (sent, mut received) = ([rank as u64], [0u64]);
        comm.group(|group| {
            group.all_reduce_in_place_with(&mut all, |a, b| times[0](a, b))?;
            group.scan_with(&products.own, &mut scan, |a, b| times[0](a, b))?;
            group.send(&sent, next)?;
            group.recv(&mut received, previous)?;
            group.exclusive_scan_in_place_with(&mut before, product)
        })
        .context(|| format!("{len} elements"))?;
        expect("all_reduce_in_place_with", &all, products.all())?;
        expect("scan_with", &scan, &products.up_to[rank])?;
        expect("exclusive_scan_in_place_with", &before, products.before(rank))?;
        expect("the message", &received, &[previous as u64])?;
    }
    Ok(String::new())
}

/// Elements that are longer than a cache line, or do not fit one a whole number of times; and one that is too long.
fn long_elements(comm: &Comm) -> Outcome {
    summed::<200>(comm, 1333)?;
    summed::<1>(comm, 70_001)?;
    summed::<3>(comm, 50_001)?;
    let mut long = [[0u64; 257]];
    match comm.all_reduce_in_place_with(&mut long, |a, _| *a) {
        Err(error) if error.to_string().contains("2056 bytes") => Ok(String::new()),
        other => Err(format!("an element of 2056 bytes: {other:?}")),
    }
}

/// Sums of elements of `N` words, in each reduction.
fn summed<const N: usize>(comm: &Comm, len: usize) -> Result<(), String> {
    let of = |rank: usize| (0..len).map(|i| [(i + rank) as u64; N]).collect::<Vec<_>>();
    let sum = |a: &[u64; N], b: &[u64; N]| std::array::from_fn(|i| a[i] + b[i]);
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (own, sums) = (of(rank), prefixes(ranks, of, sum));
    let check = |what: &str, got: &[[u64; N]], expected: &[[u64; N]]| match got == expected {
        true => Ok(()),
        false => Err(format!("{what} of {len} × {N} words")),
    };
    let mut got = vec![[0; N]; len];
    comm.scan_with(&own, &mut got, sum).context(|| "scan_with".into())?;
    check("scan_with", &got, &sums[rank])?;
    comm.all_reduce_with(&own, &mut got, sum).context(|| "all_reduce_with".into())?;
    check("all_reduce_with", &got, &sums[ranks - 1])?;
    let mut got = comm.alloc::<[u64; N]>(len).context(|| "alloc".into())?;
    got.copy_from_slice(&own);
    comm.all_reduce_in_place_with(&mut got, sum).context(|| "all_reduce_in_place_with".into())?;
    check("all_reduce_in_place_with", &got, &sums[ranks - 1])?;
    let share = len / ranks;
    let mut got = vec![[0; N]; share];
    comm.reduce_scatter_with(&own[..share * ranks], &mut got, sum)
        .context(|| "reduce_scatter_with".into())?;
    check("reduce_scatter_with", &got, &sums[ranks - 1][rank * share..][..share])
}
