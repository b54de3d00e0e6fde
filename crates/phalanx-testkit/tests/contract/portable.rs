//! The portable trait on raw pointers, of host memory or of the communicator's GPU: the same results, the
//! same checks, and tags.

use crate::buffers::Room;
use crate::world::both;
use libtest_mimic::Trial;
use phalanx::{Comm, DType, Error, ReduceOp, UsageError};
use phalanx::{RawCommunicator, StreamSyncOps};
use phalanx_testkit::Scenario;
use phalanx_testkit::reference::Combine;
use phalanx_testkit::ring::{Ring, STRIDE};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("portable/collectives", |comm, _| portable(comm, collectives)),
    Scenario::rank("portable/in_place", |comm, _| portable(comm, in_place)),
    Scenario::rank("portable/defaults", |comm, _| {
        portable(comm, |comm, room| collectives(&Least(comm), room))
    }),
    Scenario::rank("portable/messages", |comm, _| {
        portable(comm, |comm, room| messages(comm, room, Order::Sent))
    }),
    Scenario::rank("portable/tags", |comm, _| {
        portable(comm, |comm, room| messages(comm, room, Order::Reversed))
    }),
    Scenario::rank("portable/messages_among_collectives", |comm, _| {
        portable(comm, messages_among_collectives)
    }),
    Scenario::rank("portable/gather_and_scatter_are_no_messages", |comm, _| {
        portable(comm, gather_and_scatter_are_no_messages)
    }),
    Scenario::rank("portable/barrier_waits", |comm, _| portable(comm, barrier_waits)),
    Scenario::rank("portable/wrong_calls", |comm, _| portable(comm, wrong_calls)),
    Scenario::rank("portable/split", |comm, _| portable(comm, split)),
    Scenario::rank("portable/events", |comm, _| portable(comm, events)),
    Scenario::rank("portable/from_several_threads", |comm, _| from_several_threads(comm)),
];

/// Where a receive that nobody answers fails the communicator and not the job.
pub const BOUNDED: &[Scenario] = &[
    Scenario::rank("portable/dropped_with_a_receive", |comm, _| dropped_with_a_receive(comm)),
    Scenario::rank("portable/failure_is_told_to_all", |comm, _| failure_is_told_to_all(comm)),
    Scenario::rank("portable/called_while_another_waits", |comm, _| {
        portable(comm, called_while_another_waits)
    }),
];

/// With buffers of its memory.
fn portable(comm: Comm, body: fn(&dyn RawCommunicator, &Room) -> Outcome) -> Outcome {
    let room = Room::of(&comm);
    body(&*comm.into_raw_communicator(), &room)
}

pub fn trials() -> Vec<Trial> {
    let trials = SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 5]));
    trials.chain(BOUNDED.iter().flat_map(|scenario| both(*scenario, &[2]))).collect()
}

const SIZES: [usize; 4] = [0, 3, 1000, 70_001];

fn text(error: phalanx::Error) -> String {
    error.to_string()
}

