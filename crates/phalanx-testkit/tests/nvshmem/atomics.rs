//! Atomic operations.

use crate::world::{barrier, context, done, must, read, refused, upload};
use phalanx::Comm;
use phalanx::cudarc::driver::DeviceRepr;
use phalanx::nvshmem::{Atomic, AtomicBits, Context};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::{Number, Scenario};

pub const SCENARIOS: &[Scenario] =
    &[Scenario::rank("atomics/numbers", numbers), Scenario::rank("atomics/bits", bits)];

const TIMES: usize = 40;

fn numbers(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    count::<i32>(&context)?;
    count::<u32>(&context)?;
    count::<f32>(&context)?;
    count::<i64>(&context)?;
    count::<u64>(&context)?;
    count::<f64>(&context)?;
    must("finalize", context.finalize())?;
    done()
}

/// All PEs count on PE 0: nothing is lost, and everybody fetches numbers that nobody else does.
fn count<T: Atomic + Number + DeviceRepr>(context: &Context) -> Result<(), String> {
    let (me, pes) = (context.my_pe(), context.n_pes());
    let small = |value: usize| T::from_small(value as i32);
    let memory = must("alloc", context.alloc::<T>(4))?;
    barrier(context)?;
    let mut last = None;
    for _ in 0..TIMES {
        let number = must("atomic_fetch_add", context.atomic_fetch_add(&memory, 1, small(1), 0))?;
        assert!(last.is_none_or(|last| last != number), "{number:?} came twice");
        last = Some(number);
        must("atomic_add", context.atomic_add(&memory, 2, small(3), 0, context.stream()))?;
    }
    barrier(context)?;
    let sums = [
        must("fetch", context.atomic_fetch(&memory, 1, 0))?,
        must("fetch", context.atomic_fetch(&memory, 2, 0))?,
    ];
    assert!(sums[0].same(small(TIMES * pes)) && sums[1].same(small(3 * TIMES * pes)), "{sums:?}");
    // One of all wins.
    let seen = must("compare_swap", context.atomic_compare_swap(&memory, 3, small(0), small(me + 1), 0))?;
    barrier(context)?;
    let winner = must("atomic_fetch", context.atomic_fetch(&memory, 3, 0))?;
    assert_eq!(seen.same(small(0)), winner.same(small(me + 1)), "{seen:?} {winner:?}");
    let right = (me + 1) % pes;
    must("atomic_set", context.atomic_set(&memory, 0, small(me + 5), right, context.stream()))?;
    must("sync", context.sync(context.stream()))?;
    let old = must("atomic_swap", context.atomic_swap(&memory, 0, small(7), right))?;
    assert!(old.same(small(me + 5)), "{old:?}");
    barrier(context)?;
    assert!(read(&memory)?[0].same(small(7)));
    refused("no such element", context.atomic_fetch(&memory, 4, 0), &["4 elements"])?;
    refused("no such PE", context.atomic_fetch(&memory, 0, pes), &["does not exist"])?;
    barrier(context)?;
    must("free", memory.free())
}

fn bits(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    of::<i32>(&context)?;
    of::<u32>(&context)?;
    of::<i64>(&context)?;
    of::<u64>(&context)?;
    must("finalize", context.finalize())?;
    done()
}

/// Each PE has a bit of its own in PE 0's words.
fn of<T: AtomicBits + Number + DeviceRepr>(context: &Context) -> Result<(), String> {
    let (me, pes) = (context.my_pe(), context.n_pes());
    let all = (1 << pes) - 1;
    let word = |value: i32| T::from_pattern(value as u64);
    let memory = upload(context, &[word(0), word(all), word(all)])?;
    barrier(context)?;
    let own = 1 << me;
    let before = must("or", context.atomic_fetch_or(&memory, 0, word(own), 0))?;
    assert_eq!(before.bits() & own as u64, 0, "the bit was set before");
    must("and", context.atomic_fetch_and(&memory, 1, word(all & !own), 0))?;
    must("xor", context.atomic_fetch_xor(&memory, 2, word(own), 0))?;
    barrier(context)?;
    if me == 0 {
        let got: Vec<u64> = read(&memory)?.iter().map(|value| value.bits()).collect();
        assert_eq!(got, [all as u64, 0, 0]);
    }
    barrier(context)?;
    must("free", memory.free())
}
