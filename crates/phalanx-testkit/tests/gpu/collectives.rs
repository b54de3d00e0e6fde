//! Every collective on GPU memory: types × reductions × sizes × place, against a naive reference.

use crate::world::{
    DeviceRepr, are_emulated, both, both_named, done, download, expect, is_reduced, must, upload, value,
    values,
};
use libtest_mimic::Trial;
use phalanx::{Comm, DType, Error, PreMulSum, ReduceOp};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario, with_number};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("reductions", reductions),
    Scenario::rank("movements", movements),
    Scenario::rank("in_place", in_place),
    Scenario::rank("vectors", vectors),
    Scenario::rank("vectors_in_place", vectors_in_place),
    Scenario::rank("scattered_alone", scattered_alone),
    Scenario::rank("host_memory", host_memory),
    Scenario::rank("averages_that_wrap", averages_that_wrap),
];

const SIZES: [usize; 6] = [0, 1, 17, 4099, 70_001, 300_007];

/// The sizes that an argument asks for: the last two take emulated GPUs nearly all of the time.
fn sizes(args: &[String]) -> &'static [usize] {
    let (short, long) = SIZES.split_at(4);
    match args.first().map(String::as_str) {
        Some("short") => short,
        Some("long") => long,
        _ => &SIZES,
    }
}

pub fn trials(gpus: usize) -> Vec<Trial> {
    let [reductions, movements, others @ ..] = SCENARIOS else { unreachable!("there are several") };
    let by_size = [reductions, movements].into_iter().flat_map(|scenario| {
        let longest = SIZES[SIZES.len() - 1];
        let long = both_named(&format!("{}/{longest}", scenario.name), *scenario, 1, gpus, &["long"]);
        both(*scenario, 1, gpus, &["short"]).into_iter().chain(long)
    });
    by_size.chain(others.iter().flat_map(|scenario| both(*scenario, 1, gpus, &[""]))).collect()
}

fn reductions(comm: Comm, args: &[String]) -> Outcome {
    for dtype in DType::ALL {
        with_number!(dtype, T => reduce_all::<T>(&comm, dtype, sizes(args)))?;
    }
    done()
}

/// The combined value of all ranks at an index.
fn combined(op: ReduceOp, ranks: usize, index: usize) -> i32 {
    let all = (0..ranks).map(|rank| value(rank, index));
    match op {
        ReduceOp::Sum => all.sum(),
        ReduceOp::Prod => all.product(),
        ReduceOp::Min => all.min().unwrap_or(0),
        ReduceOp::Max => all.max().unwrap_or(0),
        _ => unreachable!("an average is not whole"),
    }
}

fn reduce_all<T: Number + DeviceRepr>(comm: &Comm, dtype: DType, sizes: &[usize]) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    // One rank's reduction is a copy.
    if !is_reduced(dtype) && ranks > 1 {
        let mut buffer = upload(comm, &values::<T>(rank, 3))?;
        match comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum) {
            // Real GPUs may reach each other, and own kernels reduce all types.
            Ok(()) if !are_emulated() => {}
            Ok(()) => return Err(format!("{dtype} is reduced")),
            Err(refused) => {
                assert!(matches!(refused, Error::Unsupported(_)), "{refused}");
                assert!(refused.to_string().contains(dtype.name()), "{refused}");
                return Ok(());
            }
        }
    }
    for &len in sizes {
        for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max] {
            let what = |operation: &str| format!("{operation} of {len} {dtype}, {op}");
            let whole = |index: usize| T::from_small(combined(op, ranks, index));
            let send = upload(comm, &values::<T>(rank, len))?;
            let mut recv = upload(comm, &values::<T>(7, len))?;
            must("all_reduce", comm.all_reduce(&send, &mut recv, op))?;
            expect(what("all_reduce"), &download(comm, &recv)?, whole)?;

            let root = len % ranks;
            let mut recv = upload(comm, &values::<T>(7, len))?;
            must("reduce", comm.reduce(&send, &mut recv, op, root))?;
            let got = download(comm, &recv)?;
            if rank == root {
                expect(what("reduce"), &got, whole)?;
            } else {
                expect(what("reduce, not the root"), &got, |index| T::from_small(value(7, index)))?;
            }

            let all = upload(comm, &values::<T>(rank, len * ranks))?;
            let mut own = upload(comm, &values::<T>(7, len))?;
            must("reduce_scatter", comm.reduce_scatter(&all, &mut own, op))?;
            expect(what("reduce_scatter"), &download(comm, &own)?, |index| whole(rank * len + index))?;
        }
        // The same on every rank: the average is that, and a factor of two doubles the sum.
        let send = upload(comm, &values::<T>(0, len))?;
        let mut recv = upload(comm, &values::<T>(7, len))?;
        must("avg", comm.all_reduce(&send, &mut recv, ReduceOp::Avg))?;
        expect(format!("avg of {len} {dtype}"), &download(comm, &recv)?, |index| {
            T::from_small(value(0, index))
        })?;
        let scaled = comm.all_reduce(&send, &mut recv, PreMulSum(T::from_small(2)));
        if let (1, Err(Error::Unsupported(_))) = (ranks, &scaled) {
            // What NCCL's kernel for one rank gets wrong is refused.
            continue;
        }
        must("pre-mul-sum", scaled)?;
        let scaled = |index| T::from_small(2 * ranks as i32 * value(0, index));
        expect(format!("pre-mul-sum of {len} {dtype}"), &download(comm, &recv)?, scaled)?;
    }
    Ok(())
}