fn collectives(comm: &dyn RawCommunicator, room: &Room) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<f32>::new(31);
    let summed = ring.combined(ranks, &Combine::Op(ReduceOp::Sum));
    for (i, count) in SIZES.into_iter().enumerate() {
        let start = i * 1009;
        let root = i % ranks;
        let what = |name: &str| format!("{name} of {count}, rank {rank}");
        let own = |len: usize| ring.window(start + rank * STRIDE, len);
        let mut buffer = room.buffer(own(count));
        let (mut all, mut block) = (room.buffer(vec![0f32; count * ranks]), room.buffer(vec![0f32; count]));
        let whole = room.buffer(own(count * ranks));
        let (at, dtype) = (buffer.at(), DType::F32);
        let (all_at, block_at) = (all.at(), block.at());
        // SAFETY: the buffers have the announced lengths and are not touched before the calls are complete.
        unsafe {
            comm.all_reduce(at, count, dtype, ReduceOp::Sum).context(|| what("all_reduce"))?;
            comm.sync().map_err(text)?;
            summed.expect_values(buffer.read(), start).context(|| what("all_reduce"))?;

            buffer.write(|buffer| ring.fill(buffer, start + rank * STRIDE));
            comm.reduce(at, count, dtype, ReduceOp::Sum, root).context(|| what("reduce"))?;
            comm.sync().map_err(text)?;
            if rank == root {
                summed.expect_values(buffer.read(), start).context(|| what("reduce"))?;
            }

            buffer.write(|buffer| ring.fill(buffer, start + rank * STRIDE));
            comm.broadcast(at, count, dtype, root).context(|| what("broadcast"))?;
            comm.sync().map_err(text)?;
            ring.expect_bits(buffer.read(), start + root * STRIDE).context(|| what("broadcast"))?;

            buffer.write(|buffer| ring.fill(buffer, start + rank * STRIDE));
            comm.all_gather(at, all_at, count, dtype).context(|| what("all_gather"))?;
            comm.sync().map_err(text)?;
            for from in 0..ranks {
                let part = &all.read()[from * count..(from + 1) * count];
                ring.expect_bits(part, start + from * STRIDE).context(|| what("all_gather"))?;
            }

            comm.reduce_scatter(whole.at(), block_at, count, dtype, ReduceOp::Sum)
                .context(|| what("reduce_scatter"))?;
            comm.sync().map_err(text)?;
            summed.expect_values(block.read(), start + rank * count).context(|| what("reduce_scatter"))?;

            comm.all_to_all(whole.at(), all_at, count, dtype).context(|| what("all_to_all"))?;
            comm.sync().map_err(text)?;
            for from in 0..ranks {
                let part = &all.read()[from * count..(from + 1) * count];
                ring.expect_bits(part, start + from * STRIDE + rank * count)
                    .context(|| what("all_to_all"))?;
            }

            // Where a rooted operation does not use a pointer it may be null.
            let all_or_null = if rank == root { all_at } else { 0 };
            comm.gather(at, all_or_null, count, dtype, root).context(|| what("gather"))?;
            comm.sync().map_err(text)?;
            if rank == root {
                for from in 0..ranks {
                    let part = &all.read()[from * count..(from + 1) * count];
                    ring.expect_bits(part, start + from * STRIDE).context(|| what("gather"))?;
                }
            }

            let whole_or_null = if rank == root { whole.at() } else { 0 };
            comm.scatter(whole_or_null, block_at, count, dtype, root).context(|| what("scatter"))?;
            comm.sync().map_err(text)?;
            let expected = start + root * STRIDE + rank * count;
            ring.expect_bits(block.read(), expected).context(|| what("scatter"))?;
        }
        comm.barrier().map_err(text)?;
    }
    Ok(String::new())
}

/// What has blocks, in one buffer.
fn in_place(comm: &dyn RawCommunicator, room: &Room) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<f32>::new(33);
    let summed = ring.combined(ranks, &Combine::Op(ReduceOp::Sum));
    let dtype = DType::F32;
    for (i, count) in SIZES.into_iter().enumerate() {
        let (start, root) = (i * 1013, i % ranks);
        let what = |name: &str| format!("{name} of {count} in place, rank {rank}");
        let mut buffer = room.buffer(vec![0f32; count * ranks]);
        let at = buffer.at();
        let own = at + (rank * count * dtype.size()) as u64;
        let place = |from: usize| from * count..(from + 1) * count;
        let first = |from: usize| start + from * STRIDE;
        // SAFETY: the buffer has all ranks' blocks, and is not touched before the calls are complete.
        unsafe {
            buffer.write(|buffer| ring.fill(&mut buffer[place(rank)], first(rank)));
            comm.all_gather(own, at, count, dtype).context(|| what("all_gather"))?;
            comm.sync().map_err(text)?;
            for from in 0..ranks {
                ring.expect_bits(&buffer.read()[place(from)], first(from)).context(|| what("all_gather"))?;
            }

            buffer.write(|buffer| ring.fill(buffer, first(rank)));
            comm.reduce_scatter(at, own, count, dtype, ReduceOp::Sum).context(|| what("reduce_scatter"))?;
            comm.sync().map_err(text)?;
            summed
                .expect_values(&buffer.read()[place(rank)], start + rank * count)
                .context(|| what("reduce_scatter"))?;

            buffer.write(|buffer| ring.fill(buffer, first(rank)));
            comm.all_to_all(at, at, count, dtype).context(|| what("all_to_all"))?;
            comm.sync().map_err(text)?;
            for from in 0..ranks {
                let expected = first(from) + rank * count;
                ring.expect_bits(&buffer.read()[place(from)], expected).context(|| what("all_to_all"))?;
            }

            buffer.write(|buffer| ring.fill(&mut buffer[place(rank)], first(rank)));
            comm.gather(own, if rank == root { at } else { 0 }, count, dtype, root)
                .context(|| what("gather"))?;
            comm.sync().map_err(text)?;
            for from in (0..ranks).filter(|_| rank == root) {
                ring.expect_bits(&buffer.read()[place(from)], first(from)).context(|| what("gather"))?;
            }

            buffer.write(|buffer| ring.fill(buffer, first(rank)));
            comm.scatter(if rank == root { at } else { 0 }, own, count, dtype, root)
                .context(|| what("scatter"))?;
            comm.sync().map_err(text)?;
            ring.expect_bits(&buffer.read()[place(rank)], first(root) + rank * count)
                .context(|| what("scatter"))?;
        }
    }
    Ok(String::new())
}

