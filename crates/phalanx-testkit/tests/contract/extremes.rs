//! Buffers that no cache holds, and more ranks than any machine of the tests has cores.

use crate::buffers::Memory;
use crate::world::both;
use libtest_mimic::Trial;
use phalanx::{Comm, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::reference::Combine;
use phalanx_testkit::ring::{Ring, STRIDE};
use phalanx_testkit::scenario::{ErrorContext, Outcome};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("extremes/huge_buffers", |comm, _| huge_buffers(&comm)),
    Scenario::rank("extremes/many_ranks", |comm, _| many_ranks(&comm)),
];

pub fn trials() -> Vec<Trial> {
    let mut trials = both(SCENARIOS[0], &[2, 3]);
    trials.extend(both(SCENARIOS[1], &[9, 16, 33, 64]));
    trials
}

/// Elements: 40 MiB, and a little that is no multiple of anything.
const HUGE: usize = (10 << 20) + 77;

fn huge_buffers(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<f32>::new(21);
    let summed = ring.combined(ranks, &Combine::Op(ReduceOp::Sum));
    for (i, memory) in [Memory::Private, Memory::Shared, Memory::Mixed].into_iter().enumerate() {
        let start = i * 7717;
        let own = start + rank * STRIDE;
        let root = i % ranks;
        let what = |name: &str| format!("{name}, {memory:?} memory, rank {rank}");
        let text = |error: phalanx::Error| error.to_string();
        let mut send = memory.send::<f32>(comm, HUGE).map_err(text)?;
        let mut recv = memory.recv::<f32>(comm, HUGE).map_err(text)?;
        let (send, recv) = (send.all(), recv.all());

        ring.fill(send, own);
        comm.all_reduce(&send[..], recv, ReduceOp::Sum).context(|| what("all_reduce"))?;
        summed.expect_values(recv, start).context(|| what("all_reduce"))?;
        ring.expect_bits(send, own).context(|| what("all_reduce's input"))?;
        comm.all_reduce_in_place(send, ReduceOp::Sum).context(|| what("all_reduce in place"))?;
        summed.expect_values(send, start).context(|| what("all_reduce in place"))?;

        ring.fill(send, own);
        comm.broadcast(&send[..], recv, root).context(|| what("broadcast"))?;
        ring.expect_bits(recv, start + root * STRIDE).context(|| what("broadcast"))?;

        comm.reduce(&send[..], recv, ReduceOp::Sum, root).context(|| what("reduce"))?;
        if rank == root {
            summed.expect_values(recv, start).context(|| what("reduce"))?;
        }

        let block = HUGE / ranks;
        comm.all_gather(&send[..block], &mut recv[..block * ranks]).context(|| what("all_gather"))?;
        for (from, part) in recv.chunks_exact(block).take(ranks).enumerate() {
            ring.expect_bits(part, start + from * STRIDE).context(|| what("all_gather"))?;
        }

        let whole = &send[..block * ranks];
        comm.reduce_scatter(whole, &mut recv[..block], ReduceOp::Sum).context(|| what("reduce_scatter"))?;
        summed.expect_values(&recv[..block], start + rank * block).context(|| what("reduce_scatter"))?;

        comm.all_to_all(whole, &mut recv[..block * ranks]).context(|| what("all_to_all"))?;
        for (from, part) in recv.chunks_exact(block).take(ranks).enumerate() {
            ring.expect_bits(part, start + from * STRIDE + rank * block).context(|| what("all_to_all"))?;
        }

        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        comm.send_recv(&send[..], next, recv, previous).context(|| what("send_recv"))?;
        ring.expect_bits(recv, start + previous * STRIDE).context(|| what("send_recv"))?;
    }
    Ok(String::new())
}

fn many_ranks(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<i32>::new(22);
    let summed = ring.combined(ranks, &Combine::Op(ReduceOp::Sum));
    for (i, count) in [1, 100, 3000, 20_000].into_iter().enumerate() {
        let start = i * 911;
        let root = (i * 7) % ranks;
        let what = |name: &str| format!("{name} of {count}, rank {rank}");
        let input = ring.window(start + rank * STRIDE, count);
        let mut output = vec![0; count];
        comm.all_reduce(&input, &mut output, ReduceOp::Sum).context(|| what("all_reduce"))?;
        summed.expect_bits(&output, start).context(|| what("all_reduce"))?;
        comm.broadcast(&input, &mut output, root).context(|| what("broadcast"))?;
        ring.expect_bits(&output, start + root * STRIDE).context(|| what("broadcast"))?;
        comm.barrier().context(|| what("barrier"))?;

        let block = count.div_ceil(ranks);
        let mut gathered = vec![0; block * ranks];
        comm.all_gather(&input[..block], &mut gathered).context(|| what("all_gather"))?;
        for (from, part) in gathered.chunks(block).enumerate() {
            ring.expect_bits(part, start + from * STRIDE).context(|| what("all_gather"))?;
        }
        let input = ring.window(start + rank * STRIDE, block * ranks);
        comm.all_to_all(&input, &mut gathered).context(|| what("all_to_all"))?;
        for (from, part) in gathered.chunks(block).enumerate() {
            ring.expect_bits(part, start + from * STRIDE + rank * block).context(|| what("all_to_all"))?;
        }
        comm.reduce_scatter(&input, &mut output[..block], ReduceOp::Sum)
            .context(|| what("reduce_scatter"))?;
        summed.expect_bits(&output[..block], start + rank * block).context(|| what("reduce_scatter"))?;

        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        comm.send_recv(&input[..block], next, &mut output[..block], previous)
            .context(|| what("send_recv"))?;
        ring.expect_bits(&output[..block], start + previous * STRIDE).context(|| what("send_recv"))?;
    }
    Ok(String::new())
}
