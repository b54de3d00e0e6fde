//! Collectives of single values, and of lists whose lengths the other ranks do not know.

use crate::world::{Done, both, outcome, same};
use libtest_mimic::Trial;
use phalanx::{
    BackendKind, Bitwise, Comm, Error, Locate, Located, ObjectError, PreMulSum, ReduceOp, Unchecked,
    UsageError,
};
use phalanx_testkit::Scenario;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("values/single", |comm, _| outcome(single(&comm))),
    Scenario::rank("values/lists", |comm, _| outcome(lists(&comm))),
    Scenario::rank("values/refused", |comm, _| outcome(refused(&comm))),
    Scenario::rank("values/unchecked", |comm, _| outcome(unchecked(&comm))),
    Scenario::rank("values/coalesced", |comm, _| outcome(coalesced(&comm))),
    Scenario::rank("values/coalesced_later", |comm, _| outcome(coalesced_later(&comm))),
    Scenario::rank("values/local", |comm, _| outcome(local(&comm))),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 5, 8])).collect()
}

fn single(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    same("largest", comm.all_reduce_value(rank as i32 - 3, ReduceOp::Max)?, ranks as i32 - 4)?;
    same(
        "sum of halves",
        comm.all_reduce_value(2.0 * rank as f64, PreMulSum(0.5))?,
        (ranks * (ranks - 1) / 2) as f64,
    )?;
    for root in 0..ranks {
        same("broadcast", comm.broadcast_value(rank as u8 + 100, root)?, root as u8 + 100)?;
    }
    same("all", comm.all_gather_value(rank as u64)?, (0..ranks as u64).collect::<Vec<_>>())?;
    same("shared", comm.all_gather_value(1.5f32)?, vec![1.5; ranks])?;
    let triangle = |n: usize| (n * (n + 1) / 2) as u64;
    same("scan", comm.scan_value(rank as u64, ReduceOp::Sum)?, triangle(rank))?;
    let before = comm.exclusive_scan_value(rank as u64 + 1, ReduceOp::Sum)?;
    same("exclusive scan", before, (rank > 0).then(|| triangle(rank)))?;
    for root in 0..ranks {
        let is_root = rank == root;
        let sum = comm.reduce_value(rank as u64, ReduceOp::Sum, root)?;
        same("reduce", sum, is_root.then(|| triangle(ranks - 1)))?;
        same("gather", comm.gather_value(rank, root)?, is_root.then(|| (0..ranks).collect()))?;
        let dealt: Vec<usize> =
            if is_root { (0..ranks).map(|to| to * 10 + root).collect() } else { Vec::new() };
        same("scatter", comm.scatter_values(&dealt, root)?, rank * 10 + root)?;
    }
    Ok(())
}

/// Elements from one rank to another: none, some, and more than one piece.
const LENGTHS: [fn(usize, usize) -> usize; 3] =
    [|_, _| 0, |from, to| (from * 7 + to * 3) % 5, |from, to| if from % 2 == 0 { 70_001 + to } else { from }];

fn lists(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for length in LENGTHS {
        let list = |from: usize, to: usize| vec![(from * ranks + to) as u32; length(from, to)];
        let gathered: Vec<u32> = (0..ranks).flat_map(|from| list(from, 0)).collect();
        let counts: Vec<usize> = (0..ranks).map(|from| length(from, 0)).collect();

        let all = comm.all_gather_vec(&list(rank, 0))?;
        same("all_gather_vec, counts", &all.counts, &counts)?;
        same("all_gather_vec", all.elements == gathered, true)?;
        let blocks: Vec<&[u32]> = all.iter().collect();
        for (from, block) in blocks.iter().enumerate() {
            same("a block", *block == list(from, 0) && *block == all.block(from), true)?;
        }
        same("blocks", blocks.len(), ranks)?;

        let root = ranks / 2;
        let at_root = comm.gather_vec(&list(rank, 0), root)?;
        same("gather_vec", at_root, (rank == root).then_some(all))?;

        let send: Vec<u32> = (0..ranks).flat_map(|to| list(rank, to)).collect();
        let counts: Vec<usize> = (0..ranks).map(|to| length(rank, to)).collect();
        let received = comm.all_to_all_vec(&send, &counts)?;
        let expected: Vec<u32> = (0..ranks).flat_map(|from| list(from, rank)).collect();
        same(
            "all_to_all_vec, counts",
            received.counts,
            (0..ranks).map(|from| length(from, rank)).collect::<Vec<_>>(),
        )?;
        same("all_to_all_vec", received.elements == expected, true)?;
    }
    Ok(())
}