/// What any implementation of the trait has to have; the rest is made of that.
struct Least<'a>(&'a dyn RawCommunicator);

impl RawCommunicator for Least<'_> {
    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn rank(&self) -> usize {
        self.0.rank()
    }

    unsafe fn all_reduce(&self, ptr: u64, count: usize, dtype: DType, op: ReduceOp) -> phalanx::Result<()> {
        // SAFETY: the caller's contract, as in all of these.
        unsafe { self.0.all_reduce(ptr, count, dtype, op) }
    }

    unsafe fn broadcast(&self, ptr: u64, count: usize, dtype: DType, root: usize) -> phalanx::Result<()> {
        // SAFETY: as above.
        unsafe { self.0.broadcast(ptr, count, dtype, root) }
    }

    unsafe fn all_gather(&self, send: u64, recv: u64, count: usize, dtype: DType) -> phalanx::Result<()> {
        // SAFETY: as above.
        unsafe { self.0.all_gather(send, recv, count, dtype) }
    }

    unsafe fn reduce_scatter(
        &self,
        send: u64,
        recv: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> phalanx::Result<()> {
        // SAFETY: as above.
        unsafe { self.0.reduce_scatter(send, recv, count, dtype, op) }
    }

    unsafe fn send(
        &self,
        ptr: u64,
        count: usize,
        dtype: DType,
        dest: usize,
        tag: u32,
    ) -> phalanx::Result<()> {
        // SAFETY: as above.
        unsafe { self.0.send(ptr, count, dtype, dest, tag) }
    }

    unsafe fn recv(&self, ptr: u64, count: usize, dtype: DType, src: usize, tag: u32) -> phalanx::Result<()> {
        // SAFETY: as above.
        unsafe { self.0.recv(ptr, count, dtype, src, tag) }
    }

    fn sync(&self) -> phalanx::Result<()> {
        self.0.sync()
    }

    fn barrier(&self) -> phalanx::Result<()> {
        self.0.barrier()
    }
}

/// In which order messages of a pair are received.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    Sent,
    Reversed,
}

/// Sends and receives are posted, and matched by tag, or by their order where there are no tags; `sync`
/// completes them.
fn messages(comm: &dyn RawCommunicator, room: &Room, order: Order) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<u16>::new(32);
    let start = |from: usize, to: usize, tag: u32| from * 7919 + to * 31 + tag as usize * 977;
    for count in SIZES {
        let mut received: Vec<_> = (0..ranks * 2).map(|_| room.buffer(vec![0u16; count])).collect();
        let window = |i: usize| ring.window(start(rank, i / 2, i as u32 % 2), count);
        let sent: Vec<_> = (0..ranks * 2).map(|i| room.buffer(window(i))).collect();
        // SAFETY: the buffers live and are not touched until `sync`.
        unsafe {
            for (i, message) in sent.iter().enumerate() {
                comm.send(message.at(), count, DType::U16, i / 2, i as u32 % 2).map_err(text)?;
            }
            let mut receives: Vec<_> = received.iter().enumerate().collect();
            if order == Order::Reversed {
                receives.reverse();
            }
            for (i, message) in receives {
                comm.recv(message.at(), count, DType::U16, i / 2, i as u32 % 2).map_err(text)?;
            }
            comm.sync().context(|| format!("{count} elements, rank {rank}"))?;
        }
        for (i, message) in received.iter_mut().enumerate() {
            let expected = start(i / 2, rank, i as u32 % 2);
            ring.expect_bits(message.read(), expected)
                .context(|| format!("{count} from {} to {rank}, tag {}", i / 2, i % 2))?;
        }
    }
    Ok(String::new())
}

