//! Messages between two ranks: blocking, exchanged, tagged, grouped, and larger than any buffer.

use crate::buffers::{Memory, poison};
use crate::world::both;
use libtest_mimic::Trial;
use phalanx::{BackendKind, Comm, DType, bf16};
use phalanx_testkit::ring::Ring;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario, with_number};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("messages/back_and_forth", |comm, _| back_and_forth(&comm)),
    Scenario::rank("messages/send_recv_in_a_ring", |comm, _| send_recv_in_a_ring(&comm)),
    Scenario::rank("messages/every_type", |comm, _| every_type(&comm)),
    Scenario::rank("messages/many_small_ones", |comm, _| many_small_ones(&comm)),
    Scenario::rank("messages/tags", |comm, _| tags(&comm)),
    Scenario::rank("messages/grouped_ring", |comm, _| grouped_ring(&comm)),
    Scenario::rank("messages/grouped_with_a_view", |comm, _| grouped_with_a_view(&comm)),
    Scenario::rank("messages/grouped_all_pairs", |comm, _| grouped_all_pairs(&comm)),
    Scenario::rank("messages/to_oneself", |comm, _| to_oneself(&comm)),
    Scenario::rank("messages/between_collectives", |comm, _| between_collectives(&comm)),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[2, 3, 5, 8])).collect()
}

/// Elements: none, within a line, within the small protocol, many chunks, many rings.
const SIZES: [usize; 7] = [0, 1, 13, 1000, 4099, 70_001, 700_001];

fn start(from: usize, to: usize, index: usize) -> usize {
    from * 7919 + to * 104_729 + index * 31_337
}

fn check<T: Number>(ring: &Ring<T>, actual: &[T], start: usize, what: &str) -> Result<(), String> {
    ring.expect_bits(actual, start).context(|| what.to_owned())
}

fn text(error: phalanx::Error) -> String {
    error.to_string()
}

/// Every pair of neighbours, first one way and then the other.
fn back_and_forth(comm: &Comm) -> Outcome {
    let ring = Ring::<f32>::new(1);
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for (i, size) in SIZES.into_iter().enumerate() {
        for memory in Memory::ALL {
            let mut send = memory.send(comm, size).map_err(text)?;
            let mut recv = memory.recv(comm, size).map_err(text)?;
            for low in 0..ranks - 1 {
                let high = low + 1;
                for (from, to) in [(low, high), (high, low)] {
                    let what = || format!("{size} elements from {from} to {to}, {memory:?}, rank {rank}");
                    if rank == from {
                        ring.fill(send.all(), start(from, to, i));
                        comm.send(&send.all()[..], to).context(what)?;
                    } else if rank == to {
                        comm.recv(recv.all(), from).context(what)?;
                        check(&ring, recv.all(), start(from, to, i), &what())?;
                    }
                }
            }
        }
    }
    Ok(String::new())
}

/// Everybody sends to the next and receives from the previous at once.
fn send_recv_in_a_ring(comm: &Comm) -> Outcome {
    let ring = Ring::<bf16>::new(2);
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for (i, size) in SIZES.into_iter().enumerate() {
        for memory in Memory::ALL {
            let mut send = memory.send(comm, size).map_err(text)?;
            let mut recv = memory.recv(comm, size).map_err(text)?;
            ring.fill(send.all(), start(rank, next, i));
            let what = || format!("{size} elements, {memory:?}, rank {rank}");
            comm.send_recv(&send.all()[..], next, recv.all(), previous).context(what)?;
            check(&ring, recv.all(), start(previous, rank, i), &what())?;
        }
    }
    Ok(String::new())
}

/// Every type, in each of the calls.
fn every_type(comm: &Comm) -> Outcome {
    for dtype in DType::ALL {
        let what = || format!("{dtype}, rank {}", comm.rank());
        with_number!(dtype, T => one_type::<T>(comm)).context(what)?;
    }
    Ok(String::new())
}

/// Sends to the next rank and receives from the one before.
type Exchange<'a, T> = dyn Fn(&[T], &mut [T]) -> phalanx::Result<()> + 'a;

