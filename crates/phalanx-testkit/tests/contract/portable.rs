//! The portable trait on raw pointers: the same results, the same checks, and tags.

use crate::world::both;
use libtest_mimic::Trial;
use phalanx::communicator::Communicator;
use phalanx::{Comm, DType, Error, ReduceOp, UsageError};
use phalanx_testkit::Scenario;
use phalanx_testkit::reference::Combine;
use phalanx_testkit::ring::{Ring, STRIDE};
use phalanx_testkit::scenario::{Context, Outcome};
use std::sync::Arc;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("portable/collectives", |comm, _| collectives(&*comm.into_communicator())),
    Scenario::rank("portable/messages", |comm, _| messages(&*comm.into_communicator())),
    Scenario::rank("portable/wrong_calls", |comm, _| wrong_calls(&*comm.into_communicator())),
    Scenario::rank("portable/split", |comm, _| split(&*comm.into_communicator())),
    Scenario::rank("portable/events", |comm, _| events(&*comm.into_communicator())),
    Scenario::rank("portable/from_several_threads", |comm, _| from_several_threads(comm)),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 5])).collect()
}

const SIZES: [usize; 4] = [0, 3, 1000, 70_001];

fn text(error: phalanx::Error) -> String {
    error.to_string()
}

fn address<T>(buffer: &[T]) -> u64 {
    buffer.as_ptr() as u64
}

fn address_mut<T>(buffer: &mut [T]) -> u64 {
    buffer.as_mut_ptr() as u64
}

fn collectives(comm: &dyn Communicator) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<f32>::new(31);
    let summed = ring.combined(ranks, &Combine::Op(ReduceOp::Sum));
    for (i, count) in SIZES.into_iter().enumerate() {
        let start = i * 1009;
        let root = i % ranks;
        let what = |name: &str| format!("{name} of {count}, rank {rank}");
        let own = |len: usize| ring.window(start + rank * STRIDE, len);
        let mut buffer = own(count);
        let (mut all, mut block) = (vec![0f32; count * ranks], vec![0f32; count]);
        let whole = own(count * ranks);
        let (at, dtype) = (address_mut(&mut buffer), DType::F32);
        let (all_at, block_at) = (address_mut(&mut all), address_mut(&mut block));
        // SAFETY: the buffers have the announced lengths and are not touched before the calls are complete.
        unsafe {
            comm.all_reduce(at, count, dtype, ReduceOp::Sum).context(|| what("all_reduce"))?;
            comm.sync().map_err(text)?;
            summed.expect_values(&buffer, start).context(|| what("all_reduce"))?;

            ring.fill(&mut buffer, start + rank * STRIDE);
            comm.reduce(at, count, dtype, ReduceOp::Sum, root).context(|| what("reduce"))?;
            comm.sync().map_err(text)?;
            if rank == root {
                summed.expect_values(&buffer, start).context(|| what("reduce"))?;
            }

            ring.fill(&mut buffer, start + rank * STRIDE);
            comm.broadcast(at, count, dtype, root).context(|| what("broadcast"))?;
            comm.sync().map_err(text)?;
            ring.expect_bits(&buffer, start + root * STRIDE).context(|| what("broadcast"))?;

            ring.fill(&mut buffer, start + rank * STRIDE);
            comm.all_gather(at, all_at, count, dtype).context(|| what("all_gather"))?;
            comm.sync().map_err(text)?;
            for from in 0..ranks {
                let part = &all[from * count..(from + 1) * count];
                ring.expect_bits(part, start + from * STRIDE).context(|| what("all_gather"))?;
            }

            comm.reduce_scatter(address(&whole), block_at, count, dtype, ReduceOp::Sum)
                .context(|| what("reduce_scatter"))?;
            comm.sync().map_err(text)?;
            summed.expect_values(&block, start + rank * count).context(|| what("reduce_scatter"))?;

            comm.all_to_all(address(&whole), all_at, count, dtype).context(|| what("all_to_all"))?;
            comm.sync().map_err(text)?;
            for from in 0..ranks {
                let part = &all[from * count..(from + 1) * count];
                ring.expect_bits(part, start + from * STRIDE + rank * count)
                    .context(|| what("all_to_all"))?;
            }

            // Where a rooted operation does not use a pointer it may be null.
            let all_or_null = if rank == root { all_at } else { 0 };
            comm.gather(at, all_or_null, count, dtype, root).context(|| what("gather"))?;
            comm.sync().map_err(text)?;
            if rank == root {
                for from in 0..ranks {
                    let part = &all[from * count..(from + 1) * count];
                    ring.expect_bits(part, start + from * STRIDE).context(|| what("gather"))?;
                }
            }

            let whole_or_null = if rank == root { address(&whole) } else { 0 };
            comm.scatter(whole_or_null, block_at, count, dtype, root).context(|| what("scatter"))?;
            comm.sync().map_err(text)?;
            let expected = start + root * STRIDE + rank * count;
            ring.expect_bits(&block, expected).context(|| what("scatter"))?;
        }
        comm.barrier().map_err(text)?;
    }
    Ok(String::new())
}