/// A message that was begun comes through although its rank is in a collective, and whatever its peer does
/// first.
fn messages_among_collectives(comm: &dyn RawCommunicator, room: &Room) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    if ranks == 1 {
        return Ok(String::new());
    }
    let ring = Ring::<u32>::new(33);
    for (i, count) in [2000usize, 200_001].into_iter().enumerate() {
        for first in [0, 1] {
            let start = i * 977 + first * 31;
            let sent = room.buffer(ring.window(start, count));
            let (mut received, mut sum) = (room.buffer(vec![0u32; count]), room.buffer(vec![1u64]));
            let (at, dtype) = (sum.at(), DType::U64);
            // SAFETY: the buffers live and are not touched until `sync`.
            unsafe {
                match rank {
                    0 => comm.recv(received.at(), count, DType::U32, 1, 0).map_err(text)?,
                    1 => comm.send(sent.at(), count, DType::U32, 0, 0).map_err(text)?,
                    _ => {}
                }
                if rank != first {
                    comm.sync().context(|| format!("{count} elements, rank {rank}"))?;
                }
                comm.all_reduce(at, 1, dtype, ReduceOp::Sum).map_err(text)?;
                comm.sync().context(|| format!("{count} elements, rank {rank}"))?;
            }
            if sum.read() != [ranks as u64] {
                return Err(format!("a wrong sum beside a message of {count}: {:?}", sum.read()));
            }
            if rank == 0 {
                ring.expect_bits(received.read(), start).context(|| format!("{count} elements"))?;
            }
        }
    }
    Ok(String::new())
}

/// A receive that is pending gets the message that was sent for it, and not a block of a collective.
fn gather_and_scatter_are_no_messages(comm: &dyn RawCommunicator, room: &Room) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for (root, other) in [(0, 1 % ranks), (1 % ranks, 0)] {
        let mut message = room.buffer(vec![0u16; 4]);
        let (own, mut block) = (room.buffer(vec![10 + rank as u16; 4]), room.buffer(vec![0u16; 4]));
        let mut all = room.buffer((0..ranks as u16).flat_map(|to| [20 + to; 4]).collect());
        let (all_at, dtype) = (all.at(), DType::U16);
        let expects = |rank: usize| rank == root || rank == other;
        // SAFETY: the buffers have the announced lengths and are not touched until `sync`.
        unsafe {
            // Both expect a message without a tag from the other.
            let peer = if rank == root { other } else { root };
            if expects(rank) {
                comm.recv(message.at(), 4, dtype, peer, 0).map_err(text)?;
            }
            let (whole, block_at) = (if rank == root { all_at } else { 0 }, block.at());
            comm.scatter(whole, block_at, 4, dtype, root).map_err(text)?;
            comm.gather(own.at(), whole, 4, dtype, root).map_err(text)?;
            let sent = room.buffer(vec![rank as u16; 4]);
            if expects(rank) {
                comm.send(sent.at(), 4, dtype, peer, 0).map_err(text)?;
            }
            comm.sync().map_err(text)?;
            if expects(rank) && message.read() != [peer as u16; 4] {
                return Err(format!("rank {rank} received {:?} from rank {peer}", message.read()));
            }
        }
        if block.read() != [20 + rank as u16; 4] {
            return Err(format!("rank {rank} got {:?} of the scatter of rank {root}", block.read()));
        }
        let gathered: Vec<u16> = (0..ranks as u16).flat_map(|from| [10 + from; 4]).collect();
        if rank == root && all.read() != gathered {
            return Err(format!("rank {rank} gathered {:?}", all.read()));
        }
    }
    Ok(String::new())
}

/// Nobody leaves a barrier before the last rank has come to it.
fn barrier_waits(comm: &dyn RawCommunicator, room: &Room) -> Outcome {
    let nanos = || SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as u64;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for late in 0..ranks {
        if rank == late {
            std::thread::sleep(Duration::from_millis(100));
        }
        let mut came = room.buffer(vec![nanos()]);
        comm.barrier().map_err(text)?;
        let left = nanos();
        // SAFETY: the buffer has one element.
        unsafe { comm.all_reduce(came.at(), 1, DType::U64, ReduceOp::Max) }.map_err(text)?;
        comm.sync().map_err(text)?;
        let came = came.read()[0];
        if left < came {
            let early = Duration::from_nanos(came - left);
            return Err(format!("rank {rank} left the barrier {early:?} before rank {late} came"));
        }
    }
    Ok(String::new())
}