fn one_type<T: Number>(comm: &Comm) -> Result<(), String> {
    let ring = Ring::<T>::new(7);
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for (i, size) in [0, 1, 13, 1000, 4099, 70_001].into_iter().enumerate() {
        for memory in Memory::ALL {
            let mut send = memory.send(comm, size).map_err(text)?;
            let mut recv = memory.recv(comm, size).map_err(text)?;
            let calls: [(&str, &Exchange<'_, T>); 5] = [
                ("send and recv", &|send, recv| {
                    // The last of an odd number of ranks sends first, too, to one that receives then.
                    if rank % 2 == 0 {
                        comm.send(send, next)?;
                        return comm.recv(recv, previous);
                    }
                    comm.recv(recv, previous)?;
                    comm.send(send, next)
                }),
                ("tagged", &|send, recv| {
                    if rank % 2 == 0 {
                        comm.send_tagged(send, next, 5)?;
                        return comm.recv_tagged(recv, previous, 5);
                    }
                    comm.recv_tagged(recv, previous, 5)?;
                    comm.send_tagged(send, next, 5)
                }),
                ("send_recv", &|send, recv| comm.send_recv(send, next, recv, previous)),
                ("send_recv_tagged", &|send, recv| comm.send_recv_tagged(send, next, recv, previous, 6)),
                ("send_recv_in_place", &|send, recv| {
                    recv.copy_from_slice(send);
                    comm.send_recv_in_place(recv, next, previous)
                }),
            ];
            for (number, (name, call)) in calls.into_iter().enumerate() {
                ring.fill(send.all(), start(rank, next, i + number));
                poison(recv.all(), number);
                let what = || format!("{name} of {size} elements, {memory:?}");
                call(send.all(), recv.all()).context(what)?;
                check(&ring, recv.all(), start(previous, rank, i + number), &what())?;
            }
        }
    }
    Ok(())
}

/// Far more messages in one direction than any queue holds; their order is kept.
fn many_small_ones(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for i in 0..3000u32 {
        let len = (i % 7) as usize;
        if rank == 0 {
            for to in 1..ranks {
                comm.send(&vec![i + to as u32; len], to).map_err(text)?;
            }
        } else {
            let mut message = vec![u32::MAX; len];
            comm.recv(&mut message, 0).map_err(text)?;
            if message != vec![i + rank as u32; len] {
                return Err(format!("message {i} to rank {rank} is {message:?}"));
            }
        }
    }
    Ok(String::new())
}

/// Tags tell messages apart when they are received in another order than they were sent in.
fn tags(comm: &Comm) -> Outcome {
    let ring = Ring::<u16>::new(3);
    let rank = comm.rank();
    if rank >= 2 {
        return Ok(String::new());
    }
    let peer = 1 - rank;
    // MPI's largest tag is its library's choice.
    let largest = if comm.backend() == BackendKind::Mpi { 32_766 } else { u32::MAX };
    for size in [0, 5, 300, 70_001] {
        // In order, each with a tag of its own.
        for tag in [7, 0, largest] {
            let window = ring.window(start(0, 1, tag as usize % 97), size);
            if rank == 0 {
                comm.send_tagged(&window, peer, tag).context(|| format!("tag {tag}, {size} elements"))?;
            } else {
                let mut message = vec![0u16; size];
                comm.recv_tagged(&mut message, peer, tag)
                    .context(|| format!("tag {tag}, {size} elements"))?;
                check(&ring, &message, start(0, 1, tag as usize % 97), "in order")?;
            }
        }
        // In another order, with calls that block. MPI may let a long send wait for its receive.
        if size <= 300 || comm.backend() != BackendKind::Mpi {
            let (seven, eight) = (ring.window(start(0, 1, 7), size), ring.window(start(0, 1, 8), size));
            let mut message = vec![0u16; size];
            if rank == 0 {
                comm.send_tagged(&seven, peer, 7).context(|| format!("tag 7, {size} elements"))?;
                comm.send_tagged(&eight, peer, 8).context(|| format!("tag 8, {size} elements"))?;
            } else {
                for tag in [8, 7] {
                    comm.recv_tagged(&mut message, peer, tag)
                        .context(|| format!("tag {tag}, {size} elements"))?;
                    check(&ring, &message, start(0, 1, tag as usize), "out of order, blocking")?;
                }
            }
        }
        // Each gets what has its tag, and not what was sent before.
        let own = ring.window(start(rank, peer, 20), size);
        let mut message = vec![0u16; size];
        let early = comm.start_send_tagged(vec![rank as u16; 3], peer, 11).map_err(text)?;
        comm.send_recv_tagged(&own, peer, &mut message, peer, 12).context(|| format!("{size} elements"))?;
        check(&ring, &message, start(peer, rank, 20), "send_recv_tagged")?;
        let mut first = [0u16; 3];
        comm.recv_tagged(&mut first, peer, 11).map_err(text)?;
        early.wait().map_err(text)?;
        if first != [peer as u16; 3] {
            return Err(format!("tag 11 brought {first:?} to rank {rank}"));
        }
        // In another order, all at once.
        let windows: Vec<Vec<u16>> = (0..3).map(|i| ring.window(start(0, 1, i), size)).collect();
        let mut messages = vec![vec![0u16; size]; 3];
        let result = if rank == 0 {
            comm.group(|g| (0..3).try_for_each(|i| g.send_tagged(&windows[i], peer, i as u32)))
        } else {
            let mut last_first = messages.iter_mut().enumerate().rev();
            comm.group(|g| last_first.try_for_each(|(i, message)| g.recv_tagged(message, peer, i as u32)))
        };
        result.context(|| format!("tags out of order, {size} elements, rank {rank}"))?;
        if rank == 1 {
            for (i, message) in messages.iter().enumerate() {
                check(&ring, message, start(0, 1, i), "out of order")?;
            }
        }
    }
    Ok(String::new())
}

/// A ring in which every rank sends before it receives, with messages that no buffer holds.
fn grouped_ring(comm: &Comm) -> Outcome {
    let ring = Ring::<f64>::new(4);
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for (i, size) in SIZES.into_iter().enumerate() {
        let send = ring.window(start(rank, next, i), size);
        let mut recv = vec![0f64; size];
        let mut first = [0f64; 3];
        comm.group(|g| {
            g.send(&send, next)?;
            g.send(&send[..size.min(3)], next)?;
            g.recv(&mut recv, previous)?;
            g.recv(&mut first[..size.min(3)], previous)
        })
        .context(|| format!("{size} elements, rank {rank}"))?;
        check(&ring, &recv, start(previous, rank, i), "the long message")?;
        check(&ring, &first[..size.min(3)], start(previous, rank, i), "the short message")?;
    }
    Ok(String::new())
}

/// A communicator and a view of it are one, also in a group.
fn grouped_with_a_view(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let view = comm.within(comm.timeout());
    for size in [1, 70_001] {
        let (sent, mut received) = (vec![rank as u64; size], vec![u64::MAX; size]);
        phalanx::group(|g| {
            g.on(comm).recv(&mut received, previous)?;
            g.on(&view).send(&sent, next)
        })
        .context(|| format!("{size} elements, rank {rank}"))?;
        if received != vec![previous as u64; size] {
            return Err(format!("{size} elements from {previous} to {rank} are others"));
        }
    }
    Ok(String::new())
}

/// Everybody with everybody, oneself too, in one group: an all_to_all made of messages.
fn grouped_all_pairs(comm: &Comm) -> Outcome {
    let ring = Ring::<i32>::new(5);
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for (i, size) in [1, 1000, 70_001].into_iter().enumerate() {
        let sent: Vec<Vec<i32>> = (0..ranks).map(|to| ring.window(start(rank, to, i), size + to)).collect();
        let mut received: Vec<Vec<i32>> = vec![vec![0; size + rank]; ranks];
        comm.group(|g| {
            for (to, message) in sent.iter().enumerate() {
                g.send(message, to)?;
            }
            for (from, message) in received.iter_mut().enumerate() {
                g.recv(message, from)?;
            }
            Ok(())
        })
        .context(|| format!("{size} elements, rank {rank}"))?;
        for (from, message) in received.iter().enumerate() {
            check(&ring, message, start(from, rank, i), &format!("from {from}"))?;
        }
    }
    Ok(String::new())
}

/// A rank may exchange a message with itself where nothing has to wait.
fn to_oneself(comm: &Comm) -> Outcome {
    let rank = comm.rank();
    for size in SIZES {
        let send = Ring::<u64>::new(6).window(rank, size);
        let mut recv = vec![0u64; size];
        comm.send_recv(&send, rank, &mut recv, rank).context(|| format!("{size} elements"))?;
        if recv != send {
            return Err(format!("rank {rank} got something else from itself, {size} elements"));
        }
        comm.send_recv_in_place(&mut recv, rank, rank).context(|| format!("{size} elements in place"))?;
        if recv != send {
            return Err(format!("rank {rank} replaced its buffer by something else, {size} elements"));
        }
    }
    if !matches!(comm.backend(), BackendKind::Host | BackendKind::Ucx | BackendKind::Solo) {
        return Ok(String::new());
    }
    // What was started before can be received; for what was not, nobody waits.
    for size in SIZES {
        let send = Ring::<u64>::new(6).window(rank, size);
        let mut recv = vec![0u64; size];
        let sent = comm.start_send(send.clone(), rank).map_err(text)?;
        let refused = comm.recv_tagged(&mut recv, rank, 9);
        if !refused.as_ref().is_err_and(|e| e.to_string().contains("cannot exchange with itself")) {
            return Err(format!("{size} elements of tag 9 from oneself: {refused:?}"));
        }
        comm.recv(&mut recv, rank).context(|| format!("{size} elements that were started"))?;
        sent.wait().map_err(text)?;
        if recv != send {
            return Err(format!("rank {rank} got something else than it started, {size} elements"));
        }
    }
    Ok(String::new())
}

/// Messages and collectives do not get into each other's way.
fn between_collectives(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for round in 0..200u32 {
        let len = [1, 700, 9000][round as usize % 3];
        if rank == round as usize % ranks {
            comm.send(&vec![round; len], (rank + 1) % ranks).map_err(text)?;
        }
        if (rank + ranks - 1) % ranks == round as usize % ranks {
            let mut message = vec![0; len];
            comm.recv(&mut message, (rank + ranks - 1) % ranks).map_err(text)?;
            if message != vec![round; len] {
                return Err(format!("wrong message in round {round}"));
            }
        }
        let mut sum = vec![rank as u32 + round; len];
        comm.all_reduce_in_place(&mut sum, phalanx::ReduceOp::Sum).map_err(text)?;
        let expected = (0..ranks as u32).map(|rank| rank + round).sum::<u32>();
        if sum != vec![expected; len] {
            return Err(format!("wrong sum in round {round}"));
        }
    }
    Ok(String::new())
}