/// Wrong arguments are an error before anything is sent.
fn refused(comm: &Comm) -> Done {
    let ranks = comm.world_size();
    let counts = comm.all_to_all_vec(&[1u8], &vec![0; ranks + 1]);
    let right = matches!(&counts, Err(Error::Usage(error)) if matches!(**error, UsageError::Counts { .. }));
    same("a count too many", right, true)?;
    let length = comm.all_to_all_vec(&[1u8], &vec![1; ranks + 1][..ranks]);
    let right = matches!(&length, Err(Error::Usage(error)) if matches!(**error, UsageError::Length { .. }));
    same("an element too few", right, ranks > 1)?;
    same("a root that is not there", comm.gather_vec(&[1u8], ranks).is_err(), true)?;
    same("afterwards", comm.all_gather_value(1u8)?, vec![1; ranks])?;
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq, bytemuck::NoUninit, bytemuck::CheckedBitPattern)]
#[repr(u16)]
enum Phase {
    Solid = 3,
    Liquid = 700,
}

/// Types for which not all bytes are valid, moved by every kind of operation.
fn unchecked(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let flags = |rank: usize| (0..100 * ranks).map(|i| (i + rank).is_multiple_of(3)).collect::<Vec<_>>();
    let mut all = vec![Unchecked::new(false); 100 * ranks * ranks];
    comm.all_gather(Unchecked::of(&flags(rank)), &mut all)?;
    same("all_gather", Unchecked::check(&all)? == (0..ranks).flat_map(flags).collect::<Vec<_>>(), true)?;
    let mut blocks = vec![Unchecked::new(false); 100 * ranks];
    comm.all_to_all(Unchecked::of(&flags(rank)), &mut blocks)?;
    let block = |from: usize| flags(from)[100 * rank..][..100].to_vec();
    same("all_to_all", Unchecked::check(&blocks)? == (0..ranks).flat_map(block).collect::<Vec<_>>(), true)?;

    let root = ranks / 2;
    same("a letter", comm.broadcast_value(Unchecked::new(['a', 'ß', '𝄞'][rank % 3]), root)?.get()?, {
        ['a', 'ß', '𝄞'][root % 3]
    })?;
    let phase = |rank: usize| if rank.is_multiple_of(2) { Phase::Solid } else { Phase::Liquid };
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut got = [Unchecked::new(Phase::Solid)];
    comm.send_recv(&[Unchecked::new(phase(rank))], next, &mut got, previous)?;
    same("a phase", got[0].get()?, phase(previous))?;

    // Of a rank that sends bytes that are none.
    let sent: Unchecked<bool> = if rank == root { bytemuck::cast(2u8) } else { true.into() };
    let all = comm.all_gather_value(sent)?;
    match Unchecked::check(&all) {
        Err(Error::Object(error)) => {
            let bytes = vec![2];
            same("an error", *error, ObjectError::Bytes { type_name: "bool", index: root, bytes })?;
        }
        other => Err(format!("a byte that is no bool: {other:?}"))?,
    }
    same("the others", all.iter().filter(|flag| flag.get().is_ok()).count(), ranks - 1)?;
    Ok(())
}

