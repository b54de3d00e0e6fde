//! Reductions of bits and of truth, and of values with their places, compared with a fold over the ranks.

use crate::scans::prefixes;
use crate::world::both;
use bytemuck::{AnyBitPattern, NoUninit, bytes_of};
use libtest_mimic::Trial;
use phalanx::{
    Bitwise, Comm, F8E4M3, F8E5M2, Integer, Locate, Located, Logical, ReduceOp, Reduction, bf16, f16,
};
use phalanx_testkit::number::Wide;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario, random};
use std::fmt::Debug;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("operations/bits", |comm, _| bits(&comm)),
    Scenario::rank("operations/places", |comm, _| places(&comm)),
];

/// What only backends that compare calls find.
pub const COMPARED: &[Scenario] = &[
    Scenario::rank("operations/another_extremum", |comm, _| another_extremum(&comm)),
    Scenario::rank("operations/other_parts", |comm, _| other_parts(&comm)),
];

pub fn trials() -> Vec<Trial> {
    let all = SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 3, 8]));
    all.chain(COMPARED.iter().flat_map(|scenario| both(*scenario, &[2]))).collect()
}

/// Elements: none, in a line, in a slot, in several chunks.
const SIZES: &[usize] = &[0, 13, 1000, 5003];

/// A reduction, and what it makes of an element and of two.
struct Model<T> {
    name: &'static str,
    reduction: Reduction<T>,
    prepare: fn(T) -> T,
    combine: fn(&T, &T) -> T,
}

fn models_of_bits<T: Number + Integer>() -> [Model<T>; 6] {
    let same = |x| x;
    let truth = |x: T| T::from_small(i32::from(x.bits() != 0));
    let model = |name, reduction, prepare, combine| Model { name, reduction, prepare, combine };
    let and = |a: &T, b: &T| T::from_pattern(a.bits() & b.bits());
    let or = |a: &T, b: &T| T::from_pattern(a.bits() | b.bits());
    let xor = |a: &T, b: &T| T::from_pattern(a.bits() ^ b.bits());
    [
        model("bitwise and", Bitwise::And.into(), same, and),
        model("bitwise or", Bitwise::Or.into(), same, or),
        model("bitwise xor", Bitwise::Xor.into(), same, xor),
        model("logical and", Logical::And.into(), truth, and),
        model("logical or", Logical::Or.into(), truth, or),
        model("logical xor", Logical::Xor.into(), truth, xor),
    ]
}

fn bits(comm: &Comm) -> Outcome {
    fn of<T: Number + Integer + bytemuck::Pod>(comm: &Comm, sizes: &[usize]) -> Result<(), String> {
        // Half of the elements are 0 on all ranks, so that truth differs.
        let of_rank = |rank: usize, len: usize| {
            let mut values = random::values::<T>(31 * rank as u64, len);
            values.iter_mut().step_by(2).for_each(|value| *value = T::from_small(0));
            values
        };
        models_of_bits::<T>().iter().try_for_each(|model| {
            reduced(comm, model, of_rank, sizes).context(|| format!("{} of {}", model.name, T::DTYPE))
        })
    }
    of::<u8>(comm, SIZES)?;
    of::<i8>(comm, &[13])?;
    of::<u16>(comm, &[13])?;
    of::<i16>(comm, SIZES)?;
    of::<u32>(comm, SIZES)?;
    of::<i32>(comm, &[13])?;
    of::<u64>(comm, &[13])?;
    of::<i64>(comm, SIZES)?;
    Ok(String::new())
}

/// Every operation that reduces, in memory of either kind.
fn reduced<T: NoUninit + AnyBitPattern + Send + Sync + Debug>(
    comm: &Comm,
    model: &Model<T>,
    of_rank: impl Fn(usize, usize) -> Vec<T>,
    sizes: &[usize],
) -> Result<(), String> {
    let (rank, ranks, op) = (comm.rank(), comm.world_size(), model.reduction);
    for len in sizes.iter().copied() {
        let what = || format!("{len} elements");
        let prepared = |rank| of_rank(rank, len).into_iter().map(model.prepare).collect::<Vec<T>>();
        let combined = prefixes(ranks, prepared, model.combine);
        let (own, all, root) = (of_rank(rank, len), &combined[ranks - 1], ranks / 2);

        let mut got = own.clone();
        comm.all_reduce_in_place(&mut got, op).context(what)?;
        expect("all_reduce_in_place", &got, all)?;
        let mut shared = comm.alloc::<T>(len).context(what)?;
        comm.all_reduce(&own, &mut shared, op).context(what)?;
        expect("all_reduce", &shared, all)?;
        let mut got = own.clone();
        comm.reduce_in_place(&mut got, op, root).context(what)?;
        expect("reduce_in_place", &got, if rank == root { all } else { &own })?;
        let share = len / ranks;
        let mut got = own[..share].to_vec();
        comm.reduce_scatter(&own[..share * ranks], &mut got, op).context(what)?;
        expect("reduce_scatter", &got, &all[share * rank..][..share])?;
        let mut got = own.clone();
        comm.scan_in_place(&mut got, op).context(what)?;
        expect("scan_in_place", &got, &combined[rank])?;
        let mut got = own.clone();
        comm.exclusive_scan(&own, &mut got, op).context(what)?;
        expect("exclusive_scan", &got, if rank == 0 { &own } else { &combined[rank - 1] })?;
        let got = comm.start_all_reduce(own, op).and_then(phalanx::Request::wait).context(what)?;
        expect("start_all_reduce", &got, all)?;
    }
    Ok(())
}