/// Dropping the communicator waits for what is pending no longer than the deadline.
fn dropped_with_a_receive(comm: Comm) -> Outcome {
    const TIMEOUT: Duration = Duration::from_millis(300);
    /// Machines are slow at times.
    const PATIENCE: Duration = Duration::from_secs(4);
    let rank = comm.rank();
    comm.set_timeout(TIMEOUT);
    let room = Room::of(&comm);
    let portable = comm.into_raw_communicator();
    if rank == 1 {
        // It is there, and sends nothing.
        std::thread::sleep(PATIENCE);
        return Ok(String::new());
    }
    let never = room.buffer(vec![0u8; 1000]);
    // SAFETY: the buffer outlives the communicator.
    unsafe { portable.recv(never.at(), 1000, DType::U8, 1, 0) }.map_err(text)?;
    let since = Instant::now();
    drop(portable);
    let took = since.elapsed();
    if (TIMEOUT..PATIENCE).contains(&took) { Ok(String::new()) } else { Err(format!("it took {took:?}")) }
}

/// Each thread that waits is told that its receive failed, whichever of them has waited for it.
fn failure_is_told_to_all(comm: Comm) -> Outcome {
    if comm.rank() == 1 {
        // Time for the threads to come; then it leaves, and has sent nothing.
        std::thread::sleep(Duration::from_millis(200));
        return Ok(String::new());
    }
    let room = Room::of(&comm);
    let never = room.buffer(vec![0u8; 2000]);
    let portable = comm.into_raw_communicator();
    let events = portable.as_stream_sync().ok_or("no events")?;
    let at = never.at();
    // SAFETY: the buffer outlives the communicator.
    unsafe {
        portable.recv(at, 1000, DType::U8, 1, 0).map_err(text)?;
        portable.recv(at + 1000, 1000, DType::U8, 1, 1).map_err(text)?;
    }
    let event = events.create_event().map_err(text)?;
    // On a GPU it is behind the receives, which are enqueued when the peer has come.
    let recorded =
        Some(events.record_on_comm_stream(event)).filter(|recorded| room.is_host() == recorded.is_err());
    if let Some(recorded) = recorded {
        return Err(format!("to record an event is answered {recorded:?}"));
    }
    let told: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| portable.sync())).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let later = [portable.sync(), portable.barrier(), events.stream_wait_event(0, event)];
    for (i, told) in told.into_iter().chain(later).enumerate() {
        match told {
            Err(error) if error.is_fatal() => {}
            other => return Err(format!("the one who waits as number {i} is told {other:?}")),
        }
    }
    Ok(String::new())
}

/// The peer answers only what another thread sends while the first waits for the answer.
fn called_while_another_waits(comm: &dyn RawCommunicator, room: &Room) -> Outcome {
    let peer = 1 - comm.rank();
    let [mut question, mut answer] = [41u64, 0].map(|value| room.buffer(vec![value]));
    let (asked, answered) = (question.at(), answer.at());
    // SAFETY: each buffer has one element, and is not touched before its message is complete.
    let (send, recv) = unsafe {
        (
            |at, tag| comm.send(at, 1, DType::U64, peer, tag).map_err(text),
            |at, tag| comm.recv(at, 1, DType::U64, peer, tag).map_err(text),
        )
    };
    if comm.rank() == 1 {
        recv(asked, 7)?;
        comm.sync().map_err(text)?;
        let reply = room.buffer(vec![question.read()[0] + 1]);
        send(reply.at(), 8)?;
        comm.sync().map_err(text)?;
        return Ok(String::new());
    }
    recv(answered, 8)?;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| comm.sync().map_err(text));
        std::thread::sleep(Duration::from_millis(100));
        send(asked, 7)?;
        waiting.join().expect("no panic")
    })?;
    comm.sync().map_err(text)?;
    match answer.read() {
        [42] => Ok(String::new()),
        other => Err(format!("the answer is {other:?}")),
    }
}

