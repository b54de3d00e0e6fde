//! Requests: operations that go on while others are made.

use crate::world::both;
use libtest_mimic::Trial;
use phalanx::{Comm, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::reference::Combine;
use phalanx_testkit::ring::{Ring, STRIDE};
use phalanx_testkit::scenario::{Context, Outcome};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("requests/every_kind", |comm, _| every_kind(&comm)),
    Scenario::rank("requests/overlap_with_blocking", |comm, _| overlap_with_blocking(&comm)),
    Scenario::rank("requests/waited_in_reverse", |comm, _| waited_in_reverse(&comm)),
    Scenario::rank("requests/messages", |comm, _| messages(&comm)),
    Scenario::rank("requests/to_oneself", |comm, _| to_oneself(&comm)),
    Scenario::rank("requests/is_done", |comm, _| is_done(&comm)),
    Scenario::rank("requests/dropped", |comm, _| dropped(&comm)),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 4, 7])).collect()
}

const SIZES: [usize; 4] = [1, 1000, 70_001, 300_000];

fn text(error: phalanx::Error) -> String {
    error.to_string()
}

/// Each `start_` function delivers what its blocking counterpart does.
fn every_kind(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<f32>::new(11);
    let summed = ring.combined(ranks, &Combine::Op(ReduceOp::Sum));
    for (i, size) in SIZES.into_iter().enumerate() {
        let start = i * 977;
        let own = |len: usize| ring.window(start + rank * STRIDE, len);
        let root = i % ranks;
        let what = |name: &str| format!("{name} of {size}, rank {rank}");

        let request = comm.start_all_reduce(own(size), ReduceOp::Sum).map_err(text)?;
        let result = request.wait().map_err(text)?;
        summed.expect_values(&result, start).context(|| what("all_reduce"))?;

        let result = comm.start_broadcast(own(size), root).map_err(text)?.wait().map_err(text)?;
        ring.expect_bits(&result, start + root * STRIDE).context(|| what("broadcast"))?;

        let request = comm.start_reduce(own(size), ReduceOp::Sum, root).map_err(text)?;
        let result = request.wait().map_err(text)?;
        if rank == root {
            summed.expect_values(&result, start).context(|| what("reduce"))?;
        }

        let request = comm.start_all_gather(own(size), vec![0f32; size * ranks]).map_err(text)?;
        let (send, recv) = request.wait().map_err(text)?;
        ring.expect_bits(&send, start + rank * STRIDE).context(|| what("all_gather's input"))?;
        for from in 0..ranks {
            let block = &recv[from * size..(from + 1) * size];
            ring.expect_bits(block, start + from * STRIDE).context(|| what("all_gather"))?;
        }

        let request = comm.start_reduce_scatter(own(size * ranks), vec![0f32; size], ReduceOp::Sum);
        let (_, recv) = request.map_err(text)?.wait().map_err(text)?;
        summed.expect_values(&recv, start + rank * size).context(|| what("reduce_scatter"))?;

        let request = comm.start_all_to_all(own(size * ranks), vec![0f32; size * ranks]);
        let (_, recv) = request.map_err(text)?.wait().map_err(text)?;
        for from in 0..ranks {
            let block = &recv[from * size..(from + 1) * size];
            ring.expect_bits(block, start + from * STRIDE + rank * size).context(|| what("all_to_all"))?;
        }
    }
    Ok(String::new())
}

/// Blocking operations between the start of a request and its end, on all sizes of both.
fn overlap_with_blocking(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<i64>::new(12);
    let summed = ring.combined(ranks, &Combine::Op(ReduceOp::Sum));
    for (i, size) in SIZES.into_iter().enumerate() {
        for (j, blocking) in SIZES.into_iter().enumerate() {
            let (start, other) = (i * 101 + j * 7, i * 211 + j * 13 + 5);
            let buffer = comm.alloc::<i64>(size).map_err(text)?;
            let mut buffer = buffer;
            ring.fill(&mut buffer, start + rank * STRIDE);
            let request = comm.start_all_reduce(buffer, ReduceOp::Sum).map_err(text)?;

            let mut sum = ring.window(other + rank * STRIDE, blocking);
            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
            summed.expect_values(&sum, other).context(|| format!("blocking {blocking} over {size}"))?;
            comm.barrier().map_err(text)?;
            let mut gathered = vec![0; ranks];
            comm.all_gather(&[rank as i64], &mut gathered).map_err(text)?;
            if gathered != (0..ranks as i64).collect::<Vec<_>>() {
                return Err(format!("gathered {gathered:?} over a request of {size}"));
            }

            let result = request.wait().map_err(text)?;
            summed.expect_values(&result, start).context(|| format!("request {size}, rank {rank}"))?;
        }
    }
    Ok(String::new())
}

