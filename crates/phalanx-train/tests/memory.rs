//! Memory estimates against what a step allocates: one rank of several, in a dry run.

use phalanx::{Comm, bf16};
use phalanx_train::buckets::{GradientBuckets, Parameter, Settings};
use phalanx_train::device::{Host, Number};
use phalanx_train::mesh::{Axis, MeshShape, Plan};
use phalanx_train::optimizer::{AdamW, Optimizer, Piece};
use phalanx_train::report::{MemoryPlan, Sharding};
use phalanx_train::sharding::{FlatLayout, Reduction, ShardedGroup};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's own, counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const RANKS: usize = 4;
const GROUPS: usize = 6;
const SHAPE: [usize; 2] = [256, 256];
const LEN: usize = 256 * 256;

/// The most bytes that `step` holds beyond those at the beginning, of which `already` belong to what is estimated.
fn peak(already: usize, step: impl FnOnce()) -> usize {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    step();
    PEAK.load(Ordering::Relaxed) - before + already
}

fn gradient<T: Number>() -> Vec<T> {
    vec![T::from_f32(0.5); LEN]
}

/// Steps of a sharded model, as [`ShardedGroup`] says for each kind; the peak of the second.
fn sharded<T: Number>(comm: &Comm, sharding: Sharding) -> usize {
    let adam = AdamW::new(0.1);
    let before = NOW.load(Ordering::Relaxed);
    let make = |number: usize| {
        let layout = FlatLayout::new(&[(format!("layer{number}"), SHAPE)], RANKS).unwrap();
        ShardedGroup::<_, T, f32>::new(comm, &Host, layout, &vec![1.0; LEN], &adam).unwrap()
    };
    let mut groups: Vec<ShardedGroup<Host, T, f32>> = (0..GROUPS).map(make).collect();
    let mut step = || {
        let mut whole = Vec::new();
        for number in 0..GROUPS {
            match sharding {
                Sharding::Parameters => {
                    groups[number].gather(comm).unwrap();
                    if let Some(next) = groups.get_mut(number + 1) {
                        next.prefetch(comm).unwrap();
                    }
                    groups[number].reduce_gradient(comm, &&gradient::<T>()[..], Reduction::Mean).unwrap();
                    groups[number].release();
                }
                Sharding::Gradients => {
                    // All are gathered before the first gradient comes.
                    groups.iter_mut().try_for_each(|group| group.gather(comm).map(drop)).unwrap();
                    groups[number].reduce_gradient(comm, &&gradient::<T>()[..], Reduction::Mean).unwrap();
                }
                _ => {
                    groups[number].gather(comm).unwrap();
                    whole.push(gradient::<T>());
                }
            }
        }
        for (group, gradient) in groups.iter_mut().zip(&whole) {
            group.take_gradient(gradient).unwrap();
        }
        groups.iter_mut().for_each(|group| group.step(&adam, 1.0).unwrap());
    };
    step();
    let already = NOW.load(Ordering::Relaxed) - before;
    peak(already, step)
}

/// Steps of a model that every rank has as a whole.
fn replicated(comm: &Comm) -> usize {
    let adam = AdamW::new(0.1);
    let before = NOW.load(Ordering::Relaxed);
    let names: Vec<String> = (0..GROUPS).map(|number| format!("layer{number}")).collect();
    let parameters: Vec<Parameter> = names.iter().map(|name| Parameter::new::<f32>(name, LEN)).collect();
    let mut buckets = GradientBuckets::new(comm, &Host, &parameters, Settings::default()).unwrap();
    let mut states = vec![[vec![1.0f32; LEN], vec![0.0; LEN], vec![0.0; LEN]]; GROUPS];
    let mut step = || {
        buckets.begin(comm, 1.0).unwrap();
        names.iter().for_each(|name| buckets.add(comm, name, &&gradient::<f32>()[..]).unwrap());
        buckets.finish(comm).unwrap();
        for (name, [parameters, first, second]) in names.iter().zip(&mut states) {
            let phalanx_train::buckets::Gradient::F32(gradient) = buckets.gradient(name).unwrap() else {
                panic!("of f32")
            };
            let states = &mut [&mut first[..], &mut second[..]];
            adam.update(&Host, 1, &Piece::whole(&SHAPE), &gradient, &mut &mut parameters[..], states)
                .unwrap();
        }
    };
    step();
    let already = NOW.load(Ordering::Relaxed) - before;
    peak(already, step)
}

#[test]
fn a_step_takes_the_memory_of_the_estimate() {
    let mesh = MeshShape::new(&[(Axis::Shard, RANKS)]).unwrap();
    let names: Vec<String> = (0..GROUPS).map(|number| format!("layer{number}")).collect();
    let layers: Vec<[(&str, [usize; 2]); 1]> = names.iter().map(|name| [(name.as_str(), SHAPE)]).collect();
    let layers: Vec<&[(&str, [usize; 2])]> = layers.iter().map(|layer| &layer[..]).collect();
    let check = |sharding, dtype, measured: usize| {
        let mut plan = MemoryPlan::new(&mesh, sharding);
        plan.parameters = dtype;
        let estimate = plan.of_rank(1, &Plan::new(), &layers).unwrap();
        let ratio = measured as f64 / estimate.total() as f64;
        assert!((0.98..1.02).contains(&ratio), "{sharding:?} {dtype}: {measured} B, estimated {estimate}");
    };
    phalanx::dry_run(1, RANKS, |comm| {
        check(Sharding::None, phalanx::DType::F32, replicated(&comm));
        for sharding in [Sharding::Optimizer, Sharding::Gradients, Sharding::Parameters] {
            check(sharding, phalanx::DType::F32, sharded::<f32>(&comm, sharding));
            check(sharding, phalanx::DType::Bf16, sharded::<bf16>(&comm, sharding));
        }
    })
    .unwrap();
}
