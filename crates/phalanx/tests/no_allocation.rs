//! Operations on the host allocate nothing once they have been called before, whatever their size and algorithm.
//!
//! A rank that has waited for 10 ms looks around before it sleeps, and may allocate. So a call is tried until each rank
//! has seen it without an allocation: on a machine with other work that can take several tries.
#![cfg(target_os = "linux")]

use phalanx::{BackendKind, Comm, PreMulSum, ReduceOp, Result};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // A thread that ends has no counter any more, and calls nothing that is measured.
    let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
}

// SAFETY: the system's own, counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.realloc(start, layout, len) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Buffers of a call: `whole` and `result` have a block for each rank, `part` is one.
struct Buffers<'a> {
    whole: &'a mut [f32],
    result: &'a mut [f32],
    part: &'a mut [f32],
    counts: &'a [usize],
}

type Call = fn(&Comm, &mut Buffers<'_>) -> Result<()>;

const SUM: ReduceOp = ReduceOp::Sum;

const CALLS: [(&str, Call); 27] = [
    ("all_reduce", |c, b| c.all_reduce(b.whole, b.result, SUM)),
    ("all_reduce_in_place", |c, b| c.all_reduce_in_place(b.whole, ReduceOp::Avg)),
    ("pre-multiplied sum", |c, b| c.all_reduce(b.whole, b.result, PreMulSum(0.5))),
    ("broadcast", |c, b| c.broadcast(b.whole, b.result, 0)),
    ("broadcast_in_place", |c, b| c.broadcast_in_place(b.whole, 1)),
    ("reduce", |c, b| c.reduce(b.whole, b.result, SUM, 0)),
    ("reduce_in_place", |c, b| c.reduce_in_place(b.whole, ReduceOp::Max, 1)),
    ("all_gather", |c, b| c.all_gather(b.part, b.result)),
    ("all_gather_v", |c, b| c.all_gather_v(b.part, b.result, b.counts)),
    ("all_gather_v_in_place", |c, b| c.all_gather_v_in_place(b.result, b.counts)),
    ("reduce_scatter", |c, b| c.reduce_scatter(b.whole, b.part, SUM)),
    ("reduce_scatter_v", |c, b| c.reduce_scatter_v(b.whole, b.part, b.counts, SUM)),
    ("reduce_scatter_v_in_place", |c, b| c.reduce_scatter_v_in_place(b.whole, b.counts, ReduceOp::Max)),
    ("all_to_all", |c, b| c.all_to_all(b.whole, b.result)),
    ("all_to_all_in_place", |c, b| c.all_to_all_in_place(b.whole)),
    ("all_to_all_v", |c, b| c.all_to_all_v(b.whole, b.counts, b.result, b.counts)),
    ("all_to_all_v_in_place", |c, b| c.all_to_all_v_in_place(b.whole, b.counts)),
    ("gather", |c, b| c.gather(b.part, b.result, 1)),
    ("gather_v", |c, b| c.gather_v(b.part, b.result, b.counts, 1)),
    ("gather_v_in_place", |c, b| c.gather_v_in_place(b.result, b.counts, 1)),
    ("scatter", |c, b| c.scatter(b.whole, b.part, 0)),
    ("scatter_v", |c, b| c.scatter_v(b.whole, b.counts, b.part, 0)),
    ("scatter_v_in_place", |c, b| c.scatter_v_in_place(b.whole, b.counts, 0)),
    ("barrier", |c, _| c.barrier()),
    ("send_recv", |c, b| {
        let (next, previous) =
            ((c.rank() + 1) % c.world_size(), (c.rank() + c.world_size() - 1) % c.world_size());
        c.send_recv(b.whole, next, b.result, previous)
    }),
    ("send_recv_tagged of pairs", |c, b| {
        let peer = (c.rank() ^ 1).min(c.world_size() - 1);
        c.send_recv_tagged(b.whole, peer, b.result, peer, 7)
    }),
    ("send and recv", |c, b| match c.rank() {
        0 => c.send(b.whole, 1),
        1 => c.recv(b.result, 0),
        _ => Ok(()),
    }),
];

/// Elements of a block: in an opening, in lines, in plain bytes, in a chunk, in many.
const BLOCKS: [usize; 5] = [1, 7, 100, 5_000, 300_000];

/// A call that allocates in each of so many tries allocates.
const TRIES: usize = 10;

/// The calls that have allocated, with the block and the number of allocations.
fn allocations(comm: &Comm, shared: bool) -> Result<Vec<String>> {
    let ranks = comm.world_size();
    let mut found = Vec::new();
    for block in BLOCKS {
        let counts = vec![block; ranks];
        let mut private = [block * ranks, block * ranks, block].map(|len| vec![0f32; len]);
        let mut allocated = None;
        let [whole, result, part] = if shared {
            let [whole, result, part] = &mut *allocated.insert([
                comm.alloc(block * ranks)?,
                comm.alloc(block * ranks)?,
                comm.alloc(block)?,
            ]);
            [&mut **whole, &mut **result, &mut **part]
        } else {
            let [whole, result, part] = &mut private;
            [&mut **whole, &mut **result, &mut **part]
        };
        let mut buffers = Buffers { whole, result, part, counts: &counts };
        for (name, call) in CALLS {
            // What is there from the first calls on, and where peers' memory is.
            for _ in 0..20 {
                call(comm, &mut buffers)?;
            }
            let mut more = u64::MAX;
            for _ in 0..TRIES {
                comm.barrier()?;
                let before = ALLOCATIONS.get();
                for _ in 0..10 {
                    call(comm, &mut buffers)?;
                }
                more = more.min((ALLOCATIONS.get() - before) as u64);
                let mut most = [more];
                comm.all_reduce_in_place(&mut most, ReduceOp::Max)?;
                if most == [0] {
                    break;
                }
            }
            if more > 0 {
                found.push(format!("{name} of {block} elements a block: {more} in 10 calls"));
            }
            comm.barrier()?;
        }
    }
    Ok(found)
}

#[test]
fn calls_do_not_allocate() {
    for (ranks, shared) in [(2, false), (2, true), (3, false)] {
        let ran = Comm::builder().backend(BackendKind::Host).run(ranks, |comm| allocations(&comm, shared));
        for (rank, found) in ran.unwrap().into_iter().enumerate() {
            assert_eq!(found.unwrap(), Vec::<String>::new(), "rank {rank} of {ranks}");
        }
    }
}

#[test]
fn accesses_of_one_side_do_not_allocate() {
    let ran = Comm::builder().backend(BackendKind::Host).run(2, |comm| -> Result<usize> {
        let mut memory = comm.symmetric::<u64>(1000)?;
        let (peer, mut found) = (1 - comm.rank(), [0; 500]);
        let epoch = memory.epoch()?;
        let before = ALLOCATIONS.get();
        for _ in 0..100 {
            epoch.put(&[1; 500], peer, 0)?;
            epoch.get(&mut found, peer, 500)?;
            epoch.put_strided(&[1; 10], 1, peer, 0, 7)?;
            epoch.accumulate(&[1; 10], peer, 0, SUM)?;
            epoch.fetch_and_op(1, peer, 0, ReduceOp::Max)?;
            epoch.compare_and_swap(1, 2, peer, 0)?;
            epoch.flush(peer)?;
            epoch.signal(peer)?;
        }
        let allocated = ALLOCATIONS.get() - before;
        epoch.end()?;
        Ok(allocated)
    });
    for allocated in ran.unwrap() {
        assert_eq!(allocated.unwrap(), 0);
    }
}
