//! Plain data that is no number: structs, arrays, wide integers, in every operation that only moves.

use crate::world::both;
use bytemuck::{Pod, Zeroable};
use libtest_mimic::Trial;
use phalanx::{AnySource, AnyTarget, BackendKind, Comm, DType, Error, Plain, ReduceOp, Uninit};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::fmt::Debug;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("plain/structs", |comm, _| moved::<Particle>(&comm)),
    Scenario::rank("plain/odd_sizes", |comm, _| moved::<[u8; 3]>(&comm)),
    Scenario::rank("plain/pages", |comm, _| moved::<Page>(&comm)),
    Scenario::rank("plain/wide_integers", |comm, _| moved::<u128>(&comm)),
    Scenario::rank("plain/by_value", |comm, _| by_value(&comm)),
];

/// What only backends that compare calls find.
pub const COMPARED: &[Scenario] = &[
    Scenario::rank("plain/another_struct", |comm, _| another_struct(&comm)),
    Scenario::rank("plain/a_message_of_another_struct", |comm, _| message_of_another_struct(&comm)),
];

pub fn trials() -> Vec<Trial> {
    let moved = SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 5]));
    // A third rank may be in an earlier call when the other two notice.
    moved.chain(COMPARED.iter().flat_map(|scenario| both(*scenario, &[2]))).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Particle {
    place: [f32; 3],
    kind: u16,
    charge: i16,
}

/// As large as a particle.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Quaternion([f32; 4]);

#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
struct Page([[u64; 32]; 16]);

/// An element as a function of a number.
trait Numbered: Plain + PartialEq + Debug {
    fn numbered(number: usize) -> Self;
}

impl Numbered for Particle {
    fn numbered(number: usize) -> Particle {
        Particle {
            place: [number as f32, 0.5, -1.0],
            kind: number as u16,
            charge: (number as i16).wrapping_neg(),
        }
    }
}

impl Numbered for [u8; 3] {
    fn numbered(number: usize) -> [u8; 3] {
        [number as u8, (number >> 8) as u8, (number >> 16) as u8]
    }
}

impl Numbered for Page {
    fn numbered(number: usize) -> Page {
        Page([[number as u64; 32], [!number as u64; 32]].repeat(8).try_into().expect("16 rows"))
    }
}

impl Numbered for u128 {
    fn numbered(number: usize) -> u128 {
        (number as u128) << 64 | number as u128
    }
}

/// Elements in a cache line, in a slot, in several chunks; fewer if they are long.
fn counts<T>() -> impl Iterator<Item = usize> {
    [0, 1, 13, 1000, 20_011].into_iter().map(|count| if size_of::<T>() > 1000 { count / 20 } else { count })
}

/// The elements that `from` gives to `to`.
fn block<T: Numbered>(from: usize, to: usize, count: usize) -> Vec<T> {
    (0..count).map(|index| T::numbered(7919 * from + 104_729 * to + index)).collect()
}

fn expect<T: PartialEq + Debug>(what: &str, actual: &[T], expected: &[T]) -> Result<(), String> {
    match (0..expected.len()).find(|index| actual.get(*index) != expected.get(*index)) {
        None if actual.len() == expected.len() => Ok(()),
        index => Err(format!("{what}: element {index:?} of {} is wrong", expected.len())),
    }
}

fn moved<T: Numbered>(comm: &Comm) -> Outcome {
    for count in counts::<T>() {
        collectives::<T>(comm, count).context(|| format!("{count} × {}", T::dtype()))?;
        unequal_blocks::<T>(comm, count).context(|| format!("blocks of up to {count} × {}", T::dtype()))?;
        messages::<T>(comm, count).context(|| format!("messages of {count} × {}", T::dtype()))?;
    }
    Ok(String::new())
}

fn collectives<T: Numbered>(comm: &Comm, count: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let root = ranks - 1;
    let own: Vec<T> = block(rank, 0, count);
    let of_all: Vec<T> = (0..ranks).flat_map(|from| block(from, 0, count)).collect();
    let to_all: Vec<T> = (0..ranks).flat_map(|to| block(rank, to, count)).collect();
    let nothing = |count: usize| vec![T::numbered(1 << 20); count];

    let mut got = if rank == root { own.clone() } else { nothing(count) };
    comm.broadcast_in_place(&mut got, root).context(|| "broadcast".into())?;
    expect("broadcast", &got, &block(root, 0, count))?;

    let mut got = comm.alloc::<T>(ranks * count).context(|| "alloc".into())?;
    comm.all_gather(&own, &mut got).context(|| "all_gather".into())?;
    expect("all_gather", &got, &of_all)?;

    let mut got = nothing(ranks * count);
    got[rank * count..][..count].copy_from_slice(&own);
    comm.all_gather_in_place(&mut got).context(|| "all_gather_in_place".into())?;
    expect("all_gather_in_place", &got, &of_all)?;

    let mut got = nothing(ranks * count);
    comm.all_to_all(&to_all, &mut got).context(|| "all_to_all".into())?;
    expect("all_to_all", &got, &(0..ranks).flat_map(|from| block(from, rank, count)).collect::<Vec<T>>())?;

    let mut got: Vec<T> = Vec::with_capacity(ranks * count);
    let place = &mut got.spare_capacity_mut()[..ranks * count];
    comm.gather(&own, &mut Uninit(place), root).context(|| "gather".into())?;
    if rank == root {
        // SAFETY: the root has got all blocks.
        unsafe { got.set_len(ranks * count) };
        expect("gather", &got, &of_all)?;
    }

    let mut got = nothing(count);
    comm.scatter(&to_all, &mut got, root).context(|| "scatter".into())?;
    expect("scatter", &got, &block(root, rank, count))?;

    let request = comm.start_broadcast(if rank == root { own } else { nothing(count) }, root);
    let got = request.and_then(|request| request.wait()).context(|| "start_broadcast".into())?;
    expect("start_broadcast", &got, &block(root, 0, count))
}