fn wrong_calls(comm: &dyn RawCommunicator, room: &Room) -> Outcome {
    let ranks = comm.world_size();
    let buffer = room.buffer(vec![0f64; 4 * ranks + 4]);
    let at = buffer.at();
    let dtype = DType::F64;
    let own = at + (comm.rank() * 4 * dtype.size()) as u64;
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
            // Half of this rank's place in place, and half of the next.
            ("overlap", comm.all_gather(own + 16, at, 4, dtype)),
            ("overlap", comm.reduce_scatter(at, own + 16, 4, dtype, sum)),
            ("overlap", comm.gather(own + 16, at, 4, dtype, comm.rank())),
            ("overlap", comm.scatter(at, own + 16, 4, dtype, comm.rank())),
            ("overlap", comm.all_to_all(at, at + 16, 4, dtype)),
        ]
    };
    for (i, (what, result)) in refused.into_iter().enumerate() {
        let Err(Error::Usage(usage)) = result else { return Err(format!("call {i}, {what}: {result:?}")) };
        match (what, &*usage) {
            ("null", UsageError::NullPointer { .. })
            | ("a count", UsageError::Overflow { .. })
            | ("overlap", UsageError::Overlap { .. })
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

fn split(comm: &dyn RawCommunicator, room: &Room) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let part = comm.split(rank as u32 % 2, (ranks - rank) as u32).map_err(text)?;
    let part = part.ok_or("this backend can split")?;
    let mut sum = room.buffer(vec![rank as u64]);
    // SAFETY: the buffer has one element.
    unsafe { part.all_reduce(sum.at(), 1, DType::U64, ReduceOp::Sum) }.map_err(text)?;
    part.sync().map_err(text)?;
    let sum = sum.read()[0];
    let members: Vec<usize> = (0..ranks).rev().filter(|r| r % 2 == rank % 2).collect();
    if members.get(part.rank()) != Some(&rank) || sum != members.iter().sum::<usize>() as u64 {
        return Err(format!("rank {rank} is {} in a part that sums to {}", part.rank(), sum));
    }
    comm.barrier().map_err(text)?;
    Ok(String::new())
}

fn events(comm: &dyn RawCommunicator, room: &Room) -> Outcome {
    let streams = comm.as_stream_sync().ok_or("every backend offers stream operations")?;
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
    // On a GPU its stream waits, and not the caller.
    if room.is_host() && comm.world_size() > 1 && comm.rank() < 2 {
        messages_before_an_event(comm, streams, second)?;
    }
    streams.destroy_event(second).map_err(text)?;
    Ok(String::new())
}

/// Rank 1 sends when it is told to: who waits for an event has what was posted before it, and waits for
/// nothing else.
fn messages_before_an_event(comm: &dyn RawCommunicator, streams: &dyn StreamSyncOps, event: u64) -> Outcome {
    let (go, mut told, mut first, mut last) = ([1u8], [0u8], [0u8], [0u8]);
    let dtype = DType::U8;
    // SAFETY: each buffer has one element, and is not touched before the call is complete.
    unsafe {
        if comm.rank() == 0 {
            comm.recv(first.as_mut_ptr() as u64, 1, dtype, 1, 1).map_err(text)?;
            streams.record_on_comm_stream(event).map_err(text)?;
            comm.recv(last.as_mut_ptr() as u64, 1, dtype, 1, 2).map_err(text)?;
            comm.send(go.as_ptr() as u64, 1, dtype, 1, 0).map_err(text)?;
            streams.stream_wait_event(0, event).map_err(text)?;
            if first != [7] {
                return Err("an event came before the message".into());
            }
            comm.send(go.as_ptr() as u64, 1, dtype, 1, 0).map_err(text)?;
        } else {
            for (tag, message) in [(1, [7u8]), (2, [8u8])] {
                comm.recv(told.as_mut_ptr() as u64, 1, dtype, 0, 0).map_err(text)?;
                comm.sync().map_err(text)?;
                comm.send(message.as_ptr() as u64, 1, dtype, 0, tag).map_err(text)?;
                comm.sync().map_err(text)?;
            }
        }
        comm.sync().map_err(text)?;
    }
    let right = comm.rank() == 1 || last == [8];
    if right { Ok(String::new()) } else { Err(format!("the last message is {last:?}")) }
}

/// The trait is `Sync`: threads take turns, and the order is theirs to agree on.
fn from_several_threads(comm: Comm) -> Outcome {
    let ranks = comm.world_size() as u64;
    let room = Room::of(&comm);
    let comm: Arc<dyn RawCommunicator> = comm.into_raw_communicator();
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let (comm, room) = (comm.clone(), room.clone());
            std::thread::spawn(move || -> Result<(), String> {
                for _ in 0..50 {
                    // Whatever their order, these calls are all alike.
                    let mut sum = room.buffer(vec![1u64; 700]);
                    // SAFETY: the buffer has 700 elements, and is not touched before `sync`.
                    unsafe { comm.all_reduce(sum.at(), 700, DType::U64, ReduceOp::Sum) }.map_err(text)?;
                    comm.sync().map_err(text)?;
                    if sum.read() != vec![ranks; 700] {
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