fn movements(comm: Comm, args: &[String]) -> Outcome {
    for dtype in DType::ALL {
        with_number!(dtype, T => move_all::<T>(&comm, dtype, sizes(args)))?;
    }
    done()
}

fn move_all<T: Number + DeviceRepr>(comm: &Comm, dtype: DType, sizes: &[usize]) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let of = |rank: usize, index: usize| T::from_small(value(rank, index));
    for &len in sizes {
        let root = len % ranks;
        let what = |operation: &str| format!("{operation} of {len} {dtype}, root {root}");
        let send = upload(comm, &values::<T>(rank, len))?;
        let all = upload(comm, &values::<T>(rank, len * ranks))?;

        let mut recv = upload(comm, &values::<T>(7, len))?;
        must("broadcast", comm.broadcast(&send, &mut recv, root))?;
        expect(what("broadcast"), &download(comm, &recv)?, |index| of(root, index))?;

        let mut gathered = upload(comm, &values::<T>(7, len * ranks))?;
        must("all_gather", comm.all_gather(&send, &mut gathered))?;
        expect(what("all_gather"), &download(comm, &gathered)?, |index| of(index / len, index % len))?;

        let mut gathered = upload(comm, &values::<T>(7, len * ranks))?;
        must("gather", comm.gather(&send, &mut gathered, root))?;
        let got = download(comm, &gathered)?;
        expect(
            what("gather"),
            &got,
            |index| {
                if rank == root { of(index / len, index % len) } else { of(7, index) }
            },
        )?;

        must("scatter", comm.scatter(&all, &mut recv, root))?;
        expect(what("scatter"), &download(comm, &recv)?, |index| of(root, rank * len + index))?;

        must("all_to_all", comm.all_to_all(&all, &mut gathered))?;
        let transposed = |index: usize| of(index / len, rank * len + index % len);
        expect(what("all_to_all"), &download(comm, &gathered)?, transposed)?;
    }
    Ok(())
}

fn in_place(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let of = |rank: usize, index: usize| value(rank, index) as f32;
    let sum = |index: usize| combined(ReduceOp::Sum, ranks, index) as f32;
    for len in SIZES {
        let root = len % ranks;
        let whole = || upload(&comm, &values::<f32>(rank, len));
        let blocks = || upload(&comm, &values::<f32>(rank, len * ranks));

        let mut buffer = whole()?;
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        expect("all_reduce in place", &download(&comm, &buffer)?, sum)?;

        let mut buffer = whole()?;
        must("reduce", comm.reduce_in_place(&mut buffer, ReduceOp::Sum, root))?;
        if rank == root {
            expect("reduce in place", &download(&comm, &buffer)?, sum)?;
        }

        let mut buffer = whole()?;
        must("broadcast", comm.broadcast_in_place(&mut buffer, root))?;
        expect("broadcast in place", &download(&comm, &buffer)?, |index| of(root, index))?;

        let own = |index: usize| of(index / len, index);
        let mut buffer = blocks()?;
        must("all_gather", comm.all_gather_in_place(&mut buffer))?;
        expect("all_gather in place", &download(&comm, &buffer)?, own)?;

        let mut buffer = blocks()?;
        must("gather", comm.gather_in_place(&mut buffer, root))?;
        let expected = |index: usize| if rank == root { own(index) } else { of(rank, index) };
        expect("gather in place", &download(&comm, &buffer)?, expected)?;

        let mut buffer = blocks()?;
        must("reduce_scatter", comm.reduce_scatter_in_place(&mut buffer, ReduceOp::Sum))?;
        let expected = |index: usize| if index / len == rank { sum(index) } else { of(rank, index) };
        expect("reduce_scatter in place", &download(&comm, &buffer)?, expected)?;

        let mut buffer = blocks()?;
        must("scatter", comm.scatter_in_place(&mut buffer, root))?;
        let expected = |index: usize| of(if index / len == rank { root } else { rank }, index);
        expect("scatter in place", &download(&comm, &buffer)?, expected)?;

        let mut buffer = blocks()?;
        must("all_to_all", comm.all_to_all_in_place(&mut buffer))?;
        let expected = |index: usize| of(index / len, rank * len + index % len);
        expect("all_to_all in place", &download(&comm, &buffer)?, expected)?;
    }
    done()
}