/// Several requests at once; the order of the waits is free, and may differ between ranks.
fn waited_in_reverse(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<u32>::new(13);
    let greatest = ring.combined(ranks, &Combine::Op(ReduceOp::Max));
    let mut requests = Vec::new();
    for i in 0..12 {
        let window = ring.window(i * 1009 + rank * STRIDE, [3, 5000, 100_000][i % 3]);
        requests.push((i, comm.start_all_reduce(window, ReduceOp::Max).map_err(text)?));
    }
    if rank % 2 == 0 {
        requests.reverse();
    }
    for (i, request) in requests {
        let result = request.wait().map_err(text)?;
        greatest.expect_values(&result, i * 1009).context(|| format!("request {i}, rank {rank}"))?;
    }
    Ok(String::new())
}

/// Everybody sends to everybody else before anybody receives.
fn messages(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<u8>::new(14);
    for size in SIZES {
        let start = |from: usize, to: usize| from * 7919 + to * 31;
        let peers: Vec<usize> = (0..ranks).filter(|peer| *peer != rank).collect();
        let mut sends = Vec::new();
        for &to in &peers {
            sends.push(comm.start_send(ring.window(start(rank, to), size), to).map_err(text)?);
        }
        let mut receives = Vec::new();
        for &from in &peers {
            receives.push((from, comm.start_recv(vec![0u8; size], from).map_err(text)?));
        }
        for (from, request) in receives.into_iter().rev() {
            let message = request.wait().map_err(text)?;
            let what = || format!("{size} from {from} to {rank}");
            ring.expect_bits(&message, start(from, rank)).context(what)?;
        }
        for request in sends {
            request.wait().map_err(text)?;
        }
    }
    Ok(String::new())
}

/// A started message to oneself is what a receive from oneself waits for.
fn to_oneself(comm: &Comm) -> Outcome {
    let rank = comm.rank();
    for size in SIZES {
        let ring = Ring::<u32>::new(15);
        let send = comm.start_send(ring.window(rank, size), rank).map_err(text)?;
        let mut message = vec![0u32; size];
        comm.recv(&mut message, rank).map_err(text)?;
        ring.expect_bits(&message, rank).context(|| format!("{size} elements"))?;
        send.wait().map_err(text)?;
    }
    Ok(String::new())
}

/// `is_done` becomes true without a wait, and the result is there then.
fn is_done(comm: &Comm) -> Outcome {
    let ranks = comm.world_size();
    for size in SIZES {
        let mut request = comm.start_all_reduce(vec![1u32; size], ReduceOp::Sum).map_err(text)?;
        let since = std::time::Instant::now();
        while !request.is_done() {
            if since.elapsed() > std::time::Duration::from_secs(60) {
                return Err(format!("a request of {size} elements is not done after a minute of asking"));
            }
            std::thread::yield_now();
        }
        if request.wait().map_err(text)? != vec![ranks as u32; size] {
            return Err(format!("wrong sum of {size} elements"));
        }
    }
    Ok(String::new())
}

/// A request that nobody waits for neither dangles nor disturbs what follows.
fn dropped(comm: &Comm) -> Outcome {
    let ranks = comm.world_size();
    for size in SIZES {
        drop(comm.start_all_reduce(vec![1u32; size], ReduceOp::Sum).map_err(text)?);
        let mut sum = vec![1u32; size];
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
        if sum != vec![ranks as u32; size] {
            return Err(format!("wrong sum of {size} elements after a dropped request"));
        }
    }
    Ok(String::new())
}