/// Sends and receives are posted in any order and matched by tag; `sync` completes them.
fn messages(comm: &dyn Communicator) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<u16>::new(32);
    let start = |from: usize, to: usize, tag: u32| from * 7919 + to * 31 + tag as usize * 977;
    for count in SIZES {
        let mut received = vec![vec![0u16; count]; ranks * 2];
        let sent: Vec<Vec<u16>> =
            (0..ranks * 2).map(|i| ring.window(start(rank, i / 2, i as u32 % 2), count)).collect();
        // SAFETY: the buffers live and are not touched until `sync`.
        unsafe {
            for (i, message) in sent.iter().enumerate() {
                comm.send(address(message), count, DType::U16, i / 2, i as u32 % 2).map_err(text)?;
            }
            for (i, message) in received.iter_mut().enumerate().rev() {
                comm.recv(address_mut(message), count, DType::U16, i / 2, i as u32 % 2).map_err(text)?;
            }
            comm.sync().context(|| format!("{count} elements, rank {rank}"))?;
        }
        for (i, message) in received.iter().enumerate() {
            let expected = start(i / 2, rank, i as u32 % 2);
            ring.expect_bits(message, expected)
                .context(|| format!("{count} from {} to {rank}, tag {}", i / 2, i % 2))?;
        }
    }
    Ok(String::new())
}

fn wrong_calls(comm: &dyn Communicator) -> Outcome {
    let ranks = comm.world_size();
    let mut buffer = vec![0f64; 4 * ranks];
    let at = address_mut(&mut buffer);
    let dtype = DType::F64;
    let sum = ReduceOp::Sum;
    // SAFETY: nothing is touched: every call is refused for its other arguments.
    let refused = unsafe {
        [
            ("a root", comm.broadcast(at, 4, dtype, ranks)),
            ("a root", comm.reduce(at, 4, dtype, sum, ranks)),
            ("a root", comm.gather(at, at, 4, dtype, usize::MAX)),
            ("a root", comm.scatter(at, at, 4, dtype, ranks)),
            ("a peer", comm.send(at, 4, dtype, ranks, 0)),
            ("a peer", comm.recv(at, 4, dtype, ranks, 0)),
            ("null", comm.all_reduce(0, 4, dtype, sum)),
            ("null", comm.all_gather(at, 0, 4, dtype)),
            ("null", comm.reduce_scatter(0, at, 4, dtype, sum)),
            ("null", comm.all_to_all(0, at, 4, dtype)),
            ("null", comm.send(0, 4, dtype, 0, 0)),
            ("null", comm.recv(0, 4, dtype, 0, 0)),
            ("a count", comm.all_reduce(at, usize::MAX, dtype, sum)),
            ("a count", comm.all_gather(at, at, usize::MAX / 8, dtype)),
            ("a count", comm.send(at, usize::MAX / 4, dtype, 0, 0)),
        ]
    };
    for (i, (what, result)) in refused.into_iter().enumerate() {
        let Err(Error::Usage(usage)) = result else { return Err(format!("call {i}, {what}: {result:?}")) };
        match (what, &*usage) {
            ("null", UsageError::NullPointer { .. })
            | ("a count", UsageError::Overflow { .. })
            | ("a root" | "a peer", UsageError::Rank { .. }) => {}
            (what, other) => return Err(format!("call {i}, {what}: {other:?}")),
        }
    }
    // Null with no elements is nothing wrong, and the communicator works on.
    // SAFETY: no elements are touched.
    unsafe { comm.all_reduce(0, 0, dtype, sum) }.map_err(text)?;
    comm.barrier().map_err(text)?;
    Ok(String::new())
}