/// One rank's block is all: as long as the library's kernel for one rank cannot do.
fn scattered_alone(comm: Comm, _: &[String]) -> Outcome {
    if comm.world_size() > 1 {
        return done();
    }
    for len in [1, 8197, 100_003] {
        let send = upload(&comm, &values::<f32>(0, len))?;
        let mut own = upload(&comm, &values::<f32>(7, len))?;
        must("reduce_scatter_v", comm.reduce_scatter_v(&send, &mut own, &[len], ReduceOp::Avg))?;
        expect("the average of one", &download(&comm, &own)?, |index| value(0, index) as f32)?;
    }
    done()
}

/// A sum of integers that is no number of the type wraps before an average divides it.
fn averages_that_wrap(comm: Comm, _: &[String]) -> Outcome {
    let ranks = comm.world_size() as u32;
    let mut buffer = upload(&comm, &[u32::MAX; 5])?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Avg))?;
    let averages = download(&comm, &buffer)?;
    // Own kernels do not wrap.
    let is_own = !are_emulated() && averages[0] == u32::MAX;
    expect(
        "the average",
        &averages,
        |_| if is_own { u32::MAX } else { u32::MAX.wrapping_mul(ranks) / ranks },
    )?;
    done()
}

/// Blocks of different lengths, one of them empty.
fn vectors(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let of = |rank: usize, index: usize| value(rank, index) as i64;
    let counts: Vec<usize> = (0..ranks).map(|rank| if rank == 1 { 0 } else { 1000 * rank + 3 }).collect();
    let start = |rank: usize| counts[..rank].iter().sum::<usize>();
    let all: usize = counts.iter().sum();
    let owner =
        |index: usize| (0..ranks).rfind(|rank| start(*rank) <= index && counts[*rank] > 0).unwrap_or(0);
    let gathered = |index: usize| of(owner(index), index - start(owner(index)));
    let root = ranks - 1;
    let send = upload(&comm, &values::<i64>(rank, counts[rank]))?;
    let long = upload(&comm, &values::<i64>(rank, all))?;

    let mut recv = upload(&comm, &values::<i64>(7, all))?;
    must("all_gather_v", comm.all_gather_v(&send, &mut recv, &counts))?;
    expect("all_gather_v", &download(&comm, &recv)?, gathered)?;

    let mut recv = upload(&comm, &values::<i64>(7, all))?;
    must("gather_v", comm.gather_v(&send, &mut recv, &counts, root))?;
    let expected = |index: usize| if rank == root { gathered(index) } else { of(7, index) };
    expect("gather_v", &download(&comm, &recv)?, expected)?;

    let mut own = upload(&comm, &values::<i64>(7, counts[rank]))?;
    must("scatter_v", comm.scatter_v(&long, &counts, &mut own, root))?;
    expect("scatter_v", &download(&comm, &own)?, |index| of(root, start(rank) + index))?;

    must("reduce_scatter_v", comm.reduce_scatter_v(&long, &mut own, &counts, ReduceOp::Sum))?;
    let sum = |index: usize| i64::from(combined(ReduceOp::Sum, ranks, start(rank) + index));
    expect("reduce_scatter_v", &download(&comm, &own)?, sum)?;

    // Rank i sends i + j + 1 elements to rank j, but nothing to its right neighbour.
    let count =
        |from: usize, to: usize| if ranks > 2 && to == (from + 1) % ranks { 0 } else { from + to + 1 };
    let to: Vec<usize> = (0..ranks).map(|peer| count(rank, peer)).collect();
    let from: Vec<usize> = (0..ranks).map(|peer| count(peer, rank)).collect();
    let send = upload(&comm, &values::<i64>(rank, to.iter().sum()))?;
    let mut recv = upload(&comm, &values::<i64>(7, from.iter().sum()))?;
    must("all_to_all_v", comm.all_to_all_v(&send, &to, &mut recv, &from))?;
    let got = download(&comm, &recv)?;
    let mut rest = &got[..];
    for (peer, len) in from.iter().enumerate() {
        let (block, further) = rest.split_at(*len);
        let offset: usize = (0..rank).map(|to| count(peer, to)).sum();
        expect(format!("all_to_all_v from {peer}"), block, |index| of(peer, offset + index))?;
        rest = further;
    }
    done()
}