/// By bytes, since a NaN is not equal to itself.
fn expect<T: NoUninit + Debug>(what: &str, actual: &[T], expected: &[T]) -> Result<(), String> {
    let differs = |index: &usize| bytes_of(&actual[*index]) != bytes_of(&expected[*index]);
    match (0..expected.len()).find(differs) {
        None => Ok(()),
        Some(index) => Err(format!("{what}: [{index}] = {:?}, not {:?}", actual[index], expected[index])),
    }
}

fn models_of_places<T: Number>() -> [Model<Located<T>>; 2] {
    /// Whether `a` comes first: a NaN, else the better value, else the lower place.
    fn first<T: Number>(a: &Located<T>, b: &Located<T>, is_better: fn(T, T) -> bool) -> bool {
        match [a.value.is_nan(), b.value.is_nan()] {
            [true, false] => true,
            [false, true] => false,
            [false, false] if is_better(a.value, b.value) => true,
            [false, false] if is_better(b.value, a.value) => false,
            _ => a.place() <= b.place(),
        }
    }
    fn smallest<T: Number>(a: &Located<T>, b: &Located<T>) -> Located<T> {
        let is_better = |a: T, b: T| a != b && T::narrow(a.widen().min(b.widen())) == a;
        if first(a, b, is_better) { *a } else { *b }
    }
    fn largest<T: Number>(a: &Located<T>, b: &Located<T>) -> Located<T> {
        let is_better = |a: T, b: T| a != b && T::narrow(a.widen().max(b.widen())) == a;
        if first(a, b, is_better) { *a } else { *b }
    }
    let model = |name, locate: Locate, combine| Model::<Located<T>> {
        name,
        reduction: locate.into(),
        prepare: |x| x,
        combine,
    };
    [model("min", Locate::Min, smallest::<T>), model("max", Locate::Max, largest::<T>)]
}

fn places(comm: &Comm) -> Outcome {
    fn of<T: Number>(comm: &Comm, sizes: &[usize]) -> Result<(), String> {
        // Many ties, and a NaN where the type has one; places fall with the rank.
        let of_rank = |rank: usize, len: usize| {
            let at = |index: usize| {
                let kind = (3 * rank + 7 * index) % 11;
                let nan = T::from_pattern(u64::MAX >> 1 >> (64 - 8 * size_of::<T>() as u32));
                let value = if kind == 10 { nan } else { T::from_small(kind as i32 % 4) };
                Located::new(value, (1000 - rank + index) as u64)
            };
            (0..len).map(at).collect::<Vec<_>>()
        };
        models_of_places::<T>().iter().try_for_each(|model| {
            reduced(comm, model, of_rank, sizes).context(|| format!("{} of {}", model.name, T::DTYPE))
        })
    }
    of::<f32>(comm, SIZES)?;
    of::<f64>(comm, &[13])?;
    of::<f16>(comm, &[13])?;
    of::<bf16>(comm, &[13])?;
    of::<F8E4M3>(comm, &[13])?;
    of::<F8E5M2>(comm, &[13])?;
    of::<i8>(comm, &[13])?;
    of::<u64>(comm, &[13])?;
    Ok(String::new())
}

/// The smallest of one rank and the largest of another.
fn another_extremum(comm: &Comm) -> Outcome {
    let locate = if comm.rank() == 0 { Locate::Min } else { Locate::Max };
    match comm.all_reduce_value(Located::new(1.5f32, 0), locate) {
        Err(error @ phalanx::Error::Mismatch(_)) => {
            let text = error.to_string();
            let are_named = text.contains("locate min") && text.contains("locate max");
            if are_named { Ok(String::new()) } else { Err(format!("an operation is not named: {text}")) }
        }
        other => Err(format!("the largest of one rank and the smallest of another: {other:?}")),
    }
}

/// As many elements in all, in buffers of other lengths.
fn other_parts(comm: &Comm) -> Outcome {
    let mut bufs = if comm.rank() == 0 { [vec![1u8; 3], vec![1; 5]] } else { [vec![1; 4], vec![1; 4]] };
    match comm.all_reduce_coalesced(&mut bufs, ReduceOp::Sum) {
        Err(error @ phalanx::Error::Mismatch(_)) if error.to_string().contains("parts #") => {
            Ok(String::new())
        }
        other => Err(format!("parts of other lengths: {other:?}")),
    }
}