fn split(comm: &dyn Communicator) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let part = comm.split(rank as u32 % 2, (ranks - rank) as u32).map_err(text)?;
    let part = part.ok_or("this backend can split")?;
    let mut sum = [rank as u64];
    // SAFETY: the buffer has one element.
    unsafe { part.all_reduce(address_mut(&mut sum), 1, DType::U64, ReduceOp::Sum) }.map_err(text)?;
    part.sync().map_err(text)?;
    let members: Vec<usize> = (0..ranks).rev().filter(|r| r % 2 == rank % 2).collect();
    if members.get(part.rank()) != Some(&rank) || sum[0] != members.iter().sum::<usize>() as u64 {
        return Err(format!("rank {rank} is {} in a part that sums to {}", part.rank(), sum[0]));
    }
    comm.barrier().map_err(text)?;
    Ok(String::new())
}

fn events(comm: &dyn Communicator) -> Outcome {
    let streams = comm.as_stream_sync().ok_or("the host offers stream operations")?;
    let (first, second) = (streams.create_event().map_err(text)?, streams.create_event().map_err(text)?);
    if first == second {
        return Err("two events have one handle".into());
    }
    streams.record_on_comm_stream(first).map_err(text)?;
    streams.stream_wait_event(0, first).map_err(text)?;
    streams.record_on_stream(second, 0).map_err(text)?;
    streams.comm_stream_wait_event(second).map_err(text)?;
    streams.sync_comm_stream().map_err(text)?;
    streams.destroy_event(first).map_err(text)?;
    for result in [
        streams.destroy_event(first),
        streams.record_on_comm_stream(first),
        streams.stream_wait_event(0, first),
        streams.comm_stream_wait_event(u64::MAX),
    ] {
        match result {
            Err(Error::Usage(usage)) if matches!(*usage, UsageError::Event { .. }) => {}
            other => return Err(format!("an event that does not exist: {other:?}")),
        }
    }
    streams.destroy_event(second).map_err(text)?;
    Ok(String::new())
}

/// The trait is `Sync`: threads take turns, and the order is theirs to agree on.
fn from_several_threads(comm: Comm) -> Outcome {
    let ranks = comm.world_size() as u64;
    let comm: Arc<dyn Communicator> = comm.into_communicator();
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let comm = comm.clone();
            std::thread::spawn(move || -> Result<(), String> {
                for _ in 0..50 {
                    // Whatever their order, these calls are all alike.
                    let mut sum = vec![1u64; 700];
                    // SAFETY: the buffer has 700 elements; host operations are complete when they return.
                    unsafe { comm.all_reduce(address_mut(&mut sum), 700, DType::U64, ReduceOp::Sum) }
                        .map_err(text)?;
                    if sum != vec![ranks; 700] {
                        return Err("a wrong sum".into());
                    }
                }
                Ok(())
            })
        })
        .collect();
    for worker in workers {
        worker.join().map_err(|_| "a worker panicked")??;
    }
    Ok(String::new())
}