/// Buffers that travel together, alone, and that are empty; of numbers and of places.
fn coalesced(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for lens in [&[][..], &[5], &[1, 0, 300, 7], &[9000, 8000, 20_000, 3, 1]] {
        let of = |rank: usize, i: usize| vec![(rank + 1) as u64 * (i + 1) as u64; lens[i]];
        let mut bufs: Vec<Vec<u64>> = (0..lens.len()).map(|i| of(rank, i)).collect();
        comm.all_reduce_coalesced(&mut bufs, ReduceOp::Sum)?;
        let sum = |i: usize| vec![(ranks * (ranks + 1) / 2 * (i + 1)) as u64; lens[i]];
        same("sums", bufs == (0..lens.len()).map(sum).collect::<Vec<_>>(), true)?;
        let mut borrowed: Vec<&mut [u64]> = bufs.iter_mut().map(|buf| &mut buf[..]).collect();
        comm.all_reduce_coalesced(&mut borrowed, Bitwise::Xor)?;
        let odd = |i: usize| if ranks.is_multiple_of(2) { vec![0; lens[i]] } else { sum(i) };
        same("bits", bufs == (0..lens.len()).map(odd).collect::<Vec<_>>(), true)?;
    }
    let own = Located::new(1.5f32, 7 - rank as u64 % 7);
    let mut bufs = [vec![own; 2], vec![own]];
    comm.all_reduce_coalesced(&mut bufs, Locate::Min)?;
    let first = 7 - (ranks as u64 - 1).min(6);
    same("places", bufs.concat().iter().all(|best| best.place() == first), true)?;
    Ok(())
}

/// Started and in groups; some ranks make the plain call, which NCCL does not match if it is a group.
fn coalesced_later(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    // On MPI the first that is started on a communicator is started on all ranks.
    comm.start_barrier()?.wait()?;
    for lens in [&[][..], &[5], &[1, 0, 300, 7], &[9000, 8000, 20_000, 3, 1]] {
        let own = || -> Vec<Vec<u64>> { lens.iter().map(|len| vec![rank as u64 + 1; *len]).collect() };
        let sums = lens.iter().map(|len| vec![(ranks * (ranks + 1) / 2) as u64; *len]).collect::<Vec<_>>();
        let mut bufs = own();
        if rank % 2 == 0 || comm.backend() == BackendKind::Nccl {
            let first = comm.start_all_reduce_coalesced(bufs, ReduceOp::Sum)?;
            let second = comm.start_all_reduce_coalesced(own(), ReduceOp::Sum)?;
            same("the second", second.wait()? == sums, true)?;
            bufs = first.wait()?;
        } else {
            comm.all_reduce_coalesced(&mut bufs, ReduceOp::Sum)?;
            comm.all_reduce_coalesced(&mut own(), ReduceOp::Sum)?;
        }
        same("sums", bufs == sums, true)?;

        let (mut bufs, mut more, mut value) = (own(), own(), [1u64]);
        comm.group(|group| {
            group.all_reduce_coalesced(&mut bufs, ReduceOp::Sum)?;
            group.all_reduce_in_place(&mut value, ReduceOp::Sum)?;
            group.all_reduce_coalesced(&mut more, ReduceOp::Sum)
        })?;
        same("in a group", bufs == sums && more == sums, true)?;
        same("beside them", value, [ranks as u64])?;
    }
    Ok(())
}

/// Without communication, a reduction over two ranks.
fn local(comm: &Comm) -> Done {
    let at = comm.rank() as u32;
    let mut b = [at, 10];
    phalanx::reduce_local(&[1, at], &mut b, ReduceOp::Sum)?;
    same("sum", b, [at + 1, at + 10])?;
    let mut b = vec![0.5f32; 1000];
    phalanx::reduce_local(&vec![2.0; 1000], &mut b, PreMulSum(2.0))?;
    same("products", b == [5.0; 1000], true)?;
    let mut b = [Located::new(3u8, 1)];
    phalanx::reduce_local(&[Located::new(3, 0)], &mut b, Locate::Max)?;
    same("place", b[0].place(), 0)?;
    let short = phalanx::reduce_local(&[1u8], &mut [], ReduceOp::Min);
    same("an element too many", matches!(short, Err(Error::Usage(_))), true)?;
    Ok(())
}