/// The same of one buffer, alone and in a group.
fn vectors_in_place(comm: Comm, _: &[String]) -> Outcome {
    for grouped in [false, true] {
        vectors_of_one_buffer(&comm, grouped).context(|| format!("in a group: {grouped}"))?;
    }
    done()
}

fn vectors_of_one_buffer(comm: &Comm, grouped: bool) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let of = |rank: usize, index: usize| value(rank, index) as i64;
    let counts: Vec<usize> = (0..ranks).map(|rank| if rank == 1 { 0 } else { 1000 * rank + 3 }).collect();
    let start = |rank: usize| counts[..rank].iter().sum::<usize>();
    let all: usize = counts.iter().sum();
    let owner =
        |index: usize| (0..ranks).rfind(|rank| start(*rank) <= index && counts[*rank] > 0).unwrap_or(0);
    let is_own = |index: usize| owner(index) == rank && counts[rank] > 0;
    let root = ranks - 1;
    let (others, long) = (values::<i64>(7, all), values::<i64>(rank, all));
    let mut with_own = others.clone();
    with_own[start(rank)..start(rank) + counts[rank]].copy_from_slice(&long[..counts[rank]]);
    let gathered = |index: usize| of(owner(index), index - start(owner(index)));
    // Rank i and rank j give each other i + j + 1 elements, but nothing to themselves.
    let count = |from: usize, to: usize| if from == to { 0 } else { from + to + 1 };
    let pairs: Vec<usize> = (0..ranks).map(|peer| count(rank, peer)).collect();

    let mut all_gathered = upload(comm, &with_own)?;
    let mut at_root = upload(comm, &with_own)?;
    let mut scattered = upload(comm, if rank == root { &long } else { &others })?;
    let mut reduced = upload(comm, &long)?;
    let mut exchanged = upload(comm, &values::<i64>(rank, pairs.iter().sum()))?;
    macro_rules! calls {
        ($on:expr) => {
            $on.all_gather_v_in_place(&mut all_gathered, &counts)
                .and_then(|()| $on.gather_v_in_place(&mut at_root, &counts, root))
                .and_then(|()| $on.scatter_v_in_place(&mut scattered, &counts, root))
                .and_then(|()| $on.reduce_scatter_v_in_place(&mut reduced, &counts, ReduceOp::Sum))
                .and_then(|()| $on.all_to_all_v_in_place(&mut exchanged, &pairs))
        };
    }
    let called = if grouped { comm.group(|group| calls!(group)) } else { calls!(comm) };
    must("in place", called)?;

    expect("all_gather_v", &download(comm, &all_gathered)?, gathered)?;
    let expected = |index: usize| match rank == root {
        true => gathered(index),
        false => with_own[index],
    };
    expect("gather_v", &download(comm, &at_root)?, expected)?;
    let expected = |index: usize| match rank == root || is_own(index) {
        true => of(root, index),
        false => others[index],
    };
    expect("scatter_v", &download(comm, &scattered)?, expected)?;
    let expected = |index: usize| match is_own(index) {
        true => i64::from(combined(ReduceOp::Sum, ranks, index)),
        false => long[index],
    };
    expect("reduce_scatter_v", &download(comm, &reduced)?, expected)?;
    let got = download(comm, &exchanged)?;
    let mut rest = &got[..];
    for (peer, len) in pairs.iter().enumerate() {
        let (block, further) = rest.split_at(*len);
        let offset: usize = (0..rank).map(|to| count(peer, to)).sum();
        expect(format!("all_to_all_v from {peer}"), block, |index| of(peer, offset + index))?;
        rest = further;
    }
    Ok(())
}

/// Host memory, alone and together with GPU memory, is complete when the call returns.
fn host_memory(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let sum = |index: usize| combined(ReduceOp::Sum, ranks, index) as f32;
    for len in SIZES {
        let host = values::<f32>(rank, len);
        let device = upload(&comm, &host)?;
        let mut result = vec![7.0; len];
        must("host to host", comm.all_reduce(&host, &mut result, ReduceOp::Sum))?;
        expect("host to host", &result, sum)?;
        result.fill(7.0);
        must("device to host", comm.all_reduce(&device, &mut result, ReduceOp::Sum))?;
        expect("device to host", &result, sum)?;
        let mut result = upload(&comm, &vec![7.0f32; len])?;
        must("host to device", comm.all_reduce(&host, &mut result, ReduceOp::Sum))?;
        expect("host to device", &download(&comm, &result)?, sum)?;
        let mut pinned = must("alloc", comm.alloc::<f32>(len))?;
        pinned.copy_from_slice(&host);
        must("pinned", comm.all_reduce_in_place(&mut pinned, ReduceOp::Sum))?;
        expect("pinned", &pinned, sum)?;
    }
    done()
}