fn unequal_blocks<T: Numbered>(comm: &Comm, most: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let counts: Vec<usize> = (0..ranks).map(|rank| most * (rank % 3) / 2).collect();
    let mut got = vec![T::numbered(0); counts.iter().sum()];
    comm.all_gather_v(&block::<T>(rank, 0, counts[rank]), &mut got, &counts)
        .context(|| "all_gather_v".into())?;
    let of_all: Vec<T> = (0..ranks).flat_map(|from| block(from, 0, counts[from])).collect();
    expect("all_gather_v", &got, &of_all)?;

    // What a rank sends to a rank is as long as the place of both says.
    let len = |one: usize, other: usize| counts[one].min(counts[other]);
    let own: Vec<usize> = (0..ranks).map(|other| len(rank, other)).collect();
    let sent: Vec<T> = (0..ranks).flat_map(|to| block(rank, to, own[to])).collect();
    let mut got = vec![T::numbered(0); own.iter().sum()];
    comm.all_to_all_v(&sent, &own, &mut got, &own).context(|| "all_to_all_v".into())?;
    let expected: Vec<T> = (0..ranks).flat_map(|from| block(from, rank, own[from])).collect();
    expect("all_to_all_v", &got, &expected)
}

fn messages<T: Numbered>(comm: &Comm, count: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let sent: Vec<T> = block(rank, next, count);
    let mut got = vec![T::numbered(0); count];
    comm.send_recv(&sent, next, &mut got, previous).context(|| "send_recv".into())?;
    expect("send_recv", &got, &block(previous, rank, count))?;

    let mut got = vec![T::numbered(0); count];
    comm.group(|group| {
        group.recv(&mut got, previous)?;
        group.send(&sent, next)
    })
    .context(|| "group".into())?;
    expect("group", &got, &block(previous, rank, count))
}

/// The type as a value, of a buffer of bytes at any address. It cannot be reduced.
fn by_value(comm: &Comm) -> Outcome {
    let ranks = comm.world_size();
    let own = Particle::numbered(comm.rank());
    let mut bytes = vec![0; 1 + ranks * size_of::<Particle>()];
    let mut all = AnyTarget::from_bytes(&mut bytes[1..], Particle::dtype()).context(|| "bytes".into())?;
    comm.all_gather(&AnySource::from(&[own][..]), &mut all).context(|| "all_gather".into())?;
    for (rank, element) in bytes[1..].chunks(size_of::<Particle>()).enumerate() {
        let got: Particle = bytemuck::pod_read_unaligned(element);
        expect("all_gather of bytes", &[got], &[Particle::numbered(rank)])?;
    }
    let mut bytes = vec![0; 2 * size_of::<Particle>()];
    let mut two = AnyTarget::from_bytes(&mut bytes, Particle::dtype()).context(|| "bytes".into())?;
    match comm.all_reduce_in_place(&mut two, ReduceOp::Sum) {
        Err(error @ Error::Usage(_)) if error.to_string().contains("::Particle") => Ok(String::new()),
        other => Err(format!("a sum of particles: {other:?}")),
    }
}

/// Whether the error names both types.
fn names_both(outcome: phalanx::Result<()>) -> Outcome {
    match outcome {
        Err(error @ Error::Mismatch(_)) => {
            let text = error.to_string();
            let are_named = text.contains("::Particle × 3") && text.contains("::Quaternion × 3");
            if are_named { Ok(String::new()) } else { Err(format!("a name is missing: {text}")) }
        }
        other => Err(format!("another struct of the same size was taken: {other:?}")),
    }
}

/// Both types, used once: a rank knows the names of types that it has used.
fn know_both(comm: &Comm) -> Result<[DType; 2], String> {
    comm.broadcast_in_place(&mut [Particle::numbered(1)], 0).context(|| "particles".into())?;
    comm.broadcast_in_place(&mut [Quaternion([0.0; 4])], 0).context(|| "quaternions".into())?;
    Ok([Particle::dtype(), Quaternion::dtype()])
}

fn another_struct(comm: &Comm) -> Outcome {
    assert!(matches!(comm.backend(), BackendKind::Host | BackendKind::Ucx));
    know_both(comm)?;
    names_both(match comm.rank() {
        0 => comm
            .all_gather(&[Particle::numbered(1); 3], &mut vec![Particle::numbered(0); 3 * comm.world_size()]),
        _ => comm
            .all_gather(&[Quaternion([1.0; 4]); 3], &mut vec![Quaternion([0.0; 4]); 3 * comm.world_size()]),
    })
}

fn message_of_another_struct(comm: &Comm) -> Outcome {
    know_both(comm)?;
    names_both(match comm.rank() {
        0 => comm.send(&[Particle::numbered(1); 3], 1).and_then(|()| comm.barrier()),
        _ => comm.recv(&mut [Quaternion([0.0; 4]); 3], 0),
    })
}
